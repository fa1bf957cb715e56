"""Reference curves: the losses of another run at counts of tokens, to compare a run with.

Needs no torch. The project's curves are in `runs/published.json`, those that `lab compare
--save-reference` has saved in `references.json` of the runs directory.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError

from basics.errors import UserError
from basics.json_files import FrozenConfig, describe, found_object, read_json_object
from run_config import MAX_VOCAB_SIZE, SHIPPED_RUNS, TrainConfig

Kind = Literal["train", "validation"]
PUBLISHED_PATH = SHIPPED_RUNS / "published.json"
REFERENCES = "references.json"  # in the runs directory
RUN_REFERENCE = "reference.json"  # in a run directory: the curve that it is compared with
REFERENCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
# Without `stop_if_behind`, a run is warned about beyond these limits.
WARNING_STD, WARNING_LOSS, WARNING_REPORTS = 5.0, 0.1, 3

Positive = Annotated[float, Field(gt=0, le=1e15)]
# Tokens and the loss after them. A JSON list becomes a tuple: the curve is frozen.
Point = Annotated[tuple[Positive, Positive], Field(strict=False)]
Points = Annotated[tuple[Point, ...], Field(strict=False, max_length=1000)]


@dataclass(frozen=True)
class Compared:
    """A run's loss and its reference's after as many tokens."""

    loss: float  # the run's less the reference's
    tokens: float | None  # more tokens that the reference needs for the loss; a share of the run's

    def __str__(self) -> str:
        text = f"{self.loss:+.4f}"
        return text if self.tokens is None else f"{text}, {self.tokens:+.0%} tokens"


class ReferenceCurve(FrozenConfig):
    """Losses over tokens, in nats per token of its own tokenizer."""

    name: str = Field(pattern=REFERENCE_NAME)
    about: str = ""  # model, data, optimizer
    source: str = ""
    tokenizer: str | None = None
    vocab_size: int = Field(ge=2, le=MAX_VOCAB_SIZE)
    bytes_per_token: Positive | None = None  # mean length of the validated text's tokens
    num_runs: int = Field(default=1, ge=1)  # that the curve is the mean of
    train: Points = ()
    validation: Points = ()
    # Of a single report around the curve: over seeds, and in training over batches; None: unknown.
    train_std: float | None = Field(default=None, ge=0)
    validation_std: float | None = Field(default=None, ge=0)

    def points(self, kind: Kind) -> Points:
        return self.train if kind == "train" else self.validation

    def std(self, kind: Kind) -> float | None:
        return self.train_std if kind == "train" else self.validation_std

    def loss_at(self, kind: Kind, tokens: float) -> float | None:
        """Return the loss after so many tokens, interpolated over log(tokens).

        None before the first point and after the last one.
        """
        points = self.points(kind)
        if not points or not points[0][0] <= tokens <= points[-1][0]:
            return None
        known, losses = zip(*points, strict=True)
        return float(np.interp(np.log(tokens), np.log(known), losses))

    def between(self, kind: Kind, first: float, last: float) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and losses to draw between two counts of tokens, each (n,) float64.

        Both are empty where the curve has no losses there.
        """
        points = self.points(kind)
        if points:
            first = max(first, points[0][0])
            last = min(last, points[-1][0])
        if not points or first > last:
            return np.empty(0), np.empty(0)
        known, losses = np.array(points).T
        is_inside = (known > first) & (known < last)
        tokens = np.array([first, *known[is_inside], last])
        return tokens, np.interp(np.log(tokens), np.log(known), losses)

    def tokens_at(self, kind: Kind, loss: float) -> float | None:
        """Return after how many tokens the loss was this, interpolated over log(tokens).

        A noisy curve may cross a loss several times: it is the geometric mean of the first and the
        last crossing. None if it began below the loss or ended above it.
        """
        points = self.points(kind)
        if not points:
            return None
        tokens, losses = np.array(points).T
        above = np.flatnonzero(losses > loss)
        below = np.flatnonzero(losses <= loss)
        if not len(above) or not len(below) or below[0] == 0 or above[-1] == len(losses) - 1:
            return None

        def crossing(before: int) -> float:
            share = (losses[before] - loss) / (losses[before] - losses[before + 1])
            ends = np.log(tokens[before : before + 2])
            return float(ends[0] + share * (ends[1] - ends[0]))

        return float(np.exp((crossing(below[0] - 1) + crossing(above[-1])) / 2))

    def in_units_of(
        self, tokenizer: str | None, vocab_size: int, bytes_per_token: float | None
    ) -> Self:
        """Return the curve for runs with another tokenizer, by the bytes of their tokens.

        Raises: UserError: the tokenizers differ, and the length of their tokens is not known.
        """
        is_same = (
            tokenizer == self.tokenizer
            if tokenizer and self.tokenizer
            else vocab_size == self.vocab_size
        )
        if is_same:
            return self
        if not (self.bytes_per_token and bytes_per_token):
            whose = "the reference's" if bytes_per_token else "the run's"
            raise UserError(
                f"reference {self.name} has another tokenizer ({self.tokenizer or 'unknown'}, "
                f"{self.vocab_size:,} entries) than the run ({tokenizer or 'unknown'},"
                f" {vocab_size:,}); losses would be compared per byte, but the length of"
                f" {whose} tokens is not known; choose another reference"
            )
        ratio = bytes_per_token / self.bytes_per_token

        def scaled(points: Points) -> Points:
            return tuple((tokens / ratio, loss * ratio) for tokens, loss in points)

        return self.model_copy(
            update={
                "tokenizer": tokenizer,
                "vocab_size": vocab_size,
                "bytes_per_token": bytes_per_token,
                "train": scaled(self.train),
                "validation": scaled(self.validation),
                "train_std": self.train_std and self.train_std * ratio,
                "validation_std": self.validation_std and self.validation_std * ratio,
            }
        )


