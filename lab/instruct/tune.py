"""`lab tune`: fine-tune a model on instructions, and write its answers to held-out ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from basics.cli import ABOVE_0, FiniteRange
from basics.errors import UserError, cannot_be_written, visible
from lab.instruct.instructions import (
    AnsweredEntry,
    fetch_default_entries,
    load_entries,
)

if TYPE_CHECKING:
    from lab.instruct.tuned_model import Job
    from lab.instruct.tuning import Epoch, Examples
    from trainer.models import LoadedModel


@click.command()
@click.argument("target_name", metavar="RUN")
@click.option("--checkpoint", default="best", show_default=True,
              help="latest, best or the name of a checkpoint directory.")
@click.option("--data", type=click.Path(path_type=Path), metavar="FILE",
              help="JSON: a list of objects with instruction, input and output.  [default: the"
                   " 1,100 of \"Build a Large Language Model (from Scratch)\", downloaded once]")
@click.option("--loss-on", type=click.Choice(["response", "all"]), default="response",
              show_default=True,
              help="response: compute the loss on the response only. all: on the prompt too, as the"
                   " main code of the book's chapter 7 does. The two losses are not comparable.")
@click.option("--learning-rate", type=ABOVE_0, default=5e-5,
              show_default=True)
@click.option("--weight-decay", type=FiniteRange(min=0), default=0.1, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--max-epochs", type=click.IntRange(min=1), default=10, show_default=True,
              help="Stop after this many epochs, or when validation loss rises.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True,
              help="Maximum length of an answer.")
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), default=42, show_default=True,
              help="Seed of the order of the entries and of dropout.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE",
              help="Write the answers here.  [default: runs/RUN/instruction-answers.json; if RUN is"
                   " not a run, NAME-answers.json in the current directory]")
@click.option("--model-output", type=click.Path(path_type=Path), metavar="DIR",
              help="Write the tuned model to this directory.  [default: runs/RUN/tuned; if RUN is"
                   " not a run, NAME-tuned in the current directory]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True)
def command(target_name: str, checkpoint: str, runs_dir: Path, **options: Any) -> None:
    """Fine-tune RUN's model on instructions, and write its answers to a file for `lab judge`.

    RUN may also be a directory of GPT-2 weights, or a hub name such as openai-community/gpt2. The
    first 85% of the data are for training, the next 10% for the test, the rest for validation.
    Training stops when the validation loss rises; the weights of the best epoch then answer the
    test. They are written as a standard GPT-2 with a chat template and a model card: a directory
    that `lab generate`, `lab evaluate`, `lab publish` and transformers load.
    """
    # Imported here so that --help does not wait for torch.
    from trainer.models import load_model

    target = load_model(target_name, runs_dir=runs_dir, checkpoint_name=checkpoint)
    job = _job(target, **options)
    with _out_of_memory_reported(job):
        _run(job)


def _run(job: Job) -> None:
    """Fine-tune, write the tuned model, then its answers."""
    from basics.files import write_atomically
    from basics.json_files import to_json
    from lab.instruct.tuned_model import write_tuned
    from lab.instruct.tuning import Tuner

    train, validation = _encode(job)
    counts = _counts(job, train, validation)
    tuner = Tuner(job.target.model, job.options, pad_id=job.target.load_tokenizer().eot_token)
    tuner.run(train.examples, validation.examples, _report)
    rose = tuner.best is not tuner.epochs[-1]
    click.echo(f"validation loss rose: using the weights of epoch {tuner.best.number}" if rose
               else "stopped by --max-epochs before validation loss rose")
    write_tuned(job, tuner, counts)
    click.echo(visible(f"tuned model in {job.model_output}"))
    answers = _answer(job)
    try:
        write_atomically(job.output, to_json({
            "model": job.target.name,
            "checkpoint": job.target.checkpoint and job.target.checkpoint.name,
            "data": {"file": str(job.data.path), **counts},
            "options": asdict(job.options),
            "epochs": [asdict(epoch) for epoch in tuner.epochs],
            "best_epoch": tuner.best.number,
            "answers": [answer.model_dump() for answer in answers],
        }, indent=2))
    except OSError as error:
        raise cannot_be_written(job.output, error) from None
    click.echo(visible(f"{len(answers)} answers in {job.output}"))


def _job(target: LoadedModel, *, data: Path | None, output: Path | None, model_output: Path | None,
         datasets_dir: Path, **options: Any) -> Job:
    """Read the data and check the outputs. Raises: UserError."""
    from lab.instruct.tuned_model import Job
    from lab.instruct.tuning import TuneOptions
    from lab.publish.export import check_output

    output = output or default_output(target)
    model_output = (model_output or default_model_output(target)).absolute()
    _check_is_not(target, model_output)
    check_output(model_output, option="--model-output")
    _check_writable(output)
    return Job(target, load_entries(data or fetch_default_entries(datasets_dir)),
               TuneOptions(**options), output, model_output)


def _check_is_not(target: LoadedModel, model_output: Path) -> None:
    """Check that the tuned model would not replace its base. Raises: UserError."""
    base = Path(target.name)
    if target.run is None and base.is_dir() and base.resolve() == model_output.resolve():
        raise UserError(f"{model_output}: is the model that is to be tuned, which would be"
                        " replaced; name another directory with --model-output")


def default_output(target: LoadedModel) -> Path:
    """Return the path of a target's answers: in its run's directory, else in the current one."""
    if target.run is not None:
        return target.run.run_dir / "instruction-answers.json"
    return Path(f"{Path(target.name).resolve().name}-answers.json")


def default_model_output(target: LoadedModel) -> Path:
    """Return the directory of a tuned model: in its run's directory, else in the current one."""
    if target.run is not None:
        return target.run.run_dir / "tuned"
    return Path(f"{Path(target.name).resolve().name}-tuned")


