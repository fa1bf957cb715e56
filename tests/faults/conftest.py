from __future__ import annotations

import pytest

from tests.support.workplace import Workplace


@pytest.fixture
def tiny(workplace: Workplace) -> Workplace:
    """The tiny run and its dataset, not trained yet."""
    workplace.add_run()
    workplace.add_dataset()
    return workplace
