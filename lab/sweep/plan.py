"""The plan of a sweep: its changes and seeds, in `sweep.json`, and its run directories."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from basics.errors import UserError, cannot_be_written, print_line
from basics.files import locked, write_atomically
from basics.json_files import describe, read_json_object, to_json
from lab.sweep.changes import Changes, apply_changes, label
from run_config import ModelConfig, Run, TrainConfig, load_config, with_defaults

PLAN_NAME = "sweep.json"
LONGEST_NAME = 80  # characters, of a run's directory before its seed


class Variant(BaseModel):
    """The baseline, which has no changes, or changes to it.

    Attributes:
        is_stack: whether it has all changes that were better than the baseline.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    changes: dict[str, Any] = {}
    is_stack: bool = False

    @property
    def label(self) -> str:
        return ("all together: " if self.is_stack else "") + label(self.changes)


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
            text = label(variant.changes).replace(",", "_").replace("=", "-")
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

    def with_variant(self, changes: Changes, *, is_stack: bool = False) -> Sweep:
        """Return the sweep with one more variant; the same one if it has such a variant.

        Raises:
            UserError: the changes are refused by a run's own validators.
        """
        configs = apply_changes(self.base, changes)
        if any(apply_changes(self.base, variant.changes) == configs
               for variant in self.plan.variants):
            return self
        return self._planned(variants=(*self.plan.variants,
                                       Variant(changes=changes, is_stack=is_stack)))

    def with_seeds(self, num_seeds: int) -> Sweep:
        """Return the sweep with at least this number of seeds."""
        return self._planned(num_seeds=max(num_seeds, self.plan.num_seeds))

    def _planned(self, **changes: Any) -> Sweep:
        return replace(self, plan=self.plan.model_copy(update=changes))

    def write(self) -> None:
        """Write `sweep.json` and the run directories that are missing.

        Raises:
            UserError: the base or a run directory was changed, or something cannot be written.
        """
        for run in self.runs:
            if (run.run_dir / "train.json").exists():
                self._check_unchanged(run)
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

    def _check_unchanged(self, run: PlannedRun) -> None:
        found = with_defaults(load_config(run.run_dir / "model.json", ModelConfig),
                              load_config(run.run_dir / "train.json", TrainConfig))
        for old, new in zip(found, (run.model, run.train), strict=True):
            for key in type(new).model_fields:
                if getattr(old, key) != getattr(new, key):
                    raise UserError(f"{run.run_dir}: {key} is {getattr(old, key)}, but would be"
                                    f" {getattr(new, key)} now: {self.base.run_dir} or this"
                                    " directory was edited since; undo that, or set another --name")


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
    if plan.variants[0].changes:
        raise UserError(f"{path}: was edited by hand; name another sweep with --name")
    if plan.base != base.name:
        raise UserError(f"{path}: is a sweep of {plan.base}, not of {base.name}; set another"
                        " --name")
    return plan
