"""`OUTPUT.jsonl` of `throughput.py`: one line per measurement, written as soon as it is made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from basics.files import append_whole

PACKAGES = ("torch", "triton", "transformers", "numpy")
OK, FAILED = "ok", "failed"
EMPTY: dict[str, Any] = dict.fromkeys((
    "reason", "tokens_per_second", "blocks", "step_ms", "microbatch_size", "precision",
    "is_compiled", "peak_mib", "compile_seconds", "machine", "losses", "note"))

Line = dict[str, Any]


def append(path: Path, line: Line) -> None:
    """Add a line with the versions and the time; every line has all keys."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    whole = EMPTY | {"blocks": [], "losses": []} | line | {
        "versions": versions(), "code": code_version(), "time": now}
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        append_whole(path, "\n")  # a line was cut short
    append_whole(path, json.dumps(whole) + "\n")


def read(path: Path) -> list[Line]:
    """Read all whole lines; none if there is no file yet."""
    lines = []
    if path.exists():
        for text in path.read_text().splitlines():
            with suppress(ValueError):  # cut short by a kill
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and "row" in line]


def latest(lines: Iterable[Line]) -> dict[tuple[str, str, str, int], Line]:
    """Return the last line of each measurement, by bench, device, row and round."""
    return {(line["bench"], device_of(line), line["row"], line["round"]): line for line in lines}


def device_of(line: Line) -> str:
    return (line["machine"] or {}).get("device", "unknown device")


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def code_version() -> str | None:
    """Return the commit, with "-dirty" if files were changed; None outside a repository."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, timeout=20,
            capture_output=True, text=True, check=True).stdout.strip()
    return None
