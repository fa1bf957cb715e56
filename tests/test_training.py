"""The trainer end to end, on CPU, with real torchrun and gloo."""

import json
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import ddp_train
from basics.errors import UserError
from basics.machine import code_version
from gpt import GPTModel
from processes import startup_progress
from processes.command_line import Options, command_line, read_command_line
from processes.distributed import Process
from processes.startup_agreement import Agreement
from processes.startup_progress import StartupProgress
from reporting.clock import PhaseClock
from reporting.metrics_file import INITIAL_LOSS
from run_config import TrainConfig, load_run
from tests.support.runs import files_of, follow_links, summary_of, validations_of, wait_until
from tests.support.workplace import (
    PROJECT_DIR,
    TINY_TRAIN,
    Workplace,
    forked,
    read_lines,
    run_command,
    succeeded,
    write_tokens,
)
from tokens.token_file import TokenFile
from trainer import startup


def weights_of(run_dir):
    return load_file(run_dir / "checkpoints/latest/model.safetensors")


def checkpoint_bytes(run_dir):
    return {
        name: (run_dir / "checkpoints/latest" / name).read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors")
    }


def assert_close(run_dir, reference_dir):
    wanted = weights_of(reference_dir)
    for name, value in weights_of(run_dir).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tiny run trained to its end by the command that starts torchrun."""
    workplace = Workplace(tmp_path_factory.mktemp("finished"))
    workplace.add_run(train={"validation_batches": None, "validation_sequences": 5})
    workplace.add_dataset()
    result = succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "2"))
    assert "Warning" not in result.stderr
    return workplace, result.stdout


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run and its dataset."""
    shutil.copytree(finished[0].root, tmp_path / "copied", symlinks=True)
    return Workplace(tmp_path / "copied")


def test_a_finished_run_leaves_its_files(finished):
    run_dir = finished[0].runs_dir / "tiny"
    found = {path.name for path in run_dir.iterdir()}
    assert found == {
        "model.json",
        "train.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "identity.json",
        "machine-time.jsonl",
        "loss-chart.png",
        "grad-norm-chart.png",
        "learning-rate-chart.png",
    }
    checkpoints = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert sorted(int(name.split("-")[-1]) for name in checkpoints if "-" in name) == [4, 9, 11]
    assert all(re.fullmatch(r"\d{8}Z\d{6}-iteration-\d+|latest|best", n) for n in checkpoints)


def test_a_launch_says_how_many_tensors_and_parameters_decay(finished):
    """Matrices, embeddings and head; norms and biases do not."""
    assert (
        "\nweight decay 0.1 on 11 tensors of matrix, embedding, head (14,624"
        " parameters), none on 16 tensors of vector (352"
        " parameters)\n"
    ) in finished[1]


def test_a_launch_says_what_it_is_doing_until_it_is_closed(monkeypatch, capsys):
    monkeypatch.setattr(startup_progress, "FIRST_SECONDS", 0.01)
    doing, silent = Mock(return_value="checking data"), Mock()
    progress = StartupProgress("tiny", doing, lambda: 7.2, is_active=True)
    wait_until(lambda: doing.call_count > 1)
    progress.close()
    printed = capsys.readouterr().out
    assert printed.startswith("tiny: checking data, 7 s since the start\n")
    StartupProgress("tiny", silent, lambda: 0.0, is_active=False).close()
    assert not capsys.readouterr().out and not silent.called


def test_metrics_have_one_line_per_report_and_one_per_validation(finished):
    records = read_lines(finished[0].runs_dir / "tiny" / "metrics.jsonl")
    steps = [r for r in records if "train_loss" in r]
    validations = [r for r in records if "validation_loss" in r]
    assert [r["global_step"] for r in steps] == [4, 9, 11]
    assert [r["global_step"] for r in validations] == [4, 9, 11]  # every 5 steps and at the end
    for record in steps:
        assert record["tokens"] == (record["global_step"] + 1) * 128
        assert record["train_loss_min"] <= record["train_loss"] <= record["train_loss_max"]
        assert record["grad_norm"] > 0 and record["learning_rate"] == 0.01
        assert record["tokens_per_second"] > 0
    assert validations[-1]["validation_loss"] < validations[0]["validation_loss"] < 5.6
    seconds = [r["seconds"] for r in records]
    assert seconds == sorted(seconds)
    assert records[0]["host_ram_gib"] > 0 and records[0]["disk_free_gib"] > 0
    assert not any(key.startswith("gpu_") for record in records for key in record)


