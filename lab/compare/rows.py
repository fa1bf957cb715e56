"""Results to rows: repeated seeds together, the best first, with what sets each apart."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from lab.compare.published import PUBLISHED
from lab.compare.run_figures import Figures
from lab.compare.run_results import FINISHED, Result, shown

LOSS_NAMES = {"test_loss": "test loss", "validation_loss": "validation loss",
              "train_loss": "training loss"}  # the first that all rows have decides
SEED = "random_seed"
LONGEST_NAME = 40  # characters, in a chart
# Student's t: within it lie 95 of 100 differences, by degrees of freedom from 1 on.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Row:
    """One run, one published row, or the mean of runs that differ in their seed alone.

    Attributes:
        spread: sample standard deviation of each loss over the seeds, where there are several.
        settings: those in which the compared runs differ, without what most have in common.
    """

    results: tuple[Result, ...]
    figures: Figures
    spread: dict[str, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    is_of_other_slice: bool = False
    is_within_spread: bool = False

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def is_published(self) -> bool:
        return self.first.status == PUBLISHED

    @property
    def name(self) -> str:
        names = ", ".join(result.name for result in self.results)
        marks = {FINISHED: "", PUBLISHED: "*"}
        return names + marks.get(self.first.status, f" ({self.first.status})")

    @property
    def short_name(self) -> str:
        return self.name if len(self.name) <= LONGEST_NAME else f"{self.name[:LONGEST_NAME]}..."

    @property
    def differs(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    def loss(self, kind: str) -> float | None:
        """Give a loss if it can be set beside those of the other rows."""
        is_foreign = kind == "test_loss" and self.is_of_other_slice
        return None if is_foreign else getattr(self.figures, kind)


@dataclass(frozen=True)
class Comparison:
    """Rows, the best first, and what a reader has to know of them.

    Attributes:
        sorted_by: a key of `LOSS_NAMES`.
    """

    rows: list[Row]
    sorted_by: str
    notes: list[str]


def compare(results: list[Result]) -> Comparison:
    """Set results beside each other."""
    rows = _mark_slices(_group_seeds(_with_test_losses(results)))
    rows, common = _mark_differences(rows)
    kind = deciding_loss(rows)
    rows, within = _mark_within_spread(sorted(rows, key=_order(kind)), kind)
    return Comparison(rows, kind, [note for note in (
        _sorting_note(rows, kind), common, within, *_slice_notes(rows), _published_note(rows)
    ) if note])


def _with_test_losses(results: list[Result]) -> list[Result]:
    """Give each result its loss on the slice that most have, of equals on the longest.

    The slice of published rows comes first.
    """
    counts = Counter(test_slice for result in results for test_slice in result.tests)
    published = {test_slice for result in results if result.status == PUBLISHED
                 for test_slice in result.tests}
    chosen = [max(result.tests, key=lambda test_slice: (test_slice in published,
                                                        counts[test_slice]), default="")
              for result in results]
    return [replace(result, test_slice=test_slice, figures=replace(
                result.figures, test_loss=result.tests.get(test_slice)))
            for result, test_slice in zip(results, chosen, strict=True)]


def _group_seeds(results: list[Result]) -> list[Row]:
    """Put runs together that differ in nothing but their seed.

    A seed that comes twice, trained to the same end, is no second sample: it gets a row of its own.
    """
    groups: dict[object, list[Result]] = {}
    times_seen: Counter[object] = Counter()
    for place, result in enumerate(results):
        figures, config = result.figures, {k: shown(v) for k, v in result.config.items()}
        seed = config.pop(SEED, None)
        key = (tuple(sorted(config.items())), result.status, result.machine, figures.steps,
               figures.global_batch_size)
        times_seen[key, seed] += 1
        groups.setdefault((key, times_seen[key, seed]) if config else place, []).append(result)
    return [_row(tuple(group)) for group in groups.values()]


def _row(results: tuple[Result, ...]) -> Row:
    """Make one row; of several seeds the means, of what each of them has."""
    if len(results) == 1:
        return Row(results, results[0].figures)
    columns = {field.name: [getattr(result.figures, field.name) for result in results]
               for field in fields(Figures)}
    if len({result.test_slice for result in results}) > 1:
        columns["test_loss"] = [None]
    whole = {key: values for key, values in columns.items() if None not in values}
    return Row(results, Figures(**{key: statistics.fmean(v) for key, v in whole.items()}),
               {kind: statistics.stdev(whole[kind]) for kind in LOSS_NAMES if kind in whole})


def _mark_slices(rows: list[Row]) -> list[Row]:
    """Mark test losses of other tokens than the published ones, or than most."""
    tested = [row for row in rows if row.figures.test_loss is not None]
    standard = [row for row in tested if row.is_published] or tested
    usual = Counter(row.first.test_slice for row in standard).most_common(1)
    return [replace(row, is_of_other_slice=row.figures.test_loss is not None
                    and row.first.test_slice != usual[0][0]) for row in rows]


def _mark_differences(rows: list[Row]) -> tuple[list[Row], str]:
    """Note in which settings the runs differ; what more than half have in common is said once."""
    configs = [_settings(row) for row in rows]
    known = [config for config in configs if config]
    keys = [key for key in dict.fromkeys(key for config in known for key in config)
            if len({config.get(key) for config in known}) > 1]
    common = {}
    for key in keys:
        value, count = Counter(config.get(key) for config in known).most_common(1)[0]
        if value is not None and count > len(known) / 2:
            common[key] = value
    marked = [replace(row, settings={key: config[key] for key in keys if key in config
                                     and config[key] != common.get(key)})
              for row, config in zip(rows, configs, strict=True)]
    said = " ".join(f"{key}={value}" for key, value in common.items())
    return marked, f"where nothing else is said: {said}" if said else ""


def _settings(row: Row) -> dict[str, str]:
    settings = {key: shown(value) for key, value in row.first.config.items()}
    seeds = [shown(result.config[SEED]) for result in row.results if SEED in result.config]
    return settings | ({SEED: ",".join(seeds)} if seeds else {})


def deciding_loss(rows: list[Row]) -> str:
    """Choose the loss to sort by: test before validation before training, if all rows have it.

    Else the one that most have. Runs that have not ended have a say only where none has.
    """
    measured = [row for row in rows if any(row.loss(kind) is not None for kind in LOSS_NAMES)]
    ended = [row for row in measured if row.first.status in (FINISHED, PUBLISHED)] or measured
    counts = {kind: sum(row.loss(kind) is not None for row in ended) for kind in LOSS_NAMES}
    return max(LOSS_NAMES, key=lambda kind: counts[kind])  # of equals the first


def _order(kind: str) -> Callable[[Row], tuple]:
    """Give the key to sort by: that loss, and behind all that have it, the others."""
    def key(row: Row) -> tuple:
        losses = [row.loss(name) for name in (kind, *LOSS_NAMES)]
        return (*((loss is None, loss or 0.0) for loss in losses), row.name)
    return key


def seed_spread(rows: list[Row], kind: str) -> tuple[float, int]:
    """Pool the standard deviations of all rows with several seeds; give their degrees of freedom.
    """
    groups = [(row.spread[kind], len(row.results) - 1) for row in rows
              if kind in row.spread and row.loss(kind) is not None]
    freedom = sum(free for _, free in groups)
    squares = sum(free * spread**2 for spread, free in groups)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


def _mark_within_spread(rows: list[Row], kind: str) -> tuple[list[Row], str]:
    """Mark what lies so near the best row that seeds alone may be the difference.

    Two means of n1 and n2 seeds differ by s * sqrt(1/n1 + 1/n2) (one standard deviation) when
    nothing but the seed does, s being pooled over all rows with several seeds: it is taken to be
    the same for all, also for a row with one seed. Within t times that lie 95 of 100 such
    differences. As the best row was chosen for being the best, the mark comes rather too seldom.

    Source: Student's t-test of two means with pooled variance (Student 1908, Biometrika 6).
    """
    spread, freedom = seed_spread(rows, kind)
    best = rows[0].loss(kind) if rows else None
    if not freedom or best is None:
        return rows, ""
    t = T_95[freedom - 1] if freedom <= len(T_95) else 1.96 + 2.5 / freedom
    marked = [rows[0]]
    for row in rows[1:]:
        loss = row.loss(kind)
        limit = t * spread * math.sqrt(1 / len(rows[0].results) + 1 / len(row.results))
        marked.append(replace(row, is_within_spread=loss is not None and loss - best <= limit))
    known = f"(standard deviation {spread:.4f}, {freedom} degrees of freedom, 95%)"
    if any(row.is_within_spread for row in marked):
        return marked, ("≈ within the seed spread of the best row: other seeds alone make as much"
                        f" of a difference {known}")
    return marked, f"no row lies within the seed spread of the best one {known}"


def _sorting_note(rows: list[Row], kind: str) -> str:
    missing = sum(row.loss(kind) is None for row in rows)
    behind = {0: "", 1: "; the row without one comes last"}.get(
        missing, f"; the {missing} rows without one come last")
    seeds = "; mean ± standard deviation over n seeds" if any(row.spread for row in rows) else ""
    return f"sorted by {LOSS_NAMES[kind]} (nats a token), best first{behind}{seeds}"


def _slice_notes(rows: list[Row]) -> list[str]:
    """Say what the test losses are of, and that validation losses are not of the same tokens."""
    notes = []
    for is_other, start in ((False, "test loss: of"), (True, "† not to be compared: of")):
        slices = {row.first.test_slice for row in rows if row.figures.test_loss is not None
                  and row.is_of_other_slice == is_other}
        notes += [f"{start} {'; '.join(sorted(slices))}"] if slices else []
    if len({_validation_slice(row) for row in rows if row.figures.validation_loss is not None}) > 1:
        notes.append("the validation losses are of different tokens: see what differs")
    return notes


def _validation_slice(row: Row) -> tuple[str, ...]:
    config = row.first.config
    keys = ["dataset", "start_val_token", "validation_sequences", "context_length"]
    if config.get("validation_batches") is not None:
        keys += ["validation_batches", "microbatch_size"]
    return tuple(shown(config.get(key)) for key in keys)


def _published_note(rows: list[Row]) -> str:
    if not any(row.is_published for row in rows):
        return ""
    return ("* published: measured by the original system, not here; dollars from its seconds and"
            " prices, those of validation an estimate; IFT: a judge's score, 0 to 100")
