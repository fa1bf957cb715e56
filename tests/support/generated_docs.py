"""Write the parts of documents that a command makes: `.ci/docs [--check] [--jobs N] [PART ...]`.

A part stands between `<!-- begin: PART -->` and `<!-- end: PART -->`. Without PART all quick ones
are renewed; one that takes long, such as `faults`, only if it is named. A command for a part that
was interrupted goes on where it was.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.deliberate_faults import PROJECT_DIR, read_faults, read_verdicts

DEMO_RUNS = PROJECT_DIR / ".demo-runs"
SAMPLE_LINES, LINE_CHARACTERS = 2, 100  # of the demo's sample, in README
FAULTS_PATH = PROJECT_DIR / ".faults.jsonl"  # verdicts, until the code changes


@dataclass(frozen=True)
class Part:
    """A part of a document, and how its text is made; `jobs` are processes at once."""

    document: str
    make: Callable[[int], str]
    is_quick: bool = True


def number_of_faults(jobs: int) -> str:
    return f"{len(read_faults())}"


def faults_run(jobs: int) -> str:
    """Try all deliberate faults, which takes an hour or more. Raises: SystemExit: not all tried."""
    command = [sys.executable, "-m", "tests.support.deliberate_faults", "--jobs", str(jobs)]
    status = subprocess.run([*command, "--results", str(FAULTS_PATH)], cwd=PROJECT_DIR).returncode
    faults, verdicts = read_faults(), read_verdicts(FAULTS_PATH)
    tried = [verdicts[fault.key] for fault in faults if fault.key in verdicts]
    if len(tried) < len(faults):
        sys.exit(
            f"{len(tried)} of {len(faults)} faults were tried (status {status}): nothing is"
            " written; run the same command again, which goes on from there"
        )
    return f"{sum(tried)} of {len(tried)}, {datetime.date.today()}"


def demo_run(jobs: int) -> str:
    """Train the demo with three seeds; renew its chart, its reference curve, README's transcript.

    On two quiet cores this takes a quarter of an hour. Runs that are finished are taken as they
    are. Raises: CalledProcessError: a run failed.
    """
    outputs = []
    for seed in range(42, 45):
        run_dir = DEMO_RUNS / f"demo-{seed}" if seed > 42 else DEMO_RUNS / "demo"
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("model.json", "train.json"):
            settings = json.loads((PROJECT_DIR / "runs/demo" / name).read_text())
            if name == "train.json":
                settings["random_seed"] = seed
            (run_dir / name).write_text(json.dumps(settings))
        output = run_dir / "output.log"
        if not (output.exists() and "finished at" in output.read_text()):
            with output.open("w") as file:
                command = ["ddp_train.py", run_dir.name, "--nproc-per-node", "2"]
                command += ["--runs-dir", str(DEMO_RUNS)]
                subprocess.run([sys.executable, *command], cwd=PROJECT_DIR, stdout=file, check=True)
        outputs.append(output.read_text())
    shutil.copyfile(DEMO_RUNS / "demo/loss-chart.png", PROJECT_DIR / "docs/demo-loss-chart.png")
    renew_demo_curve()
    finished = re.search("^demo finished at .*$", outputs[0], re.MULTILINE)
    lines = outputs[0].partition("\nsample:\n")[2].splitlines()
    sample = [line[:LINE_CHARACTERS].rstrip() for line in lines[:SAMPLE_LINES]]
    return "\n".join(["", "```text", finished[0], "sample:", *sample, "```", ""])


def renew_demo_curve() -> None:
    """Replace the demo's curve in `runs/published.json` by the mean of its finished runs."""
    (DEMO_RUNS / "references.json").unlink(missing_ok=True)
    command = ["-m", "lab", "compare", "--runs-dir", str(DEMO_RUNS), "--save-reference", "mean"]
    runs = ["demo", "demo-43", "demo-44"]
    subprocess.run(
        [sys.executable, *command, *runs], cwd=PROJECT_DIR, stdout=subprocess.DEVNULL, check=True
    )
    (made,) = json.loads(
        (DEMO_RUNS / "references.json").read_text(), parse_float=lambda text: round(float(text), 4)
    )["curves"]
    for key in ("train", "validation"):
        made[key] = [[int(tokens), loss] for tokens, loss in made[key]]
    path = PROJECT_DIR / "runs/published.json"
    (old,) = (curve for curve in json.loads(path.read_text())["curves"] if curve["name"] == "demo")
    text = path.read_text()
    for key in ("train", "validation", "train_std", "validation_std", "bytes_per_token"):
        was, now = (f'"{key}": {json.dumps(curve[key])}' for curve in (old, made))
        if text.count(was) != 1:
            raise ValueError(f"{path}: wanted once: {was[:60]}")
        text = text.replace(was, now)
    path.write_text(text)


PARTS = {
    "demo": Part("README.md", demo_run, is_quick=False),
    "number-of-faults": Part("RELIABILITY.md", number_of_faults),
    "faults": Part("RELIABILITY.md", faults_run, is_quick=False),
}


def renewed(text: str, name: str, made: str) -> str:
    """Return a document with a new text of a part. Raises: ValueError: it is not there once."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(place.findall(text)) != 1:
        raise ValueError(f"wanted once: {begin} ... {end}")
    return place.sub(lambda _: begin + made + end, text)


def main(arguments: list[str] | None = None, project_dir: Path = PROJECT_DIR) -> None:
    parser = argparse.ArgumentParser(prog=".ci/docs", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is old")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    quick = [name for name, part in PARTS.items() if part.is_quick]
    for name in options.parts or quick:
        path = project_dir / PARTS[name].document
        made = PARTS[name].make(options.jobs)
        text = path.read_text(encoding="utf-8")  # after a run that may take an hour
        if (changed := renewed(text, name, made)) == text:
            continue
        if options.check:
            sys.exit(f"{path}: {name} is not current; run: .ci/docs {name}")
        path.write_text(changed, encoding="utf-8")
        print(f"{path}: {name}: {made}")


if __name__ == "__main__":
    main()
