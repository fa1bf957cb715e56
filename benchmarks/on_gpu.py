"""All measurements that need a GPU, in one command that can be called again and again.

Run it with `python -m benchmarks.on_gpu`, on a machine with a GPU; README.md has examples. Each
stage is a process of its own with a time limit, in the order of `on_gpu_stages.py`, what is worth
most first. Its result is written at once: a call continues where an earlier one stopped. It ends
with a page, OUTPUT/on-gpu.md, and OUTPUT/measured.json for `lab plan`. Needs no network; the code
is used from the checkout.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from basics.errors import UserError, print_error
from basics.files import write_atomically
from basics.option_types import ABOVE_0, USD_PER_HOUR
from benchmarks.on_gpu_process import installed, run_to_limit
from benchmarks.on_gpu_stages import ENVIRONMENT, Settings, Stage, read_rows, stages

DONE, PARTIAL, FAILED, TIMED_OUT = "done", "partial", "failed", "timed out"
TAIL_LINES, TAIL_BYTES = 40, 6000
OUT_OF_TIME, LACK_OF_TIME = "ran out of time", "for lack of time"  # said by throughput.py
RESERVE_SECONDS = 15  # of --minutes, for the page and the end of the last stage
MARGIN_SECONDS = 20  # between the end that a stage with rows is told, and its limit


@dataclass
class Results:
    """What is known so far: `results.json`, written after every stage."""

    output: Path
    setup: dict[str, Any]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, output: Path, setup: dict[str, Any]) -> Results:
        """Read the results of earlier calls. Raises: UserError: they are of another device."""
        path = output / "results.json"
        if not path.exists():
            return cls(output, setup)
        try:
            values = json.loads(path.read_text())
            found = cls(output, values["setup"], values["stages"])
            old = {key: found.setup[key] for key in ("device", "dry_run")}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: cannot be read ({type(error).__name__}); move it away, or"
                            " name another --output") from None
        if old != {key: setup[key] for key in old}:
            raise UserError(f"{path}: holds results of {old}; name another --output")
        found.setup |= {key: value for key, value in setup.items() if value is not None}
        return found

    def write(self) -> None:
        values = {"setup": self.setup, "stages": self.stages}
        write_atomically(self.output / "results.json", json.dumps(values, indent=1) + "\n")

    def status(self, stage: Stage) -> str | None:
        return self.stages.get(stage.name, {}).get("status")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--dry-run", is_flag=True, help="Tiny shapes, to try all stages on a CPU.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), show_default=True,
              default=Path("on-gpu"), help="Where results are written; a later call continues.")
@click.option("--minutes", type=ABOVE_0,
              help="Begin no stage that may take longer than what is left of this.")
@click.option("--only", multiple=True, metavar="NAME", help="Only these stages, or groups of them.")
@click.option("--skip", multiple=True, metavar="NAME", help="Without these.")
@click.option("--list", "lists", is_flag=True, help="List the stages and what became of them.")
@click.option("--fresh", is_flag=True, help="Repeat stages that are done.")
@click.option("--retry", is_flag=True, help="Repeat stages that failed or ran out of time.")
@click.option("--page", "only_page", is_flag=True, help="Only write the page again.")
@click.option("--wheels", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="A directory of wheels to use, for a machine without a package index.")
@click.option("--nanogpt", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="A copy of nanoGPT, to be measured too.")
@click.option("--usd-per-hour", type=USD_PER_HOUR,
              help="Price of the machine, for the page.")
def main(**options: Any) -> None:
    """Measure all that needs a GPU."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stage is ended too
    try:
        run(**options)
    except UserError as error:
        print_error(error.line())
        sys.exit(error.status)


def run(*, output: Path, device: str, dry_run: bool, usd_per_hour: float | None,
        **options: Any) -> None:
    """Run the chosen stages, and write the page after each. Raises: UserError."""
    started, nanogpt = time.monotonic(), options["nanogpt"]
    output = output.absolute()
    results = Results.load(output, {"device": device, "dry_run": dry_run,
                                    "usd_per_hour": usd_per_hour})
    table = stages(Settings(output, device, dry_run, nanogpt and nanogpt.absolute()))
    chosen = choose(table, options["only"], options["skip"])
    if options["lists"]:
        for stage in table:
            click.echo(f"{stage.name:20} {stage.limit_seconds:4} s at most"
                       f"  {results.status(stage) or 'not run':10} {stage.title}")
        return
    output.mkdir(parents=True, exist_ok=True)
    with installed(options["wheels"]) as environment:
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if not options["only_page"]:
            minutes = options["minutes"]
            ends_at = started + 60 * minutes - RESERVE_SECONDS if minutes else float("inf")
            caller = Caller(results, environment, ends_at)
            caller.call(table, [stage for stage in chosen if caller.is_due(
                stage, fresh=options["fresh"], retry=options["retry"])])
        write_page(results, table)
    click.echo(f"{output / 'on-gpu.md'}")


def choose(table: list[Stage], only: tuple[str, ...], skip: tuple[str, ...]) -> list[Stage]:
    """Return the stages that the options name. Raises: UserError: there is no such stage."""
    names = {stage.name for stage in table} | {stage.group for stage in table}
    for option, values in (("--only", only), ("--skip", skip)):
        for value in values:
            if value not in names:
                raise UserError(f"{option} {value[:40]}: no such stage; see --list")
    return [stage for stage in table
            if (not only or {stage.name, stage.group} & {*only, ENVIRONMENT})
            and not {stage.name, stage.group} & set(skip)]


