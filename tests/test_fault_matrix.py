"""Every fault on every rank in every phase: `uv run pytest tests/test_fault_matrix.py --thorough`.

Without the option, four cells of 64. `test_faults.py` looks closer at some of them.
"""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path

import pytest
from support import Workplace, succeeded
from test_faults import (
    last_line_of_ours,
    summary_of,
    train_undisturbed,
    validations_of,
    weights_of,
)

from failpoints import VARIABLE

SETTINGS = {"hang_timeout_seconds": 4.0, "collective_timeout_seconds": 3.0, "validate_on": "all"}
FAULTS = {"raise": "raise", "oom": "oom", "kill": "kill", "exit": "exit", "hang": "hang",
          "full disk": "full", "longer than a collective waits": "slow:seconds=3.5",
          "signal": "signal:number=15"}
# The second validation, checkpoint and chart. Rank 0 alone saves and charts: while it does, and
# takes its time for it, rank 1 fails in the next step, or where it waits for rank 0.
WHILE_SAVING, WHILE_CHARTING = (f"{place}:slow:rank=0:hit=2:seconds=1" for place in
                                ("save.trainer", "chart"))
PLACES = {
    ("training", 0): "train:{}:rank=0:hit=7", ("training", 1): "train:{}:rank=1:hit=7",
    ("validation", 0): "validate:{}:rank=0:hit=3", ("validation", 1): "validate:{}:rank=1:hit=2",
    ("saving", 0): "save.trainer:{}:rank=0:hit=2",
    ("saving", 1): WHILE_SAVING + ";train:{}:rank=1:hit=11",
    ("charting", 0): "chart:{}:rank=0:hit=2",
    ("charting", 1): WHILE_CHARTING + ";wait:{}:rank=1:hit=4",
}
CELLS = list(product(FAULTS, PLACES))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), SETTINGS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        is_whole = metafunc.config.getoption("--thorough")
        cells = CELLS if is_whole else CELLS[:: 2 * len(PLACES) + 2]  # of the diagonal
        metafunc.parametrize("cell", cells, ids=[f"{fault}, {phase}, rank {rank}"
                                                 for fault, (phase, rank) in cells])


def test_whatever_fails_all_ends_and_goes_on(
    workplace: Workplace, undisturbed: Path, cell: tuple[str, tuple[str, int]]
) -> None:
    fault, (phase, rank) = cell
    workplace.add_dataset()
    run_dir = workplace.add_run(train=SETTINGS)
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{
        VARIABLE: PLACES[phase, rank].format(FAULTS[fault])})
    assert result.returncode != -signal.SIGKILL, "it hung"
    if fault == "signal":
        assert result.returncode == 128 + signal.SIGTERM
        assert summary_of(run_dir)["reason"] == "SIGTERM"
    elif result.returncode != 0:
        line = last_line_of_ours(result)
        assert line.startswith(f"Error: rank {rank} ") and " at step " in line
    succeeded(workplace.torchrun(2, "tiny"))
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)
    assert summary_of(run_dir)["status"] == "finished"