def test_the_summary_says_how_it_ended(finished):
    workplace, output = finished
    summary = summary_of(workplace.runs_dir / "tiny")
    assert summary["status"] == "finished" and summary["tokens"] == 1536
    assert summary["train"]["learning_rate"] == 0.01 and summary["model"]["emb_dim"] == 16
    assert summary["machine"]["processes"] == 2 and summary["machine"]["precision"] == "fp32"
    metas = workplace.runs_dir.glob("tiny/checkpoints/*-*/meta.json")
    assert {json.loads(meta.read_text())["code"] for meta in metas} == {summary["code"]}
    assert summary["code"] == code_version() and summary["energy_kwh"] is None
    records = read_lines(workplace.runs_dir / "tiny" / "metrics.jsonl")
    losses = {r["global_step"]: r["validation_loss"] for r in records if "validation_loss" in r}
    assert summary["validation_loss"] == losses[11]
    assert losses[summary["best"]["global_step"]] == summary["best"]["loss"] == min(losses.values())
    stalled = summary["checkpoints"]["stalled_seconds"]
    assert 0 < stalled == pytest.approx(summary["seconds"]["checkpoint"], abs=1e-6)
    assert 0 < summary["checkpoints"]["longest_write_seconds"]
    for words in (
        "microbatch 2 x accumulation 2 x 2 processes = global batch 8 sequences",
        "12 steps = 1,536 tokens",
        f"validation loss {losses[11]:.4f}",
        summary["best"]["checkpoint"],
        f"checkpoints: 3 in this launch; they stalled training for {stalled:.2f} s; ",
    ):
        assert words in output
    assert output.count("sample:") == 1 and "energy:" not in output and "speed:" not in output
    assert re.search(r"step \d+/12 \| loss \d\.\d+ .* tok/s", output)


def test_the_validation_loss_is_that_of_the_saved_weights(finished):
    run = load_run(finished[0].runs_dir, "tiny")
    model = GPTModel(run.model).eval()
    model.load_state_dict(weights_of(run.run_dir))
    tokens = TokenFile(finished[0].datasets_dir / "tiny" / "validation.safetensors").read(0, 81)
    tokens = torch.from_numpy(tokens).long()
    loss = model(tokens[:-1].view(5, 16), tokens[1:].view(5, 16)).item()  # batches of 2, 2 and 1
    assert validations_of(run.run_dir)[-1]["validation_loss"] == pytest.approx(loss, abs=1e-6)


def test_a_finished_run_says_so_and_changes_nothing(finished):
    workplace = finished[0]
    before = workplace.files()
    assert "tiny is complete: 12 steps" in succeeded(workplace.torchrun(2, "tiny")).stdout
    assert (
        "tiny is complete: 12 steps"
        in succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "2")).stdout
    )
    assert workplace.files() == before


def test_a_rank_without_the_rest_of_torchruns_environment_is_one_line(workplace):
    workplace.add_run()
    result = run_command(sys.executable, "ddp_train.py", "tiny", RANK="0")
    assert result.returncode == 2 and result.stderr == (
        "Error: RANK is set in the environment, but not WORLD_SIZE: start with torchrun, or unset"
        " RANK\n"
    )


def test_a_run_is_named_as_tab_completion_writes_it_too(workplace, monkeypatch):
    workplace.add_run()
    monkeypatch.chdir(workplace.root)
    for text in ("runs/tiny", "runs/tiny/", str(workplace.runs_dir / "tiny")):
        assert load_run(workplace.runs_dir, text).name == "tiny"
    with pytest.raises(UserError, match="not a plain name"):
        load_run(workplace.runs_dir, "elsewhere/tiny")


