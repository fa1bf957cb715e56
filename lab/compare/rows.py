"""Rows of a comparison: seeds merged, with the settings that differ and with their marks."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace

from basics.errors import UserError
from basics.text import counted
from lab.compare.results import FIGURES, PUBLISHED, Figures, Result, ratio, shown
from lab.compare.tokens_to_loss import Reached, first_reaching, mean_reached
from lab.runs import number
from lab.stats import pooled_deviation, t_95
from reporting.summary import FINISHED

SEED = "random_seed"
LOSS_NAMES = {"test_loss": "test loss", "validation_loss": "validation loss",
              "train_loss": "training loss"}  # in order of preference
BITS_PER_BYTE = {"test_loss": "test_bits_per_byte", "validation_loss": "validation_bits_per_byte"}
LONGEST_NAME = 40  # characters, in a chart


@dataclass
class Row:
    """One run, one published row, or the mean of runs that differ only in their seed.

    Attributes:
        spread: sample standard deviation of each loss over the seeds, if there are several.
        settings: settings in which the runs differ, except values that most runs have.
        reached: when the validation loss was that of the reference of `mark_reached`.
    """

    results: list[Result]
    figures: Figures
    spread: dict[str, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    is_of_other_slice: bool = False
    is_within_spread: bool = False
    reached: Reached | None = None

    def __post_init__(self) -> None:
        """Add the figures that follow from others."""
        found, hours = self.figures, ratio(self.figures["seconds"], 3600)
        rest = {key: None if None in (found[key], found[f"validation_{key}"]) else
                found[key] - found[f"validation_{key}"] for key in ("seconds", "usd")}
        megatokens = ratio(found["tokens"], 1e6)
        self.figures = found | {f"{key}_without_validation": rest[key] for key in rest} | {
            "usd_per_hour": ratio(found["usd"], hours),
            "usd_per_megatoken": ratio(found["usd"], megatokens),
            "usd_per_megatoken_without_validation": ratio(rest["usd"], megatokens)}

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
        """The settings as text."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def test_text(self) -> str:
        return self.first.text_of(self.first.test_slice)

    def loss(self, kind: str) -> float | None:
        """Return a loss if it can be compared with those of the other rows."""
        is_incomparable = kind == "test_loss" and self.is_of_other_slice
        return None if is_incomparable else self.figures[kind]

    def bits(self, kind: str) -> float | None:
        """Return the bits per byte of a loss, if they are known."""
        return self.figures[BITS_PER_BYTE[kind]] if kind in BITS_PER_BYTE else None

    def bytes_per_token(self, kind: str) -> float | None:
        """Return the mean bytes of text of the tokens that a loss was measured on, if known."""
        loss, bits = self.figures[kind], self.bits(kind)
        return loss / math.log(2) / bits if loss and bits else None


def with_test_losses(results: list[Result]) -> list[Result]:
    """Choose each result's test loss: on the published slice, else on the most common text.

    Of equally common ones the longest is chosen. Slices of different tokens may be the same text.
    """
    counts = Counter(result.text_of(test_slice) for result in results
                     for test_slice in result.tests)
    published = {test_slice for result in results if result.status == PUBLISHED
                 for test_slice in result.tests}
    found = []
    for result in results:
        chosen = max(result.tests, default="", key=lambda test_slice, result=result: (
            test_slice in published, counts[result.text_of(test_slice)]))
        test = result.tests.get(chosen, {})
        found.append(replace(result, test_slice=chosen, figures=result.figures | {
            "test_loss": test.get("loss"),
            "test_bits_per_byte": number(test.get("bits_per_byte"))}))
    return found


def group_seeds(results: list[Result]) -> list[Row]:
    """Group runs that differ only in their seed; their figures are the means of what all have.

    A second run with the same seed and length is not another sample: it gets its own row.
    """
    groups: dict[object, list[Result]] = {}
    times_seen: Counter[object] = Counter()
    for index, result in enumerate(results):
        config = {key: shown(value) for key, value in result.config.items()}
        seed = config.pop(SEED, None)
        key = (tuple(sorted(config.items())), result.status, result.machine,
               result.figures["steps"], result.figures["global_batch_size"])
        times_seen[key, seed] += 1
        groups.setdefault((key, times_seen[key, seed]) if config else index, []).append(result)
    return list(map(_row_of, groups.values()))


def _row_of(group: list[Result]) -> Row:
    if len(group) == 1:
        return Row(group, group[0].figures)
    values = {key: [result.figures[key] for result in group] for key in FIGURES}
    if len({result.test_slice for result in group}) > 1:
        values["test_loss"] = [None]
    return Row(group, {key: None if None in found else statistics.fmean(found)
                       for key, found in values.items()},
               {kind: statistics.stdev(values[kind]) for kind in LOSS_NAMES
                if None not in values[kind]})


