"""A run's two JSON files as validated, immutable configs."""

import math
import os
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, ValidationError, model_validator

from basics.cli import MAX_USD_PER_HOUR, RUNS
from basics.errors import UserError, cannot_be_written, print_error, print_line
from basics.json_files import (
    Config,
    FrozenConfig,
    describe,
    found_object,
    read_json_object,
    unknown_key,
)
from basics.text import did_you_mean

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Group = Literal["matrix", "embedding", "head", "vector"]  # of parameters
Schedule = Literal["constant", "cosine", "linear", "wsd"]
GROUPS: tuple[Group, ...] = get_args(Group)
STEP = "step"  # in an optimizer's state: the number of steps, of each parameter

MAX_VOCAB_SIZE = 2**16  # token files hold uint16
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHIPPED_RUNS = Path(__file__).parent / RUNS
DATASET_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"
SET_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}"  # of a validation set
MAX_SETS = 16
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
MUON_DEFAULTS: dict[str, Any] = {
    "matrix_learning_rate": 0.02,
    "learning_rate": 0.02,
    "embedding_learning_rate": 0.15,
    "vector_learning_rate": 0.01,
    "weight_decay": 0.0,
    "beta1": 0.8,
    "beta2": 0.95,
    "schedule": "linear",
}
WIDTH_DEPENDENT = {"learning_rate", "embedding_learning_rate", "vector_learning_rate"}

SPLITS = ("train", "validation")  # of a dataset, each in a token file
TOKENS_SUFFIX = ".safetensors"  # of token files
Count = Annotated[int, Field(ge=1, le=2**40)]
GroupRate = Annotated[float | None, Field(gt=0)]  # None stands for `learning_rate`
# A JSON list becomes a tuple: the config is frozen.
Prompts = Annotated[
    tuple[Annotated[str, Field(max_length=2**14)], ...], Field(strict=False, max_length=64)
]


class ModelConfig(FrozenConfig):
    """`model.json`: the shape of the network."""

    vocab_size: int = Field(ge=2, le=MAX_VOCAB_SIZE)
    context_length: int = Field(ge=1, le=2**20)
    emb_dim: int = Field(ge=1, le=2**16)
    n_heads: int = Field(ge=1, le=2**12)
    n_layers: int = Field(ge=1, le=2**10)
    drop_rate: float = Field(ge=0, lt=1)
    qkv_bias: bool
    tie_weights: bool = False
    init: Literal["gpt2", "torch", "zero_projections"] = "gpt2"

    @model_validator(mode="after")
    def _heads_divide_embedding(self) -> Self:
        if self.emb_dim % self.n_heads:
            raise ValueError(f"emb_dim {self.emb_dim} is not divisible by n_heads {self.n_heads}")
        return self

    def with_layers(self, n_layers: int) -> Self:
        """Return the shape of so many of the layers, with embeddings and head."""
        return self.model_copy(update={"n_layers": n_layers})

    @property
    def num_matrix_parameters(self) -> int:
        """The parameters in the layers' matrices: QKV, attention output, the two of the MLP."""
        return self.n_layers * (3 + 1 + 4 + 4) * self.emb_dim**2

    @property
    def num_parameters(self) -> int:
        """The parameters of a `GPTModel` of this shape."""
        C = self.emb_dim
        biases = C + 4 * C + C + (3 * C if self.qkv_bias else 0)  # attention output, MLP, QKV
        norms = 2 * 2 * C
        embeddings = (self.vocab_size + self.context_length) * C
        head = 0 if self.tie_weights else self.vocab_size * C
        layers = self.num_matrix_parameters + self.n_layers * (biases + norms)
        return layers + embeddings + 2 * C + head

    @property
    def flops_per_token(self) -> int:
        """The training FLOPs per token, forward and backward: 6 N + 12 L T C.

        N counts the parameters in matrix products: embeddings are look-ups and do not count, the
        vocabulary is unpadded, and attention counts as if it were not causal.

        Source: Chowdhery et al. 2022, "PaLM", appendix B.
        """
        matmul_parameters = self.num_matrix_parameters + self.vocab_size * self.emb_dim
        attention = 12 * self.n_layers * self.context_length * self.emb_dim
        return 6 * matmul_parameters + attention