def test_a_run_made_shorter_than_what_is_trained_is_finished_with_true_numbers(workplace):
    run_dir = workplace.add_run(train={"validation_interval": 5})
    workplace.add_dataset()
    stopped = succeeded(workplace.torchrun(2, "tiny", "--max-steps", "7")).stdout
    assert "\nto continue: run the same command again, for as many steps, or without" in stopped
    path = run_dir / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"min_train_tokens": 3 * 128}))
    mark = workplace.root / "done"
    result = succeeded(
        workplace.ddp_train("tiny", "--nproc-per-node", "2", "--when-done", f"touch {mark}")
    )
    assert "tiny finished at step 7, 3 were wanted: " in result.stdout and mark.exists()
    summary = summary_of(run_dir)
    assert (summary["status"], summary["global_step"], summary["tokens"]) == (
        "finished",
        6,
        7 * 128,
    )
    again = succeeded(workplace.torchrun(2, "tiny")).stdout
    assert "tiny is complete: 7 steps, 3 were wanted, 896 tokens;" in again


def test_fresh_sets_earlier_checkpoints_aside(copied):
    run_dir = copied.runs_dir / "tiny"
    old, validations = checkpoint_bytes(run_dir), validations_of(run_dir)
    change(copied, "train", validate_on="all")
    follow_links(run_dir)
    before = files_of(run_dir)
    output = succeeded(copied.torchrun(2, "tiny", "--fresh", "--max-steps", "10")).stdout
    assert "could not be renewed" not in output
    assert [record["validation_loss"] for record in validations_of(run_dir)] == pytest.approx(
        [record["validation_loss"] for record in validations[:2]], rel=1e-6
    )
    (aside,) = (run_dir / "set-aside").iterdir()
    assert str(aside) in output
    assert files_of(aside) == before
    assert (run_dir / "checkpoints/latest").is_symlink()
    succeeded(copied.torchrun(2, "tiny"))
    assert checkpoint_bytes(run_dir) == old


def checkpoint_after_five_steps(workplace):
    return next(path.name for path in workplace.runs_dir.glob("tiny/checkpoints/*-iteration-4"))


def test_a_run_without_validation_takes_best_from_the_training_loss(workplace):
    run_dir = workplace.add_run(
        train={
            "validation_interval": None,
            "validation_batches": None,
            "checkpoint_interval": 4,
            "gradient_accumulation_steps": 1,
            "min_train_tokens": 10 * 32,
            "learning_rate": 1e-9,
        }
    )
    workplace.add_dataset()
    stopped = succeeded(workplace.torchrun(1, "tiny", "--max-steps", "2")).stdout
    (unmeasured,) = run_dir.glob("checkpoints/*-*")
    assert f"newest checkpoint: {unmeasured} (step 2; none has the training loss of " in stopped
    said = succeeded(workplace.torchrun(1, "tiny")).stdout
    metas = [json.loads(path.read_text()) for path in run_dir.glob("checkpoints/*-*/meta.json")]
    metas = [meta for meta in metas if meta["global_step"] != 1]
    means = {r["global_step"]: r["train_loss"] for r in read_lines(run_dir / "metrics.jsonl")}
    assert {meta["global_step"]: meta["loss"] for meta in metas} == pytest.approx(
        {step: means[step] for step in (3, 7, 9)}, abs=1e-6
    )
    best = json.loads((run_dir / "checkpoints/best/meta.json").read_text())
    assert best == min(metas, key=lambda meta: meta["loss"])
    step = f"step {best['global_step'] + 1}, training loss {best['loss']:.4f}"
    assert re.search(rf"\nbest checkpoint: .* \({re.escape(step)}\)\n", said)


