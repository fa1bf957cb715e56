"""A comparison of runs: rows sorted by their loss, and notes on what compares and what does not."""

from collections import Counter
from dataclasses import dataclass

from lab.compare.results import Result
from lab.compare.rows import (
    LOSS_NAMES,
    Row,
    deciding_loss,
    group_seeds,
    mark_differences,
    mark_reached,
    mark_within_spread,
    with_test_losses,
)


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
    mixes_tokenizers: bool = False
    reference: Row | None = None


def compare(results: list[Result], to_loss_of: str | None = None) -> Comparison:
    """Group results into rows, sort the rows and write the notes.

    Raises:
        UserError: as `mark_reached`.
    """
    rows = group_seeds(with_test_losses(results))
    tested = [row for row in rows if row.figures["test_loss"] is not None]
    texts = [row.test_text for row in tested if row.is_published] or [
        row.test_text for row in tested]
    for row in tested:
        row.is_of_other_slice = row.test_text != Counter(texts).most_common(1)[0][0]
    common_note, kind = mark_differences(rows), deciding_loss(rows)
    bits_note = _tokens_note(rows, kind)

    def order(row: Row) -> tuple:
        values = [row.bits(kind)] if bits_note else [
            row.loss(name) for name in (kind, *LOSS_NAMES)]
        return (*((value is None, value or 0.0) for value in values), row.name)

    rows.sort(key=order)
    notes = [bits_note or _sorting_note(rows, kind), common_note,
             "" if bits_note else mark_within_spread(rows, kind),
             *_slice_notes(rows), _score_note(rows)]
    if any(row.is_published for row in rows):
        notes.append("* published results of the original system; US$ computed from its seconds"
                     " and prices, for validation an estimate")
    return Comparison(rows, kind, list(filter(None, notes)), mixes_tokenizers=bool(bits_note),
                      reference=mark_reached(rows, to_loss_of))


def _sorting_note(rows: list[Row], kind: str) -> str:
    missing = sum(row.loss(kind) is None for row in rows)
    last = f"; rows without it come last ({missing})" if missing else ""
    seeds = "; mean ± standard deviation over n seeds" if any(row.spread for row in rows) else ""
    return f"sorted by {LOSS_NAMES[kind]} (nats per token), best first{last}{seeds}"


def _tokens_note(rows: list[Row], kind: str) -> str:
    """Say how rows with different tokenizers are sorted; empty if their losses can be compared."""
    known = [row for row in rows if row.bytes_per_token(kind) is not None]
    lengths = [row.bytes_per_token(kind) for row in known]
    names = {row.first.tokenizer for row in rows if row.figures[kind] is not None}
    if not known or len(names - {None}) < 2:
        return ""
    missing = len(rows) - len(known)
    last = f"; rows without them come last ({missing})" if missing else ""
    texts = {row.first.tests.get(row.first.test_slice, {}).get("text") for row in known}
    is_same_text = kind == "test_loss" and len(texts) == 1 and None not in texts
    text = "" if is_same_text else (
        "; the bits are not of the same text: measure runs on the same documents together with lab"
        " evaluate, else each with --dataset on a few MB of documents prepared with its tokenizer")
    return (f"sorted by bits per byte of the {LOSS_NAMES[kind]}, best first{last}: tokenizers"
            f" differ ({min(lengths):.2f} to {max(lengths):.2f} bytes per token), so losses (nats"
            f" per token) do not compare{text}")


def _slice_notes(rows: list[Row]) -> list[str]:
    """Describe the tokens of the test losses; warn if validation losses are of different tokens."""
    notes = []
    for is_other, start in ((False, "test loss on"), (True, "† not comparable: test loss on")):
        slices = {row.first.test_slice for row in rows if row.figures["test_loss"] is not None
                  and row.is_of_other_slice == is_other}
        notes += [f"{start} {'; '.join(sorted(slices))}"] if slices else []
    if len({row.first.validation_slice for row in rows
            if row.figures["validation_loss"] is not None}) > 1:
        notes.append("validation losses were measured on different tokens: see the differences")
    return notes


def _score_note(rows: list[Row]) -> str:
    """Say who gave the instruction scores; only those of one judge and one prompt compare."""
    scored = [row for row in rows if row.figures["ift_score"] is not None]
    by_judge: dict[str, list[str]] = {}
    for result in (result for row in scored for result in row.results if result.judge):
        by_judge.setdefault(result.judge, []).append(result.name)
    notes = ["IFT: mean score of answers to instructions, 0 to 100 (95% interval)",
             *(f"by {judge}: {', '.join(names)}" for judge, names in by_judge.items())]
    if any(row.is_published for row in scored):
        notes.append("published ones come from another prompt and do not compare")
    return "; ".join(notes) if scored else ""
