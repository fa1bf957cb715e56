"""A model's README.md: what it is and how it came to be, in a form that the hub reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lab.targets import HUB_NAME, Target
from run_metrics import read_metrics
from run_summary import duration

CARD = """---
{front_matter}
---

# {title}

A GPT-2-class language model of {num_parameters:,} parameters, trained from scratch{on_data}.
It is a base model: it continues text, and follows no instructions.

| | |
|---|---|
{facts}

## How to load it

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{address}")
print(generator("{prompt}", max_new_tokens=50)[0]["generated_text"])
```

The architecture is stock GPT-2 (`GPT2LMHeadModel`), in float32: no code has to be trusted.
{notes}
## How it was trained

{training}

What its settings change from the defaults:

```json
{levers}
```
{charts}"""

CHARTS = {"loss-chart.png": "Training and validation loss", "grad-norm-chart.png": "Gradient norm",
          "learning-rate-chart.png": "Learning rate"}
MEASURED = {"loss": "loss (nats a token)", "perplexity": "perplexity",
            "bits_per_byte": "bits a byte", "accuracy": "accuracy",
            "normalised_accuracy": "accuracy by length"}


@dataclass(frozen=True)
class CardFacts:
    """What a card says that no file of the run knows."""

    title: str
    address: str  # of the model: on the hub, or a directory
    licence: str | None = None


def model_card(target: Target, facts: CardFacts) -> str:
    """Write the card of a run's model, from its summary and evaluations."""
    summary, dataset = _summary(target), target.run.train.dataset
    shown = [name for name in CHARTS if (target.run.run_dir / name).exists()]
    return CARD.format(
        front_matter=_front_matter(target, facts), title=facts.title,
        address=facts.address, num_parameters=target.model.num_parameters(),
        on_data=f" on {target.checkpoint.meta.tokens:,} tokens of `{dataset}`",
        prompt="def " if target.tokenizer_name == "bytes" else "Every effort moves you",
        facts=_rows(_model_facts(target)), training=_training(target, summary),
        notes=_notes(target), levers=json.dumps(_levers(target), indent=2),
        charts="".join(f"\n![{CHARTS[name]}]({name})\n" for name in shown),
    )


def _front_matter(target: Target, facts: CardFacts) -> str:
    from huggingface_hub import EvalResult, ModelCardData  # slow to import

    dataset = target.run.train.dataset
    results = [EvalResult(task_type="text-generation", task_name="Language modelling",
                          dataset_type=found["dataset"], dataset_name=found["dataset"],
                          dataset_split=found["split"], metric_type=found["metric"],
                          metric_name=found["name"], metric_value=found["value"])
               for found in measurements(target)]
    return ModelCardData(
        license=facts.licence, library_name="transformers", pipeline_tag="text-generation",
        datasets=[dataset] if HUB_NAME.fullmatch(dataset) else None, tags=["gpt2", "ddp-train"],
        model_name=facts.title, eval_results=results or None,
    ).to_yaml()


def measurements(target: Target) -> list[dict[str, Any]]:
    """Give what was measured of this checkpoint: its validation loss, and its evaluations.

    Of what was measured twice, the newer.
    """
    meta, dataset = target.checkpoint.meta, target.run.train.dataset
    found = {}
    if target.run.train.validates and meta.loss is not None:
        name = "validation loss while training (nats a token)"
        found[dataset, name] = {"metric": "loss", "value": meta.loss, "split": "validation"}
    for record in read_metrics(target.run.evaluations_path):
        if record.get("checkpoint") == target.checkpoint.name:
            for metric, name in MEASURED.items():
                if isinstance(record.get(metric), float):
                    where = record.get("benchmark") or record.get("dataset")
                    found[str(where), name + _slice(record)] = {
                        "metric": metric, "value": record[metric],
                        "split": record.get("split", "validation")}
    return [{"dataset": where, "name": name} | values for (where, name), values in found.items()]


def _slice(record: dict[str, Any]) -> str:
    if "num_tokens" not in record:
        return ""
    return f", {record['num_tokens']:,} tokens from token {record.get('start_token', 0):,}"


def _model_facts(target: Target) -> dict[str, str]:
    config = target.model.config
    return {
        "layers, heads, width": f"{config.n_layers}, {config.n_heads}, {config.emb_dim}",
        "context": f"{config.context_length:,} tokens",
        "vocabulary": f"{config.vocab_size:,} ({target.tokenizer_name or 'unknown tokenizer'})",
        "output head": "the token embedding" if config.tie_weights else "a matrix of its own",
        "biases of queries, keys, values": "yes" if config.qkv_bias else "none (stored as zeros)",
        **{f"{found['name']}, `{found['dataset']}`": f"{found['value']:.6f}"
           for found in measurements(target)},
    }


def _training(target: Target, summary: dict[str, Any]) -> str:
    meta = target.checkpoint.meta
    facts = {"step": f"{meta.global_step + 1:,} of {_count(summary.get('num_steps'))}",
             "tokens": f"{meta.tokens:,}",
             "training loss": "-" if meta.train_loss is None else f"{meta.train_loss:.6f}",
             "time": duration(sum(meta.seconds.values()))}
    if meta.usd:
        facts["US$"] = f"{sum(meta.usd.values()):.2f}"
    batch, machine = summary.get("batch") or {}, summary.get("machine") or {}
    if batch:
        facts["global batch"] = (f"{batch['microbatch_size']} x"
                                 f" {batch['gradient_accumulation_steps']} x"
                                 f" {batch['world_size']} sequences of"
                                 f" {batch['context_length']:,} tokens")
    if machine:
        facts["hardware"] = f"{machine['processes']} x {machine['device']}, {machine['precision']}"
        facts["software"] = f"PyTorch {machine['torch']}, Python {machine['python']}"
    if summary.get("tokens_per_second"):
        facts["tokens a second while training"] = f"{summary['tokens_per_second']:,.0f}"
    return "| | |\n|---|---|\n" + _rows(facts)


def _levers(target: Target) -> dict[str, Any]:
    """Give the settings that are not at their defaults, of the model and of the training."""
    run = target.run
    return {key: value for config in (run.model, run.train)
            for key, value in config.model_dump().items()
            if type(config).model_fields[key].is_required()
            or value != type(config).model_fields[key].get_default()}


def _notes(target: Target) -> str:
    if target.tokenizer_name == "bytes":
        return "Its tokens are bytes: ids 0 to 255, and 256 for the end of a text.\n"
    return ""


def _summary(target: Target) -> dict[str, Any]:
    try:
        found = json.loads(target.run.summary_path.read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _count(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else "?"


def _rows(facts: dict[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in facts.items())
