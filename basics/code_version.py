"""Which version of this project's code runs."""

from __future__ import annotations

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT_DIR = Path(__file__).parents[1]
SOURCES = ("*.py", *(f"{folder}/**/*.py" for folder in (
    "basics", "lab", "ops", "preparation", "processes", "reporting", "tokens",
    "trainer")))
GIT_SECONDS = 10.0


def code_digest() -> str:
    """Return a digest of the product's files, 12 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for pattern in SOURCES for path in PROJECT_DIR.glob(pattern)):
        digest.update(str(path.relative_to(PROJECT_DIR)).encode() + path.read_bytes())
    return digest.hexdigest()


def code_version() -> str:
    """Return the commit, with a digest of the files if they differ from it.

    Without a repository, or without git, it is the project's version and the digest.
    """
    if (PROJECT_DIR / ".git").exists():  # else git would look for one in the directories above
        try:
            commit = _git("rev-parse", "--short=12", "HEAD")
            # Only the product counts: the commands themselves write to runs/*/train.json.
            is_changed = _git("status", "--porcelain", "--", *(f":(glob){p}" for p in SOURCES))
            return f"{commit}+{code_digest()}" if is_changed else commit
        except (OSError, subprocess.SubprocessError):
            pass
    try:
        return f"{version('ddp-train')}+{code_digest()}"
    except PackageNotFoundError:  # used without being installed
        return code_digest()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PROJECT_DIR, capture_output=True, text=True,
                          timeout=GIT_SECONDS, check=True).stdout.strip()
