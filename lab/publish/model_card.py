"""A model's README.md: its card, in the format that the hub reads, with what was measured of it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, EvalResult, ModelCard, ModelCardData

from basics.errors import UserError, first_line, one_line
from basics.files import read_regular_file
from basics.text import code, counted, dollars, escaped
from lab.runs import RUNNING, RunFiles, number
from reporting.metrics_file import read_metrics
from run_config import DATASET_NAME, MUON_DEFAULTS, ModelConfig, TrainConfig
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
HERE = "."  # where the model is that no repository has: in the card's directory
MARK = "ddp-train"  # a tag that identifies our cards
ADDRESS = re.compile(r'(pipeline\("text-generation", model=)"[^"\n]*"')
FINEWEB = re.compile(r"(gpjt|HuggingFaceFW)/fineweb(-edu)?(-gpt2-tokens)?")  # has no card here
LICENCE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{1,8})*")
MEASURED = {"loss": "loss (nats per token)", "perplexity": "perplexity",
            "bits_per_byte": "bits per byte", "accuracy": "accuracy",
            "normalised_accuracy": "length-normalised accuracy"}


@dataclass(frozen=True)
class Request:
    """The command line's arguments and options."""

    source: str
    repository: str | None = None
    checkpoint: str = "best"
    output_dir: Path | None = None
    is_public: bool = False
    is_dry_run: bool = False
    with_gguf: bool = False
    licence: str | None = None
    languages: tuple[str, ...] = ()
    runs_dir: Path = Path("runs")
    datasets_dir: Path = Path("datasets")

    def check(self) -> None:
        """Raises: UserError: the hub would refuse the repository, the licence or a language."""
        if self.repository is not None and not HUB_NAME.fullmatch(self.repository):
            raise UserError(f"{self.repository[:60]!r} is not the name of a repository; give"
                            " owner/name")
        if self.licence is not None and not LICENCE_NAME.fullmatch(self.licence):
            raise UserError(f"--license: {self.licence[:60]!r} is not a licence's short name; give"
                            " one such as apache-2.0, mit or other")
        if wrong := [word for word in self.languages if not LANGUAGE_CODE.fullmatch(word)]:
            raise UserError(f"--language: {wrong[0][:60]!r} is not a language's code; give one"
                            " such as en or pt-BR")


def model_card(target: LoadedModel, request: Request) -> str:
    """Return the card of a run's model, made of its checkpoint, summary and evaluations.

    The run's JSON files may have changed since training; they are read only without a summary.
    """
    written = RunFiles.read(target.run.run_dir)
    settings = written.part("train") or target.run.train.model_dump()
    if settings.get("init_from") is not None:
        name = public_name(str(settings["init_from"]), beside=target.run.run_dir)
        settings = settings | {"init_from": name}
    start, dataset = settings.get("init_from"), one_line(str(settings.get("dataset")))
    found = measurements(target, dataset)
    meta, is_bytes = target.checkpoint.meta, target.tokenizer_name == "bytes"
    so_far = "" if written.status != RUNNING else (
        f" so far:\nthese are the weights after step {meta.global_step + 1:,}; training goes on")
    shown = [name for name in CHARTS if (target.run.run_dir / name).is_file()]
    licence, languages = declared_of(dataset, request.datasets_dir)
    front_matter = ModelCardData(  # the licence of other weights that it began with counts too
        license=request.licence or (licence if start is None else None),
        language=list(request.languages) or languages or None, library_name="transformers",
        pipeline_tag="text-generation", tags=["gpt2", MARK], model_name=request.source,
        datasets=[dataset] if HUB_NAME.fullmatch(dataset) else None, eval_results=found or None)
    return CARD.format(
        front_matter=front_matter.to_yaml(), title=request.source,
        address=request.repository or HERE, num_parameters=target.model.num_parameters(),
        start=f"the weights of {code(str(start))}" if start else "scratch",
        on_data=f" on {meta.tokens:,} tokens of {code(dataset)}{so_far}",
        prompt="def " if is_bytes else "Every effort moves you",
        facts=table_rows(_model_facts(target, found)),
        training=table_rows(_training(target, written)),
        notes="Its tokens are bytes: ids 0 to 255, and 256 for the end of text.\n" * is_bytes,
        settings=json.dumps(_changed(target, settings), indent=2),
        charts="".join(f"\n![{CHARTS[name]}]({name})\n" for name in shown),
        gguf=GGUF if request.with_gguf else "",
    )


