"""A comparison of runs: rows sorted by their loss, with seeds merged, and notes for the reader."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace

from basics.errors import UserError
from basics.text import counted
from lab.compare.results import (
    FIGURES,
    PUBLISHED,
    Figures,
    Reached,
    Result,
    first_reaching,
    mean_reached,
    ratio,
    shown,
)
from lab.runs import number
from lab.stats import pooled_deviation, t_95
from reporting.summary import FINISHED

SEED = "random_seed"
LOSS_NAMES = {"test_loss": "test loss", "validation_loss": "validation loss",
              "train_loss": "training loss"}  # in order of preference


@dataclass
class Row:
    """One run, one published row, or the mean of runs that differ only in their seed.

    Attributes:
        spread: sample standard deviation of each loss over the seeds, if there are several.
        settings: settings in which the runs differ, except values that most runs have, as text.
        reached: when the validation loss was that of the comparison's `reference`.
    """

    results: list[Result]
    figures: Figures
    spread: dict[str, float] = field(default_factory=dict)
    differs: str = ""
    is_within_spread: bool = False
    reached: Reached | None = None

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def is_published(self) -> bool:
        return self.first.status == PUBLISHED

    @property
    def name(self) -> str:
        names = ", ".join(result.name for result in self.results)
        return names + {FINISHED: "", PUBLISHED: "*"}.get(
            self.first.status, f" ({self.first.status})")

    @property
    def short_name(self) -> str:
        return self.name if len(self.name) <= 40 else f"{self.name[:40]}..."  # in a chart

    def loss(self, kind: str) -> float | None:
        """Return a loss if it can be compared with those of the other rows."""
        is_incomparable = kind == "test_loss" and self.first.is_of_other_slice
        return None if is_incomparable else self.figures[kind]

    def bits(self, kind: str) -> float | None:
        """Return the bits per byte of a loss, if they are known."""
        return self.figures.get(kind.replace("loss", "bits_per_byte"))


@dataclass(frozen=True)
class Comparison:
    """Rows, the best first, and notes for the reader.

    Attributes:
        sorted_by: a key of `LOSS_NAMES`.
        mixes_tokenizers: losses per token are not comparable; the rows are sorted by bits per byte.
        reference: the row whose final loss the column of tokens to a loss is about, if any.
    """

    rows: list[Row]
    sorted_by: str
    notes: list[str]
    mixes_tokenizers: bool
    reference: Row | None


def compare(results: list[Result], to_loss_of: str | None = None) -> Comparison:
    """Group results into rows, sort the rows and write the notes.

    Args:
        to_loss_of: the reference; without it, the finished row with the highest loss, if there are
            two: all others have reached that.

    Raises:
        UserError: the reference is not in the comparison or has no final validation loss.
    """
    rows = _group_seeds(_with_test_losses(results))
    differences, kind = _mark_differences(rows), deciding_loss(rows)
    bits_note = _bits_note(rows, kind)

    def order(row: Row) -> tuple:
        values = [row.bits(kind)] if bits_note else [
            row.loss(name) for name in (kind, *LOSS_NAMES)]
        return (*((value is None, value or 0.0) for value in values), row.name)

    rows.sort(key=order)
    missing = sum(row.loss(kind) is None for row in rows)
    last = f"; rows without it come last ({missing})" if missing else ""
    seeds = "; mean ± standard deviation over n seeds" if any(row.spread for row in rows) else ""
    sorting_note = f"sorted by {LOSS_NAMES[kind]} (nats per token), best first{last}{seeds}"
    notes = filter(None, [bits_note or sorting_note, differences, "" if bits_note else
                          _mark_within_spread(rows, kind), *_notes_on_measures(rows)])
    return Comparison(rows, kind, [*notes], bool(bits_note), _mark_reached(rows, to_loss_of))


def _with_test_losses(results: list[Result]) -> list[Result]:
    """Choose each result's test loss: on the published text, else on the most common one.

    Of equally common ones it is the longest. A result without that text has its own longest test.
    """
    texts = [{str(test.get("text") or name): name for name, test in reversed(result.tests.items())}
             for result in results]
    published = [one for one, result in zip(texts, results, strict=True)
                 if result.status == PUBLISHED]
    counts = Counter(text for one in published or texts for text in reversed(one))
    usual = counts.most_common(1)[0][0] if counts else ""
    found = []
    for one, result in zip(texts, results, strict=True):
        chosen = one.get(usual) or next(iter(result.tests), "")
        test = result.tests.get(chosen, {})
        figures = {"test_loss": test.get("loss"),
                   "test_bits_per_byte": number(test.get("bits_per_byte"))}
        found.append(replace(result, test_slice=chosen, is_of_other_slice=usual not in one,
                             figures=result.figures | figures))
    return found


def _group_seeds(results: list[Result]) -> list[Row]:
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
    rows = []
    for group in groups.values():
        values = {key: [result.figures[key] for result in group] for key in FIGURES}
        if len({result.test_slice for result in group}) > 1:
            values["test_loss"] = [None]
        found = {**group[0].figures} if len(group) == 1 else {
            key: None if None in each else statistics.fmean(each) for key, each in values.items()}
        for key in ("seconds", "usd"):
            parts = found[key], found[f"validation_{key}"]
            found[f"{key}_without_validation"] = None if None in parts else parts[0] - parts[1]
        for key in ("usd", "usd_without_validation"):
            found[key.replace("usd", "usd_per_megatoken")] = ratio(
                found[key], ratio(found["tokens"], 1e6))
        found["usd_per_hour"] = ratio(found["usd"], ratio(found["seconds"], 3600))
        rows.append(Row(group, found, {} if len(group) == 1 else {
            kind: statistics.stdev(values[kind]) for kind in LOSS_NAMES
            if None not in values[kind]}))
    return rows


def _mark_differences(rows: list[Row]) -> str:
    """Set the settings in which rows differ; values of more than half of them go into a note."""
    configs = []
    for row in rows:
        seeds = [shown(result.config[SEED]) for result in row.results if SEED in result.config]
        codes = sorted({result.code for result in row.results if result.code})
        several = {SEED: ",".join(seeds), "code": ",".join(codes)}
        configs.append({key: shown(value) for key, value in row.first.config.items()}
                       | {key: text for key, text in several.items() if text})
    known = [config for config in configs if config]
    keys = [key for key in dict.fromkeys(key for config in known for key in config)
            if len({config.get(key) for config in known}) > 1]
    common = {}
    for key in keys:
        value, count = Counter(config.get(key) for config in known).most_common(1)[0]
        if value is not None and count > len(known) / 2:
            common[key] = value
    for row, config in zip(rows, configs, strict=True):
        row.differs = " ".join(f"{key}={config[key]}" for key in keys
                               if key in config and config[key] != common.get(key))
    values = " ".join(f"{key}={value}" for key, value in common.items())
    return f"settings, unless a row shows another value: {values}" if values else ""


def deciding_loss(rows: list[Row]) -> str:
    """Choose the loss to sort by: the one that most rows have; test, then validation, if equal.

    Runs that have not ended count only if no run has ended.
    """
    measured = [row for row in rows if any(row.loss(kind) is not None for kind in LOSS_NAMES)]
    ended = [row for row in measured if row.first.status in (FINISHED, PUBLISHED)] or measured
    return max(LOSS_NAMES, key=lambda kind: sum(row.loss(kind) is not None for row in ended))


def _bits_note(rows: list[Row], kind: str) -> str:
    """Say how rows with different tokenizers are sorted; empty if their losses can be compared."""
    known = [row for row in rows if row.figures[kind] and row.bits(kind)]
    names = {row.first.tokenizer for row in rows if row.figures[kind] is not None}
    if not known or len(names - {None}) < 2:
        return ""
    lengths = [row.figures[kind] / math.log(2) / row.bits(kind) for row in known]
    last = f"; rows without them come last ({len(rows) - len(known)})" * (len(rows) > len(known))
    texts = {row.first.tests.get(row.first.test_slice, {}).get("text") for row in known}
    is_same_text = kind == "test_loss" and len(texts) == 1 and None not in texts
    text = "" if is_same_text else (
        "; the bits are not of the same text: measure runs on the same documents together with lab"
        " evaluate, else each with --dataset on a few MB of documents prepared with its tokenizer")
    return (f"sorted by bits per byte of the {LOSS_NAMES[kind]}, best first{last}: tokenizers"
            f" differ ({min(lengths):.2f} to {max(lengths):.2f} bytes per token), so losses (nats"
            f" per token) do not compare{text}")


def _mark_within_spread(rows: list[Row], kind: str) -> str:
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
    known = f"(standard deviation {spread:.4f}, {counted(freedom, 'degree')} of freedom, 95%)"
    if any(row.is_within_spread for row in rows):
        return ("≈ within the seed spread of the best row: the difference may be due to the seeds"
                f" alone {known}")
    return f"no row is within the seed spread of the best row {known}"


def _notes_on_measures(rows: list[Row]) -> list[str]:
    """Say on which tokens losses were measured, who gave scores, and what does not compare."""
    notes = []
    for is_other, start in ((False, "test loss on"), (True, "† not comparable: test loss on")):
        slices = {row.first.test_slice for row in rows if row.figures["test_loss"] is not None
                  and row.first.is_of_other_slice == is_other}
        notes += [f"{start} {'; '.join(sorted(slices))}"] if slices else []
    if len({row.first.validation_slice for row in rows
            if row.figures["validation_loss"] is not None}) > 1:
        notes.append("validation losses were measured on different tokens: see the differences")
    judges: dict[str, list[str]] = {}
    for row in rows:
        if row.figures["ift_score"] is not None and not row.is_published:
            judges.setdefault(row.first.judge, []).append(row.name)
    if any(row.figures["ift_score"] is not None for row in rows):
        notes.append("; ".join([
            "IFT: mean score of answers to instructions, 0 to 100 (95% interval); only those of one"
            " judge compare, and no published ones",
            *(f"by {judge}: {', '.join(names)}" for judge, names in judges.items())]))
    if any(row.is_published for row in rows):
        notes.append("* published results of the original system; US$ computed from its seconds"
                     " and prices, for validation an estimate")
    return notes


def _mark_reached(rows: list[Row], of_run: str | None) -> Row | None:
    """Set when each row reached the final validation loss of one of them; return that one."""
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
