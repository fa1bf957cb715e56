"""Results of runs for a comparison: figures, settings and status."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from basics.errors import UserError, one_line, print_error
from lab.compare.run_figures import Figures, Record, Written, figures_of, number, read_text
from lab.plan.setting import size_name
from run_config import ModelConfig, TrainConfig, load_config, with_defaults

LONGEST_VALUE = 60  # characters of a setting
HEARTBEAT_TIMEOUT = 60  # seconds; a run that trains writes its heartbeat every few seconds
RUNNING, NO_HEARTBEAT = "running", "no heartbeat"
LAST_WRITTEN = "running when last written"  # in a directory without a heartbeat, such as a copy
FINISHED, PUBLISHED = "finished", "published"
LOSS_SETTINGS = (  # change the loss; not the learning rates, which often change with the batch
    "dataset", "min_train_tokens", "repeat_data", "init_from", "optimizer", "weight_decay",
    "decay_norms_and_biases", "clipping_max_norm", "schedule", "schedule_learning_rate",
    "warmup_period_percent", "decay_period_percent", "final_learning_rate_fraction",
)
MEMORY_SETTINGS = (  # change the memory of a step
    "gradient_accumulation_steps", "residual_dtype", "compile", "attention", "head_chunks",
    "activation_checkpointing", "deterministic", "optimizer",
)


@dataclass(frozen=True)
class Result:
    """One run, or one published row.

    Attributes:
        config: `model.json` and `train.json` merged, with defaults; empty if one is unreadable.
        tests: losses on held-out tokens, by a description of the slice; the longest slice first.
        test_bits: the same in bits per byte, as far as they are known.
        texts: identities of the slices' texts, as far as `lab evaluate` recorded them.
        test_slice: the slice of the test loss in `figures`; the comparison chooses it.
        tokenizer: its name, if the run recorded it.
        code: the version of the code that ended the run, if it recorded one.
        machine: device, precision, number of processes.
        device: name of the GPU, or of the CPU.
        loss_group: results with an equal one form a curve of the loss over the batch size.
        memory_group: results with an equal one form a line of the memory over the microbatch.
        search: the microbatches that --find-max-microbatch has tried, and the GiB that each took.
    """

    name: str
    status: str
    figures: Figures
    config: dict[str, Any] = field(default_factory=dict)
    tests: dict[str, float] = field(default_factory=dict)
    test_bits: dict[str, float | None] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    test_slice: str = ""
    tokenizer: str | None = None
    code: str = ""
    notes: str = ""
    machine: tuple[str, ...] = ()
    device: str | None = None
    records: tuple[Record, ...] = ()
    memory_gib: float | None = None
    judge: str = ""  # who gave the instruction score, and when
    size: str = ""  # as `size_name` gives it; empty if it is not known
    loss_group: tuple[str, ...] = ()
    memory_group: tuple[str, ...] = ()
    search: tuple[tuple[float, float], ...] = ()

    @property
    def test_text(self) -> str:
        return self.text_of(self.test_slice)

    def text_of(self, test_slice: str) -> str:
        """Return what identifies the text of a slice: equal for the same text in other tokens."""
        return self.texts.get(test_slice, test_slice)


def priced(result: Result, usd_per_hour: float) -> Result:
    """Return a result as if all of its time had cost this much."""
    def usd(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / 3600 * usd_per_hour

    figures = replace(result.figures, usd=usd(result.figures.seconds),
                      validation_usd=usd(result.figures.validation_seconds))
    records = tuple(record | {"usd": usd(number(record.get("seconds")))}
                    for record in result.records)
    return replace(result, figures=figures, records=records)


def shown(value: Any) -> str:
    """Format a setting: 4 and 4.0 the same, on one line, of limited length."""
    if isinstance(value, dict | list):
        return "..."  # no setting has such a value
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if number(value) is not None and value == int(value):
        value = int(value)
    return one_line(str(value)[:LONGEST_VALUE])


def find_results(runs_dir: Path, names: tuple[str, ...]) -> list[Result]:
    """Read the runs with these names, or all runs that have been launched.

    Where no names are given, a run whose files cannot be read is left out, with a warning.

    Raises:
        UserError: there is no such run, or it has not been launched, or its files cannot be read.
    """
    try:
        found = {path.name: path for path in sorted(runs_dir.iterdir()) if path.is_dir()}
    except OSError as error:
        raise UserError(f"{runs_dir}: cannot be read ({error.strerror}); set the directory of"
                        " your runs with --runs-dir") from None
    launched = [name for name, path in found.items() if _was_launched(path)]
    for name in names:
        if name not in found:
            raise UserError(f"{runs_dir}: no run {name[:60]!r}; trained runs:"
                            f" {', '.join(launched) or 'none'}")
        if name not in launched:
            raise UserError(f"{found[name]}: has not been trained yet; train it with: uv run"
                            f" ddp_train.py {name}")
    results = []
    for name in dict.fromkeys(names or launched):
        try:
            results.append(read_result(found[name]))
        except UserError as error:
            if names:
                raise
            print_error(f"warning: left out: {one_line(str(error))}")
    return results


def read_result(run_dir: Path) -> Result:
    """Read the files of one run."""
    written = Written.read(run_dir)
    status = _status(run_dir, written)
    config, facts = _config(run_dir, written), written.part("machine")
    tests = _tests(written)
    machine = tuple(shown(facts.get(key)) for key in ("device", "precision", "processes"))
    return Result(
        name=one_line(run_dir.name), status=status, config=config, machine=machine,
        size=_size(config),
        device=machine[0] if isinstance(facts.get("device"), str) else None,
        figures=figures_of(written, config), records=written.records,
        tests={slice_of(line): line["loss"] for line in tests},  # later lines win
        test_bits={slice_of(line): number(line.get("bits_per_byte")) for line in tests},
        texts={slice_of(line): line["text"] for line in tests if isinstance(line.get("text"), str)},
        tokenizer=_tokenizer(written, tests),
        code=shown(code) if (code := written.summary.get("code")) else "",
        memory_gib=number(facts.get("peak_memory_gib")), judge=_judge(written),
        loss_group=_group(config, *LOSS_SETTINGS) if status == FINISHED else (),
        memory_group=(*machine, *_group(config, *MEMORY_SETTINGS)),
        search=tuple((size, gib) for trial in written.trials
                     if (size := number(trial.get("microbatch_size")))
                     and (gib := number(trial.get("demand_gib"))) is not None),
    )


def _tests(written: Written) -> list[Record]:
    """Return the tests of the last checkpoint, then of the best one; the longest slices first."""
    best = written.part("best").get("checkpoint")
    last = number(written.summary.get("global_step"))
    if best is None and last is None:  # the run has not ended: use its last measured checkpoint
        last = max((step for line in written.evaluations if (step := _step(line)) is not None),
                   default=None)
    of_last = [line for line in written.evaluations if last is not None and _step(line) == last]
    of_best = [line for line in written.evaluations
               if best is not None and line.get("checkpoint") == best]
    return sorted([*of_last, *of_best], key=lambda line: -(number(line.get("num_tokens")) or 0))


def _tokenizer(written: Written, tests: list[Record]) -> str | None:
    """Return the name in the summary; of a run that an earlier version trained, in its tests."""
    names = [record.get("tokenizer") for record in (written.summary, *tests)]
    return next((name for name in names if isinstance(name, str)), None)


def _step(line: Record) -> float | None:
    return number(line.get("global_step"))


def slice_of(test: Record) -> str:
    """Describe the tokens that a test loss was measured on."""
    start, count = (number(test.get(key)) for key in ("start_token", "num_tokens"))
    if start is None or count is None:
        return "unknown tokens"
    where = f"{shown(test.get('dataset'))}/{shown(test.get('split'))}"
    return f"{where}, {count:,.0f} tokens from token {start:,.0f}"


def _was_launched(run_dir: Path) -> bool:
    try:
        return any(read_text(run_dir / name).strip() for name in ("metrics.jsonl", "summary.json"))
    except UserError:  # too large: whoever reads it says so
        return True


def _status(run_dir: Path, written: Written) -> str:
    """Return the status of a run; one that should run may have been killed."""
    status = written.summary.get("status")
    if not isinstance(status, str) or not status:
        return "summary damaged" if (run_dir / "summary.json").exists() else "no summary"
    return status_now(run_dir) if status == RUNNING else one_line(status[:20])


def status_now(run_dir: Path) -> str:
    """Return the status of a run that is to train, as its summary says; it may have been killed."""
    beat = seconds_since(run_dir, "heartbeat.json")
    if beat is not None:
        return NO_HEARTBEAT if beat > HEARTBEAT_TIMEOUT else RUNNING
    written = seconds_since(run_dir, "summary.json", "metrics.jsonl")
    return LAST_WRITTEN if (written or 0.0) > HEARTBEAT_TIMEOUT else RUNNING


def seconds_since(run_dir: Path, *names: str) -> float | None:
    """Return the age of the newest of some files of a run; None if there is none."""
    times = []
    for name in names:
        with suppress(OSError):
            times.append((run_dir / name).lstat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None


def _config(run_dir: Path, written: Written) -> dict[str, Any]:
    """Return the settings that a run was trained with; empty if they cannot be read.

    The summary has them even if the files were edited later. A setting that it resolved by the
    device, and that train.json does not set, is shown as not set: it is no choice of the person.
    """
    in_files: dict[str, dict[str, Any]] = {}
    with suppress(UserError):
        configs = with_defaults(load_config(run_dir / "model.json", ModelConfig),
                                load_config(run_dir / "train.json", TrainConfig))
        in_files = {name: config.model_dump()
                    for name, config in zip(("model", "train"), configs, strict=True)}
    config: dict[str, Any] = {}
    for name, config_type in (("model", ModelConfig), ("train", TrainConfig)):
        resolved = written.part(name)
        if not in_files and not resolved:
            return {}
        config |= _with_field_defaults(config_type, resolved) if resolved else in_files[name]
    return config


def _judge(written: Written) -> str:
    line = written.judged
    return f"{shown(line['judge'])} on {shown(line.get('time'))[:10]}" if line else ""


def _size(config: dict[str, Any]) -> str:
    try:
        return size_name(ModelConfig.model_validate(
            {key: config[key] for key in ModelConfig.model_fields if key in config}))
    except ValidationError:
        return ""


def _with_field_defaults(config_type: type[BaseModel], resolved: Record) -> dict[str, Any]:
    """Add the defaults of settings that an older version did not have."""
    fields = config_type.model_fields
    defaults = {key: found.default for key, found in fields.items() if not found.is_required()}
    return defaults | {key: resolved[key] for key in fields if key in resolved}


def _group(config: dict[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the model's shape and some settings, to group results that have them in common."""
    return tuple(shown(config.get(key)) for key in (*ModelConfig.model_fields, *keys))
