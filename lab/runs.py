"""Runs as their files tell: the one reader of runs for all of the lab, and a data frame of them.

A run may be training, killed or removed meanwhile; its files may be damaged, half-written or of an
older version. A value that cannot be read, or that no run can have measured, is None.
"""

from __future__ import annotations

import datetime
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from basics.checkpoint_files import losses_of_the_original, of_the_original, step_of
from basics.errors import UserError, one_line, print_error
from basics.files import append_whole
from basics.json_files import found_object, parsed_object, to_json
from basics.text import did_you_mean
from lab.bills import Bill
from lab.columns import FIGURES, shown_in
from lab.plan.memory import size_name
from reporting.clock import DOWNLOAD, STARTUP
from reporting.metrics_file import (
    MAX_RECORDS_BYTES,
    METRICS,
    NUM_LAYERS,
    is_list,
    is_number,
    read_metrics,
    read_records,
    record_warnings,
    valid_records,
)
from reporting.reference import RUN_REFERENCE, Compared
from reporting.setting_changes import REFERENCE_SETTINGS, histories, recorded_changes
from reporting.summary import duration, last_of_sets
from run_config import (
    RUN_NAME,
    SHIPPED_RUNS,
    ModelConfig,
    TrainConfig,
    find_run,
    is_run_dir,
    load_config,
    run_name,
    with_defaults,
)
from settings.machine import MachineConfig
from settings.weights import Grow

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_WORDS = 200  # characters of a status, a phase or a reason
HEARTBEAT_SECONDS = 60  # a run that trains writes its heartbeat every few seconds
RUNNING, NO_HEARTBEAT, NEW = "running", "no heartbeat", "not launched"
NO_SUMMARY = "no summary"
OF_THE_ORIGINAL = "of the original system"
LAST_WRITTEN = "running when last written"  # in a directory without a heartbeat, such as a copy
LAUNCHED = ("metrics.jsonl", "summary.json", "heartbeat.json")  # a launched run has one of them
END_BYTES = 2**17  # of the records, some 300: what a list shows of a run
SEARCHED_BYTES = 2**22  # of the records, where the last validation is looked for
VALIDATION = b'"validation_loss"'
EVALUATIONS = "evaluations.jsonl"  # of a run, and in `runs/` of the models that are no runs
SEARCH_FILE = "microbatch-search.json"  # of --find-max-microbatch --save
PUBLISHED = "published"  # the status of a row of `runs/published.json`
LONGEST_VALUE = 60  # characters of a setting
TEXTS = ("model", "machine", "notes", "ift_judge")  # columns of `frame_of` beside NUMBERS
NUMBERS = (
    *(figure.key for figure in FIGURES),
    *("validation_seconds", "validation_perplexity", "ift_low", "ift_high"),
)

Record = dict[str, Any]
Version = tuple[int, int, int]  # of a file: inode, bytes, nanoseconds of its last change


def number(value: Any) -> float | None:
    """Return a number that a run can have measured unchanged, and None for everything else."""
    return value if is_number(value, 0) else None


def number_of(record: Record, key: str) -> float | None:
    """Return a number in a record, as `number` does; None without such a key."""
    return number(record.get(key))


def words(value: object) -> str | None:
    """Return a text of a run on one line of limited length; None if there is none."""
    return one_line(value[:MAX_WORDS]) if isinstance(value, str) and value else None


def version_of(path: Path) -> Version | None:
    """Return what changes when a file is appended to or replaced; None if missing or too large.

    None for a link too: what a run directory shows is its own.
    """
    with suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_RECORDS_BYTES:
            return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def last_records(path: Path) -> tuple[Record, ...]:
    """Return the records at the end of a `metrics.jsonl`, and the last validation before them."""
    version = version_of(path)
    return _last_records(path, version) if version else ()


