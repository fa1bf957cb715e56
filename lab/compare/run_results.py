"""Runs as results that can be compared: figures, settings, and how they stand."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from basics.errors import UserError, one_line
from lab.compare.run_figures import Figures, Record, Written, figures_of, number, read_text
from run_config import ModelConfig, TrainConfig, load_config

LONGEST_VALUE = 60  # characters of a setting
SILENT_SECONDS = 60  # a run that trains writes its heartbeat every few seconds
FINISHED = "finished"
SETS_LOSS = (  # settings beside the model's shape; not learning_rate, which may go with the batch
    "dataset", "min_train_tokens", "weight_decay", "decay_norms_and_biases", "clipping_max_norm",
    "schedule_learning_rate", "warmup_period_percent",
)
HOLDS_MEMORY = (  # settings that change what a step holds, beside the model's shape
    "gradient_accumulation_steps", "residual_dtype", "compile", "compile_mode", "head_chunks",
    "activation_checkpointing",
)


@dataclass(frozen=True)
class Result:
    """One run, or one published row.

    Attributes:
        config: both files in one, with defaults; empty where one of them cannot be read.
        tests: losses on held-out tokens, by their slice in words; the longest first.
        test_slice: the one that the test loss is of, which a comparison chooses.
        machine: device, precision, number of processes.
        loss_group: what it shares with those whose losses make one curve over the batch.
        memory_group: what it shares with those whose memory makes one line over the microbatch.
    """

    name: str
    status: str
    figures: Figures
    config: dict[str, Any] = field(default_factory=dict)
    tests: dict[str, float] = field(default_factory=dict)
    test_slice: str = ""
    notes: str = ""
    machine: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()
    memory_gib: float | None = None
    loss_group: tuple[str, ...] = ()
    memory_group: tuple[str, ...] = ()


def shown(value: Any) -> str:
    """Word a setting: 4 and 4.0 alike, in one line, not without end."""
    if isinstance(value, dict | list):
        return "..."  # no setting is one
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if number(value) is not None and value == int(value):
        value = int(value)
    return one_line(str(value)[:LONGEST_VALUE])


def find_results(runs_dir: Path, names: tuple[str, ...]) -> list[Result]:
    """Read the runs of these names, or all that have begun.

    Raises:
        UserError: there is no such run, or it has not been trained.
    """
    try:
        found = {path.name: path for path in sorted(runs_dir.iterdir()) if path.is_dir()}
    except OSError as error:
        raise UserError(f"{runs_dir}: cannot be read ({error.strerror}); name the directory of"
                        " your runs with --runs-dir") from None
    begun = [name for name, path in found.items() if _has_begun(path)]
    for name in names:
        if name not in found:
            raise UserError(f"{runs_dir}: no run {name[:60]!r} there; these have been trained:"
                            f" {', '.join(begun) or 'none'}")
        if name not in begun:
            raise UserError(f"{found[name]}: has not been trained yet; train it with: uv run"
                            f" ddp_train.py {name}")
    return [read_result(found[name]) for name in dict.fromkeys(names or begun)]


def read_result(run_dir: Path) -> Result:
    """Read what a run has left so far."""
    written = Written.read(run_dir)
    status = _status(run_dir, written)
    config, facts = _config(run_dir, written), written.part("machine")
    machine = tuple(shown(facts.get(key)) for key in ("device", "precision", "processes"))
    return Result(
        name=one_line(run_dir.name), status=status, config=config, machine=machine,
        figures=figures_of(written, config), records=written.records,
        tests=_tests(written),
        memory_gib=number(facts.get("peak_memory_gib")),
        loss_group=_in_common(config, *SETS_LOSS) if status == FINISHED else (),
        memory_group=(*machine, *_in_common(config, *HOLDS_MEMORY)),
    )


def _tests(written: Written) -> dict[str, float]:
    """Give the newest loss of each slice: of the best checkpoint, else of the last one."""
    best = written.part("best").get("checkpoint")
    last = number(written.summary.get("global_step"))
    if best is None and last is None:  # of a run that has not ended, the last that was measured
        last = max((step for line in written.evaluations if (step := _step(line)) is not None),
                   default=None)
    of_last = [line for line in written.evaluations if last is not None and _step(line) == last]
    of_best = [line for line in written.evaluations
               if best is not None and line.get("checkpoint") == best]
    lines = sorted([*of_last, *of_best], key=lambda line: -(number(line.get("num_tokens")) or 0))
    return {slice_of(line): line["loss"] for line in lines}  # of one slice the last one stays


def _step(line: Record) -> float | None:
    return number(line.get("global_step"))


def slice_of(test: Record) -> str:
    """Word the tokens that a test loss is of."""
    start, count = (number(test.get(key)) for key in ("start_token", "num_tokens"))
    if start is None or count is None:
        return "tokens that it does not tell"
    where = f"{shown(test.get('dataset'))}/{shown(test.get('split'))}"
    return f"{where}, {count:,.0f} tokens from {start:,.0f} on"


def _has_begun(run_dir: Path) -> bool:
    return any(read_text(run_dir / name).strip() for name in ("metrics.jsonl", "summary.json"))


def _status(run_dir: Path, written: Written) -> str:
    """Say how a run stands; one that says it is running, and has been still for long, is silent."""
    status = written.summary.get("status")
    if not isinstance(status, str) or not status:
        return "summary damaged" if (run_dir / "summary.json").exists() else "no summary"
    try:
        silence = time.time() - (run_dir / "heartbeat.json").stat().st_mtime
    except OSError:
        silence = 0.0
    return "silent" if status == "running" and silence > SILENT_SECONDS else one_line(status[:20])


def _config(run_dir: Path, written: Written) -> dict[str, Any]:
    """Give the settings that a run was trained with, or is to be."""
    config: dict[str, Any] = {}
    for file, config_type in (("model", ModelConfig), ("train", TrainConfig)):
        resolved = written.part(file)
        try:
            config |= (_with_defaults(config_type, resolved) if resolved
                       else load_config(run_dir / f"{file}.json", config_type).model_dump())
        except UserError:
            return {}
    return config


def _with_defaults(config_type: type[BaseModel], resolved: Record) -> dict[str, Any]:
    """Complete what an older version has resolved: it did not know all keys."""
    fields = config_type.model_fields
    defaults = {key: found.default for key, found in fields.items() if not found.is_required()}
    return defaults | {key: resolved[key] for key in fields if key in resolved}


def _in_common(config: dict[str, Any], *keys: str) -> tuple[str, ...]:
    """Give the model's shape and some settings, for results that are to share them."""
    return tuple(shown(config.get(key)) for key in (*ModelConfig.model_fields, *keys))
