"""A run with a second copy, for the tests."""

from __future__ import annotations

import shutil

from checkpointing import list_checkpoints
from processes.command_line import Options
from run_config import load_run
from tests.support.checkpoints import save
from tests.support.workplace import Workplace
from trainer.copy_process import Copy, Job

DATA = {"train": "100 tokens, abc"}


class Copied:
    """A run with checkpoints at steps 1 to 3, the best at 2, and its second copy."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace, self.place = workplace, workplace.root / "copies"
        workplace.add_run()
        self.run = load_run(workplace.runs_dir, "tiny")
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            save(self.run.checkpoints_dir, step, loss)
        self.run.metrics_path.write_text('{"global_step": 3}\n')
        self.update()
        self.copy_dir = self.place / "tiny"

    def update(self, **options: int) -> None:
        job = Job(str(self.run.run_dir), str(self.place / "tiny"), **options)
        assert Copy(job).update() == ""

    def forget(self, *steps: int) -> None:
        """Lose checkpoints and records of the run's own directory."""
        for found in list_checkpoints(self.run.checkpoints_dir):
            if not steps or found.meta.global_step in steps:
                shutil.rmtree(found.path)
        self.run.metrics_path.unlink(missing_ok=True)

    def options(self, **options: object) -> Options:
        return Options("tiny", runs_dir=self.workplace.runs_dir, sync_to=self.place, **options)

    def steps(self) -> list[int]:
        return [found.meta.global_step for found in list_checkpoints(self.run.checkpoints_dir)]
