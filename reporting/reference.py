"""Reference curves: the losses of another run at counts of tokens, to compare a run with.

Needs no torch. The project's curves are in `runs/published.json`, those that `lab compare
--save-reference` has saved in `references.json` of the runs directory.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import Field, ValidationError, model_validator

from basics.errors import UserError, writing_to
from basics.files import write_atomically
from basics.json_files import FrozenConfig, describe, found_object, read_json_object, to_json
from basics.text import did_you_mean
from run_config import SHIPPED_RUNS, TrainConfig
from settings.model import MAX_VOCAB_SIZE

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

    @model_validator(mode="after")
    def _tokens_rise(self) -> Self:
        for kind in get_args(Kind):
            tokens = [point[0] for point in self.points(kind)]
            if sorted(set(tokens)) != tokens:
                raise ValueError(f"the tokens of {kind} do not rise; sort them, each once")
        return self

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

    def compared(self, kind: Kind, tokens: float, loss: float) -> Compared | None:
        """Compare a loss after so many tokens; None if the curve has no loss there."""
        expected = self.loss_at(kind, tokens)
        if expected is None:
            return None
        same_loss_tokens = self.tokens_at(kind, loss)
        ahead = None if same_loss_tokens is None else same_loss_tokens / tokens - 1
        return Compared(loss - expected, ahead)

    def in_units_of(
        self,
        tokenizer: str | None,
        vocab_size: int,
        bytes_per_token: Callable[[], float | None],
    ) -> Self:
        """Return the curve for runs with another tokenizer, by the bytes of their tokens.

        Args:
            bytes_per_token: returns the mean length of the run's tokens; called if it is needed.

        Raises: UserError: the tokenizers differ, and the length of their tokens is not known.
        """
        is_same = (
            tokenizer == self.tokenizer
            if tokenizer and self.tokenizer
            else vocab_size == self.vocab_size
        )
        if is_same:
            return self
        length = bytes_per_token() if self.bytes_per_token else None
        if not (self.bytes_per_token and length):
            whose = "the run's" if self.bytes_per_token else "the reference's"
            raise UserError(
                f"reference {self.name} has another tokenizer ({self.tokenizer or 'unknown'}, "
                f"{self.vocab_size:,} entries) than the run ({tokenizer or 'unknown'},"
                f" {vocab_size:,}); losses would be compared per byte, but the length of"
                f" {whose} tokens is not known; choose another reference"
            )
        ratio = length / self.bytes_per_token

        def scaled(points: Points) -> Points:
            return tuple((tokens / ratio, loss * ratio) for tokens, loss in points)

        return self.model_copy(
            update={
                "tokenizer": tokenizer,
                "vocab_size": vocab_size,
                "bytes_per_token": length,
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
            curves.append(ReferenceCurve.model_validate(values))
        except ValidationError as error:
            raise UserError(f"{path}: curve {place + 1}: {describe(error)}") from None
    return curves


def reference_of_run(run_dir: Path) -> ReferenceCurve | None:
    """Return the curve that the last launch of a run was compared with, in the run's units.

    None if there was none, or its file is damaged.
    """
    with suppress(ValidationError):
        return ReferenceCurve.model_validate(found_object(run_dir / RUN_REFERENCE))
    return None


def find_reference(name: str, runs_dir: Path, run_dir: Path | None = None) -> ReferenceCurve:
    """Return the curve with a name: of the project, of the runs directory, or a run's own copy.

    The copy is there where a run directory was copied to another machine.

    Raises: UserError: there is none, or a file of curves is wrong.
    """
    curves = read_references(PUBLISHED_PATH)
    if name not in [curve.name for curve in curves]:
        curves += read_references(runs_dir / REFERENCES)
    own = reference_of_run(run_dir) if run_dir else None
    if own:
        curves.append(own)
    for curve in curves:
        if curve.name == name:
            return curve
    names = [curve.name for curve in curves]
    raise UserError(
        f"no reference {name[:60]!r}{did_you_mean(name, names)}; known are {', '.join(names)};"
        " `lab compare RUN --save-reference NAME` saves another"
    )


def write_reference(path: Path, curve: ReferenceCurve) -> None:
    """Add a curve to a file of curves, or replace the one with its name. Raises: UserError."""
    others = [other for other in read_references(path) if other.name != curve.name]
    content = {"curves": [one.model_dump() for one in (*others, curve)]}
    with writing_to(path):
        write_atomically(path, to_json(content) + "\n")


def losses_of(
    records_of_runs: Sequence[Sequence[dict[str, Any]]], key: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the losses of all records that have both, sorted by tokens, (n,)."""
    found = [
        (record["tokens"], record[key])
        for records in records_of_runs
        for record in records
        if record.get(key) is not None and record.get("tokens")
    ]
    tokens, losses = np.array(sorted(found), dtype=float).reshape(-1, 2).T
    return tokens, losses


