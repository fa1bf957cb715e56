"""Results of runs, and the published ones of the original system: figures, settings and status."""

import json
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from basics.errors import UserError, one_line
from basics.json_files import parsed_object
from basics.text import dollars
from lab.bills import BILL
from lab.plan.memory import size_name
from lab.runs import (
    EVALUATIONS,
    NEW,
    Record,
    RunFiles,
    is_launched,
    last_value,
    number,
    number_of,
    records_of,
    words,
)
from reporting.metrics_file import NUM_LAYERS, read_metrics, read_records
from reporting.setting_changes import REFERENCE_SETTINGS, histories
from reporting.summary import FINISHED, last_of_sets
from run_config import RUN_NAME, Grow, ModelConfig, TrainConfig, load_config, with_defaults

PUBLISHED_PATH = Path(__file__).parents[2] / "runs" / "published.json"
PUBLISHED = "published"
MODEL = "model"  # one that is no run of this project
SEARCH_FILE = "microbatch-search.json"  # of --find-max-microbatch --save
LONGEST_VALUE = 60  # characters of a setting
LOSS_SETTINGS = (  # change the loss; not the learning rates, which often change with the batch
    "dataset",
    "start_val_token",
    "validation",
    "min_train_tokens",
    "repeat_data",
    "init_from",
    "grow",
    "optimizer",
    "weight_decay",
    "decay_norms_and_biases",
    "clipping_max_norm",
    "schedule",
    "schedule_learning_rate",
    "warmup_period_percent",
    "decay_period_percent",
    "final_learning_rate_fraction",
)
MEMORY_SETTINGS = (  # change the memory of a step
    "gradient_accumulation_steps",
    "residual_dtype",
    "compile",
    "attention",
    "head_chunks",
    "activation_checkpointing",
    "deterministic",
    "optimizer",
)
FROM_RECORDS = (
    "tokens",
    "tokens_per_second",
    "train_loss",
    "validation_loss",
    "validation_bits_per_byte",
)  # also in a summary
Figures = dict[str, float | None]  # by FIGURES; None for what is not known
# Training FLOPs per token, with the first global step that has them: a run that grows has two.
Parts = tuple[tuple[int, int], ...]
FIGURES = (
    "global_batch_size",
    "microbatch_size",
    *FROM_RECORDS,
    "steps",
    "training_pflop",  # 10^15 FLOPs: those of the model, without validation
    "ift_score",  # 0 to 100: a judge model's score after instruction fine-tuning
    "ift_low",
    "ift_high",  # the score's 95% interval
    "ift_spread",  # standard deviation over repeated tunings; and their number
    "ift_tunings",
    "seconds",
    "validation_seconds",
    "usd",  # of all phases; of one; of all
    "download_seconds",  # of that phase
    *BILL,  # of the machines, beside all phases: set-up, searches and idle time
    "num_gpus",
)


