"""All changes together that were better than the baseline, as one more variant."""

from __future__ import annotations

from basics.errors import UserError
from lab.sweep.changes import Changes, label
from lab.sweep.plan import Sweep
from lab.sweep.results import Entry


def with_stack(sweep: Sweep, entries: list[Entry]) -> tuple[Sweep, list[str]]:
    """Return the sweep with all improvements as one variant, and lines that say what was done.

    The largest improvement comes first; a later one that sets a key to another value is left out.
    """
    better = sorted((entry for entry in entries if entry.is_improvement
                     and not entry.variant.is_stack), key=lambda entry: entry.difference.mean)
    together: Changes = {}
    used, lines = [], []
    for entry in better:
        changes = entry.variant.changes
        if any(together.get(key, value) != value for key, value in changes.items()):
            lines.append(f"stack: without {entry.variant.label}: a larger improvement sets the"
                         " same key")
            continue
        together |= changes
        used.append(entry.variant.label)
    if len(used) < 2:
        return sweep, [*lines, "stack: nothing to train: fewer than two changes were better than"
                               " the baseline outside the noise"]
    if any(entry.difference.is_noise is None for entry in better):
        lines.append("stack: with one seed the noise is not known: all changes with a lower loss"
                     " are taken")
    try:
        stacked = sweep.with_variant(together, is_stack=True)
    except UserError as error:
        return sweep, [*lines, f"stack: {label(together)} cannot be trained: {error}"]
    return stacked, [*lines, f"stack: {', '.join(used)}"]