@pytest.mark.parametrize("validate_on", ["rank0", "all"])
def test_the_initial_weights_are_validated_once_and_decide_no_best(workplace, validate_on):
    """On rank 0 of the dataset's own text, on all ranks of two sets."""
    train = {"validate_at_start": True, "learning_rate": 1e-9, "min_train_tokens": 10 * 128}
    if validate_on == "all":
        workplace.add_dataset("other", num_tokens=100)
        train |= {"validate_on": "all", "validation": {"own": "tiny", "other": "other"}}
    run_dir = workplace.add_run(train=train)
    workplace.add_dataset()
    first = succeeded(workplace.torchrun(2, "tiny", "--max-steps", "7")).stdout
    again = succeeded(workplace.torchrun(2, "tiny")).stdout
    records = read_lines(run_dir / "metrics.jsonl")
    initial, *others = [record for record in records if INITIAL_LOSS in record]
    assert not others and (initial["global_step"], initial["tokens"]) == (0, 0)
    validations = [record["validation_loss"] for record in validations_of(run_dir)]
    assert validations == pytest.approx([initial[INITIAL_LOSS]] * 2, abs=1e-4)
    seconds = initial["validation_seconds"]
    assert 0 < seconds < initial["seconds"]
    said = f"{initial[INITIAL_LOSS]:.4f}"
    if validate_on == "all":
        said = rf"{said} on own \(perplexity .*\), 5\.\d{{4}} on other \(perplexity .*\)"
    found = re.findall(rf"^step 0/10 \| validation loss {said} \| (.*) s$", first, re.MULTILINE)
    assert found == [f"{seconds:.1f}"]
    assert "step 0/10" not in again
    best = json.loads((run_dir / "checkpoints/best/validation.json").read_text())["loss"]
    assert best == min(validations)


def change(workplace, file, **values):
    path = workplace.runs_dir / "tiny" / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_bad_input_of_a_launch_is_reported_once(workplace, under_torchrun):
    workplace.add_run(train={"min_train_tokens": 10**6})
    workplace.add_dataset()
    before = workplace.files()
    result = workplace.torchrun(2, "tiny") if under_torchrun else workplace.ddp_train("tiny")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "lower" in line and 'ddp_train.py", line' not in result.stderr, "a traceback of ours"
    if under_torchrun:
        assert result.returncode != 0 and "exitcode  : 2" in result.stderr
    else:
        assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert workplace.files() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("best --fresh", "use one of the two"),
        ("--max-steps 0", "'--max-steps'"),
        ("-f --memory-limit-gib 0", "'--memory-limit-gib'"),
        ("--memory-limit-gib inf", "'--memory-limit-gib': inf is not a finite"),
        ("--usd-per-hour nan", "'--usd-per-hour': nan is not a finite"),
        ("--usd-per-hour 1e308", "'--usd-per-hour': 1e+308 is not in the range 0<x<=1000000"),
        ("--save", "--save needs --find-max-microbatch"),
        ("--memory-limit-gib 3", "--memory-limit-gib needs --find-max-microbatch"),
        ("--when-done", "--when-done"),
        ("--when-done=", "--when-done is empty; name a command"),
        ("--after-checkpoint=", "--after-checkpoint is empty; name a command"),
        *(
            (f"{option} {mode}", f"{name} cannot be used with {mode}")
            for mode in ("--find-max-microbatch", "--prefetch")
            for option, name in (
                ("best", "CHECKPOINT"),
                ("--fresh", "--fresh"),
                ("--max-steps 2", "--max-steps"),
                ("--when-done true", "--when-done"),
                ("--after-checkpoint true", "--after-checkpoint"),
            )
        ),
        ("--prefetch -f", "--prefetch cannot be used with --find-max-microbatch"),
    ],
)
def test_options_that_contradict_each_other_are_refused(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["ddp_train.py", "tiny", *arguments.split()])
    with pytest.raises(UserError, match=re.escape(message)):
        read_command_line()


def test_the_rank_that_the_old_launcher_passes_is_ignored(monkeypatch):
    """`python -m torch.distributed.launch` passes it beside the environment's."""
    for option in ("--local-rank=1", "--local_rank=1"):
        monkeypatch.setattr(sys, "argv", ["ddp_train.py", option, "tiny"])
        assert read_command_line() == Options("tiny")


