"""Choose the models of `lab evaluate` and the tokens, load each model, measure and record it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from basics.checkpoint_files import named_as_checkpoints, of_the_original
from basics.errors import UserError, one_line, print_error
from checkpointing import find_checkpoint
from lab.evaluate.losses import Slice, evaluate
from lab.evaluate.tasks import Tasks, score
from lab.plan.memory import size_name
from lab.runs import EVALUATIONS, Record, append_evaluation
from preparation.ensure_dataset import provide_dataset
from run_config import load_run
from settings.data import token_file_name
from tokens.token_file import TokenFile
from trainer.model_names import find_model
from trainer.models import load_model, say_step

DEFAULT_START_TOKEN = 50_000_000  # the slice of the original system's published results
DEFAULT_NUM_TOKENS = 19_660_800


class Chosen(NamedTuple):
    """A target by its name, and of a run one of its checkpoints: `latest`, `best` or its name."""

    name: str
    dataset: str | None  # the one that is asked for, or that of the run
    checkpoint: str = ""
    is_optional: bool = False  # it is one of all, so that it may be missing or damaged


def measure_all(
    models: list[Chosen],
    slices: dict[str, Slice],
    tasks: Tasks | None,
    runs_dir: Path,
    microbatch_size: int,
) -> Iterator[Record]:
    """Measure every model and yield a record of its loss, or of each task; keep the records.

    `slices` are by the model's name; there are none if tasks are scored instead. Raises: UserError:
    a model, tokens or a task cannot be used; earlier records are good.
    """
    done: list[Record] = []
    for model in models:
        try:
            target = load_model(model.name, runs_dir=runs_dir, checkpoint_name=model.checkpoint)
        except UserError as error:
            if not model.is_optional:
                raise
            print_error(f"warning: left out: {one_line(str(error))}")
            continue
        about: Record = {"target": target.name, "checkpoint": None, "trained_tokens": None}
        if checkpoint := target.checkpoint:
            about["checkpoint"] = checkpoint.name
            about["trained_tokens"] = checkpoint.tokens
            about["global_step"] = checkpoint.meta.global_step
        if about not in done:
            done.append(about)
            say_step(target, names_newest=not model.is_optional)
            if tasks is None:
                records = iter([evaluate(target, slices[model.name], microbatch_size)])
            else:
                records = score(target, tasks, microbatch_size)
            for record in records:
                if target.run:
                    append_evaluation(target.run.evaluations_path, about | record)
                else:
                    of_model = about | {
                        "target": target.full_name,
                        "model": size_name(target.model.config),
                    }
                    append_evaluation(runs_dir / EVALUATIONS, of_model | record)
                yield about | record
        del target  # before the next one is loaded
    if not done:
        raise UserError("no checkpoint could be read")


def choose_models(
    targets: tuple[str, ...], checkpoints: str, dataset: str | None, runs_dir: Path
) -> list[Chosen]:
    """Return the models asked for. Raises: UserError: one does not exist, or is damaged."""
    found: list[Chosen] = []
    for text in targets:
        if named := find_model(text, runs_dir):
            run = load_run(runs_dir, named.name)
            wanted = named.checkpoint or checkpoints
            is_all = wanted == "all"
            if is_all:
                places = run.checkpoints_dir
                paths = named_as_checkpoints(places) or of_the_original(places)
                names = [path.name for path in paths]
            else:
                # An error names a checkpoint that is missing; of "best" there may be none yet.
                names = [
                    each for each in wanted.split(",") if find_checkpoint(run.checkpoints_dir, each)
                ]
            if not names:
                raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; train the run first")
            dataset_of_run = dataset or run.config.dataset
            found += [Chosen(run.name, dataset_of_run, each, is_all) for each in names]
        else:
            found.append(Chosen(text, dataset))
    return found


def open_slices(
    models: list[Chosen],
    datasets_dir: Path,
    split: str,
    start_token: int | None,
    num_tokens: int | None,
) -> dict[str, Slice]:
    """Open the datasets and choose the tokens of each model, by its name.

    A model that is no run is measured on the dataset of the first run. Runs whose datasets are the
    same text in other tokens are measured on all of it, each on its own dataset. What is missing is
    downloaded or prepared. Raises: UserError.
    """
    named = [model.dataset for model in models if model.dataset]
    if not named:
        raise UserError(
            "--dataset: name the dataset to evaluate all targets on (no target is a run)"
        )
    datasets = {model.name: model.dataset or named[0] for model in models}
    slices = {}
    for dataset in dict.fromkeys(datasets.values()):
        provide_dataset(datasets_dir / dataset, dataset, [split])
        file = TokenFile(datasets_dir / dataset / token_file_name(split))
        slices[dataset] = choose_slice(file, dataset, start_token, num_tokens)
    if len(slices) > 1:
        slices = {
            dataset: Slice(dataset, part.file, 0, part.file.num_tokens - 1)
            for dataset, part in slices.items()
        }
        texts = {part.text_identity() for part in slices.values()}
        tokenizers = {part.file.metadata.get("tokenizer") for part in slices.values()}
        if None in texts or len(texts) > 1 or len(tokenizers) < len(slices):
            raise UserError(
                "--dataset: name the dataset to evaluate all targets on (the targets"
                f" were trained on different ones: {' and '.join(slices)})"
            )
        if start_token is not None or num_tokens is not None:
            raise UserError(
                "--start-token and --tokens would choose different text in the datasets"
                " of these runs; leave them out, or name one with --dataset"
            )
    return {name: slices[dataset] for name, dataset in datasets.items()}


def choose_slice(
    file: TokenFile, dataset: str, start_token: int | None = None, num_tokens: int | None = None
) -> Slice:
    """Choose the tokens that all models are evaluated on. Raises: UserError: they are too few."""
    if start_token is None:
        start_token = DEFAULT_START_TOKEN if file.num_tokens > DEFAULT_START_TOKEN else 0
    available = file.num_tokens - start_token - 1  # the last token is only a target
    wanted = min(DEFAULT_NUM_TOKENS, available) if num_tokens is None else num_tokens
    if wanted > available or wanted < 1:
        raise UserError(
            f"{file.path}: has {max(0, available):,} tokens to predict after token"
            f" {start_token:,}, wanted {max(1, wanted):,}; change --start-token or"
            " --tokens"
        )
    return Slice(dataset, file, start_token, wanted)