class StopIfBehind(FrozenConfig):
    """How far a run may be above its reference: `std` or `loss`, in `reports` reports in a row."""

    std: float | None = Field(default=None, gt=0, le=1e6)  # of the reference's noise
    loss: float | None = Field(default=None, gt=0, le=1e6)  # nats per token
    reports: int = Field(default=3, ge=1, le=2**31)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.std is None) == (self.loss is None):
            raise ValueError("stop_if_behind wants either std or loss; set one of them")
        return self


class Grow(FrozenConfig):
    """The first part of a run trains the first `from_layers` layers alone: a share of its steps."""

    from_layers: int = Field(default=1, ge=1, le=2**10)
    at: float = Field(gt=0, lt=1)  # the share


class TrainConfig(FrozenConfig):
    """`train.json`: data, batch, optimizer and intervals of a run."""

    dataset: str = Field(pattern=DATASET_NAME)
    microbatch_size: Count  # sequences in one forward pass of one process
    gradient_accumulation_steps: Count = 1
    global_batch_size: int | None = Field(default=None, ge=1, le=2**31)  # sequences
    min_train_tokens: int = Field(default=-1, le=2**50)  # -1 for all
    repeat_data: bool = False  # from the start, where min_train_tokens is more than there are
    start_train_token: int = Field(default=0, ge=0, le=2**50)
    start_val_token: int = Field(default=0, ge=0, le=2**50)
    validation_interval: Count | None = None  # global steps
    validation_batches: Count | None = None  # microbatches
    validation_sequences: Count | None = None
    validation: dict[str, str] | None = None  # sets by name: a token file, or a dataset
    validate_on: Literal["rank0", "all"] = "rank0"
    validate_at_start: bool = False  # also before the first step
    checkpoint_interval: Count | None = None  # global steps
    keep_checkpoints: Count | None = None  # None for all
    sample_prompts: Prompts | None = None
    diagnostics_interval: Count | None = None  # global steps
    grow: Grow | None = None
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    init_from: str | None = Field(default=None, min_length=1, max_length=4096)
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=4e-4, gt=0)
    matrix_learning_rate: GroupRate = None
    embedding_learning_rate: GroupRate = None
    head_learning_rate: GroupRate = None
    vector_learning_rate: GroupRate = None
    weight_decay: float = Field(default=0.1, ge=0, le=1e3)
    decay_norms_and_biases: bool = False
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, ge=1e-30)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    clipping_max_norm: float | None = Field(default=None, gt=0)
    schedule: Schedule | None = None
    schedule_learning_rate: bool = False
    warmup_period_percent: float = Field(default=0, ge=0, lt=100)  # of the global steps
    decay_period_percent: float | None = Field(default=None, gt=0, le=100)  # of the global steps
    final_learning_rate_fraction: float | None = Field(default=None, ge=0, le=1)
    use_amp: bool = True
    precision: Precision | None = None
    residual_dtype: Literal["fp32", "bf16"] | None = None
    all_reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # of gradients between the processes
    compile: bool | None = None
    attention: Literal["auto", "flash", "cudnn", "math"] = "auto"
    head_chunks: int | None = Field(default=None, ge=1, le=2**16)
    activation_checkpointing: bool = False
    deterministic: bool = False
    reference: str | None = Field(default=None, min_length=1, max_length=64)
    stop_if_behind: StopIfBehind | None = None
    random_seed: int = Field(default=42, ge=0, lt=2**63)
    usd_per_hour: float | None = Field(default=None, gt=0, le=MAX_USD_PER_HOUR)  # of all machines
    max_cost_usd: float | None = Field(default=None, gt=0, le=1e9)
    max_hours: float | None = Field(default=None, gt=0, le=1e6)
    collective_timeout_seconds: float = Field(default=600, ge=1, le=10**6)
    hang_timeout_seconds: float = Field(default=600, ge=1, le=10**6)

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        of_validation = self.validation_batches or self.validation_sequences
        for is_wrong, message in (
            (
                self.min_train_tokens != -1 and self.min_train_tokens < 1,
                f"min_train_tokens is {self.min_train_tokens}; wanted 1 or more or -1",
            ),
            (
                self.repeat_data and self.min_train_tokens == -1,
                "repeat_data needs min_train_tokens, the tokens to train on: set it",
            ),
            (
                self.global_batch_size and "gradient_accumulation_steps" in self.model_fields_set,
                "gradient_accumulation_steps follows from global_batch_size: drop it",
            ),
            (
                self.validation_batches and self.validation_sequences,
                "validation_batches and validation_sequences exclude each other: drop one",
            ),
            (
                self.validates != bool(of_validation),
                "validation_interval goes together with"
                " validation_batches or validation_sequences: set both",
            ),
            (
                self.validation is not None and not self.validates,
                "validation names the sets to validate on: set validation_interval too, or drop it",
            ),
            (
                self.validate_at_start and not self.validates,
                "validate_at_start needs a validation: set validation_interval too, or drop it",
            ),
            (
                self.validation is not None and not 1 <= len(self.validation) <= MAX_SETS,
                f"validation has {len(self.validation or ())} sets; wanted 1 to {MAX_SETS}",
            ),
            (
                not self.validates and self.checkpoint_interval is None,
                "set validation_interval with"
                " validation_batches, or checkpoint_interval, so that the run is saved",
            ),
            (
                self.schedule_learning_rate and self.schedule not in (None, "cosine"),
                f'schedule is "{self.schedule}" but schedule_learning_rate is true, which means'
                " cosine: drop one",
            ),
            (
                self.warmup_period_percent + (self.decay_period_percent or 0) > 100,
                "warmup_period_percent and decay_period_percent are more than 100 together: lower"
                " one",
            ),
            (
                not self.use_amp and self.precision in ("bf16", "fp16"),
                f'use_amp is false but precision is "{self.precision}": drop one',
            ),
            (
                self.grow is not None and self.init_from is not None,
                "grow trains from initial weights, and init_from has weights of all layers: drop"
                " one",
            ),
            (
                self.deterministic and self.attention == "cudnn",
                'attention "cudnn" is not deterministic: drop it, or deterministic',
            ),
            (
                self.sample_prompts and not self.validates,
                "sample_prompts are continued at each"
                " validation, but there is none: set validation_interval, or drop them",
            ),
        ):
            if is_wrong:
                raise ValueError(message)
        for name, place in (self.validation or {}).items():
            if not re.fullmatch(SET_NAME, name):
                raise ValueError(
                    f"validation has a set called {ascii(name)[:60]}; wanted at most 32 letters,"
                    " digits, '.', '_' and '-'"
                )
            if not _is_token_file(place) and not re.fullmatch(DATASET_NAME, place):
                raise ValueError(
                    f"validation set {name} is {ascii(place)[:60]}; wanted a dataset's name, or a"
                    f" token file, which ends in {TOKENS_SUFFIX}"
                )
        return self

    def validation_paths(self, datasets_dir: Path) -> dict[str, Path]:
        """Return the token file of each set that `validation` names, in their order."""
        paths = {}
        for name, place in (self.validation or {}).items():
            path = datasets_dir / place
            paths[name] = path if _is_token_file(place) else path / token_file_name("validation")
        return paths

    @property
    def validation_datasets(self) -> list[str]:
        """The datasets whose validation files `validation` names."""
        return [place for place in (self.validation or {}).values() if not _is_token_file(place)]

    @property
    def deciding_set(self) -> str:
        """The name of the validation set that decides `best`, the first; "" if it has no name."""
        return next(iter(self.validation or {}), "")

    @property
    def num_validation_sets(self) -> int:
        """The number of sets in one validation; 0 without validation."""
        return len(self.validation or (self.dataset,)) if self.validates else 0

    def optimizer_state(self, group: Group) -> tuple[str, ...]:
        """Return the names of the tensors that the optimizer keeps of each parameter of a group.

        All are float32. `STEP` is a number, (); the others have the parameter's shape.
        """
        if self.optimizer == "muon" and group == "matrix":
            return ("momentum",)
        return (STEP, "exp_avg", "exp_avg_sq")

    def optimizer_state_bytes(self, model: ModelConfig) -> int:
        """Return the bytes of a model's optimizer state, without the scalars of `STEP`."""
        of_matrices, of_others = (
            len([name for name in self.optimizer_state(group) if name != STEP])
            for group in ("matrix", "vector")
        )
        others = model.num_parameters - model.num_matrix_parameters
        return 4 * (of_matrices * model.num_matrix_parameters + of_others * others)

    @property
    def validates(self) -> bool:
        """Whether the run validates, so that `best` means the lowest validation loss."""
        return self.validation_interval is not None

    @property
    def resolved_schedule(self) -> Schedule:
        """The schedule; `schedule_learning_rate` is the original's name of the cosine."""
        return self.schedule or ("cosine" if self.schedule_learning_rate else "constant")

    @property
    def num_validation_sequences(self) -> int:
        """Sequences of each set in one validation, of all microbatches; 0 without validation."""
        return self.validation_sequences or (self.validation_batches or 0) * self.microbatch_size

    def growth_step(self, num_steps: int) -> int:
        """Return the first global step with all layers in a run of so many; 0 without `grow`."""
        if self.grow is None:
            return 0
        # At least one step has few layers, and at least the last one has all.
        return min(max(1, round(self.grow.at * num_steps)), num_steps - 1)

    def num_validations(self, steps: range, *, num_steps: int) -> int:
        """Return how many of these steps of a run are followed by a validation, as the last is."""
        if not self.validates:
            return 0
        return _num_due(steps, [self.validation_interval], last=[num_steps - 1])

    def num_saves(self, steps: range, *, num_steps: int) -> int:
        """Return how many of these steps of a run are followed by a checkpoint.

        These are the steps with a validation, the last one, and the last one before a growth:
        compiling all layers may fail, or be killed.
        """
        return _num_due(
            steps,
            [self.validation_interval, self.checkpoint_interval],
            last=[self.growth_step(num_steps) - 1, num_steps - 1],
        )

    def is_validation_due(self, global_step: int, *, num_steps: int) -> bool:
        """Return whether a run of so many steps is validated after this one."""
        return self.num_validations(range(global_step, global_step + 1), num_steps=num_steps) > 0

    def is_save_due(self, global_step: int, *, num_steps: int) -> bool:
        """Return whether a run of so many steps saves a checkpoint after this one."""
        return self.num_saves(range(global_step, global_step + 1), num_steps=num_steps) > 0