@dataclass
class Caller:
    """Runs stages one after another until the time is over."""

    results: Results
    environment: dict[str, str]
    ends_at: float  # in seconds of time.monotonic()

    def is_due(self, stage: Stage, *, fresh: bool, retry: bool) -> bool:
        """Return whether a stage has to be run; forget what is to be measured again.

        The environment is always read again: a later call may be on another machine.
        """
        status = self.results.status(stage)
        if fresh and status is not None:
            self.forget(stage, "*")
            del self.results.stages[stage.name]
        elif retry and status in (FAILED, TIMED_OUT):
            _drop_failed_rows(self.rows_path(stage))
        return (fresh or stage.name == ENVIRONMENT or status in (None, PARTIAL)
                or retry and status in (FAILED, TIMED_OUT))

    def call(self, table: list[Stage], due: list[Stage]) -> None:
        """Run the stages that are due, as far as they fit into the time that is left."""
        for stage in due:
            left = self.ends_at - time.monotonic()
            if left < stage.seconds_to_begin():
                click.echo(f"{stage.name}: not begun; it needs {stage.seconds_to_begin()} s and"
                           f" {max(0, left):.0f} s are left")
                continue
            seconds = min(stage.limit_seconds, left)
            click.echo(f"{stage.name}: begun, at most {seconds:.0f} s")
            result = self.run_stage(stage, seconds)
            self.results.stages[stage.name] = result
            self.results.write()
            click.echo(f"{stage.name}: {result['status']} after {result['seconds']:.0f} s"
                       f" {result['reason']}".rstrip())
            write_page(self.results, table)

    def run_stage(self, stage: Stage, seconds: float) -> dict[str, Any]:
        """Run one stage to its end or its limit; return its result."""
        log_path = self.results.output / f"{stage.name}.log"
        command, rows_before = [sys.executable, *stage.command], self.num_rows(stage)
        if stage.rows:
            told = max(seconds - MARGIN_SECONDS, seconds / 2)
            command += ["--minutes", f"{told / 60:.2f}"]
        else:
            self.forget(stage, "json*")  # of an attempt that failed
        started = time.monotonic()
        status = run_to_limit(command, seconds, log_path, self.environment)
        text = log_path.read_text(errors="replace")
        tail = text[-TAIL_BYTES:].splitlines()[-TAIL_LINES:]
        state, reason = self.judge(stage, status, text, self.num_rows(stage) - rows_before)
        return {"status": state, "reason": reason, "seconds": round(time.monotonic() - started, 1),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"), "command": command[1:],
                "machine": None if stage.name == ENVIRONMENT else self.machine(),
                "values": stage.read(self.results.output, text), "tail": tail}

    def judge(self, stage: Stage, status: int | None, text: str,
              num_new: int) -> tuple[str, str]:
        """Return a stage's status, and why it is not done.

        Args:
            status: the exit status, None if it ran out of time.
            text: what it printed.
            num_new: rows that it has measured.
        """
        rows = read_rows(self.rows_path(stage)) if stage.rows else []
        reasons = {name: [str(row.get("reason")) if row.get("status") == "failed" else ""
                          for row in rows if row.get("row") == name] for name in stage.rows}
        missing = [name for name, found in reasons.items()
                   if all(OUT_OF_TIME in reason for reason in found)]
        if num_new and (missing or LACK_OF_TIME in text):
            return PARTIAL, f"not measured yet: {'; '.join(missing) or 'the last rounds'}"
        if status is None:
            return TIMED_OUT, "killed at its limit"
        if status:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
            return FAILED, f"exit status {status}: {last.strip()[:200]}"
        if missing:
            return FAILED, f"not measured: {'; '.join(missing)}"
        failed = [name for name, found in reasons.items() if all(found)]
        return (FAILED, f"failed: {'; '.join(failed)}") if failed else (DONE, "")

    def forget(self, stage: Stage, suffix: str) -> None:
        for path in self.results.output.glob(f"{stage.name}.{suffix}"):
            path.unlink()

    def rows_path(self, stage: Stage) -> Path:
        return self.results.output / f"{stage.name}.jsonl"

    def num_rows(self, stage: Stage) -> int:
        return sum(row.get("row") in stage.rows and row.get("status") != "failed"
                   for row in read_rows(self.rows_path(stage)))

    def machine(self) -> str | None:
        """Return the GPU and PyTorch that the last reading of the environment found."""
        found = self.results.stages.get(ENVIRONMENT, {}).get("values", {})
        if "packages" not in found:
            return None
        return f"{found.get('gpu') or 'CPU'}, PyTorch {found['packages'].get('torch')}"


def _drop_failed_rows(path: Path) -> None:
    """Forget rows that failed, so that they are measured again."""
    if path.exists():
        kept = [row for row in read_rows(path) if row.get("status") != "failed"]
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in kept))


def write_page(results: Results, table: list[Stage]) -> None:
    """Write the page, and `measured.json`; what is missing for it is printed, and stops nothing."""
    try:
        # Both need pydantic, perhaps from --wheels.
        from benchmarks.on_gpu_measured import measurements
        from benchmarks.on_gpu_page import page

        text = page(results.setup, results.stages, table, results.output)
        measured = measurements(results.output)
    except ImportError as error:
        print_error(f"the page is not written: {error}; see --wheels")
        return
    write_atomically(results.output / "on-gpu.md", text)
    if measured:
        write_atomically(results.output / "measured.json", json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
