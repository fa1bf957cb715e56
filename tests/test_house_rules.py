"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import re
import sys
from collections import Counter
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from lab.__main__ import MODULES
from tests.support.workplace import PROJECT_DIR

# Imports go only from left to right.
ORDER = (
    "ddp_trainer benchmarks > ddp_train prepare_dataset lab > trainer > checkpointing optim"
    " > reporting > processes > gpt > ops > preparation > tokens > run_config"
    " > settings > basics"
)
RANK = {name: rank for rank, names in enumerate(ORDER.split(">")) for name in names.split()}
ROOT_FILES = {"ddp_train", "gpt", "optim", "run_config", "checkpointing", "prepare_dataset"}
WITHOUT_TORCH = [
    "preparation",
    "lab.plan",
    "lab.watch",
    "tokens.batch_plan",
    "tokens.token_file",
    "tokens.tokenizer",
    "run_config",
    "processes.command_line",
    "prepare_dataset",
    "processes.background",
    "reporting.charts",
    "reporting.tracker",
    *(module for verbs in MODULES.values() for module in verbs.values()),  # of `lab --help`
]


def tracked(*patterns):
    found = [path for pattern in patterns for path in PROJECT_DIR.glob(pattern)]
    return sorted(path for path in found if ".venv" not in path.parts)


FILES = tracked("*.py", *(f"{name}/**/*.py" for name in RANK if name not in ROOT_FILES))
SOURCES = [path for path in FILES if path.name != "__init__.py"]
PRODUCT = [path for path in SOURCES if path.parent.name != "benchmarks"]


def name_of(path):
    """Return a path's name relative to the project, for the tests' output."""
    return str(path.relative_to(PROJECT_DIR))


def module_of(path):
    return name_of(path).removesuffix(".py").replace("/", ".")


def imports_of(tree, *, at_import=False):
    """Return the modules that code imports; with `at_import` without those inside functions."""
    nodes, modules = [tree], set()
    while nodes:
        node = nodes.pop()
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_import and (is_typing or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def test_the_root_holds_six_files_and_every_folder_has_its_place():
    assert {path.stem for path in tracked("*.py")} == ROOT_FILES
    folders = {path.parent.name for path in tracked("*/__init__.py")} - {"tests"}
    assert folders <= set(RANK) and set(RANK) <= folders | ROOT_FILES | {"benchmarks"}


def test_imports_go_only_from_left_to_right():
    for path in FILES:
        own = path.relative_to(PROJECT_DIR).parts[0].removesuffix(".py")
        for module in imports_of(ast.parse(path.read_text())):
            other = module.split(".")[0]
            assert other != "tests"
            assert other not in RANK or other == own or RANK[other] > RANK[own], (
                f"{name_of(path)} imports {module}"
            )


def test_no_file_imports_itself_through_others():
    """Also not by imports inside functions and for type checkers."""
    imported = {module_of(path): imports_of(ast.parse(path.read_text())) for path in SOURCES}
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join((*path, module))
        if module in imported and module not in done:
            for other in imported[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in imported:
        visit(module, ())


def test_commands_that_need_no_torch_do_not_import_it():
    modules = {module_of(path): path for path in SOURCES}
    waiting = [
        module
        for module in modules
        for start in WITHOUT_TORCH
        if module == start or module.startswith(f"{start}.")
    ]
    assert len(waiting) >= len(WITHOUT_TORCH)
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        found = imports_of(ast.parse(modules[module].read_text()), at_import=True)
        assert not {name for name in found if name.split(".")[0] in ("torch", "transformers")}, (
            f"{module} imports torch"
        )
        waiting += (found & modules.keys()) - seen
        seen |= found


def test_one_expression_makes_one_decision():
    """Nested conditional expressions and names that a comprehension's condition binds are read
    twice, and so are dictionaries of lambdas."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = []
            if isinstance(node, ast.IfExp):
                parts = [part for part in (node.body, node.orelse) if isinstance(part, ast.IfExp)]
            elif isinstance(node, ast.comprehension):
                parts = [
                    part
                    for condition in node.ifs
                    for part in ast.walk(condition)
                    if isinstance(part, ast.NamedExpr)
                ]
            elif isinstance(node, ast.Dict):
                lambdas = [value for value in node.values if isinstance(value, ast.Lambda)]
                parts = lambdas[1:]
            found += [f"{name_of(path)}:{part.lineno}" for part in parts]
    assert not found


def test_no_name_is_that_of_a_package_that_a_dependency_may_import():
    names = {path.relative_to(PROJECT_DIR).parts[0].removesuffix(".py") for path in FILES}
    installed = {
        name for name, owners in packages_distributions().items() if owners != ["ddp-train"]
    }
    assert not names & installed
    assert not names & sys.stdlib_module_names
    # transformers looks for optional packages by name, whether they are installed or not.
    source = Path(find_spec("transformers").origin).parent / "utils" / "import_utils.py"
    looked_for = set(re.findall(r'_is_package_available\(\s*"(\w+)', source.read_text()))
    assert "kernels" in looked_for
    assert not names & looked_for


def test_modules_and_what_is_public_in_them_have_docstrings():
    for path in PRODUCT:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            if public and len(node.body) > 3:
                assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_a_name_is_of_one_class_only():
    nodes = [node for path in PRODUCT for node in ast.walk(ast.parse(path.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_are_by_topic_listed_once_and_import_no_other_test():
    tests = PROJECT_DIR / "tests"
    for path in sorted(tests.rglob("*.py")):
        folder = str(path.relative_to(tests).parent)
        is_helper = path.name in ("__init__.py", "conftest.py") or folder == "support"
        assert folder in (".", "lab", "faults", "support"), path
        assert path.name.startswith("test_") or is_helper, path
        for module in imports_of(ast.parse(path.read_text())):
            assert not re.fullmatch(r"tests\.(.*\.)?test_\w+.*", module), f"{path}: {module}"
    listed = re.findall(r"`([\w/]*test_\w+\.py)`", (tests / "README.md").read_text())
    assert sorted(listed) == sorted(
        str(path.relative_to(tests)) for path in tests.rglob("test_*.py")
    )


def test_the_name_of_a_token_file_has_one_owner():
    name = re.compile(r'(\{split\}|\b(train|validation))\.safetensors["\']')
    found = [name_of(path) for path in PRODUCT if name.search(path.read_text())]
    assert found == ["preparation/card.py"], "its example of code, for a dataset's page"


def test_what_differs_between_devices_has_one_owner():
    """Another device is another branch there, not a search through the code."""
    asks = re.compile(r"""torch\.cuda\.\w|\.is_cuda\b|["']cuda["']|device\.type ==""")
    found = {
        name_of(path)
        for path in PRODUCT
        if asks.search(re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL))
    }
    # The lab reads the type of a device in records, without torch.
    assert found == {"basics/device.py", "lab/runs.py"}