def read_references(path: Path) -> list[ReferenceCurve]:
    """Return the curves in a JSON file with a list under "curves"; none without such a file.

    Raises: UserError: the file is unreadable, or a curve in it is wrong.
    """
    if not path.exists():
        return []
    found = read_json_object(path, needed_by="a reference").get("curves", [])
    if not isinstance(found, list):
        raise UserError(f'{path}: "curves" is not a list; correct it')
    curves = []
    for place, values in enumerate(found):
        try:
            curve = ReferenceCurve.model_validate(values)
        except ValidationError as error:
            raise UserError(f"{path}: curve {place + 1}: {describe(error)}") from None
        for kind in ("train", "validation"):
            tokens = [point[0] for point in curve.points(kind)]  # type: ignore[arg-type]
            if sorted(set(tokens)) != tokens:
                raise UserError(
                    f"{path}: curve {curve.name}: the tokens of {kind} do not rise; correct it"
                )
        curves.append(curve)
    return curves


def reference_of_run(run_dir: Path) -> ReferenceCurve | None:
    """Return the curve that the last launch of a run was compared with, in the run's units.

    None if there was none, or its file is damaged.
    """
    with suppress(ValidationError):
        return ReferenceCurve.model_validate(found_object(run_dir / RUN_REFERENCE))
    return None


def find_reference(name: str, runs_dir: Path) -> ReferenceCurve:
    """Return the curve with a name: one of the runs directory, else one of the project.

    Raises: UserError: there is none, or a file of curves is wrong.
    """
    curves = [*read_references(runs_dir / REFERENCES), *read_references(PUBLISHED_PATH)]
    for curve in curves:
        if curve.name == name:
            return curve
    raise UserError(
        f"no reference {name[:60]!r}; known are {', '.join(curve.name for curve in curves)};"
        " `lab compare RUN --save-reference NAME` saves another"
    )


