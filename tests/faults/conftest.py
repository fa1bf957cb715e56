import pytest

from tests.support.runs import SETTINGS, made_once, train_undisturbed
from tests.support.workplace import Workplace


@pytest.fixture
def tiny(workplace) -> Workplace:
    """The tiny run and its dataset, not trained yet."""
    workplace.add_run()
    workplace.add_dataset()
    return workplace


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The run directory of a run without faults, on two processes."""
    return (
        made_once(tmp_path_factory, "undisturbed", lambda root: train_undisturbed(root, SETTINGS))
        / "runs/tiny"
    )
