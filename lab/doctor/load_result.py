"""What one process of the load tests has found, and how far it has come."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from basics.files import read_regular_file
from lab.doctor.load_process import Spec

HANG_SECONDS = 8.0  # in one part; an exchange counts from when the last process begins it


@dataclass(frozen=True)
class Result:
    """What one process has found, by part.

    Attributes:
        errors: by part, why it failed.
        began: by part, the time at which it began.
        ended: how the process ended, if that was too early: a signal, or its last line.
        is_late: it did not end, but ran at its time limit.
        waited: seconds since its last part began, by its own machine's clock.
    """

    rank: int
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ended: str = ""
    is_late: bool = False
    waited: float = 0.0

    def why_not(self, part: str) -> str:
        """Return why this process has not found something."""
        return self.errors.get(part) or self.ended or "it was not reached"

    @property
    def stopped_in(self) -> str:
        """The part that it has begun, but not finished; empty if there is none."""
        return next((part for part in reversed(self.began)
                     if part not in self.found and part not in self.errors), "")

    @property
    def has_crashed(self) -> bool:
        return bool(self.ended) and not self.is_late

    @property
    def hangs(self) -> bool:
        """Whether a GPU seems to hang: an import and a CPU may only be slow."""
        facts = self.found.get("torch", {"num_gpus": None})
        return (self.is_late and self.stopped_in not in ("", "import")
                and facts.get("num_gpus") != 0 and self.waited >= HANG_SECONDS)


def read_result(spec: Spec, ended: str, *, is_late: bool = False) -> Result:
    """Read the lines that a process has written."""
    result = Result(spec.rank, ended=ended, is_late=is_late)
    with suppress(OSError):
        for line in read_regular_file(Path(spec.output)).splitlines():
            with suppress(ValueError):  # cut off by a kill
                record = json.loads(line)
                for key, found in (("found", result.found), ("error", result.errors),
                                   ("began", result.began)):
                    if key in record:
                        found[record["part"]] = record[key]
    now = time.time()
    return replace(result, waited=now - max(result.began.values(), default=now))