def _check_writable(output: Path) -> None:
    """Check before the work that the output can be written; make its directory. Raises: UserError.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Writing replaces the file: a pipe or a device would be lost.
        if output.exists() and not output.is_file():
            raise OSError("is not a plain file")
        if not os.access(output.parent, os.W_OK):
            raise OSError("no write permission for its directory")
    except OSError as error:
        raise cannot_be_written(output, error) from None


@contextmanager
def _out_of_memory_reported(job: Job) -> Iterator[None]:
    """Turn running out of GPU memory into a UserError."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        size = job.options.batch_size
        smaller = f"a --batch-size below {size}, or " * (size > 1)
        raise UserError(f"{job.target.name}: fine-tuning and answering do not fit in the GPU's"
                        f" memory; try {smaller}a GPU that runs nothing else") from None


def _encode(job: Job) -> tuple[Examples, Examples]:
    """Encode the entries for training and for validation."""
    from lab.instruct.tuning import encode_entries

    tokenizer, length = job.target.load_tokenizer(), job.target.model.config.context_length
    train, validation = (
        encode_entries(part, tokenizer, context_length=length, loss_on=job.options.loss_on)
        for part in (job.data.split.train, job.data.split.validation))
    return train, validation


def _counts(job: Job, train: Examples, validation: Examples) -> dict[str, int]:
    """Count and print the usable entries. Raises: UserError if there are none."""
    name, length = job.target.name, job.target.model.config.context_length
    for part, purpose in ((train, "training"), (validation, "validation")):
        if not part.examples:
            raise UserError(f"{job.data.path}: no entry for {purpose} has a prompt that fits"
                            f" {name}'s context of {length} tokens; give shorter ones with --data")
    counts = {"train": len(train.examples), "validation": len(validation.examples),
              "test": len(job.data.split.test), "cut": train.num_cut + validation.num_cut,
              "skipped": train.num_skipped + validation.num_skipped}
    click.echo(visible(f"{name}: {counts['train']} entries for training,"
                       f" {counts['validation']} for validation, {counts['test']} for the test"))
    if counts["cut"] or counts["skipped"]:
        click.echo(f"{counts['cut']} entries cut to the context of {length} tokens,"
                   f" {counts['skipped']} skipped because the prompt alone is longer")
    return counts


def _report(epoch: Epoch) -> None:
    train = "before training" if epoch.train_loss is None else f"train loss {epoch.train_loss:.4f}"
    click.echo(visible(f"epoch {epoch.number}: {train}, validation loss"
                       f" {epoch.validation_loss:.4f} nats per token"))


def _answer(job: Job) -> list[AnsweredEntry]:
    """Generate the model's answers with greedy decoding, up to the end of text."""
    from tqdm import tqdm

    from reporting.sampling import SamplingOptions, generate_tokens
    from tokens.tokenizer import decode

    model, tokenizer = job.target.model, job.target.load_tokenizer()
    greedy = SamplingOptions(max_new_tokens=job.options.max_new_tokens, temperature=0, top_k=0,
                             stop_token=tokenizer.eot_token)
    answers, num_long = [], 0
    for entry in tqdm(job.data.split.test, desc="answering", unit="question", disable=None,
                      leave=False):
        prompt = tokenizer.encode_ordinary(entry.prompt())
        num_long += len(prompt) > model.config.context_length
        answer = decode(tokenizer, generate_tokens(model, prompt, greedy))
        answers.append(AnsweredEntry(**entry.model_dump(), answer=answer.strip()))
    if num_long:
        click.echo(f"{num_long} questions are longer than the context: the model saw only their"
                   " end")
    return answers
