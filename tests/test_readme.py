"""What the README says can be typed is typed; what it shows as JSON is loaded."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import pipeline

from run_config import ModelConfig, TrainConfig
from tests.support.hellaswag_task import write_hellaswag_task
from tests.support.hub_server import Hub, serving
from tests.support.upload_server import taking_uploads
from tests.support.workplace import PROJECT_DIR, read_lines, run_command, succeeded

README = (PROJECT_DIR / "README.md").read_text()
HUB_NOBODY_ANSWERS = "http://127.0.0.1:9"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks("sh")).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project whose demo is small enough for a test."""
    for path in [*PROJECT_DIR.glob("*.py"), *PROJECT_DIR.glob("*.toml")]:
        shutil.copy(path, tmp_path)
    for package in ("lab", "preparation"):
        shutil.copytree(PROJECT_DIR / package, tmp_path / package)
    for path in PROJECT_DIR.glob("runs/*/*.json"):
        if path.name in ("model.json", "train.json"):
            (tmp_path / path.parent.relative_to(PROJECT_DIR)).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / path.relative_to(PROJECT_DIR))
    shutil.copy(PROJECT_DIR / "runs/published.json", tmp_path / "runs")
    demo = tmp_path / "runs/demo/train.json"
    small = {"min_train_tokens": 12_000, "validation_batches": 2}
    demo.write_text(json.dumps(json.loads(demo.read_text()) | small))
    return tmp_path


def typed(command: str, checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Type a command in a checkout, with the packages of this environment."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_ENDPOINT": HUB_NOBODY_ANSWERS,
    } | variables
    command = command.removeprefix("uv run ")
    if command.startswith(("ddp_train.py", "prepare_dataset.py")):
        command = f"python {command}"
    return subprocess.run(command, shell=True, cwd=checkout, capture_output=True, text=True,
                          env=environment, timeout=200)


def test_every_command_of_the_readme_is_known_to_these_tests() -> None:
    assert commands() == [
        "pip install uv",
        "uv run torchrun --standalone --nproc_per_node=2 ddp_train.py demo",
        'uv run lab generate demo --prompt "def "',
        "uv run lab evaluate demo",
        "uv run lab compare --published",
        "uv run lab publish demo --output demo-gpt2",
        "uv run torchrun --standalone --nproc_per_node=8 ddp_train.py 8xa100m40",
        "uv run lab plan 8xa100m40 --budget 20",
        "uv run ddp_train.py 8xa100m40 --find-max-microbatch",
        "uv run prepare_dataset.py SOURCE datasets/mine",
        "uv run prepare_dataset.py HuggingFaceFW/fineweb datasets/fineweb --subset sample/10BT",
    ]


def test_the_demo_goes_all_the_way(checkout: Path) -> None:
    """Trained, sampled, evaluated, compared, exported, read by transformers, scored, published."""
    train, generate, evaluate, compare, export = commands()[1:6]
    result = succeeded(typed(train, checkout))
    assert "demo finished" in result.stdout and "sample:" in result.stdout
    assert (checkout / "datasets/python-stdlib/train.safetensors").is_file()
    assert {p.name for p in (checkout / "runs/demo").glob("*.png")} == {
        "loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png"}
    assert {line["prompt"] for line in read_lines(checkout / "runs/demo/samples.jsonl")} == {
        "def ", "import "}
    assert succeeded(typed(generate, checkout)).stdout.startswith("def ")
    evaluated = succeeded(typed(evaluate, checkout)).stdout.splitlines()[-1]
    assert re.match(r"demo \(.*-iteration-\d+\) +\d\.\d{6} ", evaluated)
    loss = evaluated.split()[2]
    compared = succeeded(typed(compare, checkout)).stdout
    assert re.search(rf"^demo .* {loss[:5]}", compared, flags=re.MULTILINE)
    assert "8x B200 160 GiB*" in compared
    assert {path.name for path in (checkout / "runs/comparison").iterdir()} == {
        "loss-curves.png", "loss-over-batch.png", "memory-over-microbatch.png"}
    succeeded(typed(export, checkout))
    assert loss in (checkout / "demo-gpt2/README.md").read_text()
    generator = pipeline("text-generation", model=str(checkout / "demo-gpt2"))
    assert generator("def ", max_new_tokens=4)[0]["generated_text"].startswith("def ")
    harness = re.search(r"`(lm_eval run .*?)`", README, flags=re.DOTALL)[1]
    task = write_hellaswag_task(checkout / "tasks")
    harness = harness.replace("DIR", "demo-gpt2").replace("--tasks hellaswag", f"--tasks {task}")
    scored = succeeded(typed(f"{harness} --include_path tasks --device cpu".replace("\n", " "),
                             checkout, HF_HUB_OFFLINE="1", HF_HOME=str(checkout / "home")))
    assert f"|{task}|" in scored.stdout and "acc_norm" in scored.stdout
    with taking_uploads() as hub:
        succeeded(typed("uv run lab publish demo someone/demo", checkout,
                        **hub.environment(checkout / "home")))
        assert set(hub.files("model", "someone/demo")) >= {"model.safetensors", "config.json"}


