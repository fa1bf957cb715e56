"""The plan of a sweep: its changes and seeds, in `sweep.json`, and its run directories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from basics.errors import UserError, cannot_be_written, print_line
from basics.files import locked, write_atomically
from basics.json_files import describe, read_json_object, to_json, unknown_key
from run_config import (
    GONE_KEYS,
    RUN_NAME,
    ModelConfig,
    Run,
    TrainConfig,
    load_config,
    with_defaults,
)

PLAN_NAME = "sweep.json"
SEED = "random_seed"
LONGEST_VALUE = 60  # characters, in a label
LONGEST_NAME = 80  # characters, of a run's directory before its seed

Changes = dict[str, Any]


def parse_change(text: str) -> Changes:
    """Parse `KEY=VALUE[,KEY=VALUE]...`. Raises: UserError."""
    changes: Changes = {}
    for part in re.split(r",(?=[A-Za-z_]\w*=)", text):  # a comma before another KEY=
        key, _, value = part.partition("=")
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
    known = [*ModelConfig.model_fields, *TrainConfig.model_fields]
    for key in changes:
        wrong = (f"{SEED} is the same for all variants; use --seeds N" if key == SEED else
                 f'the key "{key}" has gone: {GONE_KEYS[key]}' if key in GONE_KEYS else
                 unknown_key(key, known) if key not in known else None)
        if wrong:
            raise UserError(f"--change {label(changes)}: {wrong}")
    changed = []
    for config in (base.model, base.train):
        values = config.model_dump(exclude_unset=True) | changes | (
            {} if seed is None else {SEED: seed})
        try:
            changed.append(type(config).model_validate(
                {key: value for key, value in values.items()
                 if value is not None and key in type(config).model_fields}))
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
    # The runs of a sweep are in another directory, where the name of a run would not be found.
    name, runs_dir = train.init_from, base.run_dir.parent
    if name is not None and RUN_NAME.fullmatch(name) and (runs_dir / name).is_dir():
        path = (runs_dir / name / "checkpoints/best").absolute()
        if not path.exists():
            raise UserError(f"{base.train_path}: init_from: {path}: no checkpoint yet; train"
                            f" {name} first")
        train = train.model_copy(update={"init_from": str(path)})
    return with_defaults(model, train)


class Variant(BaseModel):
    """The baseline, which has no changes, or changes to it."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    changes: dict[str, Any] = {}

    @property
    def label(self) -> str:
        return label(self.changes)


