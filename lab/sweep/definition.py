"""The plan of a sweep: its changes and seeds, in `sweep.json`, and its run directories."""

import json
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from basics.checkpoint_files import BEST
from basics.errors import UserError, print_line, writing_to
from basics.files import locked, write_atomically
from basics.json_files import Config, FrozenConfig, describe, read_json_object, to_json, unknown_key
from reporting.reference import REFERENCES, find_reference, write_reference
from run_config import (
    ModelConfig,
    Run,
    TrainConfig,
    check_against_model,
    find_run,
    load_config,
    with_defaults,
)

PLAN_NAME = "sweep.json"
SEED, MAX_SEEDS = "random_seed", 1000
LONGEST_VALUE = 60  # characters, in a label
LONGEST_NAME = 80  # characters, of a run's directory before its seed
LIMITS = ("max_hours", "max_cost_usd")  # of a run; a sweep may have one of them
LOCK_SECONDS = 30.0  # other commands lock the plan for a moment
# What runs may have from elsewhere: earlier sweeps had the prompts of their base, and `--prune`
# gives a reference to those that it may end.
NOT_OF_PLAN = ("sample_prompts", "reference", "stop_if_behind")

Changes = dict[str, Any]


def parse_change(text: str) -> Changes:
    """Parse `KEY=VALUE[,KEY=VALUE]...`. Raises: UserError."""
    changes: Changes = {}
    for part in re.split(r",(?=[A-Za-z_][\w.]*=)", text):  # a comma before another KEY=
        key, _, value = part.partition("=")
        if not key or not value or key in changes:
            raise UserError(
                f"--change {text[:80]}: wanted KEY=VALUE or KEY=VALUE,KEY=VALUE, as"
                " drop_rate=0.1,weight_decay=0, each key once (--range takes several"
                " values)"
            )
        changes[key] = _parse_value(value)
    return changes


def parse_range(text: str) -> list[Changes]:
    """Parse `KEY=VALUE,VALUE[,VALUE]...` into one change for each value. Raises: UserError."""
    key, _, listed = text.partition("=")
    values = _parse_value(f"[{listed}]")
    if not isinstance(values, list):  # not JSON: names
        values = [_parse_value(value) for value in listed.split(",")]
    if not key or len(values) < 2 or "" in values:
        raise UserError(
            f"--range {text[:80]}: wanted KEY=VALUE,VALUE,..., as learning_rate=0.001,0.002,0.004"
        )
    return [{key: value} for value in values]


