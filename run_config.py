"""A run's two JSON files as validated, immutable configs."""

import math
import os
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from basics.cli import RUNS
from basics.errors import UserError, cannot_be_written, print_error, print_line
from basics.json_files import Config, describe, found_object, read_json_object, unknown_key
from basics.text import did_you_mean
from settings.batch import BatchConfig
from settings.checkpoints import CheckpointConfig
from settings.data import DataConfig
from settings.limits import LimitsConfig
from settings.machine import MachineConfig
from settings.model import ModelConfig
from settings.optimizer import MUON_DEFAULTS, WIDTH_DEPENDENT, OptimizerConfig
from settings.reports import ReportConfig
from settings.schedule import ScheduleConfig
from settings.validation import ValidationConfig
from settings.weights import WeightsConfig

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHIPPED_RUNS = Path(__file__).parent / RUNS
OLD_NAME = "minibatch_size"  # of microbatch_size, in the original system
LENGTH = "min_train_tokens is the length of a run, and --max-steps ends one launch earlier"
NAMES_ELSEWHERE = {  # of settings, in other trainers
    **dict.fromkeys(
        ("max_steps", "num_steps", "max_iters", "num_iterations", "epochs", "num_epochs"), LENGTH
    ),
    **dict.fromkeys(
        ("batch_size", "per_device_train_batch_size"),
        "microbatch_size is of one forward pass of a process, global_batch_size of a step",
    ),
}


class TrainConfig(
    LimitsConfig,
    ReportConfig,
    MachineConfig,
    ScheduleConfig,
    OptimizerConfig,
    CheckpointConfig,
    WeightsConfig,
    ValidationConfig,
    BatchConfig,
    DataConfig,
):
    """`train.json`: all keys of a run but those of the network.

    Pydantic lists the keys of the last base first: each record begins with `dataset`. No two
    bases have a rule or a method of the same name, because one would replace the other.
    """


def _inside(name: str) -> property:
    return property(lambda run: run.run_dir / name)


class Stage(NamedTuple):
    """Global steps in a row, and the shape of the model that they train."""

    model: ModelConfig
    steps: range


@dataclass(frozen=True)
class Run:
    """A run directory and its configs."""

    name: str
    run_dir: Path
    model: ModelConfig
    config: TrainConfig  # after start-up with the values that were decided for the device
    left_open: dict[str, Any] = field(default_factory=dict)  # those keys as `train.json` has them

    checkpoints_dir = _inside("checkpoints")  # and the links `latest` and `best`
    metrics_path = _inside("metrics.jsonl")  # one line per report and per validation
    evaluations_path = _inside("evaluations.jsonl")  # one line per `lab evaluate`
    samples_path = _inside("samples.jsonl")  # one line per sample prompt and validation
    summary_path = _inside("summary.json")  # losses, times, cost and machine
    heartbeat_path = _inside("heartbeat.json")  # progress of the processes, for monitoring
    train_path = _inside("train.json")  # that `train` was read from
    reference_path = _inside("reference.json")  # the curve that the last launch is compared with
    search_path = _inside("microbatch-search.json")  # the speed that the last search has measured
    machine_time_path = _inside("machine-time.jsonl")  # when the run used which machine

    def decided(self, config: TrainConfig) -> Self:
        """Return the run with `config`, which sets keys that the run's own config leaves open."""
        before, after = self.config.model_dump(), config.model_dump()
        left_open = {key: before[key] for key in before if before[key] != after[key]}
        return replace(self, config=config, left_open=left_open | self.left_open)

    def stages(
        self, num_steps: int, *, first_step: int = 0, has_all_layers: bool = False
    ) -> list[Stage]:
        """Return the steps from `first_step` on by the layers that they train; see `grow`."""
        growth_step = self.config.growth_step(num_steps)
        if self.config.grow is None or has_all_layers or growth_step <= first_step:
            return [Stage(self.model, range(first_step, num_steps))]
        small = self.model.with_layers(self.config.grow.from_layers)
        return [
            Stage(small, range(first_step, growth_step)),
            Stage(self.model, range(growth_step, num_steps)),
        ]

    def train_settings(self) -> dict[str, Any]:
        """Return all settings as JSON values for records; open keys have their `train.json` value.

        So records of runs on different devices with the same files are equal.
        """
        return self.config.model_dump(mode="json") | self.left_open

    def compared_with(self, reference: str | None) -> Self:
        """Return the run with the command line's reference, if any. Raises: UserError."""
        reference = reference or self.config.reference
        if self.config.stop_if_behind and not reference:
            raise UserError(
                f"{self.train_path}: stop_if_behind needs a curve to compare with; set reference,"
                " or pass --reference"
            )
        return replace(self, config=self.config.model_copy(update={"reference": reference}))

    def priced(self, usd_per_hour: float | None) -> Self:
        """Return the run with the command line's price, if any. Raises: UserError: it needs one."""
        price = usd_per_hour or self.config.usd_per_hour
        if self.config.max_cost_usd and not price:
            raise UserError(
                f"{self.train_path}: max_cost_usd needs the machine's price; set"
                " usd_per_hour, or pass --usd-per-hour"
            )
        return replace(self, config=self.config.model_copy(update={"usd_per_hour": price}))


