"""The columns of a comparison: as texts of a table, and as values for CSV and JSON."""

import csv
import io
from collections.abc import Callable
from typing import Any

from basics.text import dollars
from lab.compare.comparison import Comparison
from lab.compare.rows import BITS_PER_BYTE, LOSS_NAMES, Row
from lab.table import UNKNOWN, Column, Table, short_count

HIDDEN_FIRST = (  # in a terminal that is too narrow
    "model", "machine", "microbatch_size", "usd_per_megatoken_without_validation", "ift_score",
    "steps", "num_gpus", "usd_per_hour",
    "usd_without_validation", "tokens_per_second", "usd_per_megatoken", "train_loss",
    "seconds_without_validation", "tokens", "seconds", "tokens_to_loss", "usd", "validation_loss",
    "global_batch_size",
)
WHOLE, PRICE = "{:,.0f}".format, "{:.4f}".format
SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {  # head and format of a figure, by key
    "global_batch_size": ("global\nbatch", WHOLE), "microbatch_size": ("micro-\nbatch", WHOLE),
    "tokens": ("tokens", short_count), "steps": ("steps", WHOLE),
    "train_loss": ("train\nloss", PRICE), "validation_loss": ("val.\nloss", PRICE),
    "test_loss": ("test\nloss", PRICE),
    "validation_bits_per_byte": ("val. bits\nper byte", PRICE),
    "test_bits_per_byte": ("test bits\nper byte", PRICE),
    "ift_score": ("IFT", "{:.2f}".format), "seconds": ("seconds", WHOLE),
    "seconds_without_validation": ("seconds,\nno val.", WHOLE),
    "tokens_per_second": ("tokens\nper s", WHOLE), "num_gpus": ("GPUs", WHOLE),
    "usd_per_hour": ("US$ an\nhour", dollars), "usd": ("US$", dollars),
    "usd_without_validation": ("US$,\nno val.", dollars),
    "usd_per_megatoken": ("US$ per\nMtoken", PRICE),
    "usd_per_megatoken_without_validation": ("US$ per\nMtoken,\nno val.", PRICE),
}


def table_of(comparison: Comparison) -> Table:
    """Format a comparison, without columns in which no value is known."""
    columns = [Column("run", "left", 20, "run"), Column("differences", "left", 28, "differs"),
               Column("model", "left", key="model"),
               *(Column(head, "left" if key in LOSS_NAMES else "right", key=key)
                 for key, (head, _) in SHOWN.items()), Column("machine", "left", key="machine")]
    notes, sizes = comparison.notes, {row.first.size for row in comparison.rows}
    rows = [{"run": row.name, "differs": row.differs or row.first.notes,
             "model": row.first.size if len(sizes) > 1 else "", "machine": row.first.device or "",
             **{key: _cell(comparison, row, key) for key in SHOWN}} for row in comparison.rows]
    if comparison.reference:
        whole, name = comparison.reference.figures, comparison.reference.short_name
        loss = f"loss {whole['validation_loss']:.4f}"
        columns.append(Column(f"tokens to\n{loss}", key="tokens_to_loss"))
        notes = [*notes, f"tokens to {loss}: until the validation loss was that of {name}, their"
                         " share of its own, and what they cost"]
        for texts, row in zip(rows, comparison.rows, strict=True):
            found = row.reached
            texts["tokens_to_loss"] = "" if found is None or not whole["tokens"] else ", ".join(
                [short_count(found.tokens), f"{found.tokens / whole['tokens']:.0%}",
                 *([] if found.usd is None else [f"${dollars(found.usd)}"])])
    known = [column for column in columns if any(texts[column.key] for texts in rows)]
    return Table(known, [[texts[column.key] or UNKNOWN for column in known] for texts in rows],
                 notes, HIDDEN_FIRST)


def _cell(comparison: Comparison, row: Row, key: str) -> str:
    """Format a figure; a loss with its marks, an instruction score with its interval."""
    value, text = row.figures[key], SHOWN[key][1]
    if value is None or key in BITS_PER_BYTE.values() and not comparison.mixes_tokenizers:
        return ""  # with one tokenizer, the losses compare the rows as well
    low, high = row.figures["ift_low"], row.figures["ift_high"]
    if key == "ift_score" and len(row.results) == 1 and None not in (low, high):
        return f"{value:.2f} ({low:.2f} to {high:.2f})"
    if key not in LOSS_NAMES:
        return text(value)
    found = text(value) if value < 1000 else f"{value:.4g}"
    if row.is_published:  # no more digits than were published
        found = found.removesuffix("0")
    if key == comparison.sorted_by:
        if key in row.spread:
            found += f" ± {row.spread[key]:.4f} (n={len(row.results)})"
        found += " ≈" if row.is_within_spread else ""
    return found + (" †" if key == "test_loss" and row.is_of_other_slice else "")


def values_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows as values: always the same keys, None for what is not known."""
    return [{
        "run": ", ".join(result.name for result in row.results), "status": row.first.status,
        "differs": row.differs or row.first.notes, "model": row.first.size,
        "num_seeds": len(row.results),
        **{key: row.figures[key] for key in (*SHOWN, "ift_low", "ift_high")},
        "ift_judge": row.first.judge, "machine": row.first.device,
        **{key.replace("loss", "loss_spread"): row.spread.get(key) for key in LOSS_NAMES},
        "sorted_by": comparison.sorted_by, "is_within_spread": row.is_within_spread,
        "test_slice": row.first.test_slice,
        "tokens_to_loss": row.reached and row.reached.tokens,
        "usd_to_loss": row.reached and row.reached.usd,
    } for row in comparison.rows]


def csv_of(rows: list[dict[str, Any]]) -> str:
    """Format rows as CSV: numbers with all digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _plain(value) for key, value in row.items()})
    return text.getvalue()


def _plain(value: str | bool | float | None) -> str:
    """Format a value, a whole number without an exponent; empty if it is not known.

    A spreadsheet would run text that begins like a formula: it gets an apostrophe.
    """
    if value is None or isinstance(value, str):
        return f"'{value}" if value and value[0] in "=+-@" else value or ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if value == int(value) else repr(value)