def _parse_value(text: str) -> Any:
    """Return JSON's value, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def label(changes: Changes) -> str:
    """Name a variant in tables and messages: KEY=VALUE,..., with long values cut."""
    texts = []
    for key, value in changes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > LONGEST_VALUE:
            text = f"{text[:LONGEST_VALUE]}..."
        texts.append(f"{key}={text}")
    return ",".join(texts) or "baseline"


def _with_whole_objects(base: Run, changes: Changes) -> Changes:
    """Return changes of keys with those of a part of an object, such as `grow.at`, put into it."""
    whole = {key: value for key, value in changes.items() if "." not in key}
    settings = base.config.model_dump(exclude_unset=True) | whole
    for key in changes.keys() - whole.keys():
        name, _, part = key.partition(".")
        before = whole.get(name) or settings.get(name)
        if before is not None and not isinstance(before, dict):
            raise UserError(f"--change {label(changes)}: {name} is no object, so {key} is no key")
        whole[name] = (before or {}) | {part: changes[key]}
    return whole


def _with_values(config: Config, changes: Changes) -> Config:
    """Return a config with those changes that are keys of it."""
    known = {
        key: value
        for key, value in (config.model_dump(exclude_unset=True) | changes).items()
        if value is not None and key in type(config).model_fields
    }
    try:
        return type(config).model_validate(known)
    except ValidationError as error:
        raise UserError(f"--change {label(changes)}: {describe(error)}") from None


def changed(base: Run, changes: Changes) -> tuple[ModelConfig, TrainConfig]:
    """Return a run's configs with changes; null takes a key out, so that it has its default.

    Raises: UserError: a key is unknown, a value is bad, or the changed run cannot be compared.
    """
    known = [*ModelConfig.model_fields, *TrainConfig.model_fields]
    for key in changes:
        if key.partition(".")[0] not in known:
            raise UserError(f"--change {label(changes)}: {unknown_key(key, known)}")
    whole = _with_whole_objects(base, changes)
    model, config = _with_values(base.model, whole), _with_values(base.config, whole)
    check_against_model(f"--change {label(changes)}", model, config)
    if "sample_prompts" not in changes:  # nobody reads the samples of all variants
        config = config.model_copy(update={"sample_prompts": ()})
    if config.reference is not None:  # it is looked for beside the runs of the sweep
        config = config.model_copy(update={"reference": None})
    if config.stop_if_behind is not None:
        raise UserError(
            f"{label(changes)}: stop_if_behind would stop the baseline too; drop it from"
            f" {base.train_path}, and pass --prune"
        )
    if not config.validates:
        raise UserError(
            f"{label(changes)}: a sweep compares validation losses; set"
            f" validation_interval with validation_sequences in {base.train_path}"
        )
    # The runs of a sweep are in another directory, where the name of a run would not be found.
    name, runs_dir = config.init_from, base.run_dir.parent
    named = None if name is None else find_run(runs_dir, name)
    if named is not None and (runs_dir / named.name).is_dir():
        path = (runs_dir / named.name / "checkpoints" / (named.checkpoint or BEST)).absolute()
        if not path.exists():
            raise UserError(
                f"{base.train_path}: init_from: {path}: no checkpoint yet; train {named.name} first"
            )
        config = config.model_copy(update={"init_from": str(path)})
    return with_defaults(model, config)


def check_limits(sweep_dir: Path, configs: list[TrainConfig]) -> None:
    """Refuse runs that end at hours beside runs that end at dollars. Raises: UserError."""
    if all(any(getattr(config, key) for config in configs) for key in LIMITS):
        raise UserError(
            f"{sweep_dir}: has max_hours and max_cost_usd, but losses are compared at equal hours"
            " or at equal dollars; drop one of them from the base and the changes"
        )


class Plan(FrozenConfig):
    """`sweep.json`: the name of the changed run, the number of seeds, the changes.

    Since its first command with --parallel also what each run gets, on every machine: with another
    number of threads sums are rounded differently, and without `global_batch_size` the number of
    processes changes the batch.
    """

    base: str
    num_seeds: int = Field(ge=1, le=MAX_SEEDS)
    changes: list[Changes]
    processes: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)  # of each process; None on GPUs


class PlannedRun(NamedTuple):
    """One variant with one seed; its directory, and what its two files hold."""

    changes: Changes
    seed: int
    run_dir: Path
    model: ModelConfig
    config: TrainConfig

    @property
    def label(self) -> str:
        return f"{label(self.changes)}, seed {self.seed}"


@dataclass
class Sweep:
    """A run, the directory of the runs that are trained, and their changes; the first has none."""

    base: Run
    sweep_dir: Path
    num_seeds: int = 1
    variants: list[Changes] = field(default_factory=lambda: [{}])
    processes: int | None = None  # of each run, and CPU threads of each process, as in `Plan`
    threads: int | None = None

    @property
    def names(self) -> list[str]:
        """The variants' names in those of run directories: unique, and the same in each command."""
        names: list[str] = []
        for changes in self.variants:
            text = label(changes).replace(",", "_").replace("=", "-")
            name = re.sub(r"[^A-Za-z0-9._-]", "", text)[:LONGEST_NAME].lstrip("._-") or "variant"
            while name in names:
                name += "_"
            names.append(name)
        return names

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, one seed after the other: a sweep that is stopped has comparable runs."""
        first = self.base.config.random_seed
        return [
            PlannedRun(
                changes,
                seed,
                self.sweep_dir / f"{name}-seed-{seed}",
                *changed(self.base, changes | {SEED: seed}),
            )
            for seed in range(first, first + self.num_seeds)
            for name, changes in zip(self.names, self.variants, strict=True)
        ]

    def add(self, changes: Changes) -> None:
        """Add a variant, unless there is such a one. Raises: UserError: it is refused."""
        configs = changed(self.base, changes)
        if configs == changed(self.base, {}):
            print_line(f"{label(changes)}: is the baseline")
        elif all(changed(self.base, other) != configs for other in self.variants):
            self.variants.append(changes)

    def locked(self) -> AbstractContextManager[None]:
        """Lock the sweep's files, but not its runs, against other commands. Raises: UserError."""
        busy = f"{self.sweep_dir}: locked by another process; try again, or set another --name"
        return locked(self.sweep_dir, busy=busy, wait_seconds=LOCK_SECONDS)

    def update(
        self,
        changes: Iterable[Changes] = (),
        *,
        num_seeds: int = 1,
        processes: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Add to the plan in `sweep.json`, as other commands have left it, and write its runs.

        Processes and threads count if the plan has none yet.

        Raises: UserError: a change is refused, the plan is wrong or of another run, runs have
            limits in hours and in dollars, a run's files were edited, or files cannot be written.
        """
        path = self.sweep_dir / PLAN_NAME
        with self.locked():
            if path.exists():
                self._read(path)
            self.num_seeds = max(self.num_seeds, num_seeds)
            if self.processes is None:
                self.processes, self.threads = processes, threads
            for change in changes:
                self.add(change)
            self._write(path)

    def _read(self, path: Path) -> None:
        try:
            plan = Plan.model_validate(read_json_object(path, needed_by="this sweep"))
        except ValidationError as error:
            raise UserError(f"{path}: {describe(error)}") from None
        if plan.base != self.base.name:
            raise UserError(
                f"{path}: is a sweep of {plan.base}, not of {self.base.name}; set another --name"
            )
        self.num_seeds = max(self.num_seeds, plan.num_seeds)
        self.variants = [{}, *plan.changes]
        self.processes, self.threads = plan.processes, plan.threads

    def _write(self, path: Path) -> None:
        """Write `sweep.json` and the files of the runs that are missing."""
        missing: dict[Path, FrozenConfig] = {}
        check_limits(self.sweep_dir, [run.config for run in self.runs])
        for run in self.runs:
            model_path, train_path = run.run_dir / "model.json", run.run_dir / "train.json"
            files: dict[Path, FrozenConfig] = {model_path: run.model, train_path: run.config}
            missing |= {path: config for path, config in files.items() if not path.exists()}
            there = with_defaults(
                run.model if model_path in missing else load_config(model_path, ModelConfig),
                run.config if train_path in missing else load_config(train_path, TrainConfig),
            )
            for old, new in zip(there, files.values(), strict=True):
                for key in type(new).model_fields:
                    if key not in NOT_OF_PLAN and getattr(old, key) != getattr(new, key):
                        raise UserError(
                            f"{run.run_dir}: {key} is {getattr(old, key)}, but would be"
                            f" {getattr(new, key)} now: {self.base.run_dir} or this directory was"
                            " edited since; undo that, or set another --name"
                        )
        plan = Plan(
            base=self.base.name,
            num_seeds=self.num_seeds,
            changes=self.variants[1:],
            processes=self.processes,
            threads=self.threads,
        )
        with writing_to(self.sweep_dir):
            write_atomically(path, to_json(plan.model_dump(), indent=4) + "\n")
            for path, config in missing.items():
                path.parent.mkdir(exist_ok=True)
                text = to_json(config.model_dump(exclude_unset=True), indent=4)
                write_atomically(path, f"{text}\n")


def open_sweep(
    base: Run,
    sweep_dir: Path,
    changes: list[Changes],
    num_seeds: int,
    usd_per_hour: float | None = None,
) -> Sweep:
    """Return a sweep with its earlier plan, these variants and seeds, written to its directory.

    Raises: UserError: something is wrong with the changes, the plan or the directory, or a limit in
        dollars lacks the price.
    """
    configs = []
    for change in ({}, *changes):  # refused before anything is written
        configs.append(changed(base, change)[1])
        replace(base, config=configs[-1]).priced(usd_per_hour)
        if SEED in change:
            raise UserError(f"{SEED} is the same for all variants; use --seeds N")
    check_limits(sweep_dir, configs)
    if not changes and num_seeds == 1 and not (sweep_dir / PLAN_NAME).exists():
        raise UserError(
            f"{sweep_dir}: no such sweep yet; name at least one --change or --range, or"
            " several --seeds"
        )
    sweep = Sweep(base, sweep_dir)
    sweep.update(changes, num_seeds=num_seeds)
    if base.config.reference:  # the runs of the sweep look for it there
        curve = find_reference(base.config.reference, base.run_dir.parent, base.run_dir)
        write_reference(sweep_dir / REFERENCES, curve)
    return sweep