@lru_cache(maxsize=256)
def _last_records(path: Path, version: Version) -> tuple[Record, ...]:
    """Read them; while the file's version is the same, they are not read again."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, version[1] - SEARCHED_BYTES))
            content = file.read()
    except OSError:  # removed or replaced meanwhile
        return ()
    before, content = content[:-END_BYTES], content[-END_BYTES:]
    line = b""  # with the last validation, if that is before the end
    if VALIDATION not in content and (place := before.rfind(VALIDATION)) >= 0:
        line = before[before.rfind(b"\n", 0, place) + 1 :].partition(b"\n")[0]
    return tuple(valid_records(b"\n".join((line, content)).decode(errors="replace")))


def last_value(records: Sequence[Record], key: str) -> float | None:
    """Return the last number under a key that a run can have measured; None if there is none."""
    for record in reversed(records):
        value = number_of(record, key)
        if value is not None:
            return value
    return None


def append_evaluation(path: Path, record: Record) -> None:
    """Add a line with the time to an evaluations.jsonl; a failure is only a warning."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_whole(path, to_json(record | {"time": now}) + "\n")
    except OSError as error:
        print_error(f"warning: result not saved: {path}: {error.strerror or error}")


def launched_runs(runs_dir: Path) -> list[str]:
    """Return the names of all runs that have been launched, sorted. Raises: UserError."""
    try:
        names = sorted(os.listdir(runs_dir))
    except FileNotFoundError:
        remedy = "train a run (uv run ddp_train.py demo), or name another directory with --runs-dir"
        if SHIPPED_RUNS.is_dir() and launched_runs(SHIPPED_RUNS):
            remedy = f"there are trained runs in another one: --runs-dir {SHIPPED_RUNS}"
        raise UserError(f"{runs_dir.absolute()}: no such directory; {remedy}") from None
    except OSError as error:
        raise UserError(
            f"{runs_dir}: cannot be read ({error.strerror}); set the directory of"
            " your runs with --runs-dir"
        ) from None
    return [name for name in names if is_launched(runs_dir, name)]


def is_launched(runs_dir: Path, name: str) -> bool:
    """Return whether a run has a file that a launch writes, with something in it.

    Or a checkpoint of the original system, which writes none of these.
    """
    if not RUN_NAME.fullmatch(name):  # a name from a browser could be a path out of the directory
        return False
    versions = [version_of(runs_dir / name / file) for file in LAUNCHED]
    return any(version and version[1] for version in versions) or bool(
        of_the_original(runs_dir / name / "checkpoints")
    )


def chosen_runs(runs_dir: Path, names: Iterable[str]) -> list[str]:
    """Return these runs, or all that have been launched.

    Raises: UserError: one of them is not; it names those that are.
    """
    launched = launched_runs(runs_dir)
    chosen = []
    for text in dict.fromkeys(names):
        if find_run(runs_dir, text) is None and not is_run_dir(Path(text)):
            trained = ", ".join(launched) or "none"
            raise UserError(
                f"{runs_dir}: no run {text[:60]!r}{did_you_mean(text, launched)}; trained runs:"
                f" {trained}"
            )
        name = run_name(runs_dir, text)
        if name not in launched:
            raise UserError(
                f"{runs_dir / name}: has not been trained yet; train it with: uv run"
                f" ddp_train.py {name}"
            )
        chosen.append(name)
    return list(dict.fromkeys(chosen)) or launched


def records_of(run_dir: Path, own: Iterable[Record]) -> tuple[Record, ...]:
    """Return a run's own records, or of the original system's checkpoints a record each."""
    return tuple(own) or tuple(
        {"global_step": step_of(path), **losses_of_the_original(path)}
        for path in of_the_original(run_dir / "checkpoints")
    )


