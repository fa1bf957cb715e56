"""What was measured of a model, as a line of evaluations.jsonl and as rows of tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from lab.evaluate.held_out import Evaluation
from lab.evaluate.intervals import rounded, shown
from lab.evaluate.questions import Quiz
from lab.evaluate.scoring import Figure, Score

Row = dict[str, str]  # of a table: cells by heading
DECIMALS = {"accuracy": 4, "normalised_accuracy": 4, "perplexity": 3}  # of a task's figures
INTERVAL = "[95%]"  # in the heading of a column with intervals


@dataclass(frozen=True)
class TaskResult:
    """A model's figures of one task."""

    quiz: Quiz
    figures: dict[str, Figure]
    num_cut: int

    @classmethod
    def of(cls, quiz: Quiz, score: Score) -> TaskResult:
        return cls(quiz, {key: figure(score) for key, figure in quiz.task.figures.items()},
                   score.num_cut)

    @property
    def main_figure(self) -> Figure:
        """The one by which models are sorted, and that is drawn."""
        return self.figures[self.quiz.task.main_figure]

    def as_record(self) -> dict[str, object]:
        record: dict[str, object] = {
            "benchmark": self.quiz.name, "questions": len(self.quiz.questions),
            "questions_from": self.quiz.source, "split": self.quiz.split,
            "cut_texts": self.num_cut}
        for key, figure in self.figures.items():
            record |= {key: figure.value, f"{key}_interval": rounded(figure.interval)}
        return record


@dataclass
class Result:
    """What was measured of one model, which has been freed.

    Attributes:
        name: the target's; its title has the checkpoint too.
        run_dir: None unless the target is a run.
        trained_tokens: 0 unless the target is a run.
        tasks: by name.
        checkpoint: its name; None if the target is a directory of weights or on the hub.
    """

    name: str
    title: str
    run_dir: Path | None = None
    trained_tokens: int = 0
    evaluation: Evaluation | None = None
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    checkpoint: str | None = None

    def as_document(self) -> dict[str, object]:
        """Return the result for scripts: the records of evaluations.jsonl, for any target."""
        return {"name": self.name, "checkpoint": self.checkpoint,
                "trained_tokens": self.trained_tokens if self.checkpoint else None,
                "loss": self.evaluation and self.evaluation.as_record(),
                "tasks": [found.as_record() for found in self.tasks.values()]}


def loss_rows(results: list[Result], *, by_bits: bool) -> list[Row]:
    """Return a table of the losses, lowest first.

    Args:
        by_bits: the fewest bits per byte first, where losses do not compare.
    """
    found = [(result.title, result.evaluation) for result in results if result.evaluation]
    return _sorted([((one.bits_per_byte or math.nan) if by_bits else one.loss,
                     _loss_row(title, one)) for title, one in found])


def _loss_row(title: str, measured: Evaluation) -> Row:
    bits, where = measured.bits_per_byte, measured.slice
    return {
        "model": title,
        f"loss {INTERVAL}": shown(measured.loss, measured.loss_interval, decimals=6),
        f"perplexity {INTERVAL}": shown(measured.perplexity, measured.perplexity_interval,
                                        decimals=3),
        f"bits per byte {INTERVAL}":
            "-" if bits is None else shown(bits, measured.bits_interval, decimals=6),
        "tokens": f"{where.num_tokens:,}", "start token": f"{where.start_token:,}",
        "dataset": f"{where.dataset} {where.split}",
    }


def task_rows(results: list[Result], quizzes: list[Quiz]) -> list[Row]:
    """Return a table of the tasks in their order, of each the best model first."""
    keys = [key for key in DECIMALS if any(key in quiz.task.figures for quiz in quizzes)]
    rows: list[Row] = []
    for quiz in quizzes:
        rows += _sorted([(-found.main_figure.value, _task_row(result.title, found, keys))
                         for result in results if (found := result.tasks.get(quiz.name))])
    return rows


def _task_row(title: str, found: TaskResult, keys: list[str]) -> Row:
    cells = {key: shown(*found.figures[key], decimals=DECIMALS[key]) if key in found.figures
             else "-" for key in keys}
    return {"model": title, "task": found.quiz.name,
            **{f"{key.replace('_', ' ')} {INTERVAL}": cell for key, cell in cells.items()},
            "questions": f"{len(found.quiz.questions):,}"}


def _sorted(found: list[tuple[float, Row]]) -> list[Row]:
    """Sort the rows by their keys, NaN last."""
    return [row for _, row in sorted(found, key=lambda item: (math.isnan(item[0]), item[0]))]
