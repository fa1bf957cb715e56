"""Tune a model, write it with its card, then its answers: the work of `lab tune`."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from huggingface_hub import ModelCardData
from tqdm import tqdm

from basics.errors import UserError, cannot_be_written, one_line, visible
from basics.files import write_atomically
from basics.json_files import to_json
from basics.text import code, escaped
from lab.instruct.instructions import (
    INPUT,
    AnsweredEntry,
    Data,
    Entry,
    chat_template,
    fetch_default_entries,
    load_entries,
)
from lab.instruct.tuning import Epoch, Examples, TuneOptions, Tuner, encode_entries
from lab.publish.export import Extras, check_output, write_export
from lab.publish.model_card import MARK, public_name, table_rows
from reporting.sampling import SamplingOptions, generate_tokens
from tokens.tokenizer import decode
from trainer.models import HUB_NAME, LoadedModel

CARD = """---
{front_matter}
---

# {title}

A GPT-2-class language model of {num_parameters:,} parameters that answers instructions. It is
{base}, fine-tuned.

## How to load it

```python
from transformers import pipeline

generator = pipeline("text-generation", model=".")
messages = [{{"role": "user", "content": "Name the largest planet."}}]
print(generator(messages, max_new_tokens=50)[0]["generated_text"][-1]["content"])
```

The architecture is standard GPT-2 (`GPT2LMHeadModel`) in float32; no custom code is needed. The
tokenizer's chat template makes the prompt that the model was tuned on:

```text
{prompt}
```

A text that the instruction is about follows the instruction as `{input}`, or is the `input` of the
message. The model was tuned on single questions: of a longer conversation it has seen none.

## What it was tuned on

| | |
|---|---|
{data}

## How it was tuned

| | |
|---|---|
{settings}

Losses in nats per token. Epoch 0 is the model before tuning; the weights are those of epoch {best}.

