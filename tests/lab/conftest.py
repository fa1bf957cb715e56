"""One tiny trained run for all tests of the lab: each test gets a copy."""

import shutil

import pytest
import torch

from tests.support.runs import made_once
from tests.support.workplace import Workplace, train_tiny


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory):
    return Workplace(
        made_once(
            tmp_path_factory,
            "trained",
            lambda root: train_tiny(root, validation_batches=15, usd_per_hour=36.0),
        )
    )


@pytest.fixture
def trained(trained_once, tmp_path_factory):
    """A workplace with a trained run, which the test may change."""
    root = tmp_path_factory.mktemp("copy") / "workplace"
    return Workplace(shutil.copytree(trained_once.root, root, symlinks=True))


@pytest.fixture
def runs_dir(tmp_path):
    """An empty directory of runs."""
    path = tmp_path / "runs"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Use one thread: on a busy machine, threads that wait for each other take much longer.

    Each thread takes memory, too, which must not depend on the number of cores.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a launch keeps it
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
