import json
import re

import numpy as np
from click.testing import CliRunner
from matplotlib import colormaps
from matplotlib.image import imread

from basics.errors import UserError
from benchmarks.recipes import main
from run_config import load_run
from tests.support.lab_cli import run_lab
from tests.support.workplace import PROJECT_DIR

TWINS = PROJECT_DIR / "benchmarks/twins"


def test_twins_are_valid_runs_of_one_dataset_each():
    for name in (path.name for path in TWINS.iterdir()):
        run = load_run(TWINS, name)
        assert run.train.dataset == f"prose-{name.split('-')[0]}"
        assert run.model.vocab_size == (257 if name.startswith("bytes") else 4096)
        assert not run.warnings


def test_the_projected_dollars_are_those_of_lab_plan():
    text = (PROJECT_DIR / "benchmarks/recipes.md").read_text()
    command, = re.findall(r"^uv run lab (plan gpt2-small-one-dollar .*)$", text, re.MULTILINE)
    plan = json.loads(run_lab(*command.split(), "--json", "--runs-dir",
                              str(PROJECT_DIR / "runs")).stdout)
    found = {machine["name"]: machine for machine in plan["machines"]}
    for name, row in (("4090", "one RTX 4090 at US$0.35 an hour"),
                      ("8x H100", "8x H100 at US$23.92 an hour")):
        hours, usd = found[name]["hours"], found[name]["usd"]
        assert (f"| {row} | {hours['expected']:.2f} | {usd['expected']:.2f} |"
                f" {usd['low']:.2f} to {usd['high']:.2f} |" in text)


def add_run(sweep_dir, name, *, tokens, losses):
    """Write a finished run with evenly spaced validations."""
    run_dir = sweep_dir / name
    run_dir.mkdir(parents=True)
    for file in ("model.json", "train.json"):
        (run_dir / file).write_text((TWINS / "bytes-original" / file).read_text())
    steps = [tokens * (number + 1) // len(losses) for number in range(len(losses))]
    (run_dir / "metrics.jsonl").write_text("".join(
        json.dumps({"global_step": number, "tokens": step, "validation_loss": loss}) + "\n"
        for number, (step, loss) in enumerate(zip(steps, losses, strict=True))))
    (run_dir / "summary.json").write_text(json.dumps({
        "status": "finished", "tokens": tokens, "validation_loss": losses[-1]}))


def table(sweeps_dir):
    """Return the cells below the head."""
    result = CliRunner().invoke(main, ["--sweeps-dir", str(sweeps_dir)])
    assert result.exit_code == 0, result.output
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in result.output.splitlines()[2:]]


def test_the_share_of_a_baselines_tokens_is_paired_by_seed(tmp_path):
    for seed, shift in ((42, 0.0), (43, 0.2)):
        add_run(tmp_path / "bytes-original", f"baseline-seed-{seed}", tokens=1000,
                losses=[3.0 + shift, 2.5 + shift])
        add_run(tmp_path / "bytes-muon", f"baseline-seed-{seed}", tokens=400,
                losses=[2.8 + shift, 2.2 + shift * 1.5])
    assert table(tmp_path) == [[
        "bytes-original", "1,000", "2.600 (2 seeds)", "bytes-muon", "400", "40%",
        "2.350 (2 seeds)", "-0.250", "-0.885 to +0.385", "310", "31.0%", "18.3% to 43.7%"]]


def test_changed_variants_are_named_and_drawn_and_other_directories_are_left_out(tmp_path):
    for name in ("baseline-seed-42", "learning_rate-0.01-seed-42", "baseline-seed-42.old"):
        add_run(tmp_path / "bytes-muon", name, tokens=400, losses=[2.8, 2.6])
    add_run(tmp_path / "bytes-original", "baseline-seed-42", tokens=1000, losses=[3.0, 2.5])
    rows = table(tmp_path)
    assert [row[3] for row in rows] == ["bytes-muon", "bytes-muon: learning_rate-0.01"]
    assert {tuple(row[8:]) for row in rows} == {("-", "not reached", "-", "-")}
    result = CliRunner().invoke(main, ["--sweeps-dir", str(tmp_path),
                                       "--chart", str(tmp_path / "chart.png")])
    assert result.exit_code == 0, result.output
    pixels = imread(tmp_path / "chart.png")[..., :3].reshape(-1, 3)
    for color in colormaps["tab20"].colors[:3]:
        assert np.isclose(pixels, color, atol=0.01).all(axis=1).any()


def test_without_runs_it_says_what_to_do(tmp_path):
    result = CliRunner().invoke(main, ["--sweeps-dir", str(tmp_path)])
    assert isinstance(result.exception, UserError) and "run those commands" in str(result.exception)
