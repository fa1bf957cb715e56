import contextlib
import os
import subprocess
from multiprocessing.process import BaseProcess

import pytest
import torch

from tests.support.stand_ins import FakeTime
from tests.support.workplace import Workplace

# Tables and bars fit the terminal: here as without one, whoever starts the tests, and from where.
os.environ |= {"COLUMNS": "80", "LINES": "24"}
GPU_SECONDS = 180  # of a test on a GPU: one that hangs must not use up the time of a rented card

with contextlib.suppress(ModuleNotFoundError):  # its tests are then skipped
    from hypothesis import Phase, settings

    settings.register_profile("without deadlines", deadline=None)  # machines may be loaded
    settings.load_profile("without deadlines")
    # For deliberate faults: whether a test fails matters, not the smallest example.
    phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
    settings.register_profile("without shrinking", deadline=None, phases=phases)

if torch.cuda.is_available():
    # The first product of a process decides whether all may be deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser):
    parser.addoption(
        "--storm", type=int, default=2, metavar="N", help="how often test_storm.py kills a run"
    )
    parser.addoption(
        "--relaunches",
        type=int,
        default=1,
        metavar="N",
        help="how often test_storm.py kills a launch and types the command again",
    )
    parser.addoption(
        "--restarts",
        type=int,
        default=1,
        metavar="N",
        help="how often test_faults.py and test_nodes.py let torchrun restart a rank",
    )
    parser.addoption(
        "--exits",
        type=int,
        default=3,
        metavar="N",
        help="how many runs test_storm.py takes to their end",
    )
    parser.addoption(
        "--quick", action="store_true", help="only tests that start no process: a few minutes"
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="all faults, nodes, steps, memory limits and megabytes that the tests of"
        " faults, nodes, leaks, the search and preparing are laid out for, not a"
        " selection",
    )


def pytest_runtest_setup(item):
    if item.config.getoption("--quick") and item.get_closest_marker("processes"):
        pytest.skip("starts a process")


@pytest.fixture(scope="session", autouse=True)
def only_this_process(request):
    """With --quick, skip a test as soon as it starts a process other than git.

    The marker `processes` is for tests that start one in a thread, where skipping has no effect.
    """
    if not request.config.getoption("--quick"):
        yield
        return
    start = subprocess.Popen.__init__

    def popen(self, command, *arguments, **options):
        if command[0] != "git":
            pytest.skip("starts a process")
        start(self, command, *arguments, **options)

    def refuse(*_, **__):
        pytest.skip("starts a process")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", popen)
        patch.setattr(BaseProcess, "start", refuse)
        patch.setattr(os, "fork", refuse)
        yield


@pytest.fixture(autouse=True)
def same_random_numbers():
    """A model of a test has the same initial weights in each run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def workplace(tmp_path):
    return Workplace(tmp_path)


@pytest.fixture
def now(monkeypatch):
    """The time that a run's clock sees."""
    time = FakeTime()
    monkeypatch.setattr("reporting.clock.time.perf_counter", time)
    return time


@pytest.fixture
def device():
    """A GPU where there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def num_restarts(request):
    return request.config.getoption("--restarts")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "gpu" in item.keywords and torch.cuda.is_available():
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(GPU_SECONDS))
        if "thorough" in item.keywords and not config.getoption("--thorough"):
            item.add_marker(pytest.mark.skip(reason="only with --thorough"))
