from __future__ import annotations

from pathlib import Path

import pytest

from basics.errors import UserError
from lab.publish import plain_files
from lab.publish.export import Extras, write_export
from tests.support.lab_cli import error_line, run_lab
from tests.support.models import random_model
from tests.support.workplace import Workplace
from trainer.models import LoadedModel

SECRET = "hf_secret"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET)
    return path


def charts_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "grad-norm-chart.png").write_bytes(plain_files.PNG_MAGIC + b"chart")
    return directory


def export_with(charts: Path, tmp_path: Path) -> Path:
    return write_export(LoadedModel("mine", random_model(vocab_size=257), "bytes"),
                        tmp_path / "export", "tags: ddp-train", Extras(charts_dir=charts))


def test_charts_are_copied(tmp_path: Path) -> None:
    output = export_with(charts_dir(tmp_path), tmp_path)
    assert [(path.name, path.read_bytes()) for path in output.glob("*.png")] == [
        ("grad-norm-chart.png", plain_files.PNG_MAGIC + b"chart")]


@pytest.mark.parametrize("target", ["token", "png", "missing"])
def test_a_chart_that_is_a_link_is_not_published(tmp_path: Path, secret: Path,
                                                 target: str) -> None:
    charts = charts_dir(tmp_path)
    places = {"token": secret, "png": charts / "grad-norm-chart.png", "missing": tmp_path / "nix"}
    (charts / "loss-chart.png").symlink_to(places[target])
    with pytest.raises(UserError, match="loss-chart.png: is a link.* move it away"):
        export_with(charts, tmp_path)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("kind", ["text", "large", "directory"])
def test_what_is_no_chart_is_not_published(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    charts = charts_dir(tmp_path)
    path = charts / "loss-chart.png"
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"text" if kind == "text" else plain_files.PNG_MAGIC + b"x" * 100)
    monkeypatch.setattr(plain_files, "MAX_CHART_BYTES", 50)
    with pytest.raises(UserError, match="loss-chart.png: .*move it away"):
        export_with(charts, tmp_path)


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json"])
def test_a_link_in_a_dataset_is_not_uploaded(workplace: Workplace, secret: Path,
                                             name: str) -> None:
    directory = workplace.add_dataset()
    (directory / name).symlink_to(secret)
    result = run_lab("publish", str(directory), "someone/data", "--dry-run", "--runs-dir",
                     str(workplace.runs_dir), HF_TOKEN="")
    assert f"{name}: is a link" in error_line(result)
