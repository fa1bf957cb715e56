"""The directory of a tuned model: a GPT-2 with the prompt's template, and its card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import ModelCardData

from basics.errors import one_line
from basics.text import code, escaped
from lab.instruct.instructions import INPUT, Data, Entry, chat_template
from lab.instruct.tuning import TuneOptions, Tuner
from lab.publish.export import Extras, write_export
from lab.publish.model_card import MARK, public_name, table_rows
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

    @property
    def base_name(self) -> str:
        """The base model's name in a card: without the directories of this machine."""
        return one_line(public_name(self.target.name))


def write_tuned(job: Job, tuner: Tuner, counts: dict[str, int]) -> None:
    """Write the tuned model's directory completely or not at all. Raises: UserError."""
    card = tuned_card(job, tuner, counts)
    write_export(job.target, job.model_output, card, Extras(chat_template=chat_template()))


def tuned_card(job: Job, tuner: Tuner, counts: dict[str, int]) -> str:
    """Return the card of a tuned model, made of what it was tuned from, on and how."""
    title = f"{job.base_name.rpartition('/')[2]}-tuned"
    settings = asdict(job.options) | {"loss_on": COMPUTED_ON[job.options.loss_on]}
    return CARD.format(
        front_matter=_front_matter(job, title), title=escaped(title), base=_base(job),
        num_parameters=job.target.model.num_parameters(),
        prompt=Entry(instruction="Name the largest planet.", output="").prompt().rstrip("\n"),
        input=INPUT.replace("\n", "\\n"), data=table_rows(_data_facts(job, counts)),
        settings=table_rows({words: str(settings[key]) for key, words in SETTINGS.items()}),
        best=tuner.best.number, epochs="\n".join(
            f"| {epoch.number} | {_loss(epoch.train_loss)} | {_loss(epoch.validation_loss)} |"
            for epoch in tuner.epochs))


def _front_matter(job: Job, title: str) -> str:
    on_hub = HUB_NAME.fullmatch(job.base_name)
    return ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", model_name=title,
        base_model=job.base_name if on_hub else None,
        tags=["gpt2", MARK, "instruction-tuning"]).to_yaml()


def _base(job: Job) -> str:
    name, checkpoint = code(job.base_name), job.target.checkpoint
    if checkpoint is None:
        return name
    return (f"{name} after {checkpoint.meta.tokens:,} tokens (checkpoint `{checkpoint.name}`)")


def _data_facts(job: Job, counts: dict[str, int]) -> dict[str, str]:
    return {
        "file": job.data.path.name, "SHA-256": job.data.sha256,
        "entries": f"{len(job.data.entries):,}",
        "for training, validation, the test": "{train:,}, {validation:,}, {test:,}".format(
            **counts),
        "cut to the context": f"{counts['cut']:,}",
        "left out: the prompt is too long": f"{counts['skipped']:,}"}


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"
