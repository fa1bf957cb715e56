"""When a run used which machine: `machine-time.jsonl`, from which `lab list` computes bills.

One line for each use: a launch has one from its start and one from its end, and one from its last
heartbeat if it was killed, which the next launch adds. Lines may overlap. Needs no torch.
"""

import datetime
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from basics.files import append_whole, read_regular_file
from basics.json_files import FrozenConfig, parsed_object, to_json
from basics.machine import boot_id, machine_up_seconds, seconds_since_process_start
from processes.run_lock import read_heartbeat
from reporting.clock import PhaseClock
from run_config import Run

LAUNCH, SEARCH = "launch", "search"
SHARES_VARIABLE = "DDP_TRAIN_SHARES"  # of a sweep: its runs at once, each with a share of the price
LAST_SECOND = 1e11  # since 1970
MAX_USD_PER_HOUR = 1e9


class Use(FrozenConfig):
    """A use of a machine by a run. Times are in seconds since 1970, by the machine's clock.

    The price is that of the whole machine, or of all, if the launch has several: its line is of
    rank 0's. `earlier_seconds` are of launches before this file was kept, which no line has.
    """

    run: str
    kind: Literal["launch", "search"]
    host: str
    boot: str  # tells machines with the same host name apart
    up_since: float = Field(ge=0, le=LAST_SECOND)  # of the machine, or of the container
    began: float = Field(ge=0, le=LAST_SECOND)
    until: float = Field(ge=0, le=LAST_SECOND)
    usd_per_hour: float | None = Field(gt=0, le=MAX_USD_PER_HOUR)
    earlier_seconds: float = Field(ge=0, le=LAST_SECOND)


def record_use(
    run: Run, kind: str, seconds: float, usd_per_hour: float | None, earlier_seconds: float = 0.0
) -> None:
    """Record that a run has used this machine in the last `seconds`. Rank 0.

    What cannot be written, on a full disk, is missing in the bill: the run goes on.
    """
    now = time.time()
    shares = int(os.environ.get(SHARES_VARIABLE, "1"))
    use = {
        "run": run.name,
        "kind": kind,
        "host": socket.gethostname(),
        "boot": boot_id(),
        "up_since": round(now - machine_up_seconds(), 3),
        "began": round(now - seconds, 3),
        "until": round(now, 3),
        "usd_per_hour": usd_per_hour and usd_per_hour * shares,
        "earlier_seconds": earlier_seconds,
    }
    with suppress(OSError):
        append_whole(run.machine_time_path, to_json(use) + "\n")


def record_search(run: Run, usd_per_hour: float | None) -> None:
    """Record this process, a search that has found something; one that fails leaves no file.

    `usd_per_hour` is that of the command line, if it has one.
    """
    record_use(run, SEARCH, seconds_since_process_start(), usd_per_hour or run.config.usd_per_hour)


def record_launch(run: Run, clock: PhaseClock, earlier_seconds: float = 0.0) -> None:
    """Record this launch until now. Rank 0."""
    seconds = sum(clock.read_this_launch().values())
    record_use(run, LAUNCH, seconds, clock.usd_per_hour, earlier_seconds)


def begin_launch(run: Run, clock: PhaseClock, uses: list[Use]) -> None:
    """Record this launch, and the one before it if that was killed.

    Rank 0, when nothing is left that could be refused. `uses` were read before this launch's first
    heartbeat, which has replaced the last one of that launch.
    """
    earlier_seconds = 0.0
    launches = [use for use in uses if use.kind == LAUNCH]
    if launches:
        with suppress(OSError):
            append_whole(run.machine_time_path, to_json(launches[-1].model_dump()) + "\n")
    else:  # rounded: the clock goes on between two readings
        seconds = sum(clock.read_this_launch().values())
        earlier_seconds = round(sum(clock.read().values()) - seconds, 1)
    record_launch(run, clock, earlier_seconds)


def read_uses(run_dir: Path) -> list[Use]:
    """Return the uses that a run has recorded; a launch without an end ends with its heartbeat.

    The file is not trusted: lines that no run can have written are left out.
    """
    uses = []
    try:
        lines = read_regular_file(run_dir / "machine-time.jsonl").split("\n")
    except OSError:
        return []
    for line in lines:
        with suppress(ValidationError):
            use = Use.model_validate(parsed_object(line))
            if use.up_since <= use.until and use.began <= use.until:
                uses.append(use)
    beat = read_heartbeat(run_dir)
    places = [place for place, use in enumerate(uses) if use.kind == LAUNCH]
    if places and beat.get("host") == uses[places[-1]].host:
        with suppress(ValueError, TypeError, OverflowError):  # a heartbeat is not trusted either
            beaten = datetime.datetime.fromisoformat(beat["time"]).timestamp()
            last = uses[places[-1]]
            until = max(last.until, min(beaten, time.time()))
            uses[places[-1]] = last.model_copy(update={"until": until})
    return uses
