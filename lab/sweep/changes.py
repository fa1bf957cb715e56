"""Changes to the settings of a run: read from the command line, checked, applied."""

import json
import re
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from basics.errors import UserError
from basics.json_files import describe, unknown_key
from run_config import GONE_KEYS, RUN_NAME, ModelConfig, Run, TrainConfig, with_defaults

NEXT_KEY = re.compile(r",(?=[A-Za-z_]\w*=)")  # a comma before another KEY=
LONGEST_VALUE = 60  # characters, in a label
SEED = "random_seed"

Changes = dict[str, Any]


def parse_change(text: str) -> Changes:
    """Parse `KEY=VALUE[,KEY=VALUE]...`. Raises: UserError."""
    changes: Changes = {}
    rest = text
    while rest or not changes:
        key, _, rest = rest.partition("=")
        end = 0  # a comma inside JSON is part of the value
        with suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(rest)
        found = NEXT_KEY.match(rest, end) or NEXT_KEY.search(rest) if end < len(rest) else None
        value, rest = (rest[:found.start()], rest[found.end():]) if found else (rest, "")
        if not key or not value:
            raise UserError(f"--change {text[:80]}: wanted KEY=VALUE or KEY=VALUE,KEY=VALUE, as"
                            " drop_rate=0.1,weight_decay=0")
        if key in changes:
            raise UserError(f"--change {text[:80]}: names {key} twice; each --change is one variant"
                            " (--range is for several values of a key)")
        changes[key] = _parse_value(value)
    return changes


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
    texts = {key: value if isinstance(value, str) else json.dumps(value)
             for key, value in changes.items()}
    return ",".join(f"{key}={text[:LONGEST_VALUE]}{'...' * (len(text) > LONGEST_VALUE)}"
                    for key, text in texts.items()) or "baseline"


def apply_changes(base: Run, changes: Changes, *, seed: int | None = None
                  ) -> tuple[ModelConfig, TrainConfig]:
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
    if not train.validates:
        raise UserError(f"{label(changes)}: a sweep compares validation losses; set"
                        f" validation_interval with validation_sequences in {base.train_path}")
    for key, option in (("max_hours", "--budget-hours"), ("max_cost_usd", "--budget-usd")):
        if getattr(train, key) is not None:
            raise UserError(f"{label(changes)}: {key} would stop runs before their end; drop it"
                            f" from {base.train_path}, and pass {option} for the whole sweep")
    return with_defaults(model, _with_found_weights(base, train))


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
        wrong = (f"{SEED} is the same for all variants; use --seeds N" if key == SEED else
                 f'the key "{key}" has gone: {GONE_KEYS[key]}' if key in GONE_KEYS else
                 unknown_key(key, known) if key not in known else None)
        if wrong:
            raise UserError(f"--change {label(changes)}: {wrong}")
