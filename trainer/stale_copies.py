"""`stale-copies.json` in a run directory: from which step on a second copy is of an abandoned run.

A launch with `--fresh`, or from an earlier checkpoint, leaves checkpoints of the second copy
behind. The process that copies sets them aside; until it has, a launch must not fetch them.
"""

from __future__ import annotations

import json
from pathlib import Path

from basics.files import read_regular_file, write_atomically

STALE = "stale-copies.json"
MAX_STEP = 2**40


def stale_from(run_dir: Path, place: Path) -> int | None:
    """Return from which global step on a copy is stale; None if it is not, or not known to be."""
    return _read(run_dir).get(str(place))


def mark_stale(run_dir: Path, place: Path, step: int | None) -> None:
    """Record from which global step on a copy is stale; None: it is not. Raises: OSError."""
    stale = _read(run_dir)
    stale.pop(str(place), None)
    if step is not None:
        stale[str(place)] = step
    if stale:
        write_atomically(run_dir / STALE, json.dumps(stale) + "\n", durable=True)
    else:
        (run_dir / STALE).unlink(missing_ok=True)


def _read(run_dir: Path) -> dict[str, int]:
    try:
        stale = json.loads(read_regular_file(run_dir / STALE))
        return {place: step for place, step in stale.items()
                if type(step) is int and 0 <= step <= MAX_STEP}
    except (OSError, ValueError, AttributeError, RecursionError):  # none, or damaged
        return {}
