"""`lab compare --reference` and `--save-reference`: rows against a curve, and a curve of runs."""

import re
import statistics
from pathlib import Path
from typing import get_args

from basics.errors import UserError, cannot_be_written
from basics.files import write_atomically
from basics.json_files import to_json
from lab.compare.results import Result
from lab.compare.rows import Row
from lab.runs import bytes_per_token, number_of
from reporting.reference import (
    PUBLISHED_PATH,
    REFERENCE_NAME,
    REFERENCES,
    Compared,
    Kind,
    ReferenceCurve,
    find_reference,
    mean_curve,
    read_references,
    reference_of_run,
)
from reporting.summary import FINISHED

MAX_POINTS = 200  # of a saved curve


def references_of(
    results: list[Result], name: str | None, runs_dir: Path
) -> tuple[dict[str, ReferenceCurve], list[str]]:
    """Return the curve that each run is compared with, in the run's units, by the run's name.

    Without `name` it is the one that the runs were compared with as they trained, if that was the
    same for all that had one.

    Returns also a note for each run that cannot be compared with it.
    Raises: UserError: there is no curve with this name.
    """
    curves: dict[str, ReferenceCurve] = {}
    notes = []
    if name is None:
        for result in results:
            found = reference_of_run(runs_dir / result.name)
            if found is not None:
                curves[result.name] = found
        is_one = len({curve.name for curve in curves.values()}) == 1
        return (curves if is_one else {}), []
    curve = find_reference(name, runs_dir)
    for result in results:
        vocab_size = int(number_of(result.config, "vocab_size") or 0)
        length = bytes_per_token(result.records)
        try:
            curves[result.name] = curve.in_units_of(result.tokenizer, vocab_size, length)
        except UserError as error:
            notes.append(f"{result.name}: {error}")
    return curves, notes


def mark_differences(rows: list[Row], curves: dict[str, ReferenceCurve]) -> list[str]:
    """Set how far each row is from its reference at its last loss; return a note on it.

    It is the last validation loss where the curve has one at so many tokens, else the last
    training loss. Of several runs it is the mean.
    """
    used = set()
    for row in rows:
        found = [
            _difference(result, curves[result.name])
            for result in row.results
            if result.name in curves
        ]
        compared = [one for one in found if one is not None]
        if not compared or len(compared) < len(row.results):
            continue
        row.values["reference"] = curves[row.first.name].name
        row.values["reference_difference"] = statistics.fmean(one.loss for one in compared)
        shares = [one.tokens for one in compared if one.tokens is not None]
        if len(shares) == len(compared):
            row.values["reference_tokens_ahead"] = statistics.fmean(shares)
        used.add(row.values["reference"])
    return [
        f"to {name}: the last loss less that of the reference after as many tokens, and how many"
        " more tokens the reference needs for that loss (share of the run's); its data and"
        " validation text may be others"
        for name in sorted(used)
    ]


def _difference(result: Result, curve: ReferenceCurve) -> Compared | None:
    """Compare a run's last loss with a curve; None if it ended where the curve has no loss."""
    for kind in reversed(get_args(Kind)):  # validation first
        for record in reversed(result.records):
            tokens = number_of(record, "tokens")
            loss = number_of(record, f"{kind}_loss")
            if tokens is None or loss is None:
                continue
            expected = curve.loss_at(kind, tokens)
            if expected is None:
                break
            same_loss_tokens = curve.tokens_at(kind, loss)
            ahead = None if same_loss_tokens is None else same_loss_tokens / tokens - 1
            return Compared(loss - expected, ahead)
    return None


def save_reference(rows: list[Row], name: str, runs_dir: Path) -> Path:
    """Save the mean curve of the runs of one row in the runs directory; return the file.

    Raises: UserError: the runs differ in more than their seed or have no records, the name is
        taken, or the file cannot be written.
    """
    if len(rows) != 1 or rows[0].is_published:
        raise UserError(
            "--save-reference wants one run, or runs that differ only in their random_seed; name"
            " them, as in: lab compare RUN --save-reference NAME"
        )
    runs = rows[0].results
    unfinished = [run.name for run in runs if run.status != FINISHED]
    if unfinished:
        raise UserError(f"--save-reference wants finished runs; {unfinished[0]} is not")
    path = runs_dir / REFERENCES
    saved = read_references(path)
    if not re.fullmatch(REFERENCE_NAME, name):
        raise UserError(
            f"--save-reference {name[:60]!r}: a name has letters, digits, '.', '_' and '-'; choose"
            " another"
        )
    if name in [curve.name for curve in (*saved, *read_references(PUBLISHED_PATH))]:
        raise UserError(f"--save-reference {name}: there is such a curve; choose another name")
    vocab_size = number_of(runs[0].config, "vocab_size")
    records = [run.records for run in runs]
    train, train_std = mean_curve(records, "train_loss", max_points=MAX_POINTS)
    validation, validation_std = mean_curve(records, "validation_loss", max_points=MAX_POINTS)
    if not train or vocab_size is None:
        raise UserError(f"{runs_dir / runs[0].name}: has no losses to save as a reference")
    curve = ReferenceCurve(
        name=name,
        about=f"{rows[0].values['model']}, {runs[0].config.get('optimizer')}".strip(", "),
        source=", ".join(run.name for run in runs),
        tokenizer=runs[0].tokenizer,
        vocab_size=int(vocab_size),
        bytes_per_token=bytes_per_token(runs[0].records),
        num_runs=len(runs),
        train=train,
        validation=validation,
        train_std=train_std,
        validation_std=validation_std,
    )
    content = {"curves": [one.model_dump() for one in (*saved, curve)]}
    try:
        write_atomically(path, to_json(content) + "\n")
    except OSError as error:
        raise cannot_be_written(path, error) from None
    return path