@dataclass(frozen=True)
class RunFiles:
    """What a run's `summary.json` and `heartbeat.json` tell."""

    run_dir: Path
    summary: Record
    beat: Record
    status: str  # as in `summary.json`; NO_HEARTBEAT if it should run and may have been killed
    heartbeat_seconds: float | None  # since the last heartbeat; None if there is none

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        summary, beat = map(found_object, (run_dir / "summary.json", run_dir / "heartbeat.json"))
        age = seconds_since(run_dir, "heartbeat.json")
        status = words(summary.get("status"))
        if status in (None, RUNNING) and age is not None and age <= HEARTBEAT_SECONDS:
            status = RUNNING  # without a status it starts
        elif status is None:
            status = NO_SUMMARY
            if (run_dir / "summary.json").exists():
                status = "summary damaged"
            elif of_the_original(run_dir / "checkpoints"):
                status = OF_THE_ORIGINAL
        elif status == RUNNING and age is not None:
            status = NO_HEARTBEAT
        elif status == RUNNING:
            written = seconds_since(run_dir, "summary.json", "metrics.jsonl") or 0.0
            status = LAST_WRITTEN if written > HEARTBEAT_SECONDS else RUNNING
        return cls(run_dir, summary, beat, status, age)

    @property
    def has_ended(self) -> bool:
        return "global_step" in self.summary

    @property
    def is_on_gpus(self) -> bool:
        return self.part("machine").get("device_type") == "cuda"

    def part(self, name: str) -> Record:
        """Return an object of the summary; empty if it is missing."""
        found = self.summary.get(name)
        return found if isinstance(found, dict) else {}

    def phases(self, kind: str) -> dict[str, float]:
        """Return seconds or US dollars by phase, as far as they are numbers."""
        numbers = {key: number(value) for key, value in self.part(kind).items()}
        return {key: value for key, value in numbers.items() if value is not None}

    def spent(self, records: Sequence[Record]) -> tuple[float | None, float | None]:
        """Return the seconds and the US dollars of all launches until now.

        The summary of a run that has not ended has those of its start: the last record and the
        heartbeat tell more.
        """
        seconds, usd = self.phases("seconds"), self.phases("usd").get("total")
        if self.has_ended and seconds:
            return sum(seconds.values()), usd
        recorded = last_value(records, "seconds") or 0.0
        dollars = last_value(records, "usd") or 0.0
        latest = max(sum(seconds.values()), recorded, number_of(self.beat, "seconds") or 0.0)
        if dollars and recorded:  # at the same price until now
            dollars *= max(1.0, latest / recorded)
        return latest or None, max(usd or 0.0, dollars) or usd


def seconds_since(run_dir: Path, *names: str) -> float | None:
    """Return the age of the newest of some files of a run; None if there is none."""
    versions = [version_of(run_dir / name) for name in names]
    times = [version[2] / 1e9 for version in versions if version]
    return max(0.0, time.time() - max(times)) if times else None


