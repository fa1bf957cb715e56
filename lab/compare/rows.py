"""Rows of a comparison: seeds merged, sorted by loss, with the settings that differ."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from lab.compare.bits import bits_order, tokens_note
from lab.compare.row import LOSS_NAMES, Row
from lab.compare.run_figures import Figures
from lab.compare.run_results import FINISHED, PUBLISHED, Result, shown
from lab.compare.student import t_95

SEED = "random_seed"


@dataclass(frozen=True)
class Comparison:
    """Rows, the best first, and notes for the reader.

    Attributes:
        sorted_by: a key of `LOSS_NAMES`.
        mixes_tokenizers: losses per token are not comparable; the rows are sorted by bits per byte.
    """

    rows: list[Row]
    sorted_by: str
    notes: list[str]
    mixes_tokenizers: bool = False


def compare(results: list[Result]) -> Comparison:
    """Group results into rows, sort the rows and write the notes."""
    rows = _mark_slices(_group_seeds(_with_test_losses(results)))
    rows, common_note = _mark_differences(rows)
    kind = deciding_loss(rows)
    rows = sorted(rows, key=_order(kind))
    if bits_note := tokens_note(rows, kind):
        rows, spread_note = sorted(rows, key=bits_order(kind)), ""
    else:
        rows, spread_note = _mark_within_spread(rows, kind)
    return Comparison(rows, kind, [note for note in (
        bits_note or _sorting_note(rows, kind), common_note, spread_note, *_slice_notes(rows),
        *_score_notes(rows), _published_note(rows)) if note], mixes_tokenizers=bool(bits_note))


def _with_test_losses(results: list[Result]) -> list[Result]:
    """Choose each result's test loss: on the published slice, else on the most common text.

    Of equally common ones the longest is chosen. Slices of different tokens may be the same text.
    """
    counts = Counter(result.text_of(test_slice) for result in results
                     for test_slice in result.tests)
    published = {test_slice for result in results if result.status == PUBLISHED
                 for test_slice in result.tests}
    chosen = [max(result.tests, key=lambda test_slice: (test_slice in published,
                                                        counts[result.text_of(test_slice)]),
                  default="")
              for result in results]
    return [replace(result, test_slice=test_slice, figures=replace(
                result.figures, test_loss=result.tests.get(test_slice),
                test_bits_per_byte=result.test_bits.get(test_slice)))
            for result, test_slice in zip(results, chosen, strict=True)]


def _group_seeds(results: list[Result]) -> list[Row]:
    """Group runs that differ only in their seed.

    A second run with the same seed and length is not another sample: it gets its own row.
    """
    groups: dict[object, list[Result]] = {}
    times_seen: Counter[object] = Counter()
    for index, result in enumerate(results):
        figures, config = result.figures, {k: shown(v) for k, v in result.config.items()}
        seed = config.pop(SEED, None)
        key = (tuple(sorted(config.items())), result.status, result.machine, figures.steps,
               figures.global_batch_size)
        times_seen[key, seed] += 1
        groups.setdefault((key, times_seen[key, seed]) if config else index, []).append(result)
    return [_row(tuple(group)) for group in groups.values()]


def _row(results: tuple[Result, ...]) -> Row:
    """Return one row; for several seeds the means of the figures that all of them have."""
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
    """Mark test losses on other text than the published rows, or than most rows."""
    tested = [row for row in rows if row.figures.test_loss is not None]
    standard = [row for row in tested if row.is_published] or tested
    usual = Counter(row.first.test_text for row in standard).most_common(1)
    return [replace(row, is_of_other_slice=row.figures.test_loss is not None
                    and row.first.test_text != usual[0][0]) for row in rows]


def _mark_differences(rows: list[Row]) -> tuple[list[Row], str]:
    """Set the settings in which rows differ; values of more than half of them go into a note."""
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
    values = " ".join(f"{key}={value}" for key, value in common.items())
    return marked, f"settings, unless a row shows another value: {values}" if values else ""


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


def _order(kind: str) -> Callable[[Row], tuple]:
    """Return a sort key: this loss, then the others; rows without it come last."""
    def key(row: Row) -> tuple:
        losses = [row.loss(name) for name in (kind, *LOSS_NAMES)]
        return (*((loss is None, loss or 0.0) for loss in losses), row.name)
    return key


def seed_spread(rows: list[Row], kind: str) -> tuple[float, int]:
    """Return the standard deviation pooled over rows with several seeds; its degrees of freedom."""
    groups = [(row.spread[kind], len(row.results) - 1) for row in rows
              if kind in row.spread and row.loss(kind) is not None]
    freedom = sum(free for _, free in groups)
    squares = sum(free * spread**2 for spread, free in groups)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


def _mark_within_spread(rows: list[Row], kind: str) -> tuple[list[Row], str]:
    """Mark rows whose difference from the best row may be due to the seeds alone.

    If only the seeds differ, the difference of two means of n1 and n2 seeds has the standard
    deviation s * sqrt(1/n1 + 1/n2); s is pooled over all rows with several seeds and assumed to be
    equal for all rows, even those with one seed. 95% of such differences are below t times that.
    As the best row was selected for its loss, rather too few rows are marked.

    Source: Student's t-test of two means with pooled variance (Student 1908, Biometrika 6).
    """
    spread, freedom = seed_spread(rows, kind)
    best = rows[0].loss(kind) if rows else None
    if not freedom or best is None:
        return rows, ""
    marked = [rows[0]]
    for row in rows[1:]:
        loss = row.loss(kind)
        limit = t_95(freedom) * spread * math.sqrt(1 / len(rows[0].results) + 1 / len(row.results))
        marked.append(replace(row, is_within_spread=loss is not None and loss - best <= limit))
    known = f"(standard deviation {spread:.4f}, {freedom} degrees of freedom, 95%)"
    if any(row.is_within_spread for row in marked):
        return marked, ("≈ within the seed spread of the best row: the difference may be due to the"
                        f" seeds alone {known}")
    return marked, f"no row is within the seed spread of the best row {known}"


def _sorting_note(rows: list[Row], kind: str) -> str:
    missing = sum(row.loss(kind) is None for row in rows)
    last = f"; rows without it come last ({missing})" if missing else ""
    seeds = "; mean ± standard deviation over n seeds" if any(row.spread for row in rows) else ""
    return f"sorted by {LOSS_NAMES[kind]} (nats per token), best first{last}{seeds}"


def _slice_notes(rows: list[Row]) -> list[str]:
    """Describe the tokens of the test losses; warn if validation losses are of different tokens."""
    notes = []
    for is_other, start in ((False, "test loss on"), (True, "† not comparable: test loss on")):
        slices = {row.first.test_slice for row in rows if row.figures.test_loss is not None
                  and row.is_of_other_slice == is_other}
        notes += [f"{start} {'; '.join(sorted(slices))}"] if slices else []
    if len({validation_slice(row.first.config) for row in rows
            if row.figures.validation_loss is not None}) > 1:
        notes.append("validation losses were measured on different tokens: see the differences")
    return notes


def validation_slice(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the settings that say on which tokens a run validates."""
    keys = ["dataset", "start_val_token", "validation_sequences", "context_length"]
    if config.get("validation_batches") is not None:
        keys += ["validation_batches", "microbatch_size"]
    return tuple(shown(config.get(key)) for key in keys)


def _published_note(rows: list[Row]) -> str:
    if not any(row.is_published for row in rows):
        return ""
    return ("* published results of the original system; US$ computed from its seconds and prices,"
            " for validation an estimate")


def _score_notes(rows: list[Row]) -> list[str]:
    """Say who gave the instruction scores; only those of one judge and one prompt compare."""
    scored = [row for row in rows if row.figures.ift_score is not None]
    by_judge: dict[str, list[str]] = {}
    for result in (result for row in scored for result in row.results if result.judge):
        by_judge.setdefault(result.judge, []).append(result.name)
    notes = ["IFT: mean score of answers to instructions, 0 to 100 (95% interval)",
             *(f"by {judge}: {', '.join(names)}" for judge, names in by_judge.items())]
    if any(row.is_published for row in scored):
        notes.append("published ones come from another prompt and do not compare")
    return ["; ".join(notes)] if scored else []
