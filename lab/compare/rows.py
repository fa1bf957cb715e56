"""A comparison of runs: rows sorted by their loss, with seeds merged, and notes for the reader."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from basics.errors import UserError
from basics.text import counted, did_you_mean
from lab.compare.reaching import mean_reached
from lab.runs import NUMBERS, PUBLISHED, TEXTS, Result, frame_of, shown, with_ratios
from lab.stats import pooled_deviation, t_95
from reporting.metrics_file import SET_KEY
from reporting.summary import FINISHED
from run_config import TrainConfig
from settings.keys import SAME_LOSS

SEED = "random_seed"
WITHOUT_EFFECT = {
    key for key, facts in TrainConfig.model_fields.items() if SAME_LOSS in facts.metadata
}
LOSS_NAMES = {
    "test_loss": "test loss",
    "validation_loss": "validation loss",
    "train_loss": "training loss",
}  # in order of preference


@dataclass
class Row:
    """One run or published row, or the mean of runs that differ only in their seed."""

    results: list[Result]
    values: dict[str, Any]  # by column of CSV and JSON; None for what is not known
    settings: dict[str, str] = field(default_factory=dict)  # those that most rows do not have

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def is_published(self) -> bool:
        return self.first.status == PUBLISHED

    @property
    def is_of_other_text(self) -> bool:
        """Whether its test loss does not compare with those of the other rows."""
        return self.values["is_of_other_text"]

    @property
    def name(self) -> str:
        mark = {FINISHED: "", PUBLISHED: "*"}.get(self.first.status, f" ({self.first.status})")
        return self.values["run"] + mark

    @property
    def short_name(self) -> str:
        """The name as it fits into a chart and its legend."""
        return self.name if len(self.name) <= 40 else f"{self.name[:40]}..."

    def loss(self, key: str) -> float | None:
        """Return a loss, or its `bits_key`, if it can be compared with those of the other rows."""
        is_other = key.startswith("test_") and self.is_of_other_text
        return None if is_other else self.values.get(key)


def bits_key(kind: str) -> str:
    """Name the same loss in bits per byte of text, which does not depend on the tokenizer."""
    return kind.replace("loss", "bits_per_byte")


class ComparedRuns(NamedTuple):
    """Rows, the best first, and notes for the reader."""

    rows: list[Row]
    notes: list[str]
    sorted_by: str  # a column; bits per byte if the tokenizers differ
    target: Row | None  # whose final loss the column of tokens to a loss is about


def compare(results: list[Result], to_loss_of: str | None = None) -> ComparedRuns:
    """Group results into rows, sort the rows and write the notes.

    Tokens are counted to the final loss of the run `to_loss_of`; without one it is the finished row
    with the highest loss, if there are two.

    Raises: UserError: that run is not in the comparison or has no final validation loss.
    """
    rows = _group_seeds(results)
    differences, kind = _mark_differences(rows), deciding_loss(rows)
    bits_note = _bits_note(rows, kind)
    sorted_by = bits_key(kind) if bits_note else kind

    def order(row: Row) -> tuple:
        if bits_note:
            losses = [row.values[sorted_by]]
        else:
            losses = [row.loss(name) for name in (kind, *LOSS_NAMES)]
        return [(loss is None, loss or 0.0) for loss in losses], row.name

    rows.sort(key=order)
    for row in rows:
        row.values |= {
            "sorted_by": sorted_by,
            "is_within_spread": False,
            "tokens_to_loss": None,
            "usd_to_loss": None,
            "reference": None,
            "reference_difference": None,
            "reference_tokens_ahead": None,
        }
    notes = [
        bits_note
        or f"sorted by {LOSS_NAMES[kind]} (nats per token), best first"
        + _mark_within_spread(rows, kind),
        *differences,
        *_notes_on_measures(rows),
    ]
    if target := _mark_reached(rows, to_loss_of):
        notes.append(
            f"tokens to loss {target.values['validation_loss']:.4f}: until the"
            f" validation loss was that of {target.short_name}, and their share of its own"
            + (", and what they cost" if any(row.values["usd_to_loss"] for row in rows) else "")
        )
    return ComparedRuns(rows, [*filter(None, notes)], sorted_by, target)


def has_several_tokenizers(rows: Iterable[Row]) -> bool:
    """Return whether the known tokenizers differ: losses in nats per token do not compare then."""
    return len({row.first.tokenizer for row in rows} - {None}) > 1


def _group_seeds(results: list[Result]) -> list[Row]:
    """Group runs that differ only in their seed; a figure is the mean, if all of them have it.

    A second run with the same seed and length is not another sample: it gets its own row.
    """
    import pandas as pd

    groups: dict[object, list[Result]] = {}
    times_seen: Counter[object] = Counter()
    for result in results:
        settings = dict(result.settings)
        seed = settings.pop(SEED, None)
        key = (
            tuple(sorted(settings.items())),
            result.status,
            result.kind_of_machine,
            result.steps,
            result.global_batch_size,
        )
        times_seen[key, seed] += 1
        group = (key, times_seen[key, seed]) if settings else id(result)
        groups.setdefault(group, []).append(result)
    runs = frame_of([result for group in groups.values() for result in group])
    by_group = runs.groupby([place for place, group in enumerate(groups.values()) for _ in group])
    is_other = runs["test_slice"] != by_group["test_slice"].transform("first")
    runs.loc[is_other, ["test_loss", "test_bits_per_byte"]] = math.nan
    sets = [key for key in runs if SET_KEY.fullmatch(key)]
    means = by_group[[*NUMBERS, *sets]].agg(lambda one: one.astype(float).mean(skipna=False))
    texts = by_group[[*TEXTS, "status", "test_slice", "is_of_other_text"]].nth(0)
    spreads = by_group[[*LOSS_NAMES]].agg(lambda one: one.std(skipna=False))
    table = pd.concat(
        [
            by_group["run"].agg(", ".join),
            texts.reset_index(drop=True),
            by_group.size().rename("num_seeds"),
            with_ratios(means),
            spreads.add_suffix("_spread"),
        ],
        axis=1,
    )
    return [
        Row(group, {key: None if value != value else value for key, value in values.items()})
        for group, values in zip(groups.values(), table.to_dict("records"), strict=True)
    ]


def _mark_differences(rows: list[Row]) -> list[str]:
    """Set the settings of each row that not all rows have; return notes on them.

    A value that more than half of the rows have stands in a note instead.
    """
    configs = []
    for row in rows:
        seeds = [shown(result.config[SEED]) for result in row.results if SEED in result.config]
        codes = sorted({result.code for result in row.results if result.code})
        config = dict(row.first.settings)
        if seeds:
            config[SEED] = ",".join(seeds)
        if codes:
            config["code"] = ",".join(codes)
        configs.append(config)
    known = [config for config in configs if config]
    common, differing = {}, []
    for key in dict.fromkeys(key for config in known for key in config):
        counts = Counter(config.get(key) for config in known)
        (value, count), *others = counts.most_common()
        if others:
            differing.append(key)
            if value is not None and count > len(known) / 2:
                common[key] = value
    for row, config in zip(rows, configs, strict=True):
        row.settings = {
            key: config[key] for key in differing if config.get(key) not in (None, common.get(key))
        }
        row.values["differs"] = _assigned(row.settings) or row.first.notes
    notes = []
    if values := _assigned({key: common[key] for key in common if key not in WITHOUT_EFFECT}):
        notes.append(f"settings, unless a row shows another value: {values}")
    if without := [key for key in differing if key in WITHOUT_EFFECT]:
        notes.append(f"settings that differ and change no loss: {', '.join(without)}")
    return notes


def _assigned(settings: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def deciding_loss(rows: list[Row]) -> str:
    """Choose the loss to sort by: the one that most rows have; test, then validation, if equal.

    Runs that have not ended count only if no run has ended.
    """
    measured = [row for row in rows if any(row.loss(kind) is not None for kind in LOSS_NAMES)]
    ended = [row for row in measured if row.first.status in (FINISHED, PUBLISHED)]
    deciding = ended or measured
    return max(LOSS_NAMES, key=lambda kind: sum(row.loss(kind) is not None for row in deciding))


def _bits_note(rows: list[Row], kind: str) -> str:
    """Say how rows with different tokenizers are sorted; empty if their losses can be compared."""
    measured = [row for row in rows if row.loss(kind) is not None]
    known = [row for row in measured if row.loss(kind) and row.loss(bits_key(kind))]
    if not known or not has_several_tokenizers(measured):
        return ""
    lengths = []  # bytes per token
    for row in known:
        bits_per_token = row.values[kind] / math.log(2)
        lengths.append(bits_per_token / row.values[bits_key(kind)])
    text = ""
    if kind != "test_loss":
        text = (
            "; the bits are not of the same text: measure runs on the same documents together with"
            " lab evaluate, else each with --dataset on a few MB of documents prepared with its"
            " tokenizer"
        )
    return (
        f"sorted by bits per byte of the {LOSS_NAMES[kind]}, best first: tokenizers differ"
        f" ({min(lengths):.2f} to {max(lengths):.2f} bytes per token), so losses (nats per"
        f" token) do not compare{text}"
    )


def _mark_within_spread(rows: list[Row], kind: str) -> str:
    """Mark rows whose difference from the best row may be due to the seeds alone.

    If only the seeds differ, the difference of two means of n1 and n2 seeds has the standard
    deviation s * sqrt(1/n1 + 1/n2); s is pooled over all rows with several seeds and assumed to be
    equal for all rows, even those with one seed. 95% of such differences are below t times that.
    As the best row was selected for its loss, rather too few rows are marked.

    Source: Student's t-test of two means with pooled variance (Student 1908, Biometrika 6).
    """
    spread, freedom = pooled_deviation(
        (row.values[f"{kind}_spread"], len(row.results))
        for row in rows
        if row.values[f"{kind}_spread"] is not None and row.loss(kind) is not None
    )
    if not freedom:
        own = [row for row in rows if not (row.is_published or row.is_of_other_text)]
        if sum(row.loss(kind) is not None for row in own) < 2:
            return ""
        return "; by how much chance changes a loss, lab sweep --seeds 3 shows"
    best = rows[0]
    for row in rows[1:]:
        inverse_counts = 1 / len(best.results) + 1 / len(row.results)
        limit = t_95(freedom) * spread * math.sqrt(inverse_counts)
        loss = row.loss(kind)
        row.values["is_within_spread"] = loss is not None and loss - best.values[kind] <= limit
    return (
        "; mean ± standard deviation over n seeds; ≈ the difference from the best row may be"
        f" due to the seeds alone (standard deviation {spread:.4f},"
        f" {counted(freedom, 'degree')} of freedom, 95%)"
    )


def _notes_on_measures(rows: list[Row]) -> list[str]:
    """Say on which tokens losses were measured, who gave scores, and what does not compare."""
    notes = []
    for is_other, start in ((False, "test loss on"), (True, "† not comparable: test loss on")):
        slices = {row.values["test_slice"] for row in rows if row.is_of_other_text == is_other}
        if slices - {""}:
            notes.append(f"{start} {'; '.join(sorted(slices - {''}))}")
    validated = [row for row in rows if row.values["validation_loss"] is not None]
    if any(row.values["test_loss"] is not None and not row.is_published for row in validated):
        notes.append(
            "validation loss: on the tokens on which a run validates, so not that of the"
            " test, also where both are of one file"
        )
    first_sets = {row.first.deciding_set for row in validated} - {""}
    if first_sets:
        notes.append(f"val. loss: of the first validation set, {', '.join(sorted(first_sets))}")
    if len({row.first.validation_slice for row in validated}) > 1:
        notes.append("validation losses were measured on different tokens: see the differences")
    if any(row.values["ift_score"] is not None for row in rows):
        about = (
            "IFT: mean score of answers to instructions, 0 to 100 (95% interval);"
            " only those of one judge compare, and no published ones"
        )
        judges = [f"{row.name} by {row.first.ift_judge}" for row in rows if row.first.ift_judge]
        notes.append("; ".join([about, *judges]))
    if any(row.is_published for row in rows):
        notes.append(
            "* published results of the original system; US$ computed from its seconds"
            " and prices, for validation an estimate"
        )
    return notes


def _mark_reached(rows: list[Row], of_run: str | None) -> Row | None:
    """Set tokens and dollars until each row reached the final validation loss of one of them.

    Returns that one: the row of this run, else of finished rows the one with the highest
    loss; None if there are not two. Raises: UserError: the named run cannot be one.
    """
    usable = [
        row
        for row in rows
        if row.first.status == FINISHED
        and row.first.records
        and row.values["tokens"]
        and row.values["validation_loss"] is not None
        and of_run in (None, *(run.name for run in row.results))
    ]
    if of_run is not None and not usable:
        raise UserError(
            f"--to-loss-of {of_run[:60]}: no finished run with a validation loss has this name"
            f"{did_you_mean(of_run, [run.name for row in rows for run in row.results])}; name one"
            " of the compared runs"
        )
    if of_run is None and len(usable) < 2:
        return None
    target = max(usable, key=lambda row: row.values["validation_loss"])
    mean = target.values["validation_loss"]
    by_seed = {run.settings.get(SEED): run.validation_loss for run in target.results}
    for row in rows:
        found = None
        if row is target:  # to its end
            found = row.values["tokens"], row.values["usd"]
        elif row.first.validation_slice == target.first.validation_slice:
            found = mean_reached(  # each to the loss of its seed; of another seed to the mean
                (run.records, by_seed.get(run.settings.get(SEED), mean)) for run in row.results
            )
        if found:
            row.values["tokens_to_loss"], row.values["usd_to_loss"] = found
    return target