def mean_curve(
    records_of_runs: Sequence[Sequence[dict[str, Any]]], key: str, *, max_points: int
) -> Points:
    """Return the mean of a loss over runs, in buckets of equal length in log(tokens)."""
    tokens, losses = losses_of(records_of_runs, key)
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
        # Rounded: else the last count may be a little before the one that it is the mean of.
        points.append((float(np.round(middle)), float(losses[is_in].mean())))
    return tuple(points)


def report_noise(
    records_of_runs: Sequence[Sequence[dict[str, Any]]], key: str, *, reports: int
) -> float | None:
    """Return the standard deviation of a single loss, over the second half of the tokens.

    It is that within groups of so many reports in a row, in which the mean changes little. With one
    report it is that over the runs alone; with several also that over batches, which seeds may
    have in common. None if there is no group of several losses.
    """
    tokens, losses = losses_of(records_of_runs, key)
    if not len(tokens):
        return None
    is_late = tokens >= tokens[-1] / 2
    tokens, losses = tokens[is_late], losses[is_late]
    groups = np.searchsorted(np.unique(tokens), tokens) // reports
    squares = 0.0
    freedom = 0
    for group in np.unique(groups):
        inside = losses[groups == group]
        squares += float(((inside - inside.mean()) ** 2).sum())
        freedom += len(inside) - 1
    return (squares / freedom) ** 0.5 if freedom else None


class ReferenceComparison:
    """Compares a run's losses with a reference as it trains. Rank 0.

    `failure` is set once the losses of so many reports in a row, of training or of validation, have
    been above the reference by more than the limit, and empty again after one that is not.
    """

    def __init__(self, curve: ReferenceCurve, config: TrainConfig) -> None:
        self._curve, limit = curve, config.stop_if_behind
        self.stops = limit is not None
        self._max_std = limit.std if limit else WARNING_STD
        self._max_loss = limit.loss if limit else WARNING_LOSS
        self._num_reports = limit.reports if limit else WARNING_REPORTS
        self._num_behind: dict[Kind, int] = {"train": 0, "validation": 0}
        self._failures: dict[Kind, str] = {"train": "", "validation": ""}

    @property
    def failure(self) -> str:
        return self._failures["validation"] or self._failures["train"]

    def compare(
        self, kind: Kind, tokens: int, loss: float, *, counts: bool = True
    ) -> tuple[dict[str, float], str]:
        """Compare one report.

        Args:
            tokens: that the run has trained on.
            loss: nats per token, finite or not.
            counts: whether it is one of the reports in a row; not if it is of fewer steps.

        Returns the numbers for its record, and the text for its line; both empty outside the
        reference's tokens.
        """
        expected = self._curve.loss_at(kind, tokens)
        if expected is None:
            return {}, ""
        if counts:
            self._count(kind, loss - expected)
        numbers = {f"{kind}_reference_loss": expected}
        same_loss_tokens = self._curve.tokens_at(kind, loss)
        if same_loss_tokens is not None:
            numbers[f"{kind}_reference_tokens"] = same_loss_tokens
        compared = self._curve.compared(kind, tokens, loss)
        return numbers, f"{compared} against {self._curve.name}"

    def _count(self, kind: Kind, behind: float) -> None:
        """Count a report that is behind by more than the limit; others end the count."""
        std = self._curve.std(kind)
        if self._max_std is not None and std is not None:
            limit = self._max_std * std
            limit_text = f"{self._max_std:g} standard deviations"
        elif self._max_loss is not None:
            limit = self._max_loss
            limit_text = f"{limit:g}"
        else:
            return  # a limit in standard deviations, and a kind whose noise is not known
        if behind <= limit:  # not so for a loss that is not a number
            self._num_behind[kind] = 0
            self._failures[kind] = ""
            return
        self._num_behind[kind] += 1
        if self._num_behind[kind] >= self._num_reports:
            name = "training" if kind == "train" else kind
            self._failures[kind] = (
                f"the {name} loss has been above that of {self._curve.name} by more than"
                f" {limit_text} for {self._num_behind[kind]} reports in a row, by {behind:.4f} in"
                " the last one"
            )