| epoch | training loss | validation loss |
|---:|---:|---:|
{epochs}
"""
SETTINGS = {"loss_on": "loss computed on", "learning_rate": "learning rate, constant (AdamW)",
            "weight_decay": "weight decay", "batch_size": "batch size", "max_epochs": "most epochs",
            "seed": "seed"}
COMPUTED_ON = {"response": "the response only", "all": "prompt and response"}


@dataclass(frozen=True)
class Job:
    """The base model and the data, read; the options; the places of answers and tuned model."""

    target: LoadedModel
    data: Data
    options: TuneOptions
    output: Path
    model_output: Path


def job_of(target: LoadedModel, *, data: Path | None, output: Path | None,
           model_output: Path | None, datasets_dir: Path, **options: Any) -> Job:
    """Read the data and check the outputs. Raises: UserError."""
    output = output or default_place(target, "instruction-answers.json", "-answers.json")
    model_output = (model_output or default_place(target, "tuned", "-tuned")).absolute()
    base = Path(target.name)
    if target.run is None and base.is_dir() and base.resolve() == model_output.resolve():
        raise UserError(f"{model_output}: is the model that is to be tuned, which would be"
                        " replaced; name another directory with --model-output")
    check_output(model_output, option="--model-output")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise OSError("is a directory")
        if not os.access(output.parent, os.W_OK):
            raise OSError("no write permission for its directory")
    except OSError as error:
        raise cannot_be_written(output, error) from None
    return Job(target, load_entries(data or fetch_default_entries(datasets_dir)),
               TuneOptions(**options), output, model_output)


def default_place(target: LoadedModel, in_run: str, ending: str) -> Path:
    """Return a path in a target's run's directory; of another target, in the current one."""
    if target.run is not None:
        return target.run.run_dir / in_run
    return Path(f"{Path(target.name).resolve().name}{ending}")


def run(job: Job) -> None:
    """Fine-tune, write the tuned model completely or not at all, then its answers.

    Raises:
        UserError: no entry can be used, or a file cannot be written.
    """
    tokenizer, length = job.target.load_tokenizer(), job.target.model.config.context_length
    train, validation = (
        encode_entries(part, tokenizer, context_length=length, loss_on=job.options.loss_on)
        for part in (job.data.train, job.data.validation))
    counts = _counts(job, train, validation)
    tuner = Tuner(job.target.model, job.options, pad_id=tokenizer.eot_token)
    tuner.run(train.examples, validation.examples, _report)
    rose = tuner.best is not tuner.epochs[-1]
    click.echo(f"validation loss rose: using the weights of epoch {tuner.best.number}" if rose
               else "stopped by --max-epochs before validation loss rose")
    write_export(job.target, job.model_output, tuned_card(job, tuner, counts),
                 Extras(chat_template=chat_template()))
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


def _counts(job: Job, train: Examples, validation: Examples) -> dict[str, int]:
    """Count and print the usable entries. Raises: UserError if there are none."""
    name, length = job.target.name, job.target.model.config.context_length
    for part, purpose in ((train, "training"), (validation, "validation")):
        if not part.examples:
            raise UserError(f"{job.data.path}: no entry for {purpose} has a prompt that fits"
                            f" {name}'s context of {length} tokens; give shorter ones with --data")
    counts = {"train": len(train.examples), "validation": len(validation.examples),
              "test": len(job.data.test), "cut": train.num_cut + validation.num_cut,
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
    model, tokenizer = job.target.model, job.target.load_tokenizer()
    greedy = SamplingOptions(max_new_tokens=job.options.max_new_tokens, temperature=0, top_k=0,
                             stop_token=tokenizer.eot_token)
    answers, num_long = [], 0
    for entry in tqdm(job.data.test, desc="answering", unit="question", disable=None, leave=False):
        prompt = tokenizer.encode_ordinary(entry.prompt())
        num_long += len(prompt) > model.config.context_length
        answer = decode(tokenizer, generate_tokens(model, prompt, greedy))
        answers.append(AnsweredEntry(**entry.model_dump(), answer=answer.strip()))
    if num_long:
        click.echo(f"{num_long} questions are longer than the context: the model saw only their"
                   " end")
    return answers


def tuned_card(job: Job, tuner: Tuner, counts: dict[str, int]) -> str:
    """Return the card of a tuned model, made of what it was tuned from, on and how."""
    base, data, checkpoint = one_line(public_name(job.target.name)), job.data, job.target.checkpoint
    title = f"{base.rpartition('/')[2]}-tuned"
    front_matter = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", model_name=title,
        base_model=base if HUB_NAME.fullmatch(base) else None,
        tags=["gpt2", MARK, "instruction-tuning"]).to_yaml()
    trained = "" if checkpoint is None else (
        f" after {checkpoint.meta.tokens:,} tokens (checkpoint `{checkpoint.name}`)")
    facts = {
        "file": data.path.name, "SHA-256": data.sha256,
        "entries": f"{len(data.train) + len(data.test) + len(data.validation):,}",
        "for training, validation, the test": "{train:,}, {validation:,}, {test:,}".format(
            **counts),
        "cut to the context": f"{counts['cut']:,}",
        "left out: the prompt is too long": f"{counts['skipped']:,}"}
    settings = asdict(job.options) | {"loss_on": COMPUTED_ON[job.options.loss_on]}
    return CARD.format(
        front_matter=front_matter, title=escaped(title), base=code(base) + trained,
        num_parameters=job.target.model.num_parameters(),
        prompt=Entry(instruction="Name the largest planet.", output="").prompt().rstrip("\n"),
        input=INPUT.replace("\n", "\\n"), data=table_rows(facts),
        settings=table_rows({words: str(settings[key]) for key, words in SETTINGS.items()}),
        best=tuner.best.number, epochs="\n".join(
            f"| {epoch.number} | {_loss(epoch.train_loss)} | {_loss(epoch.validation_loss)} |"
            for epoch in tuner.epochs))


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"
