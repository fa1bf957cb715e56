"""A model's README.md: its card, in the format that the hub reads, with what was measured of it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, EvalResult, ModelCard, ModelCardData

from basics.cli import RUNS
from basics.errors import UserError, first_line, one_line
from basics.files import read_regular_file
from basics.text import code, counted, dollars, escaped
from checkpointing import CheckpointMeta
from lab.runs import RUNNING, Record, RunFiles, number
from reporting.metrics_file import read_metrics
from reporting.setting_changes import histories
from run_config import ModelConfig, TrainConfig
from settings.data import DATASET_NAME
from settings.optimizer import MUON_DEFAULTS
from tokens.tokenizer import TOKENIZER_FILE
from trainer.model_names import HUB_NAME
from trainer.models import LoadedModel

CHARTS = {
    "loss-chart.png": "Training and validation loss",
    "grad-norm-chart.png": "Gradient norm",
    "learning-rate-chart.png": "Learning rate",
}
HERE = "."  # where the model is that no repository has: in the card's directory
MAX_PROMPT = 60  # characters, of the example
MARK = "ddp-train"  # a tag that identifies our cards
ADDRESS = re.compile(r'(pipeline\("text-generation", model=)"[^"\n]*"')
FINEWEB = re.compile(r"(gpjt|HuggingFaceFW)/fineweb(-edu)?(-gpt2-tokens)?")  # has no card here
LICENCE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{1,8})*")
MEASURED = {
    "loss": "loss (nats per token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
    "normalised_accuracy": "length-normalised accuracy",
}


def template(name: str) -> str:
    """Return a part of a card, to be filled in by `str.format`."""
    return (Path(__file__).parent / "cards" / name).read_text(encoding="utf-8")


GGUF = template("gguf.md").strip()


@dataclass(frozen=True)
class PublishRequest:
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
    runs_dir: Path = RUNS
    datasets_dir: Path = Path("datasets")

    def check(self) -> None:
        """Raises: UserError: the hub would refuse the repository, the licence or a language."""
        for option, values, pattern, wanted in (
            ("REPOSITORY", [self.repository], HUB_NAME, "owner/name"),
            ("--license", [self.licence], LICENCE_NAME, "a short name such as mit or other"),
            ("--language", self.languages, LANGUAGE_CODE, "a code such as en or pt-BR"),
        ):
            for value in values:
                if value is not None and not pattern.fullmatch(value):
                    raise UserError(f"{option}: {value[:60]!r} cannot be used; give {wanted}")


def model_card(target: LoadedModel, request: PublishRequest) -> str:
    """Return the card of a run's model, made of its checkpoint, summary and evaluations.

    The run's configs may have changed since training: they count only where neither the checkpoint
    nor the summary has the settings.
    """
    run_dir = target.run.run_dir
    written = RunFiles.read(run_dir)
    config = target.model.config
    meta, tokens = target.checkpoint.meta, target.checkpoint.tokens
    settings = meta.settings or written.part("train") or target.run.config.model_dump()
    start = settings.get("init_from")
    if start is not None:
        start = public_name(str(start), beside=run_dir)
        settings = settings | {"init_from": start}
    dataset = one_line(str(settings.get("dataset")))
    found = measurements(target, dataset)
    licence, languages = declared_of(dataset, request.datasets_dir)
    front_matter = ModelCardData(  # the licence of other weights that it began with counts too
        license=request.licence or (licence if start is None else None),
        language=list(request.languages) or languages or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", MARK],
        model_name=target.run.name,
        datasets=[dataset] if HUB_NAME.fullmatch(dataset) else None,
        eval_results=found or None,
    )
    step = f"{meta.global_step + 1:,}"
    so_far = ""
    if written.status == RUNNING:
        so_far = f" so far:\nthese are the weights after step {step}; training goes on"
    if num_steps := number(written.summary.get("num_steps")):
        step += f" of {num_steps:,.0f}"
    tokenizer = target.tokenizer_name or "unknown tokenizer"
    if target.tokenizer_path:
        tokenizer = TOKENIZER_FILE
    prompts = settings.get("sample_prompts")  # the run's own, which suit its text
    found_prompts = prompts if isinstance(prompts, list) else []
    usable = (each for each in found_prompts if isinstance(each, str) and each.strip())
    prompt = next(usable, "The ")[:MAX_PROMPT]
    notes = ""
    if target.tokenizer_name == "bytes":
        notes = "Its tokens are bytes: ids 0 to 255, and 256 for the end of text.\n"
    results = {f"{one.metric_name}, {one.dataset_name}": f"{one.metric_value:.6f}" for one in found}
    records = read_metrics(target.run.metrics_path)
    until_here = [record for record in records if record["global_step"] < meta.global_step]
    more = []
    for name, title in CHARTS.items():
        if (run_dir / name).is_file():
            more.append(f"![{title}]({name})")
    if request.with_gguf:
        more.append(GGUF)
    return template("base_model.md").format(
        front_matter=front_matter.to_yaml(),
        title=target.run.name,
        config=config,
        tokens="an unknown number of" if tokens is None else f"{tokens:,}",
        address=request.repository or HERE,
        start=f"the weights of {code(start)}" if start else "scratch",
        dataset=code(dataset),
        so_far=so_far,
        tokenizer=tokenizer,
        head="tied to the token embedding" if config.tie_weights else "separate",
        biases="yes" if config.qkv_bias else "no (stored as zeros)",
        results=_rows(results),
        prompt=ascii(prompt),  # as Python's code has it, on one line
        num_new_tokens=min(50, config.context_length // 2),
        notes=notes,
        step=step,
        train_loss="-" if meta.train_loss is None else f"{meta.train_loss:.6f}",
        hours=f"{sum(meta.seconds.values()) / 3600:.3f}" if meta.seconds else "-",
        training=_rows(_training(meta, written) | histories(until_here)),
        settings=json.dumps(_changed(meta.model, settings), indent=2),
        more="".join(f"\n\n{part}" for part in more),
    )


def changed_card(path: Path, request: PublishRequest) -> str:
    """Return an exported model's card with what a request changes. Raises: UserError."""
    try:
        card = ModelCard(read_regular_file(path))
    except Exception as error:  # the YAML library has errors of its own
        raise UserError(
            f"{path}: not a model card ({first_line(error)}); export the model again"
        ) from None
    card.data["license"] = request.licence or card.data.get("license")
    card.data["language"] = list(request.languages) or card.data.get("language")
    before, _, own = card.text.partition(GGUF)  # somebody may have written something below
    card.text = ADDRESS.sub(rf'\1"{request.repository or HERE}"', before.rstrip("\n"))
    parts = [str(card), *[GGUF] * request.with_gguf, own.strip("\n")]
    return "\n\n".join(filter(None, parts)) + "\n"


