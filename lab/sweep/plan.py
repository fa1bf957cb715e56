"""The plan of a sweep: its variants and seeds, in `sweep.json`, and their run directories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from basics.directory_lock import locked
from basics.errors import UserError, cannot_be_written, print_line
from basics.files import write_atomically
from basics.json_files import describe, read_json_object, to_json
from lab.sweep.changes import Changes, Configs, apply_changes, label
from run_config import ModelConfig, Run, TrainConfig, load_config, with_defaults
from tokens.batch_plan import accumulation_steps_of

PLAN_NAME = "sweep.json"
BASELINE = "baseline"
LONGEST_NAME = 80  # characters, of a run's directory before its seed


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Variant(_Frozen):
    """The baseline, or a change to it.

    Attributes:
        name: of its run directories, before the seed.
        is_stack: whether it has all changes that were better than the baseline.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    changes: dict[str, Any]
    is_stack: bool = False

    @property
    def is_baseline(self) -> bool:
        return self.name == BASELINE

    @property
    def label(self) -> str:
        return ("all together: " if self.is_stack else "") + label(self.changes)


class Plan(_Frozen):
    """`sweep.json`: the baseline's settings when the sweep began, the seeds and the variants.

    Attributes:
        variants: the baseline first.
    """

    base: str
    model: dict[str, Any]
    train: dict[str, Any]
    num_seeds: int = Field(ge=1, le=1000)
    variants: tuple[Variant, ...] = Field(strict=False, min_length=1)


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed."""

    variant: Variant
    seed: int
    run_dir: Path
    configs: Configs

    @property
    def label(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A plan, the run that it changes, and the directory of its runs.

    Attributes:
        num_processes: of each run; None if it is not known.
    """

    plan: Plan
    base: Run
    sweep_dir: Path
    num_processes: int | None = None

    @classmethod
    def of(cls, base: Run, sweep_dir: Path, *, num_processes: int | None = None) -> Sweep:
        """Return a sweep that has only the baseline, with one seed."""
        return cls(_new_plan(base), base, sweep_dir, num_processes)

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, one seed after the other: a sweep that is stopped has comparable runs."""
        return [self._run(variant, self.base.train.random_seed + i)
                for i in range(self.plan.num_seeds) for variant in self.plan.variants]

    def _run(self, variant: Variant, seed: int) -> PlannedRun:
        return PlannedRun(variant, seed, self.sweep_dir / f"{variant.name}-seed-{seed}",
                          apply_changes(self.base, variant.changes, seed=seed))

    def with_seeds(self, num_seeds: int) -> Sweep:
        """Return the sweep with at least this number of seeds. Raises: UserError."""
        num_seeds = max(num_seeds, self.plan.num_seeds)
        return replace(self, plan=self.plan.model_copy(update={"num_seeds": num_seeds}))

    def with_variant(self, changes: Changes, *, is_stack: bool = False) -> Sweep:
        """Return the sweep with one more variant; the same one if it has such a variant.

        Raises:
            UserError: the changes are refused by a run's own validators, or its global batch
                cannot be divided by the processes.
        """
        configs = apply_changes(self.base, changes)
        self._check_batch(changes, configs)
        for variant in self.plan.variants:
            if apply_changes(self.base, variant.changes) == configs:
                return self
        variant = Variant(name=self._free_name(changes), changes=changes, is_stack=is_stack)
        variants = (*self.plan.variants, variant)
        return replace(self, plan=self.plan.model_copy(update={"variants": variants}))

    def _check_batch(self, changes: Changes, configs: Configs) -> None:
        model, train = configs
        if self.num_processes is not None:
            try:
                accumulation_steps_of(replace(self.base, model=model, train=train),
                                      world_size=self.num_processes)
            except UserError as error:
                raise UserError(f"{label(changes)}: {error}") from None

    def _free_name(self, changes: Changes) -> str:
        """Return a directory name for a variant, with a number if another one has it."""
        text = label(changes).replace(",", "_").replace("=", "-")
        name = re.sub(r"[^A-Za-z0-9._-]", "", text)[:LONGEST_NAME].lstrip("._-") or "variant"
        taken = {variant.name for variant in self.plan.variants}
        names = (name, *(f"{name}.{i}" for i in range(2, len(taken) + 3)))
        return next(free for free in names if free not in taken)

    def write(self) -> None:
        """Write `sweep.json` and the run directories that are missing.

        Raises:
            UserError: a run directory has other settings, or something cannot be written.
        """
        files = [(run.run_dir / f"{name}.json", config) for run in self.runs
                 for name, config in zip(("model", "train"), run.configs, strict=True)]
        for path, config in files:
            if path.exists() and _set_keys(load_config(path, type(config))) != _set_keys(config):
                raise UserError(f"{path}: was changed after the sweep had written it; undo that, or"
                                " name another sweep with --name")
        try:
            _write_json(self.sweep_dir / PLAN_NAME, self.plan)
            for path, config in files:
                path.parent.mkdir(exist_ok=True)
                if not path.exists():
                    _write_json(path, config)
        except OSError as error:
            raise cannot_be_written(self.sweep_dir, error) from None


def _write_json(path: Path, config: BaseModel) -> None:
    write_atomically(path, to_json(_set_keys(config), indent=4) + "\n")


def _set_keys(config: BaseModel) -> dict[str, Any]:
    return config.model_dump(exclude_unset=True)


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
    base, sweep_dir, wanted = new.base, new.sweep_dir, new
    for change in ({}, *changes):
        wanted = wanted.with_variant(change)  # refused before anything is written
    apply_changes(base, {}, seed=wanted.with_seeds(num_seeds or 1).runs[-1].seed)
    if not changes and num_seeds in (None, 1) and not (sweep_dir / PLAN_NAME).exists():
        raise UserError(f"{sweep_dir}: no such sweep yet; name at least one --change or --range,"
                        " or several --seeds")
    busy = (f"{sweep_dir}: another sweep runs in this directory; wait for its end, or set another"
            " --name")
    with locked(sweep_dir, busy=busy):
        sweep = replace(new, plan=_read_plan(base, sweep_dir))
        for change in changes:
            before, sweep = sweep, sweep.with_variant(change)
            if sweep == before and apply_changes(base, change) == apply_changes(base, {}):
                print_line(f"{label(change)}: is the baseline")
        sweep = sweep.with_seeds(num_seeds or 1)
        sweep.write()
        yield sweep


def _new_plan(base: Run) -> Plan:
    model, train = (json.loads(config.model_dump_json(exclude_unset=True))
                    for config in (base.model, base.train))
    return Plan(base=base.name, model=model, train=train, num_seeds=1,
                variants=(Variant(name=BASELINE, changes={}),))


def _read_plan(base: Run, sweep_dir: Path) -> Plan:
    """Return the directory's plan, or a new one. Raises: UserError if it is of another base."""
    path = sweep_dir / PLAN_NAME
    if not path.exists():
        return _new_plan(base)
    try:
        plan = Plan.model_validate(read_json_object(path, needed_by="this sweep"))
        before = with_defaults(ModelConfig.model_validate(plan.model),
                               TrainConfig.model_validate(plan.train))
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from None
    names = [variant.name for variant in plan.variants]
    if names[0] != BASELINE or len(set(names)) < len(names):
        raise UserError(f"{path}: was edited by hand; name another sweep with --name")
    if plan.base != base.name:
        raise UserError(f"{path}: is a sweep of {plan.base}, not of {base.name}; set another"
                        " --name")
    for old, new in zip(before, (base.model, base.train), strict=True):
        changed = [key for key in type(new).model_fields if getattr(old, key) != getattr(new, key)]
        if changed:
            key = changed[0]
            raise UserError(f"{base.run_dir}: {key} is {getattr(new, key)}, but was"
                            f" {getattr(old, key)} when the sweep {sweep_dir.name} began; undo"
                            " that, or set another --name")
    return plan
