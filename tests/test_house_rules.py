"""The rules of CONTRIBUTING.md that a machine can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.workplace import PROJECT_DIR

# Each room imports only from rows below its own; the lab from all of the trainer, never back.
ROWS = [
    {"ddp_train", "prepare_dataset"},
    {"ending"},
    {"job", "microbatch_search", "checkpoint_writer"},
    {"resuming", "checkpoint_loading"},
    {"checkpointing", "microbatch_trial", "evaluation"},
    {"training_step", "charting", "run_log", "sampling", "preparation"},
    {"acceleration", "run_summary"},
    {"supervision"},
    {"gpt", "token_dataset", "optimization", "tokenizer", "launching", "run_metrics", "step_window",
     "agreement"},
    {"run_clock", "command_line", "expected_speed", "head_loss", "block_attention", "neighbours"},
    {"batch_plan", "curve_fits", "memory_meters", "run_lock", "notice_board"},
    {"run_config", "manifest", "failpoints"},
    {"json_files"},
    {"user_error"},
]
# The same within preparation/, which is one room to the others.
PREPARATION_ROWS = [
    {"foreign_tokens", "providing"},
    {"pipeline"},
    {"planning", "dataset_card", "hub"},
    {"gpt2_workers"},
    {"documents", "encoding", "progress_display"},
    {"readers"},
    {"parquet"},
    {"cutting", "journal"},
    {"token_file_writer"},
]
ROW_OF = {room: number for number, row in enumerate(ROWS) for room in row}
PREPARATION_ROW_OF = {room: number for number, row in enumerate(PREPARATION_ROWS) for room in row}
TRAINER_FILES = sorted(PROJECT_DIR.glob("*.py"))
PREPARATION_FILES = sorted((PROJECT_DIR / "preparation").glob("[!_]*.py"))
FILES = [*TRAINER_FILES, *PREPARATION_FILES, *sorted((PROJECT_DIR / "lab").glob("*.py"))]


def imported_by(tree: ast.AST) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


def test_every_room_has_its_row() -> None:
    assert {path.stem for path in TRAINER_FILES} | {"preparation"} == set(ROW_OF)
    assert {path.stem for path in PREPARATION_FILES} == set(PREPARATION_ROW_OF)


@pytest.mark.parametrize("path", PREPARATION_FILES, ids=lambda path: path.stem)
def test_preparation_imports_only_from_rows_below(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for module in imported_by(tree) - {"preparation"}:
        assert ROW_OF.get(module, 99) > ROW_OF["preparation"] and module not in ("lab", "torch")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("preparation."):
            part = node.module.removeprefix("preparation.")
            assert PREPARATION_ROW_OF[part] > PREPARATION_ROW_OF[path.stem], node.module


@pytest.mark.parametrize("path", TRAINER_FILES, ids=lambda path: path.stem)
def test_a_room_imports_only_from_rows_below(path: Path) -> None:
    for module in imported_by(ast.parse(path.read_text())):
        assert module != "lab"
        if module in ROW_OF:
            assert ROW_OF[module] > ROW_OF[path.stem], f"{path.stem} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    limit = 450 if path.name == "ddp_train.py" else 300
    assert len(text.splitlines()) < limit
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, node.name
            is_command = any("command" in ast.unparse(d) for d in node.decorator_list)
            positional = [a for a in node.args.args if a.arg not in ("self", "cls", "ctx")]
            parameters = len(positional) + len(node.args.kwonlyargs)
            assert is_command or parameters <= 5, f"{node.name} has {parameters} parameters"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_room_and_public_function_of_more_than_a_line_says_what_it_does(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        if public and len(node.body) > 3:
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