def names_licence(directory: Path) -> bool:
    front_matter = read_regular_file(directory / "README.md").partition("\n---")[0]
    return "\nlicense:" in front_matter


def public_name(name: str, *, beside: Path | None = None) -> str:
    """Return a model's name as others may read it: of a path on this machine the last part."""
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
    licence = str(values.get("license"))
    languages = values.get("language")
    if not LICENCE_NAME.fullmatch(licence) or licence == "unknown":  # nobody has filled it in
        return None, []
    if not isinstance(languages, list):
        languages = [languages]
    codes = [str(language) for language in languages]
    return licence, codes if all(map(LANGUAGE_CODE.fullmatch, codes)) else []


def measurements(target: LoadedModel, dataset: str) -> list[EvalResult]:
    """Collect the results of this checkpoint: its validation loss and its evaluations.

    Of repeated evaluations the newest counts; losses of tokens trained on, which say nothing about
    others, and values that are not numbers are left out.
    """
    checkpoint = target.checkpoint
    found: dict[tuple[str, str], EvalResult] = {}

    def add(where: str, name: str, split: Any, metric: str, value: float) -> None:
        found[where, name] = EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_type=where,
            dataset_name=where,
            metric_type=metric,
            dataset_split=None if split is None else one_line(str(split)),
            metric_name=name,
            metric_value=value,
        )

    if target.run.config.validates and checkpoint.loss is not None:
        name = "validation loss during training (nats per token)"
        config = target.run.config
        where = one_line((config.validation or {}).get(config.deciding_set, dataset))
        add(where, name, "validation", "loss", checkpoint.loss)
    for record in read_metrics(target.run.evaluations_path):
        is_task = "benchmark" in record
        split = record.get("split", None if is_task else "validation")
        if record.get("checkpoint") != checkpoint.name or (not is_task and split != "validation"):
            continue
        where = one_line(str(record.get("benchmark") or record.get("dataset")))
        for metric, name in MEASURED.items():
            if (value := number(record.get(metric))) is not None:
                add(where, name + _of_what(record), split, metric, value)
    return list(found.values())


def _of_what(record: Record) -> str:
    """Say on which tokens a loss was measured, or on which questions that are not the task's."""
    count = number(record.get("num_tokens"))
    start = number(record.get("start_token"))
    if "benchmark" not in record and count is not None and start is not None:
        return f", {count:,.0f} tokens from token {start:,.0f}"
    if "questions_from" in record and not isinstance(record.get("split"), str):
        return f", questions of {one_line(str(record['questions_from']))}"
    return ""


def _training(meta: CheckpointMeta, written: RunFiles) -> dict[str, str]:
    """Return what else is known of the training; a run's own files may be damaged."""
    machine = written.part("machine")
    batch = written.part("batch")
    facts = {}
    if meta.usd:
        facts["US$"] = dollars(sum(meta.usd.values()))
    if epoch_tokens := number(batch.get("epoch_tokens")):
        facts["passes over the dataset"] = f"{meta.tokens / epoch_tokens:.2f}"
    keys = ("microbatch_size", "gradient_accumulation_steps", "world_size", "context_length")
    sizes = [number(batch.get(key)) for key in keys]
    if all(sizes):
        text = "{:.0f} x {:.0f} x {:.0f} sequences of {:,.0f} tokens"
        facts["global batch"] = text.format(*sizes)
    if machine:
        processes = int(number(machine.get("processes")) or 1)
        each = f"{processes} x"
        if machine.get("device_type") == "cpu":
            each = counted(processes, "process on", "processes on")
        facts["hardware"] = f"{each} {machine.get('device')}"
        facts["precision"] = str(machine.get("precision"))
        facts["software"] = f"PyTorch {machine.get('torch')}, Python {machine.get('python')}"
    if speed := number(written.summary.get("tokens_per_second")):
        facts["tokens per second during training"] = f"{speed:,.0f}"
    return facts


def _changed(model: ModelConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of model and training that differ from their defaults."""
    # With Muon also those whose default depends on the width: a card is read without this code.
    always = {*MUON_DEFAULTS, "init"} if settings.get("optimizer") == "muon" else set()
    return {
        key: values[key]
        for config, values in ((ModelConfig, model.model_dump()), (TrainConfig, settings))
        for key, field in config.model_fields.items()
        if key in values
        and (field.is_required() or key in always or values[key] != field.get_default())
    }


def _rows(facts: dict[str, str]) -> str:
    return "".join(
        "\n| {} | {} |".format(*(escaped(one_line(text)) for text in row)) for row in facts.items()
    )
