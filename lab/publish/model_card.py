"""Write a model's README.md: its card, in the format that the hub reads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from basics.errors import UserError, first_line, one_line
from basics.files import read_regular_file
from basics.text import code, escaped
from lab.publish.dataset_facts import LANGUAGE_CODE, LICENCE_NAME, declared_of
from lab.publish.measurements import measurements
from lab.runs import RUNNING, RunFiles, number
from run_config import MUON_DEFAULTS, ModelConfig, TrainConfig
from tokens.tokenizer import TOKENIZER_FILE
from trainer.models import HUB_NAME, LoadedModel

CARD = """---
{front_matter}
---

# {title}

A GPT-2-class language model of {num_parameters:,} parameters, trained from
{start}{on_data}.
It is a base model: it continues text and does not follow instructions.

| | |
|---|---|
{facts}

## How to load it

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{address}")
print(generator("{prompt}", max_new_tokens=50)[0]["generated_text"])
```

The architecture is standard GPT-2 (`GPT2LMHeadModel`) in float32; no custom code is needed.
{notes}
## How it was trained

| | |
|---|---|
{training}

Settings that differ from the defaults:

```json
{settings}
```
{charts}{gguf}"""

GGUF = """
## GGUF

For llama.cpp and programs made of it, with the tokenizer inside: `model-F16.gguf` holds 16-bit
floats, `model-Q8_0.gguf` blocks of 32 8-bit integers, in half of the bytes.

```sh
llama-server --model model-Q8_0.gguf
```
"""

CHARTS = {"loss-chart.png": "Training and validation loss", "grad-norm-chart.png": "Gradient norm",
          "learning-rate-chart.png": "Learning rate"}
MARK = "ddp-train"  # a tag that identifies our cards
HERE = "."  # the address in the card of a directory: the directory itself
ADDRESS = re.compile(r'(pipeline\("text-generation", model=)"[^"\n]*"')


@dataclass(frozen=True)
class CardFacts:
    """The parts of a card that no file of the run contains."""

    title: str
    address: str  # where the model is loaded from: a name on the hub, or `HERE`
    licence: str | None = None
    languages: tuple[str, ...] = ()
    has_gguf: bool = False
    datasets_dir: Path = Path("datasets")

    def check(self) -> None:
        """Raises: UserError: the hub would refuse the licence or a language."""
        if self.licence is not None and not LICENCE_NAME.fullmatch(self.licence):
            raise UserError(f"--license: {self.licence[:60]!r} is not a licence's short name; give"
                            " one such as apache-2.0, mit or other")
        for language in self.languages:
            if not LANGUAGE_CODE.fullmatch(language):
                raise UserError(f"--language: {language[:60]!r} is not a language's code; give one"
                                " such as en or pt-BR")


def model_card(target: LoadedModel, facts: CardFacts) -> str:
    """Return the card of a run's model, made of its checkpoint, summary and evaluations.

    The run's JSON files may have changed since training; they are read only without a summary.
    """
    written = RunFiles.read(target.run.run_dir)
    settings = written.part("train") or target.run.train.model_dump()
    dataset = one_line(str(settings.get("dataset")))
    found = measurements(target, dataset)
    if settings.get("init_from") is not None:
        name = public_name(str(settings["init_from"]), beside=target.run.run_dir)
        settings = settings | {"init_from": name}
    start = settings.get("init_from")
    shown = [name for name in CHARTS if (target.run.run_dir / name).is_file()]
    return CARD.format(
        front_matter=_front_matter(settings, found, facts), title=facts.title,
        address=facts.address, num_parameters=target.model.num_parameters(),
        start=f"the weights of {code(str(start))}" if start else "scratch",
        on_data=f" on {target.checkpoint.meta.tokens:,} tokens of {code(dataset)}{_so_far(target)}",
        prompt="def " if target.tokenizer_name == "bytes" else "Every effort moves you",
        facts=table_rows(_model_facts(target, found)),
        training=table_rows(_training(target, written)),
        notes=_notes(target), settings=json.dumps(_changed(target, settings), indent=2),
        charts="".join(f"\n![{CHARTS[name]}]({name})\n" for name in shown),
        gguf=GGUF if facts.has_gguf else "",
    )


def changed_card(path: Path, facts: CardFacts) -> str:
    """Return the card of an exported model with another address, licence, languages or GGUF files.

    Raises:
        UserError: its front matter cannot be read.
    """
    facts.check()
    text = read_regular_file(path)
    try:
        card = ModelCard(text)
    except Exception as error:  # the YAML library has errors of its own
        raise UserError(f"{path}: not a model card ({first_line(error)}); export the model"
                        " again") from None
    card.data.license = facts.licence or card.data.license
    card.data.language = list(facts.languages) or card.data.language
    before, _, after = card.text.partition(GGUF.strip("\n"))
    card.text = ADDRESS.sub(rf'\1"{facts.address}"', before.rstrip("\n"))
    own = after.strip("\n")  # what somebody has written below
    return f"{card}\n{GGUF if facts.has_gguf else ''}" + (f"\n{own}\n" if own else "")


def public_name(name: str, *, beside: Path | None = None) -> str:
    """Return a model's name as others may read it: of a path on this machine the last part.

    Args:
        beside: a directory; a path may be relative to one above it, too.
    """
    places = [Path(), *(beside.absolute().parents if beside else ())]
    if HUB_NAME.fullmatch(name) and not any((place / name).exists() for place in places):
        return name
    return Path(name).resolve().name


def _front_matter(settings: dict[str, Any], found: list[dict[str, Any]], facts: CardFacts) -> str:
    facts.check()
    dataset = one_line(str(settings.get("dataset")))
    declared = declared_of(dataset, facts.datasets_dir)
    is_from_scratch = settings.get("init_from") is None  # else other weights' licence counts too
    licence = facts.licence or (declared.licence if is_from_scratch else None)
    languages = list(facts.languages or declared.languages or ())
    results = [EvalResult(task_type="text-generation", task_name="Language modelling",
                          dataset_type=one["dataset"], dataset_name=one["dataset"],
                          dataset_split=one["split"], metric_type=one["metric"],
                          metric_name=one["name"], metric_value=one["value"]) for one in found]
    return ModelCardData(
        license=licence, language=languages or None, library_name="transformers",
        pipeline_tag="text-generation",
        datasets=[dataset] if HUB_NAME.fullmatch(dataset) else None, tags=["gpt2", MARK],
        model_name=facts.title, eval_results=results or None,
    ).to_yaml()


def _model_facts(target: LoadedModel, found: list[dict[str, Any]]) -> dict[str, str]:
    config = target.model.config
    return {
        "layers, heads, embedding width": f"{config.n_layers}, {config.n_heads}, {config.emb_dim}",
        "context": f"{config.context_length:,} tokens",
        "vocabulary": f"{config.vocab_size:,} ({_tokenizer(target)})",
        "output head": "tied to the token embedding" if config.tie_weights else "separate",
        "query, key and value biases": "yes" if config.qkv_bias else "no (stored as zeros)",
        **{f"{one['name']}, {one['dataset']}": f"{one['value']:.6f}" for one in found},
    }


def _tokenizer(target: LoadedModel) -> str:
    return TOKENIZER_FILE if target.tokenizer_path else target.tokenizer_name or "unknown tokenizer"


def _training(target: LoadedModel, written: RunFiles) -> dict[str, str]:
    meta, machine = target.checkpoint.meta, written.part("machine")
    num_steps = number(written.summary.get("num_steps"))
    facts = {"step": f"{meta.global_step + 1:,}" + (f" of {num_steps:,.0f}" if num_steps else ""),
             "tokens": f"{meta.tokens:,}",
             "training loss, mean since the checkpoint before":
                 "-" if meta.train_loss is None else f"{meta.train_loss:.6f}",
             "hours": f"{sum(meta.seconds.values()) / 3600:.3f}"}
    if meta.usd:
        facts["US$"] = f"{sum(meta.usd.values()):.2f}"
    if epoch_tokens := number(written.part("batch").get("epoch_tokens")):
        facts["passes over the dataset"] = f"{meta.tokens / epoch_tokens:.2f}"
    batch = [number(written.part("batch").get(key)) for key in (
        "microbatch_size", "gradient_accumulation_steps", "world_size", "context_length")]
    if all(batch):
        sizes = "{:.0f} x {:.0f} x {:.0f} sequences of {:,.0f} tokens"
        facts["global batch"] = sizes.format(*batch)
    if machine:
        processes = number(machine.get("processes")) or 1
        each = "processes on" if machine.get("device_type") == "cpu" else "x"
        facts["hardware"] = f"{processes:.0f} {each} {machine.get('device')}"
        facts["precision"] = str(machine.get("precision"))
        facts["software"] = f"PyTorch {machine.get('torch')}, Python {machine.get('python')}"
    if speed := number(written.summary.get("tokens_per_second")):
        facts["tokens per second during training"] = f"{speed:,.0f}"
    return facts


def _so_far(target: LoadedModel) -> str:
    """Return what says that later weights are to come; empty if the run does not train now."""
    if RunFiles.read(target.run.run_dir).status != RUNNING:
        return ""
    step = target.checkpoint.meta.global_step + 1
    return f" so far:\nthese are the weights after step {step:,}, and training goes on"


def _changed(target: LoadedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of model and training that differ from their defaults.

    With Muon also those whose default depends on the width: a card is read without this code.
    """
    always = {*MUON_DEFAULTS, "init"} if settings.get("optimizer") == "muon" else set()
    changed = {}
    for config, values in ((ModelConfig, target.checkpoint.meta.model.model_dump()),
                           (TrainConfig, settings)):
        for key, field in config.model_fields.items():
            if key in values and (field.is_required() or key in always
                                  or values[key] != field.get_default()):
                changed[key] = values[key]
    return changed


def _notes(target: LoadedModel) -> str:
    if target.tokenizer_name == "bytes":
        return "Its tokens are bytes: ids 0 to 255, and 256 for the end of text.\n"
    return ""


def table_rows(facts: dict[str, str]) -> str:
    """Return the rows of a Markdown table of two columns."""
    return "\n".join("| {} | {} |".format(*(escaped(one_line(text)) for text in row))
                     for row in facts.items())
