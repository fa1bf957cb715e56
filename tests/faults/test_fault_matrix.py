"""Every fault on every rank in every phase: `pytest tests/faults/test_fault_matrix.py --thorough`.

Without the option, only the diagonal: 8 of 64 cells. `test_faults.py` checks some faults in detail.
"""

import re
import signal
import time
from itertools import product
from pathlib import Path

import pytest

from basics.failpoints import MARKS, VARIABLE
from tests.support.runs import (
    last_line_of_ours,
    summary_of,
    train_undisturbed,
    validations_of,
    weights_of,
)
from tests.support.workplace import succeeded

# Seconds apart from each other, which a busy machine may take for the rest of a step.
HANG_SECONDS, SLOW_SECONDS, COLLECTIVE_SECONDS = 14.0, 9.0, 6.0
SETTINGS = {
    "hang_timeout_seconds": HANG_SECONDS,
    "collective_timeout_seconds": COLLECTIVE_SECONDS,
    "validate_on": "all",
}
FAULTS = {
    "raise": "raise",
    "oom": "oom",
    "kill": "kill",
    "exit": "exit",
    "hang": "hang",
    "full disk": "full",
    "longer than a collective waits": f"slow:seconds={SLOW_SECONDS}",
    "signal": "signal:number=15",
}
# The second validation, checkpoint and chart. Only rank 0 saves and charts: while it does so,
# slowed down, rank 1 fails in the next step, or where it waits for rank 0.
WHILE_SAVING, WHILE_CHARTING = (
    f"{place}:slow:rank=0:hit=2:seconds=1" for place in ("save.optimizer", "chart")
)
PLACES = {
    ("training", 0): "train:{}:rank=0:hit=7",
    ("training", 1): "train:{}:rank=1:hit=7",
    ("validation", 0): "validate:{}:rank=0:hit=3",
    ("validation", 1): "validate:{}:rank=1:hit=2",
    ("saving", 0): "save.optimizer:{}:rank=0:hit=2",
    ("saving", 1): WHILE_SAVING + ";train:{}:rank=1:hit=11",
    ("charting", 0): "chart:{}:rank=0:hit=2",
    ("charting", 1): WHILE_CHARTING + ";wait:{}:rank=1:hit=4",
}
CELLS = list(product(FAULTS, PLACES))
# The exit status and a part of the last line for each fault, and the exceptions: a failed save or
# chart is a warning, and hang detection is suspended while a rank waits for others.
GONE, SILENT = (1, "killed, or crashed"), (5, " hung ")
ENDINGS = {
    "raise": (1, "RuntimeError: failpoint"),
    "oom": (1, "OutOfMemoryError: failpoint"),
    "kill": (-9, GONE[1]),
    "exit": GONE,
    "hang": SILENT,
    "full disk": (4, "OSError: [Errno 28] No space left on device"),
    "longer than a collective waits": SILENT,
    "signal": (143, "(SIGTERM): "),
}
UNSAVED, UNCHARTED, UNHARMED = (
    (0, "warning: the checkpoint of step 10 could not be written ("),
    (0, "warning: charts are not up to date: "),
    (0, ""),
)
ELSEWHERE = {
    **dict.fromkeys(product(("raise", "oom", "full disk"), (("saving", 0),)), UNSAVED),
    **dict.fromkeys(product(("raise", "oom", "full disk"), (("charting", 0),)), UNCHARTED),
    **dict.fromkeys(
        product(
            ("longer than a collective waits",), (("saving", 0), ("charting", 0), ("charting", 1))
        ),
        UNHARMED,
    ),
    ("hang", ("charting", 1)): (5, "rank 0 and 1 hung "),  # both wait: the cause is not known
}
# Seconds from the fault to the end of all processes, checked with --thorough: 10, and a hang its
# timeout more; twice that on a busy machine.
PATIENCE, HANG_PATIENCE = 2 * 10.0, 2 * (HANG_SECONDS + 10.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), SETTINGS)


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        is_whole = metafunc.config.getoption("--thorough")
        cells = CELLS if is_whole else CELLS[:: len(PLACES) + 1]  # the diagonal
        metafunc.parametrize(
            "cell", cells, ids=[f"{fault}, {phase}, rank {rank}" for fault, (phase, rank) in cells]
        )


def test_whatever_fails_all_ranks_end_and_the_run_resumes(
    workplace, undisturbed, cell, pytestconfig
):
    fault, (phase, rank) = cell
    workplace.add_dataset()
    run_dir = workplace.add_run(train=SETTINGS)
    marks = workplace.root / "marks"
    result = workplace.torchrun(
        2, "tiny", **{VARIABLE: PLACES[phase, rank].format(FAULTS[fault]), MARKS: str(marks)}
    )
    ended = time.time()
    struck = [line.split() for line in marks.read_text().splitlines()]  # what the failpoints wrote
    kind = FAULTS[fault].partition(":")[0]
    began = [float(at) for _, *which, _, at in struck if which == [kind, str(rank)]][-1]
    assert not [pid for *_, pid, _ in struck if Path(f"/proc/{pid}").exists()]
    status, words = ELSEWHERE.get(cell, ENDINGS[fault])
    check_end(result, status, words, rank)
    is_timed = pytestconfig.getoption("--thorough")
    if is_timed and (status != 0 or fault == "signal"):
        limit = HANG_PATIENCE if status == 5 else PATIENCE
        assert ended - began < limit
    summary_is_stale = rank == 0 and fault in ("kill", "exit")  # rank 0 writes the summary
    assert summary_of(run_dir)["status"] == (
        "running"
        if summary_is_stale
        else "stopped"
        if fault == "signal"
        else "failed"
        if status
        else "finished"
    )
    succeeded(workplace.torchrun(2, "tiny"))
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)
    assert summary_of(run_dir)["status"] == "finished"
    print(f"{status} {last_line_of_ours(result)} {ended - began:.1f} s")


def check_end(result, status, words, rank):
    """Check the exit status and the last line of a run."""
    assert result.returncode != -signal.SIGKILL, "it hung"
    # torchrun prints the status of the first process that exited last.
    found = re.findall(r"exitcode *: (-?\d+)", result.stderr)
    assert int(found[-1] if result.returncode else 0) == status, result.stderr
    if status in (0, 128 + signal.SIGTERM):
        assert words in result.stdout and "Error: rank " not in result.stderr
    else:
        line = last_line_of_ours(result)
        assert line.startswith((f"Error: rank {rank} ", f"Error: {words}"))
        assert " at step " in line and words in line
        assert result.stderr.count("Error: rank ") == 1
    if " hung " in words:
        assert all(f"rank {each} in " in result.stderr for each in (0, 1))  # its stacks
        assert 'failpoints.py", line' in result.stderr
