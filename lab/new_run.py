"""`lab new`: a run directory for a dataset, made from the settings of a run that there is."""

import math
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from basics.cli import ABOVE_0, DATASETS_DIR, RUNS_DIR
from basics.entry_points import say_torch_loads
from basics.errors import UserError, visible, writing_to
from basics.files import write_atomically
from basics.json_files import describe, read_json_object, to_json
from basics.text import counted, did_you_mean, gib
from run_config import (
    OLD_NAME,
    RUN_NAME,
    SHIPPED_RUNS,
    ModelConfig,
    Run,
    TrainConfig,
    check_against_model,
    load_config,
    plain_name,
    with_defaults,
)
from settings.data import token_file_name
from tokens.batch_plan import BatchPlan

# More passes over the same text than this lower the loss hardly any further. Source: Muennighoff
# et al. 2023, "Scaling Data-Constrained Language Models".
MAX_PASSES = 4
VALIDATIONS = 10  # in a run
FEW_STEPS = 100
MOST_OF_ALL = 0.1  # share of the layers in all parameters, below which the vocabulary is too large
BLOCK_TOKENS = 2**24  # read at a time
SMALLEST_CONTEXT = 8
PROMPT_TOKENS, PROMPT_WORDS = 200, 3
OF_ANOTHER_DATASET = (  # keys of train.json that are not taken over
    "start_train_token",
    "start_val_token",
    "validation",
    "sample_prompts",
)


@click.command()
@click.argument("run")
@click.option(
    "--dataset",
    required=True,
    metavar="NAME",
    help="A directory in --datasets-dir, or a dataset of token files on the hub.",
)
@click.option(
    "--like",
    metavar="RUN",
    help="The run whose settings are taken.  [default: demo; with a size gpt2-small-1gpu]",
)
@click.option(
    "--params",
    metavar="NUMBER",
    help="The size, such as 124M or 1.5B: width, layers, batch, tokens and rates follow.",
)
@click.option(
    "--usd",
    type=ABOVE_0,
    metavar="USD",
    help="The size: the largest whose run costs at most so much on --machine.",
)
@click.option("--machine", metavar="COUNTxGPU@USD_PER_HOUR", help="Such as 1xRTX-4090@0.45.")
@RUNS_DIR
@DATASETS_DIR
def command(
    run: str,
    dataset: str,
    like: str | None,
    params: str | None,
    usd: float | None,
    machine: str | None,
    runs_dir: Path,
    datasets_dir: Path,
) -> None:
    """Make the run directory RUN for a dataset: model.json and train.json.

    They are those of another run, with the vocabulary, the length and the validation that fit the
    dataset, and with the size that is asked for. What is changed is printed with the reason.
    """
    from lab.size_rules import BASE, affordable_width, apply_rules, machine_of_size, nearest_width
    from preparation.ensure_dataset import provide_dataset
    from tokens.token_file import TokenFile

    # Before the dataset, which may be downloaded: all that can be refused without it.
    box = machine_of_size(params, usd, machine)
    dataset = dataset.rstrip("/").removeprefix(f"{datasets_dir}/")  # as prepare_dataset.py had it
    is_sized = params is not None or box is not None
    like = like or (BASE if is_sized else "demo")
    run, like = plain_name(runs_dir, run), plain_name(runs_dir, like)
    run_dir = runs_dir / run
    if not RUN_NAME.fullmatch(run):
        raise UserError(
            f"run {run[:60]!r} is not a plain name; wanted letters, digits, '.', '_'"
            " and '-', at most 128"
        )
    if run_dir.exists():
        raise UserError(f"{run_dir}: is there already; choose another name, or delete it yourself")
    model, train = read_settings(runs_dir, like)
    dataset_dir = datasets_dir / dataset
    provide_dataset(dataset_dir, dataset)
    say_torch_loads()
    from tokens.batches import open_run_data

    before: dict[str, Any] = model | train
    reasons: dict[str, str] = {}
    cost = ""
    if is_sized or train["dataset"] != dataset:  # else all fits, also the length
        files = {
            split: TokenFile(dataset_dir / token_file_name(split))
            for split in ("train", "validation")
        }
        reasons = fit_to_dataset(model, train, dataset, files)
        most_tokens = MAX_PASSES * (files["train"].num_tokens - train.get("start_train_token", 0))
        # The validation needs one sequence at least, so its file limits the context.
        num_validation = files["validation"].num_tokens - train.get("start_val_token", 0)
        longest = 2 ** int(math.log2(max(1, num_validation - 1)))
        if longest < SMALLEST_CONTEXT:
            path = files["validation"].path
            raise UserError(f"{path}: has only {num_validation:,} tokens; prepare more text")
        if num_validation <= model["context_length"]:
            model["context_length"] = longest
            reasons["context_length"] = f"the validation file has only {num_validation:,} tokens"

        def run_of(width: int) -> Run:
            settings = dict(model), dict(train)
            apply_rules(width, *settings, most_tokens, longest)
            fit_length(*settings, files)
            return made_run(run_dir, like, *settings)

        # The size is set before the length, which follows from its batch and its tokens.
        if is_sized:
            if box:
                width, train["microbatch_size"], cost = affordable_width(
                    usd, box, run_of, most_tokens
                )
            else:
                width = nearest_width(params, model, longest)
            reasons |= apply_rules(width, model, train, most_tokens, longest)
        reasons |= fit_length(model, train, files)

    made = made_run(run_dir, like, model, train)
    plan = open_run_data(made, dataset_dir, world_size=1).plan  # or an error: nothing is written
    with writing_to(run_dir):
        run_dir.mkdir(parents=True)
        for name, settings in (("model.json", model), ("train.json", train)):
            write_atomically(run_dir / name, to_json(settings, indent=4) + "\n")
    after = model | train
    changed = [
        f"  {key} {shown(after[key]) if key in after else 'dropped'}: {reason}"
        for key, reason in reasons.items()
        if before.get(key) != after.get(key)
    ]
    but_for = ", but for" if changed else ""
    lines = [f"{run_dir}: model.json and train.json are those of {like}{but_for}", *changed]
    lines += _about_plan(made, plan)
    if cost:
        lines.append(cost)
    lines.append(f"train it: uv run ddp_train.py {run}")
    click.echo(visible("\n".join(lines)))