def test_prefetch_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="--prefetch needs no torchrun; start it with python"):
        Options("tiny", prefetch=True).check()


def test_another_global_batch_is_refused_on_resuming_and_another_split_is_not(finished, copied):
    name = checkpoint_after_five_steps(copied)
    message = "was trained with 128 tokens per step, this launch has 64"
    before = copied.files()
    for result in (copied.torchrun(1, "tiny", name), copied.ddp_train("tiny", name)):
        assert message in result.stderr
    assert copied.files() == before
    change(copied, "train", gradient_accumulation_steps=4)
    succeeded(copied.torchrun(1, "tiny", name))
    assert_close(copied.runs_dir / "tiny", finished[0].runs_dir / "tiny")


def test_demo_starts_on_8_processes_and_goes_on_with_2(workplace):
    """With microbatches of 1 and of 4; the global batch stays."""
    for split, num_tokens in (("train", 5_610_000), ("validation", 60_000)):
        tokens = np.resize(np.arange(250, dtype=np.uint16), num_tokens)
        write_tokens(workplace.datasets_dir / f"python-stdlib/{split}.safetensors", tokens)
    first = succeeded(workplace.torchrun(8, "demo", "--max-steps", "1"))
    assert "microbatch 1 x accumulation 1 x 8 processes = global batch 8 sequ" in first.stdout
    assert first.stdout.count("microbatch_size is 1 in this launch, not 4") == 1
    second = succeeded(workplace.torchrun(2, "demo", "--max-steps", "1"))
    assert "microbatch 4 x accumulation 1 x 2 processes = global batch 8 sequ" in second.stdout
    assert "microbatch_size" not in second.stdout  # nor is it a changed setting
    copied = f"demo: copied from {PROJECT_DIR}/runs/demo to {workplace.runs_dir}/demo"
    assert first.stdout.count(copied) == 1 and "copied" not in second.stdout
    assert summary_of(workplace.runs_dir / "demo")["global_step"] == 1


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (
            {"gradient_accumulation_steps": None, "global_batch_size": 9},
            {},
            "global_batch_size 9 is not divisible by 2 processes",
        ),
        ({"reference": "nosuch"}, {}, "no reference 'nosuch'"),
        ({"init_from": "no such model"}, {}, "init_from: run 'no such model' is not"),
        ({}, {"checkpoint": "best"}, "no checkpoint yet"),
    ],
)
def test_what_can_be_refused_without_the_data_is_refused_before_they_are_asked_for(
    workplace, monkeypatch, train, options, message
):
    workplace.add_run(train={"dataset": "owner/name"} | train)
    monkeypatch.setattr(startup, "provide_datasets", lambda *_: pytest.fail("asked for the data"))
    options = Options("tiny", runs_dir=workplace.runs_dir, **options)
    place = Process(0, 0, 2, torch.device("cpu"))
    with pytest.raises(UserError, match=message):
        startup.prepare_run(options, place, PhaseClock(), Agreement.in_one_process())


@pytest.mark.parametrize(
    ("words", "datasets_dir", "checkpoint"),
    [
        ([], "datasets", None),
        (["best"], "datasets", "best"),
        (["./datasets"], "datasets", None),
        (["data/sets", "latest"], "data/sets", "latest"),
        (["data"], "data", None),
        (["/tmp", "20260101Z000000-iteration-4-1"], "/tmp", "20260101Z000000-iteration-4-1"),
    ],
)
def test_the_originals_command_line_is_understood(
    tmp_path, monkeypatch, words, datasets_dir, checkpoint
):
    for name in ("datasets", "data/sets"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    options = command_line.main(["RUN", *words], standalone_mode=False)
    assert options == Options("RUN", checkpoint, datasets_dir=Path(datasets_dir))
    for flag in ("-f", "--find-max-microbatch-size"):
        assert command_line.main(["RUN", *words, flag], standalone_mode=False).find_max_microbatch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("two", "nosuch"), "runs/two: no such run"),
        (("tiny", "nosuch"), "'nosuch' is neither a directory of datasets nor the name of a"),
        (("tiny", "latest", "best"), "'best' is a second CHECKPOINT or DATASETS_DIR"),
    ],
)
def test_a_word_too_many_is_refused_after_a_run_that_is_missing(workplace, words, message):
    workplace.add_run()
    with pytest.raises(UserError, match=message):
        command_line.main([*words, "--runs-dir", str(workplace.runs_dir)], standalone_mode=False)