@dataclass(frozen=True)
class Result:
    """One run, another model, or a published row. Results with an equal group form one curve."""

    name: str
    status: str
    figures: Figures  # losses are the last ones, not the best
    sets: Figures = field(default_factory=dict)  # of validation sets with names, by key of a record
    reason: str = ""  # why it ended or stopped, as its summary says
    # `model.json` and `train.json` merged, with defaults; empty if one is unreadable.
    config: dict[str, Any] = field(default_factory=dict)
    # The same as text; of a setting that was changed during the run all its values.
    settings: dict[str, str] = field(default_factory=dict)
    # On held-out tokens, by the text or the slice; the longest first.
    tests: dict[str, Record] = field(default_factory=dict)
    tokenizer: str | None = None
    code: str = ""  # the version of the code that ended the run, if it recorded one
    notes: str = ""
    machine: tuple[str, ...] = ()  # device, precision, number of processes
    device: str | None = None
    records: tuple[Record, ...] = ()
    flops_per_token: Parts = ()  # of training
    memory_gib: float | None = None
    judge: str = ""  # who gave the instruction score, and when
    size: str = ""  # as `size_name` gives it; empty if it is not known
    loss_group: tuple[str, ...] = ()  # of a curve of the loss over the batch size
    memory_group: tuple[str, ...] = ()  # of a line of the memory over the microbatch
    search: tuple[tuple[float, float], ...] = ()  # tried by --find-max-microbatch, and their GiB

    @property
    def validation_slice(self) -> tuple[str, ...]:
        """The settings that say on which tokens the run validates."""
        keys = ["start_val_token", "validation_sequences", "context_length"]
        if self.config.get("validation_batches") is not None:
            keys += ["validation_batches", "microbatch_size"]
        # The first set may be the dataset's own validation file, with a name.
        place = next(iter(self._validation.values()), self.config.get("dataset"))
        return str(place), *(shown(self.config.get(key)) for key in keys)  # not cut: a long path

    @property
    def deciding_set(self) -> str:
        """The name of the validation set whose loss `validation_loss` is; "" without a name."""
        return shown(next(iter(self._validation), ""))

    @property
    def _validation(self) -> dict[str, Any]:
        sets = self.config.get("validation")
        return sets if isinstance(sets, dict) else {}

    def priced(self, usd_per_hour: float) -> Self:
        """Return this result with the dollars of all its time at one price."""

        def usd(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * usd_per_hour / 3600

        return replace(
            self,
            figures=self.figures | {"usd": usd(self.figures["seconds"])},
            records=tuple(record | {"usd": usd(record.get("seconds"))} for record in self.records),
        )


def shown(value: Any) -> str:
    """Format a setting: 4 and 4.0 the same, on one line, of limited length."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if number(value) is not None and value == int(value):
        value = int(value)
    return one_line(str(value)[:LONGEST_VALUE])


def read_result(run_dir: Path) -> Result:
    """Read the files of one run. Raises: UserError: one of them is too large."""
    files = RunFiles.read(run_dir)
    records = records_of(run_dir, read_metrics(run_dir / "metrics.jsonl"))
    evaluations = _evaluations(run_dir)
    judged = _last_judged(evaluations)
    tests = _tests(files, evaluations)
    config, facts, code = _config(files), files.part("machine"), files.summary.get("code")
    settings = {key: shown(value) for key, value in config.items() if key not in REFERENCE_SETTINGS}
    settings |= {key: text for key, text in histories(records).items() if key in settings}
    machine = tuple(shown(facts.get(key)) for key in ("device", "precision", "processes"))
    tokenizers = [record.get("tokenizer") for record in (files.summary, *tests)]
    known = {key: config[key] for key in ModelConfig.model_fields if key in config}
    model = None
    with suppress(ValidationError):
        model = ModelConfig.model_validate(known)
    flops_per_token = _flops_per_token(files, records, config, model) if model else ()

    def group(*keys: str) -> tuple[str, ...]:
        return tuple(settings.get(key, "null") for key in (*ModelConfig.model_fields, *keys))

    return Result(
        name=run_dir.name,
        status=files.status,
        config=config,
        settings=settings,
        machine=machine,
        size=size_name(model) if model else "",
        reason=str(files.summary.get("reason") or ""),
        device=machine[0] if isinstance(facts.get("device"), str) else None,
        figures=_figures(files, records, config, judged, flops_per_token),
        flops_per_token=flops_per_token,
        sets={key: number(value) for key, value in last_of_sets([*records, files.summary]).items()},
        records=records,
        tests=_by_text(tests),
        tokenizer=next((name for name in tokenizers if isinstance(name, str)), None),
        code=shown(code) if code else "",
        memory_gib=number_of(facts, "peak_memory_gib"),
        judge=_judge_of(judged),
        loss_group=group(*LOSS_SETTINGS) if files.status == FINISHED else (),
        memory_group=(*machine, *group(*MEMORY_SETTINGS)),
        search=_trials(run_dir),
    )


def _figures(
    files: RunFiles,
    records: tuple[Record, ...],
    config: dict[str, Any],
    judged: Record,
    flops_per_token: Parts,
) -> Figures:
    found: Figures = {}
    for key in FROM_RECORDS:
        told = [record[key] for record in (*records, files.summary) if key in record]
        found[key] = number(told[-1]) if told else None  # a loss of null is not finite
    last_step = last_value([*records, files.summary], "global_step")
    steps = None if last_step is None else last_step + 1
    seconds, usd = files.spent(records)
    if files.has_ended:
        validation = files.phases("seconds").get("validation", 0.0)
    else:
        validation = sum(record.get("validation_seconds") or 0.0 for record in records)
    batch = number_of(config, "global_batch_size")
    context_length = number_of(config, "context_length")
    if found["tokens"] and steps and context_length:
        batch = round(found["tokens"] / steps / context_length)
    machine = files.part("machine")
    is_on_gpus = machine.get("device_type") == "cuda"
    found |= _score(judged)
    return found | {
        "steps": steps,
        "training_pflop": training_flops(flops_per_token, found["tokens"], steps) / 1e15
        if flops_per_token and found["tokens"] and steps
        else None,
        "seconds": seconds,
        "usd": usd,
        "validation_seconds": validation,
        "download_seconds": files.phases("seconds").get("download"),
        **dict.fromkeys(BILL),  # its files alone do not tell
        "global_batch_size": batch,
        "microbatch_size": number((files.part("batch") or config).get("microbatch_size")),
        "num_gpus": number_of(machine, "processes") if is_on_gpus else None,
    }


def _flops_per_token(
    files: RunFiles, records: tuple[Record, ...], config: dict[str, Any], model: ModelConfig
) -> Parts:
    """Return what a run's training takes per token; nothing if that is not known.

    Of a run that grows it is that of the layers which its record of the growth tells.
    """
    try:
        grow = None if config.get("grow") is None else Grow.model_validate(config["grow"])
    except ValidationError:
        return ()
    grown_at = [record["global_step"] for record in records if number_of(record, NUM_LAYERS)]
    if grow is None:
        # With a record of a growth, the key was dropped since.
        return () if grown_at else ((0, model.flops_per_token),)
    small = (0, model.with_layers(grow.from_layers).flops_per_token)
    if grown_at:
        return (small, (grown_at[-1], model.flops_per_token))
    # With all layers and no record of a growth, the run got the key when it had trained them.
    num_layers = number_of(files.part("this_launch"), "num_layers")
    return ((0, model.flops_per_token),) if num_layers == model.n_layers else (small,)


def training_flops(parts: Parts, tokens: float, steps: float) -> float:
    """Return the training FLOPs of a run's first steps, which have so many tokens in all."""
    ends = [*(first for first, _ in parts[1:]), steps]
    of_steps = sum(
        per_token * (min(end, steps) - min(first, steps))
        for (first, per_token), end in zip(parts, ends, strict=True)
    )
    return tokens * of_steps / steps


def read_searched(runs_dir: Path) -> list[Result]:
    """Read the runs that were not launched and have a saved search. Raises: UserError."""
    names = sorted(path.parent.name for path in runs_dir.glob(f"*/{SEARCH_FILE}"))
    found = [
        replace(read_result(runs_dir / name), status=NEW)
        for name in names
        if RUN_NAME.fullmatch(name) and not is_launched(runs_dir, name)
    ]
    return [result for result in found if result.search]


def read_models(runs_dir: Path) -> list[Result]:
    """Read what was measured of models that are no runs. Raises: UserError: it is too large."""
    by_target: dict[str, list[Record]] = {}
    for line in _evaluations(runs_dir):
        if target := words(line.get("target")):
            by_target.setdefault(target, []).append(line)
    results = []
    for target, lines in by_target.items():
        tests = sorted(_losses(lines), key=_num_tokens, reverse=True)
        judged = _last_judged(lines)
        figures: Figures = dict.fromkeys(FIGURES)
        if tests or judged:  # scores of tasks are not shown
            tokenizers = (words(test.get("tokenizer")) for test in tests)
            sizes = (words(line.get("model")) for line in lines)
            result = Result(
                name=target,
                status=MODEL,
                figures=figures | _score(judged),
                tests=_by_text(tests),
                tokenizer=next(filter(None, tokenizers), None),
                judge=_judge_of(judged),
                size=next(filter(None, sizes), ""),
            )
            results.append(result)
    return results


def _evaluations(directory: Path) -> list[Record]:
    """Return the lines of `lab evaluate` and `lab judge`; of a damaged one an empty record."""
    return [*map(parsed_object, read_records(directory / EVALUATIONS).split("\n"))]


def _last_judged(evaluations: list[Record]) -> Record:
    """Return the last line of `lab judge`; an empty one if there is none."""
    scores = [
        line for line in evaluations if number_of(line, "score") is not None and "judge" in line
    ]
    return scores[-1] if scores else {}


def _judge_of(judged: Record) -> str:
    return f"{shown(judged['judge'])} on {shown(judged.get('time'))[:10]}" if judged else ""


def _score(judged: Record) -> Figures:
    interval = judged.get("score_interval")
    low, high = interval if isinstance(interval, list) and len(interval) == 2 else (None, None)
    return {
        "ift_score": number_of(judged, "score"),
        "ift_low": number(low),
        "ift_high": number(high),
        "ift_spread": number_of(judged, "score_spread"),
        "ift_tunings": number_of(judged, "tunings"),
    }


def _by_text(tests: list[Record]) -> dict[str, Record]:
    """Return tests by the text or the slice that they were measured on; later ones win."""
    return {str(test.get("text") or slice_of(test)): test for test in tests}


def _num_tokens(test: Record) -> float:
    return number_of(test, "num_tokens") or 0


def _losses(evaluations: list[Record]) -> list[Record]:
    """Return the losses on held-out tokens; not on tokens trained on."""
    return [
        line
        for line in evaluations
        if number_of(line, "loss") is not None and line.get("split") == "validation"
    ]


def _tests(files: RunFiles, evaluations: list[Record]) -> list[Record]:
    """Return the tests of the last checkpoint, then of the best one; the longest slices first."""
    tests = _losses(evaluations)
    best = files.part("best").get("checkpoint")
    last = number_of(files.summary, "global_step")
    steps = [number_of(line, "global_step") for line in tests]
    if best is None and last is None:  # the run has not ended: use its last measured checkpoint
        last = max((step for step in steps if step is not None), default=None)
    found = []
    if last is not None:
        found += [line for line, step in zip(tests, steps, strict=True) if step == last]
    if best is not None:
        found += [line for line in tests if line.get("checkpoint") == best]
    return sorted(found, key=_num_tokens, reverse=True)


def _trials(run_dir: Path) -> tuple[tuple[float, float], ...]:
    """Return the microbatches that fitted in --find-max-microbatch --save, and the GiB of each."""
    trials = parsed_object(read_records(run_dir / SEARCH_FILE)).get("trials")
    found = []
    for trial in trials if isinstance(trials, list) else []:
        if isinstance(trial, dict) and trial.get("fits") is True:
            size, gib = number_of(trial, "microbatch_size"), number_of(trial, "demand_gib")
            if size and gib is not None:
                found.append((size, gib))
    return tuple(found)


def slice_of(test: Record) -> str:
    """Describe the tokens that a test loss was measured on."""
    start, count = number_of(test, "start_token"), number_of(test, "num_tokens")
    if start is None or count is None:
        return "unknown tokens"
    where = f"{shown(test.get('dataset'))}/{shown(test.get('split'))}"
    return f"{where}, {count:,.0f} tokens from token {start:,.0f}"


def _config(files: RunFiles) -> dict[str, Any]:
    """Return the settings that a run was trained with; empty if they cannot be read.

    The summary has them even if the files were edited later. Settings that an older version did
    not have get their defaults.
    """
    fields = ModelConfig.model_fields | TrainConfig.model_fields
    if files.part("model") and files.part("train"):
        known = {key: one.default for key, one in fields.items() if not one.is_required()}
        known |= files.part("model") | files.part("train")
        return {key: known[key] for key in fields if key in known}
    try:
        configs = with_defaults(
            load_config(files.run_dir / "model.json", ModelConfig),
            load_config(files.run_dir / "train.json", TrainConfig),
        )
    except UserError:
        return {}
    model, train = (config.model_dump(mode="json") for config in configs)
    return model | train


def read_published() -> list[Result]:
    """Read the published results; dollars follow from their seconds and the machine's price."""
    published = json.loads(PUBLISHED_PATH.read_text(encoding="utf-8"))
    where = published["test_slice"]
    results = []
    for row in published["rows"]:
        num_gpus, _, device = row.get("machine", "").partition("x ")
        # The original's fit has one point per run: of two checkpoints the best.
        is_in_fit = row.get("dataset") == "FineWeb" and row.get("checkpoint") != "latest"
        test = {slice_of(where): where | {"loss": row["test_loss"]}} if "test_loss" in row else {}
        figures = {key: row.get(key) for key in FIGURES}
        result = Result(
            name=row["name"],
            status=PUBLISHED,
            notes=row.get("notes", ""),
            size=row["model"],
            figures=figures | {"num_gpus": int(num_gpus) if device else None},
            tests=test,
            device=device or None,
            memory_gib=row.get("gib_per_gpu"),
            loss_group=(PUBLISHED, row["dataset"], str(row.get("tokens"))) if is_in_fit else (),
            memory_group=(PUBLISHED,),
        )
        results.append(result.priced(row["usd_per_hour"]) if "usd_per_hour" in row else result)
    return results


def published_bills() -> str:
    """Say what the machines of the published runs cost in all, which their seconds do not tell."""
    bills = json.loads(PUBLISHED_PATH.read_text(encoding="utf-8"))["bills"]
    usd = ", ".join(map(dollars, bills["runs_usd"]))
    return (
        f"its four runs on rented machines were billed US${usd}, and all of the machines' time"
        f" US${dollars(bills['total_usd'])}"
    )


class Reached(NamedTuple):
    """What a run had trained on and spent when it reached a loss; dollars if the price is known."""

    tokens: float
    usd: float | None = None


def first_reaching(records: Iterable[Record], loss: float) -> Reached | None:
    """Return when a run's validation loss was first at or below a loss; None if it never was.

    Between two validations the loss is taken as linear in tokens, and so are the dollars. Of a
    run whose first validation is already there, it is that validation: an upper bound.
    """
    before: tuple[float, Reached] | None = None
    for record in records:
        now = number_of(record, "validation_loss")
        tokens, usd = number_of(record, "tokens"), number_of(record, "usd")
        if now is None or tokens is None:
            continue
        if now > loss:
            before = now, Reached(tokens, usd)
        elif before is None:
            return Reached(tokens, usd)
        else:
            high, first = before
            share = (high - loss) / (high - now)
            return Reached(
                first.tokens + share * (tokens - first.tokens),
                None if None in (first.usd, usd) else first.usd + share * (usd - first.usd),
            )
    return None


def mean_reached(runs: Iterable[tuple[Iterable[Record], float]]) -> Reached | None:
    """Return the mean over runs with a loss to reach each; None without any, or if one has not."""
    found = [first_reaching(records, loss) for records, loss in runs]
    if not found or None in found:
        return None
    tokens, usd = zip(*found, strict=True)
    return Reached(statistics.fmean(tokens), None if None in usd else statistics.fmean(usd))
