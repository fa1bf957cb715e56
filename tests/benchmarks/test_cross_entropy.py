from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import cross_entropy


def test_forms_are_measured_and_a_failure_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ImportError("no such package\nsecond line")

    output = tmp_path / "rows.jsonl"
    monkeypatch.setattr(cross_entropy, "liger", broken)
    monkeypatch.setattr(cross_entropy, "compiled", lambda form: form)
    monkeypatch.setattr(sys, "argv", [
        "cross_entropy", "--tokens", "32", "--width", "8", "--vocabulary", "101", "--rounds", "2",
        "--output", str(output), "--forms", "whole, eager", "ours whole, compiled",
        "4 chunks, compiled", "Liger"])
    cross_entropy.main()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["form"] for row in rows if "round" in row].count("whole, eager") == 2
    failed, *measured = [row for row in rows if "round" not in row]
    assert failed["error"] == "ImportError: no such package"
    losses = [row["loss"] for row in measured]
    assert len(losses) == 3 and max(losses) - min(losses) < 1e-3 * losses[0]
    table = capsys.readouterr().out
    assert "4 chunks, compiled" in table and "no such package" in table