def test_the_big_run_starts_by_fetching_its_dataset(checkout: Path) -> None:
    result = typed("uv run ddp_train.py 8xa100m40", checkout)
    assert result.returncode == 2
    assert "gpjt/fineweb-gpt2-tokens on the Hugging Face hub: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_run_can_be_planned_and_its_microbatch_searched_for(checkout: Path) -> None:
    plan, search = commands()[7:9]
    assert "Within $20.00: " in succeeded(typed(plan, checkout)).stdout
    result = typed(search, checkout)  # there is no GPU here
    assert "Error: --find-max-microbatch without a GPU: give --memory-limit-gib" in result.stderr


def test_own_data_is_prepared_as_shown(checkout: Path) -> None:
    (checkout / "SOURCE").mkdir()
    for name in ("a", "b", "c"):
        (checkout / "SOURCE" / f"{name}.txt").write_text(f"document {name}")
    succeeded(typed(commands()[9], checkout))
    assert (checkout / "datasets/mine/validation.safetensors").is_file()


def test_fineweb_is_prepared_from_the_hub_as_shown(checkout: Path) -> None:
    content = io.BytesIO()
    texts = [f"document {i}" for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), content)
    hub = Hub({"sample/10BT/000_00000.parquet": content.getvalue()},
              repository="HuggingFaceFW/fineweb")
    with serving(hub):
        succeeded(typed(commands()[10], checkout, HF_ENDPOINT=hub.endpoint,
                        HF_HOME=str(checkout / "home")))
    assert (checkout / "datasets/fineweb/train.safetensors").is_file()


def test_the_json_blocks_are_valid_configs() -> None:
    model, train = blocks("json")
    assert ModelConfig(**json.loads(model)).emb_dim == 768
    assert TrainConfig(**json.loads(train)).microbatch_size == 12


@pytest.mark.parametrize("config", [ModelConfig, TrainConfig])
def test_every_key_stands_in_a_table_with_its_default(config: type) -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    for name, field in config.model_fields.items():
        row = next((row for row in rows if f"`{name}`" in row.split("|")[1]), None)
        assert row, f"{name} is in no table"
        default = row.split("|")[3].strip().strip("`")
        if field.is_required():
            assert default == "-"
        elif field.default is None:
            assert default in ("none", "by device")
        else:
            assert default == str(field.default).lower().replace("4e-4", "0.0004")


def test_the_readme_is_short_and_its_pictures_exist() -> None:
    assert len(README.splitlines()) <= 200
    assert not re.search(r"@[A-Z]+@|TODO|TBD", README)
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (PROJECT_DIR / picture).is_file()


@pytest.mark.parametrize("script", ["ddp_train.py", "prepare_dataset.py", "-m lab"])
def test_help_does_not_wait_for_torch(script: str) -> None:
    code = ("import runpy, sys\n"
            "try:\n"
            "    runpy.run_{}\n"
            "except SystemExit as end:\n"
            "    assert end.code == 0, end.code\n"
            "assert 'torch' not in sys.modules\n")
    is_module = script.startswith("-m")
    run = "module('lab', run_name='__main__')" if is_module else f"path('{script}', "\
        "run_name='__main__')"
    result = succeeded(run_command(
        sys.executable, "-c", "import sys; sys.argv = ['x', '--help']\n" + code.format(run)))
    assert "Usage:" in result.stdout