def _about_plan(run: Run, plan: BatchPlan) -> list[str]:
    """Say how long a run trains, how it grows, and what memory it takes."""
    from lab.plan.estimate import default_precision
    from lab.plan.memory import Setting, peak_memory

    lines = []
    if plan.num_steps < FEW_STEPS:
        lines.append(
            f"this is only {counted(plan.num_steps, 'step')}: give it more text, or a smaller"
            " global_batch_size"
        )
    model = run.model
    matrices = 1 if model.tie_weights else 2  # embedding and head
    in_layers = model.num_parameters - matrices * model.vocab_size * model.emb_dim
    if in_layers < MOST_OF_ALL * model.num_parameters and plan.num_tokens < model.num_parameters:
        lines.append(
            f"{1 - in_layers / model.num_parameters:.0%} of the parameters are the vocabulary's,"
            " and the text is short for it: lab tokenizer makes a smaller one from your text"
        )
    first, *others = run.stages(plan.num_steps)
    if others:
        lines.append(
            f"the first {first.steps.stop:,} steps train {counted(first.model.n_layers, 'layer')},"
            f" the others {run.model.n_layers} (grow); drop grow to train all from the start"
        )
    setting = Setting(run.model, run.config, default_precision(run.config), 1)
    memory = peak_memory(setting, run.config.microbatch_size).total
    lines.append(
        f"plan: {run.model.num_parameters:,} parameters, {plan.num_steps:,} steps of"
        f" {plan.tokens_per_step:,} tokens, {gib(memory)} of tensors a process"
    )
    return lines


def made_run(run_dir: Path, like: str, model: dict[str, Any], train: dict[str, Any]) -> Run:
    """Return the run of settings that were made, checked as `load_run` does. Raises: UserError."""
    try:
        configs = ModelConfig.model_validate(model), TrainConfig.model_validate(train)
    except ValidationError as error:
        raise UserError(
            f"{like}: its settings do not fit ({describe(error)}); choose another --like"
        ) from None
    check_against_model(f"--like {like}", *configs)
    return Run(run_dir.name, run_dir, *with_defaults(*configs))