class NamedRun(NamedTuple):
    """A run that a person names, and a checkpoint of it: `latest`, `best` or its name."""

    name: str
    checkpoint: str = ""


def plain_name(runs_dir: Path, text: str) -> str:
    """Return the name of a run that is given as tab completion writes it, such as `runs/demo/`."""
    text = text.replace("/@", "@")  # a checkpoint after that: runs/demo/@best
    path = Path(text)
    if "/" in text and path.parent.resolve() == runs_dir.resolve():
        return path.name
    return text if path.is_dir() else text.rstrip("/")


def find_run(runs_dir: Path, text: str) -> NamedRun | None:
    """Return the run that a name, its directory, or RUN@CHECKPOINT means; None if there is none.

    A shipped run without a copy is one too. Raises: UserError: nothing stands after the @.
    """
    name, at, checkpoint = plain_name(runs_dir, text).partition("@")
    if at and not checkpoint:
        raise UserError(f"{text}: wanted a checkpoint after @: latest, best or its name")
    places = (runs_dir / name, SHIPPED_RUNS / name)
    is_one = RUN_NAME.fullmatch(name) and any(place.is_dir() for place in places)
    return NamedRun(name, checkpoint) if is_one else None


def run_name(runs_dir: Path, text: str) -> str:
    """Return the name of the run that a text means. Raises: UserError: it means none."""
    found = find_run(runs_dir, text)
    if found is None:
        raise no_such_run(runs_dir, text)
    if found.checkpoint:
        raise UserError(f"{text}: is a checkpoint; name the run alone: {found.name}")
    return found.name


def no_such_run(runs_dir: Path, text: str) -> UserError:
    """Return the error of a text that means no run."""
    path = Path(text.partition("@")[0])
    if path.name and is_run_dir(path):
        return UserError(f"{text}: is a run of another directory; add --runs-dir {path.parent}")
    name = plain_name(runs_dir, text).partition("@")[0]
    if not RUN_NAME.fullmatch(name):
        also = "" if os.path.exists(text) else ", and no such directory"
        return UserError(
            f"run {text[:60]!r} is not a plain name{also}; wanted a directory inside"
            f" {runs_dir}, of letters, digits, '.', '_' and '-', at most 128"
        )
    names, shipped = (
        sorted(path.parent.name for path in place.glob("*/train.json"))
        for place in (runs_dir, SHIPPED_RUNS)
    )
    return UserError(
        f"{runs_dir / name}: no such run{did_you_mean(name, [*names, *shipped])};"
        f" {runs_dir} has: {', '.join(names) or 'no runs'}"
    )


def is_run_dir(path: Path) -> bool:
    """Return whether a directory is one of a run, and not one of weights with configs beside."""
    return (path / "train.json").is_file() and not (path / "model.safetensors").exists()


def load_run(runs_dir: Path, name: str) -> Run:
    """Read and check a run's two config files; a shipped run without a copy is read in place.

    Raises: UserError: the name is not one plain directory name, the run does not exist or was
        trained in another directory, or one of its files is missing, unreadable or wrong.
    """
    name = run_name(runs_dir, name)
    run_dir = runs_dir / name
    settings_dir = run_dir if run_dir.exists() else SHIPPED_RUNS / name
    if runs_dir == RUNS and not runs_dir.exists() and has_checkpoints(settings_dir):
        raise UserError(  # else it would start over, and nobody would notice
            f"{name}: its checkpoints are in {settings_dir}, and there is no {RUNS}/ here:"
            f" cd {SHIPPED_RUNS.parent}, or mkdir {RUNS} to start it over"
        )
    model, config = with_defaults(
        load_config(settings_dir / "model.json", ModelConfig),
        load_config(settings_dir / "train.json", TrainConfig),
    )
    check_against_model(settings_dir / "train.json", model, config)
    return Run(name, run_dir, model, config)


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a run was trained in a directory, also if a kill left a part of one only."""
    return any((run_dir / "checkpoints").glob("*-iteration-*"))


def check_against_model(where: Path | str, model: ModelConfig, config: TrainConfig) -> None:
    """Check that `grow` and `sampled_softmax` begin with less than the model has.

    Raises: UserError: one of them does not.
    """
    if config.grow is not None and config.grow.from_layers >= model.n_layers:
        raise UserError(
            f"{where}: grow has from_layers {config.grow.from_layers}, and model.json has"
            f" n_layers {model.n_layers}; make from_layers smaller, or drop grow"
        )
    if config.sampled_softmax is not None and config.sampled_softmax >= model.vocab_size:
        raise UserError(
            f"{where}: sampled_softmax is {config.sampled_softmax}, and model.json has vocab_size"
            f" {model.vocab_size}; make sampled_softmax smaller, or drop it"
        )


def setting_warnings(run: Run) -> list[str]:
    """Return what is allowed in a run's files, but hardly what was meant."""
    model, config, model_path = run.model, run.config, run.run_dir / "model.json"
    is_constant = config.resolved_schedule == "constant"
    without_effect = (
        ("momentum", config.optimizer != "muon", "it is a key of optimizer muon"),
        ("decay_period_percent", is_constant, "schedule is constant"),
        ("final_learning_rate_fraction", is_constant, "schedule is constant"),
        (
            "head_learning_rate",
            model.tie_weights,
            "tied weights have embedding_learning_rate",
        ),
        (
            "decay_norms_and_biases",
            not config.weight_decay or config.optimizer == "muon",
            "muon decays the matrices alone" if config.weight_decay else "weight_decay is 0",
        ),
        ("start_val_token", not config.validates, "there is no validation"),
    )
    warnings = [
        f"{run.train_path}: {key} has no effect: {reason}; drop it"
        for key, applies, reason in without_effect
        if applies and key in config.model_fields_set and getattr(config, key)
    ]
    if config.init_from is not None and "init" in model.model_fields_set:
        warnings.append(f"{model_path}: init has no effect: init_from is set; drop it")
    if config.grow is not None and config.stop_if_behind is not None:
        warnings.append(
            f"{run.train_path}: stop_if_behind may end the run before it grows: with few layers it"
            " is behind a reference that had all; unless that grew too, drop stop_if_behind or grow"
        )
    if model.tie_weights and model.init == "torch" and config.init_from is None:
        warnings.append(
            f'{model_path}: with tie_weights and init "torch" the loss begins many times'
            f" as high as with other weights, where it is ln {model.vocab_size} ="
            f' {math.log(model.vocab_size):.1f}; set init "gpt2"'
        )
    if OLD_NAME in found_object(run.train_path):
        warnings.append(
            f"{run.train_path}: {OLD_NAME} is the old name of microbatch_size; rename the key"
        )
    return warnings