def changed_card(path: Path, request: Request) -> str:
    """Return the card of an exported model with another address, licence, languages or GGUF files.

    Raises:
        UserError: its front matter cannot be read.
    """
    try:
        card = ModelCard(read_regular_file(path))
    except Exception as error:  # the YAML library has errors of its own
        raise UserError(f"{path}: not a model card ({first_line(error)}); export the model"
                        " again") from None
    card.data.license = request.licence or card.data.license
    card.data.language = list(request.languages) or card.data.language
    before, _, after = card.text.partition(GGUF.strip("\n"))
    card.text = ADDRESS.sub(rf'\1"{request.repository or HERE}"', before.rstrip("\n"))
    own = after.strip("\n")  # what somebody has written below
    return f"{card}\n{GGUF if request.with_gguf else ''}" + (f"\n{own}\n" if own else "")


def public_name(name: str, *, beside: Path | None = None) -> str:
    """Return a model's name as others may read it: of a path on this machine the last part.

    A path may be relative to this directory or to one above `beside`.
    """
    places = [Path(), *(beside.absolute().parents if beside else ())]
    if HUB_NAME.fullmatch(name) and not any((place / name).exists() for place in places):
        return name
    return Path(name).resolve().name


def declared_of(dataset: str, datasets_dir: Path) -> tuple[str | None, list[str]]:
    """Return the licence and languages of a dataset: of FineWeb, or as its card declares them."""
    if FINEWEB.fullmatch(dataset):
        return "odc-by", ["en"]
    if not re.fullmatch(DATASET_NAME, dataset):
        return None, []
    try:
        values = DatasetCard(read_regular_file(datasets_dir / dataset / "README.md")).data
    except Exception:  # there is none, or it is damaged; the YAML library has errors of its own
        return None, []
    licence, languages = values.get("license"), values.get("language")
    is_name = isinstance(licence, str) and LICENCE_NAME.fullmatch(licence)
    if not is_name or licence == "unknown":  # nobody has filled it in
        return None, []
    codes = languages if isinstance(languages, list) else [languages]
    are_codes = all(isinstance(code, str) and LANGUAGE_CODE.fullmatch(code) for code in codes)
    return licence, codes if are_codes else []


def measurements(target: LoadedModel, dataset: str) -> list[EvalResult]:
    """Collect the results of this checkpoint: its validation loss and its evaluations.

    Of repeated evaluations the newest counts; losses of tokens trained on, which say nothing about
    others, and values that are not numbers are left out.
    """
    found: dict[tuple[str, str], EvalResult] = {}

    def add(where: str, split: str | None, name: str, metric: str, value: float) -> None:
        found[where, name] = EvalResult(
            task_type="text-generation", task_name="Language modelling", dataset_type=where,
            dataset_name=where, dataset_split=split, metric_type=metric, metric_name=name,
            metric_value=value)

    checkpoint = target.checkpoint
    if target.run.train.validates and checkpoint.loss is not None:
        add(dataset, "validation", "validation loss during training (nats per token)", "loss",
            checkpoint.loss)
    for record in read_metrics(target.run.evaluations_path):
        if record.get("checkpoint") != checkpoint.name:
            continue
        split, of_what = record.get("split"), ""
        if "benchmark" in record:
            if not isinstance(split, str) and "questions_from" in record:
                of_what = f", questions of {one_line(str(record['questions_from']))}"
        elif (split := record.get("split", "validation")) == "validation":
            count, start = number(record.get("num_tokens")), number(record.get("start_token"))
            if count is not None and start is not None:
                of_what = f", {count:,.0f} tokens from token {start:,.0f}"
        else:
            continue
        where = one_line(str(record.get("benchmark") or record.get("dataset")))
        for metric, name in MEASURED.items():
            if (value := number(record.get(metric))) is not None:
                add(where, None if split is None else one_line(str(split)), name + of_what, metric,
                    value)
    return list(found.values())