def read_settings(runs_dir: Path, like: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `model.json` and `train.json` of a run, as they stand there. Raises: UserError."""
    places = [place / like for place in (runs_dir, SHIPPED_RUNS)]
    found = next((place for place in places if (place / "train.json").is_file()), None)
    if found is None or not RUN_NAME.fullmatch(like):
        paths = [path for place in (runs_dir, SHIPPED_RUNS) for path in place.glob("*/train.json")]
        names = sorted({path.parent.name for path in paths})
        raise UserError(
            f"--like {like[:60]}: no such run{did_you_mean(like, names)}; there are:"
            f" {', '.join(names)}"
        )
    load_config(found / "model.json", ModelConfig)  # or an error
    load_config(found / "train.json", TrainConfig)
    model, train = read_json_object(found / "model.json"), read_json_object(found / "train.json")
    if OLD_NAME in train:
        train["microbatch_size"] = train.pop(OLD_NAME)
    return model, train


def shown(value: Any) -> str:
    """Format a setting: a number with commas, else JSON."""
    return to_json(value) if isinstance(value, bool | str | list | dict) else f"{value:,}"


def fit_to_dataset(
    model: dict[str, Any], train: dict[str, Any], dataset: str, files: dict[str, Any]
) -> dict[str, str]:
    """Set what depends on the dataset, but not on the size; return the reasons by key."""
    like = TrainConfig.model_validate(train)
    model["vocab_size"], why = vocabulary_of(files, files["train"].path.parent)
    reasons = {"vocab_size": why, "dataset": "set by --dataset"}
    if train.pop("validation_batches", None):  # a microbatch may have another size now
        train["validation_sequences"] = like.num_validation_sequences
        reasons["validation_batches"] = "validation_sequences takes its place"
    if like.dataset != dataset:
        train["dataset"] = dataset
        for key in OF_ANOTHER_DATASET:
            train.pop(key, None)
            reasons[key] = f"it belongs to {like.dataset}"
        if like.sample_prompts and (prompt := first_words(files["validation"])):
            train["sample_prompts"] = [prompt]
            reasons["sample_prompts"] = "the first words of the validation text"
    return reasons


def fit_length(
    model: dict[str, Any], train: dict[str, Any], files: dict[str, Any]
) -> dict[str, str]:
    """Set the tokens and the validation that fit the dataset; return the reasons by key."""
    config, context_length = TrainConfig.model_validate(train), model["context_length"]
    accumulation = config.microbatch_size * config.gradient_accumulation_steps
    step_tokens = (config.global_batch_size or accumulation) * context_length
    num_tokens = files["train"].num_tokens - config.start_train_token
    wanted = num_tokens if config.min_train_tokens == -1 else config.min_train_tokens
    num_steps = max(1, min(wanted, MAX_PASSES * num_tokens) // step_tokens)
    to_train = train["min_train_tokens"] = num_steps * step_tokens
    passes = to_train / num_tokens
    advice = "; more passes help little" if passes > MAX_PASSES - 1 else ""
    reasons = {
        "min_train_tokens": f"{passes:.3g} passes over the {num_tokens:,} training tokens{advice}",
        "repeat_data": f"the dataset has {num_tokens:,} training tokens",
    }
    train.pop("repeat_data", None)
    if to_train >= num_tokens:
        train["repeat_data"] = True
    if config.validates:
        available = (files["validation"].num_tokens - config.start_val_token - 1) // context_length
        train["validation_sequences"] = min(config.num_validation_sequences, available)
        train["validation_interval"] = math.ceil(num_steps / VALIDATIONS)
        reasons["validation_sequences"] = f"of the {available:,} that the validation file has"
        reasons["validation_interval"] = f"steps, {VALIDATIONS} times in the run"
    return reasons


def vocabulary_of(files: dict[str, Any], dataset_dir: Path) -> tuple[int, str]:
    """Return the vocabulary size that a dataset needs, and why. Raises: UserError."""
    from tokens.tokenizer import KNOWN_SIZES, file_beside, load_tokenizer

    name = files["train"].metadata.get("tokenizer")
    if name is None:
        largest = max(
            int(file.read(start, min(start + BLOCK_TOKENS, file.num_tokens)).max())
            for file in files.values()
            for start in range(0, file.num_tokens, BLOCK_TOKENS)
        )
        return largest + 1, "one more than the largest token id; the dataset names no tokenizer"
    size = KNOWN_SIZES.get(name) or load_tokenizer(name, file_beside(dataset_dir, name)).n_vocab
    return size, "the entries of the dataset's tokenizer"


def first_words(file: Any) -> str:
    """Return the first words of a token file; empty if they cannot be decoded."""
    from tokens.tokenizer import file_beside, load_tokenizer

    name = file.metadata.get("tokenizer")
    if name is None:
        return ""
    try:
        tokenizer = load_tokenizer(name, file_beside(file.path.parent, name))
    except UserError:  # GPT-2's may have to be downloaded
        return ""
    first = file.read(0, min(PROMPT_TOKENS, file.num_tokens))
    ids = [int(token) for token in first if token != tokenizer.eot_token]
    words = tokenizer.decode(ids).replace("\ufffd", "").split()
    return " ".join(words[:PROMPT_WORDS])[:PROMPT_TOKENS]