def mark_differences(rows: list[Row]) -> str:
    """Set the settings in which rows differ; values of more than half of them go into a note."""
    configs = list(map(_settings, rows))
    known = [config for config in configs if config]
    keys = [key for key in dict.fromkeys(key for config in known for key in config)
            if len({config.get(key) for config in known}) > 1]
    common = {}
    for key in keys:
        value, count = Counter(config.get(key) for config in known).most_common(1)[0]
        if value is not None and count > len(known) / 2:
            common[key] = value
    for row, config in zip(rows, configs, strict=True):
        row.settings = {key: config[key] for key in keys
                        if key in config and config[key] != common.get(key)}
    values = " ".join(f"{key}={value}" for key, value in common.items())
    return f"settings, unless a row shows another value: {values}" if values else ""


def _settings(row: Row) -> dict[str, str]:
    settings = {key: shown(value) for key, value in row.first.config.items()}
    seeds = [shown(result.config[SEED]) for result in row.results if SEED in result.config]
    codes = sorted({result.code for result in row.results if result.code})
    return settings | ({SEED: ",".join(seeds)} if seeds else {}) | (
        {"code": ",".join(codes)} if codes else {})


def deciding_loss(rows: list[Row]) -> str:
    """Choose the loss to sort by: the one that most rows have; test, then validation, if equal.

    Runs that have not ended count only if no run has ended.
    """
    measured = [row for row in rows if any(row.loss(kind) is not None for kind in LOSS_NAMES)]
    ended = [row for row in measured if row.first.status in (FINISHED, PUBLISHED)] or measured
    counts = {kind: sum(row.loss(kind) is not None for row in ended) for kind in LOSS_NAMES}
    return max(LOSS_NAMES, key=lambda kind: counts[kind])  # the first of equals


def mark_within_spread(rows: list[Row], kind: str) -> str:
    """Mark rows whose difference from the best row may be due to the seeds alone.

    If only the seeds differ, the difference of two means of n1 and n2 seeds has the standard
    deviation s * sqrt(1/n1 + 1/n2); s is pooled over all rows with several seeds and assumed to be
    equal for all rows, even those with one seed. 95% of such differences are below t times that.
    As the best row was selected for its loss, rather too few rows are marked.

    Source: Student's t-test of two means with pooled variance (Student 1908, Biometrika 6).
    """
    spread, freedom = pooled_deviation((row.spread[kind], len(row.results)) for row in rows
                                       if kind in row.spread and row.loss(kind) is not None)
    best = rows[0].loss(kind) if rows else None
    if not freedom or best is None:
        return ""
    for row in rows[1:]:
        loss = row.loss(kind)
        limit = t_95(freedom) * spread * math.sqrt(1 / len(rows[0].results) + 1 / len(row.results))
        row.is_within_spread = loss is not None and loss - best <= limit
    known = (f"(standard deviation {spread:.4f}, {counted(freedom, 'degree')} of freedom, 95%)")
    if any(row.is_within_spread for row in rows):
        return ("≈ within the seed spread of the best row: the difference may be due to the seeds"
                f" alone {known}")
    return f"no row is within the seed spread of the best row {known}"


def mark_reached(rows: list[Row], of_run: str | None) -> Row | None:
    """Set when each row reached the final validation loss of one of them; return that one.

    Args:
        of_run: the reference; without it, the finished row with the highest loss, if there are
            two: all others have reached that.

    Raises:
        UserError: the reference is not in the comparison or has no final validation loss.
    """
    usable = [row for row in rows if row.first.status == FINISHED and row.first.records
              and None not in (row.figures["validation_loss"], row.figures["tokens"])
              and of_run in (None, *(run.name for run in row.results))]
    if of_run is not None and not usable:
        raise UserError(f"--to-loss-of {of_run[:60]}: no finished run with a validation loss"
                        " has this name; name one of the compared runs")
    if of_run is None and len(usable) < 2:
        return None
    reference = max(usable, key=lambda row: row.figures["validation_loss"])
    mean = reference.figures["validation_loss"]
    losses = {shown(run.config.get(SEED)): run.figures["validation_loss"]
              for run in reference.results}  # of another seed: the mean
    for row in rows:
        if row.first.validation_slice == reference.first.validation_slice:
            row.reached = mean_reached([first_reaching(
                run.records, losses.get(shown(run.config.get(SEED)), mean)) for run in row.results])
    reference.reached = Reached(reference.figures["tokens"], reference.figures["usd"])  # to its end
    return reference
