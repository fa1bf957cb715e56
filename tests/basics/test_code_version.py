from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from basics import code_version

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ddp_train.py").write_text("first")
    monkeypatch.setattr(code_version, "PROJECT_DIR", tmp_path)
    return tmp_path


def git(project: Path, *arguments: str) -> str:
    return subprocess.run(["git", *IDENTITY, *arguments], cwd=project, check=True,
                          capture_output=True, text=True).stdout.strip()


def test_it_is_the_commit_with_a_digest_of_changed_files(project: Path) -> None:
    git(project, "init", "-q"), git(project, "add", "."), git(project, "commit", "-qm", "first")
    commit = git(project, "rev-parse", "--short=12", "HEAD")
    git(project, "tag", "v1")  # no tag takes the commit's place
    (project / "README.md").write_text("not the code")
    assert code_version.code_version() == commit
    (project / "ddp_train.py").write_text("second")
    second = code_version.code_version()
    assert re.fullmatch(rf"{commit}\+[0-9a-f]{{12}}", second)
    (project / "ddp_train.py").write_text("third")
    assert code_version.code_version() not in (second, commit)


def test_without_a_repository_it_is_the_version_and_a_digest(project: Path) -> None:
    first = code_version.code_version()
    assert re.fullmatch(r"[0-9.]+\+[0-9a-f]{12}", first)
    (project / "ddp_train.py").write_text("second")
    assert code_version.code_version() != first


def test_a_repository_around_the_project_is_another_one(tmp_path: Path, project: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    git(project, "init", "-q"), git(project, "add", "."), git(project, "commit", "-qm", "first")
    (project / "inside").mkdir()
    monkeypatch.setattr(code_version, "PROJECT_DIR", project / "inside")
    assert git(project, "rev-parse", "--short=12", "HEAD") not in code_version.code_version()