def token_file_name(split: str) -> str:
    """Return the name of the token file of a split in the directory of a dataset."""
    return split + TOKENS_SUFFIX


def _is_token_file(place: str) -> bool:
    """Return whether a value of `validation` is a file; else it is the name of a dataset."""
    return place.endswith(TOKENS_SUFFIX)


def _num_due(steps: range, intervals: list[int | None], *, last: list[int]) -> int:
    """Return how many of these steps are the last of an interval, of one or two, or in `last`."""
    used = [interval for interval in intervals if interval is not None]

    def num_multiples(interval: int) -> int:
        return steps.stop // interval - steps.start // interval

    number = sum(map(num_multiples, used))
    if len(used) == 2:
        number -= num_multiples(math.lcm(*used))  # these were counted twice
    others = {step for step in last if all((step + 1) % interval for interval in used)}
    return number + len([step for step in others if step in steps])


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
    check_growth(settings_dir / "train.json", model, config)
    return Run(name, run_dir, model, config)


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a run was trained in a directory, also if a kill left a part of one only."""
    return any((run_dir / "checkpoints").glob("*-iteration-*"))


def check_growth(where: Path | str, model: ModelConfig, config: TrainConfig) -> None:
    """Check that a run that grows begins with fewer layers than it has. Raises: UserError."""
    if config.grow is not None and config.grow.from_layers >= model.n_layers:
        raise UserError(
            f"{where}: grow has from_layers {config.grow.from_layers}, and model.json has"
            f" n_layers {model.n_layers}; make from_layers smaller, or drop grow"
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
        ("decay_norms_and_biases", not config.weight_decay, "weight_decay is 0"),
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