class Plan(BaseModel):
    """`sweep.json`: the name of the changed run, the seeds and the variants, the baseline first."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    base: str
    num_seeds: int = Field(1, ge=1, le=1000)
    variants: tuple[Variant, ...] = Field((Variant(),), strict=False, min_length=1)


class PlannedRun(NamedTuple):
    """One variant with one seed; its directory, and what its two files hold."""

    variant: Variant
    seed: int
    run_dir: Path
    model: ModelConfig
    train: TrainConfig

    @property
    def label(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A plan, the run that it changes, and the directory of its runs."""

    plan: Plan
    base: Run
    sweep_dir: Path

    @property
    def names(self) -> list[str]:
        """The variants' names in those of run directories: unique, and the same in each command."""
        names: list[str] = []
        for variant in self.plan.variants:
            text = variant.label.replace(",", "_").replace("=", "-")
            name = re.sub(r"[^A-Za-z0-9._-]", "", text)[:LONGEST_NAME].lstrip("._-") or "variant"
            names.append(next(free for free in (name, *(f"{name}.{i}" for i in range(
                2, len(names) + 3))) if free not in names))
        return names

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, one seed after the other: a sweep that is stopped has comparable runs."""
        first = self.base.train.random_seed
        return [PlannedRun(variant, seed, self.sweep_dir / f"{name}-seed-{seed}",
                           *apply_changes(self.base, variant.changes, seed=seed))
                for seed in range(first, first + self.plan.num_seeds)
                for name, variant in zip(self.names, self.plan.variants, strict=True)]

    def with_variant(self, changes: Changes) -> Sweep:
        """Return the sweep with one more variant; the same one if it has such a variant.

        Raises:
            UserError: the changes are refused by a run's own validators.
        """
        configs, variants = apply_changes(self.base, changes), self.plan.variants
        if any(apply_changes(self.base, variant.changes) == configs for variant in variants):
            return self
        return replace(self, plan=self.plan.model_copy(
            update={"variants": (*variants, Variant(changes=changes))}))

    def with_seeds(self, num_seeds: int) -> Sweep:
        """Return the sweep with at least this number of seeds."""
        return replace(self, plan=self.plan.model_copy(
            update={"num_seeds": max(num_seeds, self.plan.num_seeds)}))

    def write(self) -> None:
        """Write `sweep.json` and the run directories that are missing.

        Raises:
            UserError: the base or a run directory was changed, or something cannot be written.
        """
        for run in self.runs:
            if not (run.run_dir / "train.json").exists():
                continue
            found = with_defaults(load_config(run.run_dir / "model.json", ModelConfig),
                                  load_config(run.run_dir / "train.json", TrainConfig))
            for old, new in zip(found, (run.model, run.train), strict=True):
                for key in type(new).model_fields:
                    if getattr(old, key) != getattr(new, key):
                        raise UserError(
                            f"{run.run_dir}: {key} is {getattr(old, key)}, but would be"
                            f" {getattr(new, key)} now: {self.base.run_dir} or this directory was"
                            " edited since; undo that, or set another --name")
        try:
            write_atomically(self.sweep_dir / PLAN_NAME,
                             to_json(self.plan.model_dump(), indent=4) + "\n")
            for run in self.runs:
                run.run_dir.mkdir(exist_ok=True)
                for name, config in (("model", run.model), ("train", run.train)):
                    if not (path := run.run_dir / f"{name}.json").exists():
                        write_atomically(path, to_json(
                            config.model_dump(exclude_unset=True), indent=4) + "\n")
        except OSError as error:
            raise cannot_be_written(self.sweep_dir, error) from None


@contextmanager
def open_sweep(new: Sweep, changes: list[Changes], num_seeds: int | None) -> Iterator[Sweep]:
    """Lock a sweep's directory; yield its earlier plan with these variants added, written.

    Args:
        new: with the baseline only.
        changes: one for each variant; none continues an earlier plan.
        num_seeds: None for those of the earlier plan, else 1.

    Raises:
        UserError: something is wrong with the changes, the plan or the directory.
    """
    base, path, wanted = new.base, new.sweep_dir / PLAN_NAME, new
    for change in ({}, *changes):
        wanted = wanted.with_variant(change)  # refused before anything is written
    apply_changes(base, {}, seed=wanted.with_seeds(num_seeds or 1).runs[-1].seed)
    if not changes and num_seeds in (None, 1) and not path.exists():
        raise UserError(f"{new.sweep_dir}: no such sweep yet; name at least one --change or"
                        " --range, or several --seeds")
    busy = (f"{new.sweep_dir}: another sweep runs in this directory; wait for its end, or set"
            " another --name")
    with locked(new.sweep_dir, busy=busy):
        sweep = replace(new, plan=_read_plan(path, base)) if path.exists() else new
        for change in changes:
            before, sweep = sweep, sweep.with_variant(change)
            if sweep == before and apply_changes(base, change) == apply_changes(base, {}):
                print_line(f"{label(change)}: is the baseline")
        sweep = sweep.with_seeds(num_seeds or 1)
        sweep.write()
        yield sweep


def _read_plan(path: Path, base: Run) -> Plan:
    """Return the plan in a directory. Raises: UserError if it is damaged or of another base."""
    try:
        plan = Plan.model_validate(read_json_object(path, needed_by="this sweep"))
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from None
    if plan.base != base.name:
        raise UserError(f"{path}: is a sweep of {plan.base}, not of {base.name}; set another"
                        " --name")
    return plan
