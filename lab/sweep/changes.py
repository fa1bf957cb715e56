"""Changes to the settings of a run: read from the command line, checked, applied."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

from basics.errors import UserError
from basics.json_files import describe, unknown_key
from run_config import GONE_KEYS, RUN_NAME, ModelConfig, Run, TrainConfig, with_defaults

NEXT_KEY = re.compile(r",(?=[A-Za-z_]\w*=)")  # a comma before another KEY=
LONGEST_VALUE = 60  # characters, in a label
SEED = "random_seed"

Changes = dict[str, Any]
Configs = tuple[ModelConfig, TrainConfig]


def parse_change(text: str) -> Changes:
    """Parse `KEY=VALUE[,KEY=VALUE]...`. Raises: UserError."""
    changes: Changes = {}
    rest = text
    while rest or not changes:
        key, _, rest = rest.partition("=")
        value, rest = _split_value(rest)
        if not key or not value:
            raise UserError(f"--change {text[:80]}: wanted KEY=VALUE or KEY=VALUE,KEY=VALUE, as"
                            " drop_rate=0.1,weight_decay=0")
        if key in changes:
            raise UserError(f"--change {text[:80]}: names {key} twice; each --change is one variant"
                            " (--range is for several values of a key)")
        changes[key] = _parse_value(value)
    return changes


def _split_value(text: str) -> tuple[str, str]:
    """Split a value from the next `KEY=`; a comma inside JSON is part of the value."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        end = 0
    if end < len(text):
        found = NEXT_KEY.match(text, end) or NEXT_KEY.search(text)
        return (text[:found.start()], text[found.end():]) if found else (text, "")
    return text, ""


def parse_range(text: str) -> list[Changes]:
    """Parse `KEY=VALUE,VALUE[,VALUE]...` into one change for each value. Raises: UserError."""
    key, _, listed = text.partition("=")
    values = _parse_value(f"[{listed}]")
    if not isinstance(values, list):  # not JSON: names
        values = [_parse_value(value) for value in listed.split(",")]
    if not key or len(values) < 2 or "" in values:
        raise UserError(f"--range {text[:80]}: wanted KEY=VALUE,VALUE,..., as"
                        " learning_rate=0.001,0.002,0.004")
    return [{key: value} for value in values]


def _parse_value(text: str) -> Any:
    """Return JSON's value, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def label(changes: Changes) -> str:
    """Return changes as text, as on the command line."""
    return ",".join(f"{key}={_shown(value)}" for key, value in changes.items()) or "baseline"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def apply_changes(base: Run, changes: Changes, *, seed: int | None = None) -> Configs:
    """Return a run's configs with changes; null takes a key out, so that it has its default.

    Args:
        seed: the run's random_seed instead of the base's.

    Raises:
        UserError: a key is unknown, a value is bad, or the changed run cannot be compared.
    """
    _check_keys(changes)
    changed = []
    for config in (base.model, base.train):
        own = {key: value for key, value in changes.items() if key in type(config).model_fields}
        if seed is not None and SEED in type(config).model_fields:
            own[SEED] = seed
        values = config.model_dump(exclude_unset=True) | own
        try:
            changed.append(type(config).model_validate(
                {key: value for key, value in values.items() if value is not None}))
        except ValidationError as error:
            raise UserError(f"--change {label(changes)}: {describe(error)}") from None
    model, train = changed
    _check_comparable(base, train, changes)
    return with_defaults(model, _with_found_weights(base, train))


def _check_comparable(base: Run, train: TrainConfig, changes: Changes) -> None:
    """Refuse runs without validation, and runs that stop before their end. Raises: UserError."""
    if not train.validates:
        raise UserError(f"{label(changes)}: a sweep compares validation losses; set"
                        f" validation_interval with validation_sequences in {base.train_path}")
    for key, option in (("max_hours", "--budget-hours"), ("max_cost_usd", "--budget-usd")):
        if getattr(train, key) is not None:
            raise UserError(f"{label(changes)}: {key} would stop runs before their end; drop it"
                            f" from {base.train_path}, and pass {option} for the whole sweep")


def _with_found_weights(base: Run, train: TrainConfig) -> TrainConfig:
    """Replace the name of a run in `init_from` by the path of its best checkpoint.

    The runs of a sweep are in another directory, where that name would not be found.

    Raises:
        UserError: that run has no checkpoint.
    """
    name, runs_dir = train.init_from, base.run_dir.parent
    if name is None or not (RUN_NAME.fullmatch(name) and (runs_dir / name).is_dir()):
        return train
    path = (runs_dir / name / "checkpoints/best").absolute()
    if not path.exists():
        raise UserError(f"{base.train_path}: init_from: {path}: no checkpoint yet; train {name}"
                        " first")
    return train.model_copy(update={"init_from": str(path)})


def _check_keys(changes: Changes) -> None:
    """Refuse unknown keys, and the seed, which is not a change. Raises: UserError."""
    known = [*ModelConfig.model_fields, *TrainConfig.model_fields]
    for key in changes:
        if key == SEED:
            raise UserError(f"--change {label(changes)}: {SEED} is the same for all variants; use"
                            " --seeds N")
        if key in GONE_KEYS:
            raise UserError(f'--change {label(changes)}: the key "{key}" has gone:'
                            f" {GONE_KEYS[key]}")
        if key not in known:
            raise UserError(f"--change {label(changes)}: {unknown_key(key, known)}")
