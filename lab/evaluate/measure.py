"""Choose the models of `lab evaluate` and the tokens, load each model, measure and record it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from basics.checkpoint_files import directory_of, named_as_checkpoints
from basics.errors import UserError, one_line, print_error
from basics.files import check_inside
from checkpointing import find_checkpoint
from lab.evaluate.results import Result
from lab.evaluate.scoring import Slice, encode_questions, evaluate, score
from lab.evaluate.tasks import Quiz, read_quiz
from lab.runs import Record, append_evaluation
from preparation.ensure_dataset import provide_dataset
from run_config import DATASET_NAME, load_run
from tokens.token_file import TokenFile
from trainer.models import LoadedModel, check_name, is_run, load_model

DEFAULT_START_TOKEN = 50_000_000  # the slice of the original system's published results
DEFAULT_NUM_TOKENS = 19_660_800


@dataclass(frozen=True)
class Options:
    """The command line's options.

    Attributes:
        checkpoints: of runs: `all`, or names separated by commas.
        tasks: NAME or NAME=FILE each; without one, the loss is measured.
    """

    checkpoints: str
    tasks: tuple[str, ...]
    microbatch_size: int
    dataset: str | None
    split: str
    start_token: int | None
    num_tokens: int | None
    runs_dir: Path
    datasets_dir: Path


class Chosen(NamedTuple):
    """A target by its name, and of a run one of its checkpoints: `latest`, `best` or its name."""

    name: str
    checkpoint: str = ""
    is_optional: bool = False  # it is one of all, so that it may be missing or damaged


def measure_all(targets: tuple[str, ...], options: Options) -> Iterator[Result]:
    """Measure every model, which is freed before the next one is loaded.

    Raises:
        UserError: a target, the tokens or the questions cannot be used. Before the first result,
            nothing was measured; later the results so far are good.
    """
    models = choose_models(targets, options.checkpoints, options.runs_dir)
    names = list(dict.fromkeys(model.name for model in models))
    slices = {} if options.tasks else open_held_out(options, names)
    quizzes: list[Quiz] = []
    for text in options.tasks:
        name, _, source = text.partition("=")
        quiz = read_quiz(name, source)
        if quiz.name in [other.name for other in quizzes]:
            raise UserError(f"--task: {quiz.name} is there twice; give it once")
        quizzes.append(quiz)
    done: set[tuple[str, str | None]] = set()
    for model in models:
        try:
            target = load_model(model.name, runs_dir=options.runs_dir,
                                checkpoint_name=model.checkpoint)
        except UserError as error:
            if not model.is_optional:
                raise
            print_error(f"warning: left out: {one_line(str(error))}")
            continue
        run, checkpoint = target.run, target.checkpoint
        result = Result(target.name, checkpoint and checkpoint.name, run and run.run_dir,
                        checkpoint and checkpoint.meta.tokens, [])
        if (result.name, result.checkpoint) not in done:
            done.add((result.name, result.checkpoint))
            for record in _records(target, slices.get(model.name), quizzes,
                                   options.microbatch_size):
                result.records.append(record)
                if run and checkpoint:
                    append_evaluation(run.evaluations_path, {
                        "target": result.name, "checkpoint": checkpoint.name,
                        "global_step": checkpoint.meta.global_step,
                        "trained_tokens": checkpoint.meta.tokens} | record)
            yield result
        del target
    if not done:
        raise UserError("no checkpoint could be read")


def choose_models(targets: tuple[str, ...], checkpoints: str, runs_dir: Path) -> list[Chosen]:
    """Return all models that are asked for.

    Args:
        targets: RUN@CHECKPOINT chooses this run's own checkpoints.
        checkpoints: of runs: `all`, or names separated by commas.

    Raises:
        UserError: one does not exist, or is damaged.
    """
    found: list[Chosen] = []
    for text in targets:
        name, _, own = text.partition("@")
        if not own or is_run(text, runs_dir) or directory_of(Path(text)).is_dir():
            name, own = text, ""  # a directory may have an @ in its name
        check_name(name, runs_dir)
        if not is_run(name, runs_dir):
            if own:
                raise UserError(f"{text}: {name} is no run, so it has no checkpoints; give {name}"
                                " alone")
            found.append(Chosen(name))
            continue
        directory, wanted = load_run(runs_dir, name).checkpoints_dir, own or checkpoints
        chosen = [Chosen(name, path.name, is_optional=True)
                  for path in named_as_checkpoints(directory)] if wanted == "all" else [
                      Chosen(name, each) for each in wanted.split(",")
                      if find_checkpoint(directory, each)]
        if not chosen:
            raise UserError(f"{directory}: no checkpoint yet; train the run first")
        found += chosen
    return found


def open_held_out(options: Options, names: list[str]) -> dict[str, Slice]:
    """Open the datasets and choose the tokens of each target, by the target's name.

    Runs whose datasets are the same text in other tokens are measured on all of it, each on its
    own dataset.

    Raises:
        UserError: a dataset is missing, too short, or of other text than another.
    """
    if options.dataset:
        own = dict.fromkeys(names, options.dataset)
    else:
        own = {name: load_run(options.runs_dir, name).train.dataset for name in names
               if is_run(name, options.runs_dir)}
    if not own:
        raise UserError("--dataset: name the dataset to evaluate all targets on (no target is a"
                        " run)")
    datasets = {name: own.get(name, next(iter(own.values()))) for name in names}
    files = {dataset: _open(options, dataset) for dataset in dict.fromkeys(datasets.values())}
    if len(files) == 1:
        slices = {dataset: choose_slice(file, dataset, options.start_token, options.num_tokens)
                  for dataset, file in files.items()}
    else:
        slices = {dataset: Slice(dataset, file, 0, file.num_tokens - 1)
                  for dataset, file in files.items()}
        texts = {part.text_identity() for part in slices.values()}
        tokenizers = {file.metadata.get("tokenizer") for file in files.values()}
        if (len(own) < len(names) or None in texts or len(texts) > 1
                or len(tokenizers) < len(files)):
            raise UserError("--dataset: name the dataset to evaluate all targets on (the targets"
                            f" were trained on different ones: {' and '.join(files)})")
        if options.start_token is not None or options.num_tokens is not None:
            raise UserError("--start-token and --tokens would choose different text in the datasets"
                            " of these runs; leave them out, or name one with --dataset")
    return {name: slices[dataset] for name, dataset in datasets.items()}


def _open(options: Options, dataset: str) -> TokenFile:
    """Open the token file; download it or prepare the dataset first if it is missing."""
    if not re.fullmatch(DATASET_NAME, dataset):
        raise UserError(f"--dataset: {dataset[:60]!r} is not a plain name, or owner/name")
    dataset_dir = options.datasets_dir / dataset
    check_inside(dataset_dir, options.datasets_dir, "--datasets-dir")
    provide_dataset(dataset_dir, dataset, [options.split])
    return TokenFile(dataset_dir / f"{options.split}.safetensors")


def choose_slice(file: TokenFile, dataset: str, start_token: int | None = None,
                 num_tokens: int | None = None) -> Slice:
    """Choose the tokens that all models are evaluated on, whatever their context lengths.

    Raises:
        UserError: the file is too short.
    """
    if start_token is None:
        start_token = DEFAULT_START_TOKEN if file.num_tokens > DEFAULT_START_TOKEN else 0
    available = file.num_tokens - start_token - 1  # the last token is only a target
    wanted = min(DEFAULT_NUM_TOKENS, available) if num_tokens is None else num_tokens
    if wanted > available or wanted < 1:
        raise UserError(f"{file.path}: has {max(0, available):,} tokens to predict after token"
                        f" {start_token:,}, wanted {max(1, wanted):,}; change --start-token or"
                        " --tokens")
    return Slice(dataset, file, start_token, wanted)


def _records(target: LoadedModel, part: Slice | None, quizzes: list[Quiz],
             microbatch_size: int) -> Iterator[Record]:
    """Measure the loss on a slice, or without one the tasks. Raises: UserError."""
    if part is not None:
        yield evaluate(target, part, microbatch_size=microbatch_size)
    # Errors of the questions come before any work.
    texts = [encode_questions(target, quiz) for quiz in quizzes]
    for quiz, encoded in zip(quizzes, texts, strict=True):
        record = score(target, quiz, encoded, microbatch_size=microbatch_size)
        if record["cut_texts"]:
            print_error(f"warning: {quiz.name}: {record['cut_texts']:,} texts are longer than the"
                        f" context of {target.name} and lost their beginning, as in lm-eval")
        yield record
