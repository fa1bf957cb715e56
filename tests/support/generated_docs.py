"""Write the parts of documents that a command makes: `.ci/docs [--check] [--jobs N] [PART ...]`.

A part stands between `<!-- begin: PART -->` and `<!-- end: PART -->`. Without PART all quick ones
are renewed; one that takes long, such as `faults`, only if it is named. A command for a part that
was interrupted goes on where it was.
"""

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.deliberate_faults import PROJECT_DIR, read_faults, read_verdicts

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


PARTS = {
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