@pytest.mark.parametrize(
    ("num_processes", "graphs_in_training"),
    [pytest.param(1, 1, marks=pytest.mark.thorough), (2, 3)],
)
def test_nothing_is_compiled_again_after_a_validation_and_the_curve_is_that_of_eager_runs(
    workplace, num_processes, graphs_in_training
):
    workplace.add_dataset()
    # A tied matrix has gradients from the first and the last graph; the last microbatch of a
    # validation is one sequence.
    settings = {
        "validation_batches": None,
        "validation_sequences": 5,
        "gradient_accumulation_steps": 4 // num_processes,
        "diagnostics_interval": 2,
    }
    run_dir, eager_dir = (
        workplace.add_run(name, model={"tie_weights": True}, train=settings | {"compile": compiles})
        for name, compiles in (("tiny", True), ("eager", False))
    )
    succeeded(workplace.torchrun(num_processes, "eager"))
    for arguments in (["--max-steps", "6"], []):  # and none more after resuming
        output = succeeded(
            forked(
                "tests/support/torchrun_workers.py",
                [
                    "count-compilations",
                    str(workplace.root),
                    *workplace.arguments("tiny", *arguments),
                ],
                num_processes=num_processes,
            )
        ).stdout
        counts = [json.loads(found) for found in re.findall("^compiled: (.*)$", output, re.M)]
        assert len(counts) >= 2 and all(count == counts[0] for count in counts)
        # Embedding, a layer and the loss, or the whole; and the whole in evaluation.
        assert counts[0]["stats"]["unique_graphs"] == graphs_in_training + 1
        assert counts[0]["graph_break"] == {}
        assert f"graphs in the end: {graphs_in_training + 1}" in output
    assert summary_of(run_dir)["machine"]["compiled"]
    assert_close(run_dir, eager_dir)


def test_a_compiled_run_that_grows_compiles_each_depth_once_and_has_the_curve_of_an_eager_one(
    workplace,
):
    workplace.add_dataset()
    settings = {"grow": {"from_layers": 1, "at": 0.5}, "sample_prompts": []}
    run_dir, eager_dir = (
        workplace.add_run(name, model={"n_layers": 2}, train=settings | {"compile": compiles})
        for name, compiles in (("tiny", True), ("eager", False))
    )
    succeeded(workplace.torchrun(1, "eager"))
    output = succeeded(
        forked(
            "tests/support/torchrun_workers.py",
            ["count-compilations", str(workplace.root), *workplace.arguments("tiny")],
            num_processes=1,
        )
    ).stdout
    counts = [json.loads(found) for found in re.findall("^compiled: (.*)$", output, re.M)]
    # In training and in evaluation, with one layer and then with two.
    assert [count["stats"]["unique_graphs"] for count in counts] == [2, 2, 2, 4, 4, 4]
    assert {*summary_of(run_dir)["seconds"]} >= {"compile"}
    assert_close(run_dir, eager_dir)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_are_averaged_in_the_dtype_that_is_asked_for(dtype):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    process = Process(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    train = TrainConfig(**TINY_TRAIN | {"all_reduce_dtype": dtype})
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(16, 16), torch.randn(4, 16)
    try:
        parallel = ddp_train.wrap_in_ddp(layer, process, train)
        parallel(inputs).square().sum().backward()
    finally:
        dist.destroy_process_group()
    (wanted,) = torch.autograd.grad(layer(inputs).square().sum(), layer.weight)
    in_bf16 = wanted.bfloat16().float()
    assert not torch.equal(wanted, in_bf16)
    assert torch.equal(layer.weight.grad, wanted if dtype == "fp32" else in_bf16)
