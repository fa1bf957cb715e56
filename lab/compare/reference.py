"""`lab compare --reference` and `--save-reference`: rows against a curve, and a curve of runs."""

import re
import statistics
from functools import partial
from pathlib import Path
from typing import get_args

from basics.errors import UserError
from lab.compare.rows import Row
from lab.runs import Result, bytes_per_token, number_of
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
    report_noise,
    write_reference,
)
from reporting.summary import FINISHED

MAX_POINTS = 200  # of a saved curve
REPORTS_OF_NOISE = 8  # in a row, of whose training losses the noise is taken


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
        names = sorted({curve.name for curve in curves.values()})
        if len(names) > 1:
            return {}, [f"trained with other references: {', '.join(names)}; choose --reference"]
        return curves, []
    curve = find_reference(name, runs_dir)
    for result in results:
        vocab_size = int(number_of(result.config, "vocab_size") or 0)
        try:
            curves[result.name] = curve.in_units_of(
                result.tokenizer, vocab_size, partial(bytes_per_token, result.records)
            )
        except UserError as error:
            notes.append(f"{result.name}: {error}")
    return curves, notes


def mark_differences(rows: list[Row], curves: dict[str, ReferenceCurve]) -> list[str]:
    """Set how far each row is from its reference at its last loss; return a note on it.

    It is the last validation loss where the curve has one at so many tokens, else the last
    training loss. Of several runs it is the mean.
    """
    used = set()
    outside = []
    for row in rows:
        found = [
            _difference(result, curves[result.name])
            for result in row.results
            if result.name in curves
        ]
        compared = [one for one in found if one is not None]
        if len(compared) < len(row.results):
            outside += [row.name] if found else []
            continue
        row.values["reference"] = curves[row.first.name].name
        row.values["reference_difference"] = statistics.fmean(one.loss for one in compared)
        shares = [one.tokens for one in compared if one.tokens is not None]
        if len(shares) == len(compared):
            row.values["reference_tokens_ahead"] = statistics.fmean(shares)
        used.add(row.values["reference"])
    notes = [
        f"to {name}: the last loss less that of the reference after as many tokens, and how many"
        " more tokens the reference needs for that loss (share of the run's); its data and"
        " validation text may be others"
        for name in sorted(used)
    ]
    if outside:
        notes.append(f"the reference has no loss after as many tokens: {', '.join(outside)}")
    return notes


def _difference(result: Result, curve: ReferenceCurve) -> Compared | None:
    """Compare a run's last loss with a curve; None if it ended where the curve has no loss."""
    for kind in reversed(get_args(Kind)):  # validation first
        for record in reversed(result.records):
            tokens = number_of(record, "tokens")
            loss = number_of(record, f"{kind}_loss")
            if tokens is None or loss is None:
                continue
            compared = curve.compared(kind, tokens, loss)
            if compared:
                return compared
            break
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
    train = mean_curve(records, "train_loss", max_points=MAX_POINTS)
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
        validation=mean_curve(records, "validation_loss", max_points=MAX_POINTS),
        train_std=report_noise(records, "train_loss", reports=REPORTS_OF_NOISE),
        validation_std=report_noise(records, "validation_loss", reports=1),  # always the same text
    )
    write_reference(path, curve)
    return path
