"""`lab sweep --prune`: runs that are clearly behind the baseline's curve end early.

Validation losses are compared, since dropout changes the training loss. The trainer does it, by
the keys `reference` and `stop_if_behind` that a run gets here.
"""

from collections.abc import Sequence

from basics.errors import writing_to
from basics.files import write_atomically
from basics.json_files import read_json_object, to_json
from lab.runs import Result
from lab.sweep.definition import PlannedRun, Sweep
from reporting.reference import (
    REFERENCES,
    WARNING_LOSS,
    WARNING_STD,
    ReferenceCurve,
    mean_curve,
    report_noise,
    write_reference,
)
from run_config import StopIfBehind

REFERENCE = "baseline"  # its name in `references.json` of the sweep
# Of the tokens: nothing ends before. The noise is that of the second half; and runs with twice the
# baseline's rate were behind after 40% of their tokens, and ended ahead (docs/sweeps.md).
FIRST_SHARE = 0.5
MAX_POINTS = 1000
REPORTS = 2  # validations in a row
# Runs with other values than the baseline have other losses at the same number of tokens.
SAME_KEYS = (
    "dataset",
    "vocab_size",
    "context_length",
    "grow",
    "min_train_tokens",
    "validation",
    "start_val_token",
    "validation_sequences",
    "validation_batches",
)


def save_reference(sweep: Sweep, baselines: Sequence[Result]) -> StopIfBehind | None:
    """Save the mean validation curve of the finished baselines; return the limit for other runs.

    With one seed the noise is not known, and the limit is a loss. None if there is no curve.

    Raises: UserError: the sweep's references are wrong, or cannot be written.
    """
    records = [result.records for result in baselines]
    points = mean_curve(records, "validation_loss", max_points=MAX_POINTS)
    if not points:
        return None
    std = report_noise(records, "validation_loss", reports=1)
    first_tokens = FIRST_SHARE * points[-1][0]
    curve = ReferenceCurve(
        name=REFERENCE,
        about=f"{sweep.base.name}, the baseline of this sweep",
        vocab_size=sweep.base.model.vocab_size,
        num_runs=len(records),
        validation=tuple(point for point in points if point[0] >= first_tokens),
        validation_std=std,
    )
    write_reference(sweep.sweep_dir / REFERENCES, curve)
    if std:
        return StopIfBehind(std=WARNING_STD, reports=REPORTS)
    return StopIfBehind(loss=WARNING_LOSS, reports=REPORTS)


def set_limit(sweep: Sweep, run: PlannedRun, limit: StopIfBehind | None) -> None:
    """Write into a run's `train.json` when it ends early; with None that it never does.

    The baseline never does, nor does a run that cannot be compared with it as it trains.
    """
    base = sweep.base.model.model_dump() | sweep.base.config.model_dump()
    own = run.model.model_dump() | run.config.model_dump()
    keys = [*SAME_KEYS, *["microbatch_size"] * (own["validation_batches"] is not None)]
    is_comparable = all(own[key] == base[key] for key in keys)
    path = run.run_dir / "train.json"
    there = read_json_object(path)
    wanted = {key: there[key] for key in there if key not in ("reference", "stop_if_behind")}
    if limit is not None and run.changes and is_comparable:
        wanted |= {"reference": REFERENCE, "stop_if_behind": limit.model_dump(exclude_none=True)}
    if wanted != there:
        with writing_to(path):
            write_atomically(path, to_json(wanted, indent=4) + "\n")