@dataclass(frozen=True)
class Result:
    """One run, what it does or how it ended, or a published row. What is not known is None.

    Losses are the last ones, in nats per token. Seconds and US dollars are of all launches.
    """

    name: str
    status: str  # as in `RunFiles`, and so is `heartbeat_seconds`; PUBLISHED
    reason: str | None = None  # why it ended or stopped
    phase: str | None = None  # while it trains
    heartbeat_seconds: float | None = None
    notes: str = ""  # of a published row
    global_step: int | None = None  # counted from 0
    num_steps: int | None = None
    tokens: float | None = None  # trained on
    train_loss: float | None = None
    validation_loss: float | None = None  # of the first validation set
    validation_bits_per_byte: float | None = None
    tokens_per_second: float | None = None  # as last reported; of a run that has ended its mean
    mfu: float | None = None  # as last reported, a fraction
    seconds: float | None = None
    validation_seconds: float | None = None  # a part of `seconds`, as `download_seconds` is
    download_seconds: float | None = None
    usd: float | None = None
    seconds_left: float | None = None  # as it last recorded while it trains, as `usd_at_end` is
    usd_at_end: float | None = None
    bill: Bill | None = None  # of its machines, where `read_bills` was asked for it
    memory_gib: float | None = None  # of the fullest GPU as last reported, else a process's peak
    peak_memory_gib: float | None = None  # of a process
    tokenizer: str | None = None
    bytes_per_token: float | None = None  # the mean, of the validation text, else of the dataset
    reference: str | None = None  # the curve that it is compared with
    train_compared: Compared | None = None  # its last losses with those of the reference
    validation_compared: Compared | None = None
    warnings: tuple[str, ...] = ()  # one line each
    recorded: dict[str, float | None] = field(default_factory=dict)  # the last of each metric
    # The rest is read with `whole`.
    records: tuple[Record, ...] = ()
    # `model.json` and `train.json` merged, with defaults; empty if one is unreadable.
    config: dict[str, Any] = field(default_factory=dict)
    # The same as text; of a setting that was changed during the run all its values.
    settings: dict[str, str] = field(default_factory=dict)
    code: str = ""  # the version of the code that ended the run, if it recorded one
    model: str = ""  # as `size_name` gives it
    machine: str | None = None  # the device
    kind_of_machine: tuple[str, ...] = ()  # device, precision, number of processes
    num_gpus: float | None = None
    global_batch_size: float | None = None  # sequences
    microbatch_size: float | None = None  # sequences
    training_pflop: float | None = None  # 10^15 FLOPs: those of the model, without validation
    # Losses on held-out tokens, by the text or the slice; the longest first.
    tests: dict[str, Record] = field(default_factory=dict)
    ift_score: float | None = None  # 0 to 100: a judge model's score after instruction tuning
    ift_low: float | None = None  # the score's 95% interval
    ift_high: float | None = None
    ift_judge: str = ""  # who gave the score, and when
    search: tuple[tuple[float, float], ...] = ()  # microbatches of a saved search, and their GiB

    @property
    def steps(self) -> int | None:
        """The global steps that it has taken."""
        return None if self.global_step is None else self.global_step + 1

    @property
    def usd_per_hour(self) -> float | None:
        """The mean price until now."""
        return self.usd / self.seconds * 3600 if self.usd and self.seconds else None

    @property
    def validation_sets(self) -> dict[str, str]:
        """The token file or the dataset of each validation set with a name; the first decides."""
        sets = self.config.get("validation")
        return sets if isinstance(sets, dict) else {}

    @property
    def deciding_set(self) -> str:
        """The name of the set of `validation_loss`, as in `TrainConfig`; "" if it has no name."""
        return next(iter(self.validation_sets), "")

    @property
    def validation_slice(self) -> tuple[str, ...]:
        """The settings that say on which tokens the run validates."""
        keys = ["start_val_token", "validation_sequences", "context_length"]
        if self.config.get("validation_batches") is not None:
            keys += ["validation_batches", "microbatch_size"]
        # The first set may be the dataset's own validation file, with a name.
        place = self.validation_sets.get(self.deciding_set, self.config.get("dataset"))
        return str(place), *(shown(self.config.get(key)) for key in keys)  # not cut: a long path

    def value(self, key: str) -> Any:
        """Return a figure: a field, a part of the bill, or the last value of a metric."""
        if hasattr(self, key):
            return getattr(self, key)
        return getattr(self.bill, key, self.recorded.get(key))

    def state(self) -> dict[str, Any]:
        """Return what `lab list --json` and the page of `lab watch` tell of the run."""
        names = [one.name for one in fields(self)]
        known = {name: getattr(self, name) for name in names[: names.index("recorded")]}
        for key in ("bill", "train_compared", "validation_compared"):
            known[key] = known[key] and asdict(known[key])
        known["usd_per_hour"] = self.usd_per_hour
        return known | {one.key: self.value(one.key) for one in shown_in("page")}

    def priced(self, usd_per_hour: float) -> Self:
        """Return this run with the dollars of all its time at one price."""

        def usd(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * usd_per_hour / 3600

        records = tuple(record | {"usd": usd(record.get("seconds"))} for record in self.records)
        return replace(self, usd=usd(self.seconds), records=records)


def read_run(run_dir: Path, bill: Bill | None = None, *, whole: bool = True) -> Result:
    """Read one run; its files lack its bill. Raises: UserError: one of them is too large.

    Args:
        whole: all of it; else what `lab list` and `lab watch` show often of many runs, from the
            end of its records.
    """
    files = RunFiles.read(run_dir)
    path = run_dir / "metrics.jsonl"
    records = records_of(run_dir, read_metrics(path) if whole else last_records(path))
    is_running = files.status == RUNNING
    phase = words(files.beat.get("phase")) if is_running else None
    # A summary of a run that has ended tells more than its last record.
    told = [*records, files.summary] if files.has_ended else records
    recorded = _last_numbers(told)
    step = number_of(files.summary, "global_step")
    if step is None:
        step = max((record["global_step"] for record in records), default=None)
    num_steps = number_of(files.summary, "num_steps")
    seconds, usd = files.spent(records)
    left = at_end = None
    if is_running and phase not in (STARTUP, DOWNLOAD):
        # Not as an earlier launch recorded them: its machine, or the run's length, may have been
        # another. The summary has what was spent before this launch, once that has started up.
        before = sum(files.phases("seconds").values())
        of_launch = [record for record in records if (number_of(record, "seconds") or 0) > before]
        left = last_value(of_launch, "seconds_left")
        at_end = last_value(of_launch, "usd_at_end")
    gpus = _last_list(records, "gpu_memory_gib")
    peak = number_of(files.part("machine"), "peak_memory_gib")
    result = Result(
        name=run_dir.name,
        status=files.status,
        reason=words(files.summary.get("reason")),
        phase=phase,
        heartbeat_seconds=files.heartbeat_seconds,
        global_step=None if step is None else int(step),
        num_steps=None if num_steps is None else int(num_steps),
        tokens=recorded.get("tokens"),
        train_loss=recorded.get("train_loss"),
        validation_loss=recorded.get("validation_loss"),
        validation_bits_per_byte=recorded.get("validation_bits_per_byte"),
        tokens_per_second=recorded.get("tokens_per_second"),
        mfu=recorded.get("mfu"),
        seconds=seconds,
        validation_seconds=files.phases("seconds").get("validation", 0.0)
        if files.has_ended
        else sum(number_of(record, "validation_seconds") or 0.0 for record in records),
        download_seconds=files.phases("seconds").get("download"),
        usd=usd,
        seconds_left=left,
        usd_at_end=at_end,
        bill=bill,
        memory_gib=max((gib for gib in gpus if gib), default=peak),
        peak_memory_gib=peak,
        tokenizer=words(files.summary.get("tokenizer")),
        bytes_per_token=bytes_per_token(told) or number_of(files.summary, "bytes_per_token"),
        reference=words(found_object(run_dir / RUN_REFERENCE).get("name")),
        train_compared=_compared(records, "train"),
        validation_compared=_compared(records, "validation"),
        warnings=tuple(_warnings(files, records)),
        recorded=recorded | {key: number(value) for key, value in last_of_sets(told).items()},
    )
    return _with_the_rest(result, files, records) if whole else result


def read_searched(runs_dir: Path, names: Iterable[str] = ()) -> list[Result]:
    """Read the runs that were not launched and have a saved search, all or those with these names.

    Raises: UserError: a file of one is too large.
    """
    found = sorted(path.parent.name for path in runs_dir.glob(f"*/{SEARCH_FILE}"))
    results = [
        replace(read_run(runs_dir / name), status=NEW)
        for name in found
        if RUN_NAME.fullmatch(name) and not is_launched(runs_dir, name)
        if not names or name in names
    ]
    return [result for result in results if result.search]


def _with_the_rest(result: Result, files: RunFiles, records: tuple[Record, ...]) -> Result:
    """Add to a run its settings, what they imply, and what was measured of it afterwards."""
    evaluations = _evaluations(files.run_dir)
    judged = _last_judged(evaluations)
    tests = _tests(files, evaluations)
    config, facts, code = _config(files), files.part("machine"), files.summary.get("code")
    settings = {key: shown(value) for key, value in config.items() if key not in REFERENCE_SETTINGS}
    settings |= {key: text for key, text in histories(records).items() if key in settings}
    known = {key: config[key] for key in ModelConfig.model_fields if key in config}
    model = None
    with suppress(ValidationError):
        model = ModelConfig.model_validate(known)
    batch, context_length = config.get("global_batch_size"), number_of(config, "context_length")
    if result.tokens and result.steps and context_length:
        batch = round(result.tokens / result.steps / context_length)
    microbatch = (files.part("batch") or config).get("microbatch_size")
    tokenizers = [result.tokenizer, *(words(test.get("tokenizer")) for test in tests)]
    return replace(
        result,
        records=records,
        config=config,
        settings=settings,
        code=shown(code) if code else "",
        model=size_name(model) if model else "",
        machine=shown(facts["device"]) if isinstance(facts.get("device"), str) else None,
        kind_of_machine=tuple(
            shown(facts.get(key)) for key in ("device", "precision", "processes")
        ),
        num_gpus=number_of(facts, "processes") if files.is_on_gpus else None,
        global_batch_size=number(batch),
        microbatch_size=number(microbatch),
        training_pflop=_training_pflop(result, files, records, config, model) if model else None,
        tests={str(test.get("text") or slice_of(test)): test for test in tests},  # later ones win
        tokenizer=next(filter(None, tokenizers), None),
        search=_trials(files.run_dir),
        **_score(judged),
    )


def _last_numbers(told: Sequence[Record]) -> dict[str, float | None]:
    """Return the last value of each metric that is one number; None for one that is not finite."""
    merged: Record = {}
    for record in told:
        merged |= record
    return {key: number(merged[key]) for key in METRICS.keys() & merged.keys() if not is_list(key)}


def _training_pflop(
    result: Result,
    files: RunFiles,
    records: Sequence[Record],
    config: dict[str, Any],
    model: ModelConfig,
) -> float | None:
    """Return the 10^15 FLOPs of a run's training; None if they are not known.

    Of a run that grows, its steps until the record of the growth have the first layers alone.
    """
    try:
        grow = None if config.get("grow") is None else Grow.model_validate(config["grow"])
        machine = MachineConfig(sampled_softmax=config.get("sampled_softmax"))
    except ValidationError:
        return None
    if not result.tokens or not result.steps:
        return None
    grown_at = [record["global_step"] for record in records if number_of(record, NUM_LAYERS)]
    if any("sampled_softmax" in changes for _, changes in recorded_changes(records)):
        return None
    flops = machine.flops_per_token(model)
    if grow is None:
        # With a record of a growth, the key was dropped since.
        return None if grown_at else result.tokens * flops / 1e15
    small = machine.flops_per_token(model.with_layers(grow.from_layers))
    num_layers = number_of(files.part("this_launch"), "num_layers")
    share = 1.0  # of the steps, with the first layers alone
    if grown_at:
        share = min(1.0, grown_at[-1] / result.steps)
    elif num_layers == model.n_layers:
        # No record of a growth: the run got the key when it had trained all layers.
        share = 0.0
    return result.tokens * (small * share + flops * (1 - share)) / 1e15


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


def _evaluations(directory: Path) -> list[Record]:
    """Return the lines of `lab evaluate` and `lab judge`; of a damaged one an empty record."""
    return [*map(parsed_object, read_records(directory / EVALUATIONS).split("\n"))]


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
    return sorted(found, key=lambda test: number_of(test, "num_tokens") or 0, reverse=True)


def _losses(evaluations: list[Record]) -> list[Record]:
    """Return the losses on held-out tokens; not on tokens trained on."""
    return [
        line
        for line in evaluations
        if number_of(line, "loss") is not None and line.get("split") == "validation"
    ]


def _last_judged(evaluations: list[Record]) -> Record:
    """Return the last line of `lab judge`; an empty one if there is none."""
    scores = [
        line for line in evaluations if number_of(line, "score") is not None and "judge" in line
    ]
    return scores[-1] if scores else {}


def _score(judged: Record) -> dict[str, Any]:
    """Return the fields of a judge's score."""
    interval = judged.get("score_interval")
    low, high = interval if isinstance(interval, list) and len(interval) == 2 else (None, None)
    return {
        "ift_score": number_of(judged, "score"),
        "ift_low": number(low),
        "ift_high": number(high),
        "ift_judge": f"{shown(judged['judge'])} on {shown(judged.get('time'))[:10]}"
        if judged
        else "",
    }


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


def shown(value: Any) -> str:
    """Format a setting: 4 and 4.0 the same, on one line, of limited length."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if number(value) is not None and value == int(value):
        value = int(value)
    return one_line(str(value)[:LONGEST_VALUE])


def frame(runs_dir: Path | str = "runs", *, records: bool = False) -> DataFrame:
    """Return a pandas DataFrame of all runs that have been launched, for notebooks and scripts.

    It has a row for each run: its name, status, the figures of lab/columns.py and its settings.
    With `records` it has a row for each record of each run's `metrics.jsonl`, with the run's name.
    What is not known is NaN or None. Raises: UserError: the directory or a file cannot be read.
    """
    from pandas import DataFrame

    names = launched_runs(Path(runs_dir))
    results = [read_run(Path(runs_dir) / name) for name in names]
    if records:
        return DataFrame([{"run": one.name} | record for one in results for record in one.records])
    return frame_of(results)


def frame_of(results: Sequence[Result]) -> DataFrame:
    """Return a pandas DataFrame with a row for each run, in their order, as `frame` does.

    Test losses are those on the published text, else on the most common one, of several the
    longest. A run without that text has its own longest test.
    """
    from pandas import DataFrame

    published = [result for result in results if result.status == PUBLISHED]
    counts = Counter(text for result in published or results for text in result.tests)
    text = counts.most_common(1)[0][0] if counts else ""
    rows = []
    for result in results:
        chosen = text if text in result.tests else next(iter(result.tests), text)
        test = result.tests.get(chosen, {})
        names = {"run": result.name, "status": result.status}
        names |= {key: getattr(result, key) for key in TEXTS}
        numbers = {key: result.value(key) for key in NUMBERS}
        numbers |= {f"test_{key}": number_of(test, key) for key in ("loss", "bits_per_byte")}
        sets = {key: value for key, value in result.recorded.items() if key not in METRICS}
        text_of_test = {
            "test_slice": slice_of(test) if test else "",
            "is_of_other_text": chosen != text,
        }
        rows.append(result.config | names | numbers | sets | text_of_test)
    return with_ratios(DataFrame(rows).astype(dict.fromkeys(NUMBERS, float)))


def with_ratios(runs: DataFrame) -> DataFrame:
    """Compute the columns of a data frame of runs that are ratios of others."""
    seconds = runs["seconds"].where(runs["seconds"] > 0)
    megatokens = runs["tokens"].where(runs["tokens"] > 0) / 1e6
    training = runs["seconds"] - runs["validation_seconds"]
    usd_of_training = runs["usd"] * training / seconds
    return runs.assign(
        seconds_without_validation=training,
        usd_without_validation=usd_of_training,
        usd_per_hour=runs["usd"] / seconds * 3600,
        usd_per_megatoken=runs["usd"] / megatokens,
        usd_per_megatoken_without_validation=usd_of_training / megatokens,
    )


def bytes_per_token(records: Sequence[Record]) -> float | None:
    """Return the mean length of the validation text's tokens: its last loss is in both units."""
    for record in reversed(records):
        nats = number_of(record, "validation_loss")
        bits = number_of(record, "validation_bits_per_byte")
        if nats and bits:
            return nats / math.log(2) / bits
    return None


def _compared(records: Sequence[Record], kind: str) -> Compared | None:
    """Compare a run's last loss with its reference; None if they have not been compared there."""
    for record in reversed(records):
        loss = number_of(record, f"{kind}_loss")
        if loss is None:
            continue
        expected = number_of(record, f"{kind}_reference_loss")
        if expected is None:
            return None
        tokens = number_of(record, "tokens")
        same_loss_tokens = number_of(record, f"{kind}_reference_tokens")
        is_known = tokens and same_loss_tokens is not None
        return Compared(loss - expected, same_loss_tokens / tokens - 1 if is_known else None)
    return None


def _last_list(records: tuple[Record, ...], key: str) -> list:
    return next((record[key] for record in reversed(records) if key in record), [])


def _warnings(files: RunFiles, records: tuple[Record, ...]) -> list[str]:
    if files.status == LAST_WRITTEN:
        ago = duration(seconds_since(files.run_dir, "summary.json", "metrics.jsonl"))
        return [f"last written {ago} ago, and no heartbeat.json: a copy, or it was killed"]
    if files.status not in (RUNNING, NO_HEARTBEAT):
        return []
    found = []
    if files.status == NO_HEARTBEAT:
        ago = duration(files.heartbeat_seconds)
        found.append(f"no heartbeat for {ago}: the run may have been killed")
    return found + record_warnings(records)
