"""The stages of `on_gpu.py`, in the order of what is worth most, and how their results are read.

Imports only what the runner may import before missing packages are installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT_DIR = Path(__file__).resolve().parents[1]
ORIGINAL, HUGGING_FACE, NANOGPT = "original", "Hugging Face, SDPA, compiled", "nanoGPT, compiled"
ENVIRONMENT = "environment"
TINY_HEAD = ("--tokens", "64", "--width", "32", "--vocabulary", "500", "--forms", "whole, eager")


@dataclass(frozen=True)
class Settings:
    """What the commands of the stages depend on."""

    output: Path  # absolute
    device: str
    is_dry: bool = False
    nanogpt: Path | None = None

    def path(self, name: str) -> str:
        return str(self.output / name)


@dataclass(frozen=True)
class Stage:
    """A command, the time that it may take, and what becomes of its output.

    Attributes:
        group: stages of one group are chosen together by this name.
        rows: of `throughput.py`; a stage with rows takes `--minutes`, ends in time and continues
            in the next call.
        least_seconds: a stage with rows is begun if this much time is left.
        read: returns values from the output directory and the text that the command printed; it
            is called after a failure too.
    """

    group: str
    name: str
    title: str
    command: tuple[str, ...]  # after the interpreter
    limit_seconds: int
    rows: tuple[str, ...] = ()
    least_seconds: int = 180
    read: Callable[[Path, str], dict[str, Any]] = lambda output, text: {}

    def seconds_to_begin(self) -> int:
        """Return how many seconds must be left for this stage to be begun."""
        return min(self.least_seconds, self.limit_seconds) if self.rows else self.limit_seconds


def stages(settings: Settings) -> list[Stage]:
    """Return all stages in order."""
    return [
        Stage(ENVIRONMENT, ENVIRONMENT, "Environment",
              ("-m", "benchmarks.on_gpu_environment", settings.path("environment.json")), 120,
              read=_json_of("environment.json")),
        Stage("tests", "tests", "Tests that need a GPU", _tests(settings), 540, read=read_tests),
        _throughput(settings, "ours", "microbatches", "Microbatches", ("ours",) if settings.is_dry
                    else ("ours", "ours, microbatch 48", "ours, microbatch 96")),
        Stage("ours", "ours-kernels", "Kernels of a step",
              ("-m", "benchmarks.kernel_profile", "--device", settings.device, "--output",
               settings.path("ours-kernels")), 240, read=_json_of("ours-kernels.json")),
        _throughput(settings, "ours", "options", "Attention kernels and cross-entropy in training",
                    ("bf16",) if settings.is_dry else
                    ("tried: cuDNN attention", "tried: flash attention"), "--ladder"),
        Stage("ours", "ours-cross-entropy", "Head and cross-entropy alone",
              ("-m", "benchmarks.cross_entropy", "--output",
               settings.path("ours-cross-entropy.jsonl"), *(TINY_HEAD if settings.is_dry else ())),
              300),
        _throughput(settings, "peers", "", "Other systems, in turn with ours",
                    (ORIGINAL,) if settings.is_dry else ("ours", ORIGINAL, HUGGING_FACE),
                    *_peers(settings)),
        _check(settings, "search", "search", "Search for the largest microbatch", 540),
        _check(settings, "numbers", "precision", "bf16 against fp32", 240),
        _check(settings, "numbers", "repeat", "The same run repeated, and stopped and resumed",
               300),
        _check(settings, "around", "checkpoint", "Checkpoints", 120),
        _check(settings, "around", "run", "Validation and evaluation", 300),
        _throughput(settings, "around", "whole-run", "A whole run", ("ours, whole run",)),
    ]


def _tests(settings: Settings) -> tuple[str, ...]:
    """Return the command of the tests with the marker `gpu`: -qvv leaves a line for each."""
    files = sorted(str(path.relative_to(PROJECT_DIR))
                   for path in (PROJECT_DIR / "tests").rglob("test_*.py")
                   if "pytest.mark.gpu" in path.read_text())
    mode = ("--collect-only",) if settings.is_dry else (
        "-vv", "-rA", f"--junitxml={settings.path('tests.xml')}")
    return ("-m", "pytest", "-m", "gpu", "-p", "no:xdist", "--continue-on-collection-errors",
            *mode, *files)


def _throughput(settings: Settings, group: str, part: str, title: str, rows: tuple[str, ...],
                *options: str) -> Stage:
    name = f"{group}-{part}" if part else group
    module = "benchmarks.on_gpu_tiny" if settings.is_dry else "benchmarks.throughput"
    chosen = [word for row in rows for word in ("--only", row)]
    command = ("-m", module, "--device", settings.device, *options, *chosen, "--output",
               settings.path(name))
    peers = (NANOGPT,) if settings.nanogpt and group == "peers" else ()
    return Stage(group, name, title, command, 540, rows=rows + peers)


def _peers(settings: Settings) -> tuple[str, ...]:
    if settings.nanogpt is None:
        return ()
    script = PROJECT_DIR / "benchmarks/peer_nanogpt.py"
    return ("--peer", f"{NANOGPT}={script} {settings.nanogpt} --precision bf16 --compile")


def _check(settings: Settings, group: str, part: str, title: str, limit_seconds: int) -> Stage:
    name = group if part == group else f"{group}-{part}"
    dry = ("--dry-run",) if settings.is_dry else ()
    command = ("-m", "benchmarks.on_gpu_checks", "--device", settings.device, *dry, "--output",
               settings.path(f"{name}.json"), part)
    return Stage(group, name, title, command, limit_seconds, read=_json_of(f"{name}.json"))


def _json_of(name: str) -> Callable[[Path, str], dict[str, Any]]:
    def read(output: Path, text: str) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads((output / name).read_text()))
        return {}

    return read


def read_tests(output: Path, text: str) -> dict[str, Any]:
    """Return the outcomes of tests from pytest's lines, also of a session that was killed."""
    outcomes: dict[str, list[str]] = {}
    for name, outcome in re.findall(r"^(tests/\S+?\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b",
                                    text, re.MULTILINE):
        outcomes.setdefault(outcome.lower(), []).append(name)
    collected = re.search(r"(\d+)(?:/\d+)? tests? collected", text)
    return {"collected": int(collected[1]) if collected else None,
            **{key: len(names) for key, names in outcomes.items()},
            "names": outcomes.get("failed", []) + outcomes.get("error", [])}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; a line that a kill has cut short is left out."""
    found = []
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                value = json.loads(line)
                found += [value] if isinstance(value, dict) else []
    return found
