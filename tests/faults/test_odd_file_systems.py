"""A whole run where the run directory lies on a file system that lacks calls."""


import pytest

from basics.checkpoint_files import directory_of, find_damage, named_as_checkpoints
from basics.failpoints import VARIABLE
from checkpointing import list_checkpoints
from tests.support import odd_files
from tests.support.runs import (
    SETTINGS,
    metrics_of,
    summary_of,
    train_undisturbed,
    weights_of,
    with_deadlines,
)
from tests.support.thorough import thorough_but
from tests.support.workplace import succeeded

KEPT = SETTINGS | {"keep_checkpoints": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), KEPT)


@pytest.mark.parametrize("fault", thorough_but(
    ["save.manifest:kill:rank=0:hit=1"],
    [f"{place}:kill:rank=0:hit={hit}" for place, hit in (
        ("save.manifest", 1), ("save.remove", 1), ("save.validation", 2), ("save.links", 2),
        ("save.prune", 1), ("record", 1))]))
def test_a_killed_run_resumes_to_the_same_weights(workplace, undisturbed, fault):
    workplace.add_dataset()
    run_dir = workplace.add_run(train=KEPT)
    environment = {odd_files.VARIABLE: str(workplace.runs_dir)} | with_deadlines(heartbeat=0.5)
    assert workplace.torchrun(2, "tiny", **environment, **{VARIABLE: fault}).returncode
    for found in list_checkpoints(run_dir / "checkpoints"):
        assert find_damage(found.path, thoroughly=True) == ""
    result = succeeded(workplace.torchrun(2, "tiny", **environment))
    assert "its file system has no locks" in result.stdout
    latest = directory_of(run_dir / "checkpoints/latest")
    assert latest.name != "latest" and (run_dir / "checkpoints/latest").is_file()
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert metrics_of(run_dir) == metrics_of(undisturbed)
    assert summary_of(run_dir)["status"] == "finished"
    assert not named_as_checkpoints(run_dir / "checkpoints", partial=True)
    assert len(list_checkpoints(run_dir / "checkpoints")) <= 2  # one may have been resumed from
    result = succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "2"))  # on a usual one
    assert "tiny is complete" in result.stdout
