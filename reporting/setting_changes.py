"""Settings that were changed between two launches of a run. Needs no torch.

A checkpoint has the settings that it was trained with. A launch that resumes from it with others
adds a record to `metrics.jsonl`: {"global_step": 437, ..., "changed": {KEY: [BEFORE, AFTER]}}.
"""

from collections.abc import Iterable
from typing import Any

from reporting.metrics_file import CHANGED
from run_config import Run

# Settings that change no weight. The clock compares prices itself.
REFERENCE_SETTINGS = ("reference", "stop_if_behind")
NOT_OF_TRAINING = ("usd_per_hour", *REFERENCE_SETTINGS)

Changes = dict[str, list[Any]]  # by key: the value before and the value after


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings of `model.json` and `train.json` in one dictionary, as JSON has them.

    Those that change no weight are left out.
    """
    settings = run.model.model_dump(mode="json") | run.train_settings()
    return {key: value for key, value in settings.items() if key not in NOT_OF_TRAINING}


def find_changes(before: dict[str, Any], after: dict[str, Any]) -> Changes:
    """Return the keys with different values; keys that only one version of the code has do not."""
    return {
        key: [before[key], after[key]]
        for key in after
        if key in before and before[key] != after[key]
    }


def change_lines(changes: Changes, num_steps: int) -> list[str]:
    """Return a line of text for each setting that was changed after so many steps."""
    return [
        f"{key} was {_shown(before)} until step {num_steps:,} and is {_shown(after)} from here on"
        for key, (before, after) in changes.items()
    ]


def recorded_changes(records: Iterable[dict[str, Any]]) -> list[tuple[int, Changes]]:
    """Return the changes of a run with the steps that were taken before each; damaged ones not."""
    found = []
    for record in records:
        recorded = record.get(CHANGED)
        if not isinstance(recorded, dict):
            continue
        changes = {
            key: values
            for key, values in recorded.items()
            if isinstance(values, list) and len(values) == 2 and key.isidentifier()
        }
        if changes:
            found.append((record["global_step"] + 1, changes))
    return found


def histories(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return by key all values of a setting as text: "0.01 until step 438, then 0.02"."""
    before: dict[str, str] = {}
    last: dict[str, str] = {}
    for num_steps, changes in recorded_changes(records):
        for key, (old, new) in changes.items():
            earlier = f"{before[key]}, " if key in before else ""
            before[key] = f"{earlier}{_shown(old)} until step {num_steps:,}"
            last[key] = _shown(new)
    return {key: f"{before[key]}, then {last[key]}" for key in before}


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)[:60] if isinstance(value, (int, float)) else ascii(value)[:60]