def _model_facts(target: LoadedModel, found: list[EvalResult]) -> dict[str, str]:
    config = target.model.config
    tokenizer = TOKENIZER_FILE if target.tokenizer_path else (
        target.tokenizer_name or "unknown tokenizer")
    return {
        "layers, heads, embedding width": f"{config.n_layers}, {config.n_heads}, {config.emb_dim}",
        "context": f"{config.context_length:,} tokens",
        "vocabulary": f"{config.vocab_size:,} ({tokenizer})",
        "output head": "tied to the token embedding" if config.tie_weights else "separate",
        "query, key and value biases": "yes" if config.qkv_bias else "no (stored as zeros)",
        **{f"{one.metric_name}, {one.dataset_name}": f"{one.metric_value:.6f}" for one in found},
    }


def _training(target: LoadedModel, written: RunFiles) -> dict[str, str]:
    """Return how a checkpoint was trained; a run's own files may be damaged."""
    meta, summary = target.checkpoint.meta, written.summary
    machine, batch = written.part("machine"), written.part("batch")
    num_steps = number(summary.get("num_steps"))
    facts = {"step": f"{meta.global_step + 1:,}" + (f" of {num_steps:,.0f}" if num_steps else ""),
             "tokens": f"{meta.tokens:,}", "training loss, mean since the checkpoint before":
             "-" if meta.train_loss is None else f"{meta.train_loss:.6f}",
             "hours": f"{sum(meta.seconds.values()) / 3600:.3f}"}
    if meta.usd:
        facts["US$"] = dollars(sum(meta.usd.values()))
    if epoch_tokens := number(batch.get("epoch_tokens")):
        facts["passes over the dataset"] = f"{meta.tokens / epoch_tokens:.2f}"
    sizes = [number(batch.get(key)) for key in (
        "microbatch_size", "gradient_accumulation_steps", "world_size", "context_length")]
    if all(sizes):
        text = "{:.0f} x {:.0f} x {:.0f} sequences of {:,.0f} tokens"
        facts["global batch"] = text.format(*sizes)
    if machine:
        processes = int(number(machine.get("processes")) or 1)
        each = (counted(processes, "process on", "processes on")
                if machine.get("device_type") == "cpu" else f"{processes} x")
        facts["hardware"] = f"{each} {machine.get('device')}"
        facts["precision"] = str(machine.get("precision"))
        facts["software"] = f"PyTorch {machine.get('torch')}, Python {machine.get('python')}"
    if speed := number(summary.get("tokens_per_second")):
        facts["tokens per second during training"] = f"{speed:,.0f}"
    return facts


def _changed(target: LoadedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of model and training that differ from their defaults.

    With Muon also those whose default depends on the width: a card is read without this code.
    """
    always = {*MUON_DEFAULTS, "init"} if settings.get("optimizer") == "muon" else set()
    return {key: values[key] for config, values in (
        (ModelConfig, target.checkpoint.meta.model.model_dump()), (TrainConfig, settings))
        for key, field in config.model_fields.items() if key in values and (
            field.is_required() or key in always or values[key] != field.get_default())}


def table_rows(facts: dict[str, str]) -> str:
    """Return the rows of a Markdown table of two columns."""
    return "\n".join("| {} | {} |".format(*(escaped(one_line(text)) for text in row))
                     for row in facts.items())