def mean_curve(
    records_of_runs: Sequence[Sequence[dict[str, Any]]], key: str, *, max_points: int
) -> tuple[Points, float | None]:
    """Return the mean of a metric over runs, and the standard deviation of a single record.

    Records are averaged in buckets of equal length in log(tokens). The deviation is that of the
    runs' records from the mean curve, over the second half of the tokens, where the curve is
    straight within a bucket; None if there are fewer than two records in each bucket.

    Args:
        records_of_runs: the records of each run, with `tokens` and perhaps `key`.
    """
    found = [
        (record["tokens"], record[key])
        for records in records_of_runs
        for record in records
        if record.get(key) is not None and record.get("tokens")
    ]
    if not found:
        return (), None
    tokens, losses = np.array(sorted(found)).T
    distinct = np.unique(tokens)
    if len(distinct) > max_points:
        # The last count is a bucket of its own: runs of the same length end within the curve.
        edges = np.geomspace(distinct[0], distinct[-1], max_points)[1:]
        edges[-1] = distinct[-1]
        buckets = np.digitize(tokens, edges)
    else:
        buckets = np.searchsorted(distinct, tokens)
    points = []
    for bucket in np.unique(buckets):
        is_in = buckets == bucket
        middle = np.exp(np.log(tokens[is_in]).mean())
        points.append((float(np.round(middle)), float(losses[is_in].mean())))
    at = np.interp(np.log(tokens), np.log([point[0] for point in points]), [p[1] for p in points])
    late = tokens >= tokens[-1] / 2
    num_buckets = len(np.unique(buckets[late]))
    freedom = int(late.sum()) - num_buckets  # each bucket's mean takes one
    if freedom < 1:
        return tuple(points), None
    squares = float(((losses - at)[late] ** 2).sum())
    return tuple(points), (squares / freedom) ** 0.5


class Comparison:
    """Compares a run's losses with a reference as it trains. Rank 0.

    `failure` is set once the losses of so many reports in a row, in training and validation, have
    been above the reference by more than the limit, and cleared by one that is not.
    """

    def __init__(self, curve: ReferenceCurve | None, config: TrainConfig) -> None:
        self._curve, limit = curve, config.stop_if_behind
        self.stops = limit is not None
        self._max_std = limit.std if limit else WARNING_STD
        self._max_loss = limit.loss if limit else WARNING_LOSS
        self._num_reports = limit.reports if limit else WARNING_REPORTS
        self._num_behind = 0
        self.failure = ""

    def compare(self, kind: Kind, tokens: int, loss: float) -> tuple[dict[str, float], str]:
        """Compare one report.

        Args:
            tokens: that the run has trained on.
            loss: nats per token, finite or not.

        Returns the numbers for its record, and the text for its line; both empty outside the
        reference's tokens.
        """
        if self._curve is None:
            return {}, ""
        expected = self._curve.loss_at(kind, tokens)
        if expected is None:
            return {}, ""
        self._count(self._curve, kind, loss - expected)
        numbers = {f"{kind}_reference_loss": expected}
        same_loss_tokens = self._curve.tokens_at(kind, loss)
        ahead = None
        if same_loss_tokens is not None:
            numbers[f"{kind}_reference_tokens"] = same_loss_tokens
            ahead = same_loss_tokens / tokens - 1
        return numbers, f"{Compared(loss - expected, ahead)} against {self._curve.name}"

    def _count(self, curve: ReferenceCurve, kind: Kind, behind: float) -> None:
        """Count a report that is behind by more than the limit; others end the count."""
        std = curve.std(kind)
        if self._max_std is not None and std is not None:
            limit = self._max_std * std
            limit_text = f"{self._max_std:g} standard deviations"
        elif self._max_loss is not None:
            limit = self._max_loss
            limit_text = f"{limit:g}"
        else:
            return  # a limit in standard deviations, and a kind whose noise is not known
        if behind <= limit:  # not so for a loss that is not a number
            self._num_behind = 0
            self.failure = ""
            return
        self._num_behind += 1
        if self._num_behind >= self._num_reports:
            self.failure = (
                f"the loss has been above that of {curve.name} by more than {limit_text} for"
                f" {self._num_behind} reports in a row, by {behind:.4f} in the last one"
            )
