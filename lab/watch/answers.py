"""What the page asks for: the states of runs, and the points and samples of one."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from basics.errors import UserError, visible
from lab.runs import RUNNING, identity_of, is_launched, launched_runs, parsed_object, read_part
from lab.watch.columns import Range, columns_of, points_of
from lab.watch.run_state import read_state
from reporting.metrics_file import MAX_STEP

MAX_RUNS = 200
SAMPLES_BYTES, MAX_SAMPLES, MAX_TEXT = 2**18, 40, 4000  # the end of the file; newest; characters

Answer = dict[str, Any]


@dataclass(frozen=True)
class Watched:
    """The runs that are watched: some of a directory, or all that have been launched."""

    runs_dir: Path
    names: tuple[str, ...] = ()

    def runs(self) -> Answer:
        """Return the states of the runs, those that train first.

        The most recently changed ones, if there are many.
        """
        try:
            launched = launched_runs(self.runs_dir)
        except UserError:  # removed meanwhile, or not mounted
            launched = []
        found = [self._state(name) for name in launched if not self.names or name in self.names]
        newest = sorted(found, key=lambda run: -run["changed"])[:MAX_RUNS]
        return {"runs": sorted(newest, key=lambda run: (run["status"] != RUNNING, run["name"]))}

    def _state(self, name: str) -> Answer:
        """Return a run's state, the second of its last change, and what changes with its points."""
        metrics, samples, summary = (identity_of(self.runs_dir / name / file) for file in (
            "metrics.jsonl", "samples.jsonl", "summary.json"))
        changed = [found.mtime_ns / 1e9 for found in (metrics, samples, summary) if found]
        return asdict(read_state(self.runs_dir, name)) | {
            "changed": max(changed, default=0.0), "version": str((metrics, samples))}

    def has(self, name: str) -> bool:
        """Return whether this is one of the runs."""
        return (not self.names or name in self.names) and is_launched(self.runs_dir, name)

    def run(self, name: str, within: Range | None = None) -> Answer:
        """Return the points of a run's lines, as `points_of` does, and its samples.

        Args:
            name: one that `has` accepts.
        """
        columns = columns_of(self.runs_dir / name / "metrics.jsonl").read()
        return points_of(columns, within) | {"samples": self.samples(name)}

    def samples(self, name: str) -> list[Answer]:
        """Return a run's newest samples, the newest first, with orders to a terminal escaped."""
        path, found = self.runs_dir / name / "samples.jsonl", []
        with suppress(OSError):
            content = read_part(path, max(0, path.lstat().st_size - SAMPLES_BYTES),
                                max_bytes=SAMPLES_BYTES)
            found = [sample for line in content.decode(errors="replace").split("\n")
                     if (sample := _sample(parsed_object(line)))]
        return sorted(found[-MAX_SAMPLES:], key=lambda sample: -sample["step"])


def _sample(values: Answer) -> Answer | None:
    step, prompt, text = (values.get(key) for key in ("global_step", "prompt", "text"))
    if type(step) is not int or not 0 <= step < MAX_STEP or not (
            isinstance(prompt, str) and isinstance(text, str)):
        return None
    return {"step": step + 1, "prompt": visible(prompt[:MAX_TEXT]),
            "text": visible(text[:MAX_TEXT])}