def make_run_dir(run: Run) -> None:
    """Copy one of the project's runs into the runs directory, if it is not there; say so.

    Raises: UserError: the directory cannot be written.
    """
    if run.run_dir.exists():
        return
    source_dir = SHIPPED_RUNS / run.name
    partial_dir = run.run_dir.with_name(f".{run.name}.{os.getpid()}")
    try:
        partial_dir.mkdir(parents=True)
        for file in ("model.json", "train.json"):
            shutil.copyfile(source_dir / file, partial_dir / file)
        partial_dir.rename(run.run_dir)  # so that no other process finds half of it
    except OSError as error:
        shutil.rmtree(partial_dir, ignore_errors=True)
        if not run.run_dir.exists():  # another process may have made it
            raise cannot_be_written(run.run_dir, error) from None
        return
    copied = f"{run.name}: copied from {source_dir} to {run.run_dir.absolute()}"
    if has_checkpoints(source_dir):
        print_error(f"warning: {copied}, without its checkpoints: it starts over here")
    else:
        print_line(copied)


def with_defaults(model: ModelConfig, config: TrainConfig) -> tuple[ModelConfig, TrainConfig]:
    """Set the keys of `MUON_DEFAULTS` that are not set, or null; they still count as not set.

    The rates are those of `runs/gpt2-small-muon`. `MUON_DEFAULTS` holds them for a width of 128;
    all but the matrices' rate are divided by sqrt(width / 128). If `learning_rate` is set, it is
    the rate of every group without a rate of its own, except the matrices.
    """
    if config.optimizer != "muon":
        return model, config
    missing = {
        key: value
        for key, value in MUON_DEFAULTS.items()
        if key not in config.model_fields_set or getattr(config, key) is None
    }
    if config.schedule_learning_rate:  # it asks for a cosine, which `schedule` would override
        missing.pop("schedule", None)
    for key in WIDTH_DEPENDENT & missing.keys():
        if "learning_rate" in config.model_fields_set:
            del missing[key]
        else:
            missing[key] = float(f"{missing[key] * (128 / model.emb_dim) ** 0.5:.3g}")
    if config.init_from is None and "init" not in model.model_fields_set:
        model = _filled(model, {"init": "zero_projections"})
    return model, _filled(config, missing)


def _filled(config: Config, missing: dict[str, Any]) -> Config:
    config = config.model_copy(update=missing)
    config.model_fields_set.difference_update(missing)  # `model_copy` has added these keys
    return config


def load_config(path: Path, config_type: type[Config]) -> Config:
    """Read one of the two files into its config. Raises: UserError, naming file, key and value."""
    values = read_json_object(path)
    if OLD_NAME in values and config_type is TrainConfig and "microbatch_size" not in values:
        values["microbatch_size"] = values.pop(OLD_NAME)
    for key in values:
        if key in NAMES_ELSEWHERE:
            raise UserError(f'{path}: unknown key "{key}"; {NAMES_ELSEWHERE[key]}')
        if key not in config_type.model_fields:
            raise UserError(f"{path}: {unknown_key(key, config_type.model_fields)}")
    try:
        return config_type.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from None
