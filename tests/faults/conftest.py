import pytest


@pytest.fixture
def tiny(workplace):
    """The tiny run and its dataset, not trained yet."""
    workplace.add_run()
    workplace.add_dataset()
    return workplace
