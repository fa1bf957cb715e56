from __future__ import annotations

import math
import os
import shutil
import threading
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import Result
from matplotlib.figure import Figure

from basics.errors import UserError
from checkpointing import list_checkpoints
from lab import __main__
from lab.evaluate import charts as lab_charts
from lab.evaluate import held_out, measure
from lab.evaluate.held_out import choose_slice, evaluate
from lab.evaluate.models import Chosen
from reporting import metrics_file
from tests.support.hub_server import Hub, serving
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.lm_eval_tasks import write_records
from tests.support.models import export, random_model
from tests.support.workplace import Workplace, read_lines, write_tokens
from tests.support.workplace import succeeded as process_succeeded
from tokens.token_file import TokenFile
from tokens.tokenizer import load_tokenizer
from trainer.models import LoadedModel, load_model


def lab_evaluate(workplace: Workplace, *arguments: str, **environment: str) -> Result:
    return run_lab(*workplace.arguments("evaluate", *arguments), **environment)


def rows_of(result: Result | CompletedProcess[str]) -> list[list[str]]:
    """Return the cells of the printed table."""
    result = succeeded(result) if isinstance(result, Result) else process_succeeded(result)
    _, _, *lines = result.stdout.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def token_file(path: Path, tokens: np.ndarray, **metadata: str) -> TokenFile:
    write_tokens(path, tokens.astype(np.uint16), metadata)
    return TokenFile(path)


def raise_(error: Exception) -> None:
    raise error


@torch.no_grad()
def test_loss_perplexity_and_bits_per_byte_match_their_definitions(tmp_path: Path) -> None:
    model = random_model(vocab_size=257, context_length=8)
    tokens = np.random.default_rng(0).integers(0, 256, size=100)
    tokens[10:60:7] = 256  # ends of text: eight among the targets
    file = token_file(tmp_path / "validation.safetensors", tokens, tokenizer="bytes")
    token_slice = choose_slice(file, "mine", start_token=3, num_tokens=64)
    found = evaluate(LoadedModel("x", model, "bytes"), file, token_slice, microbatch_size=3)
    ids = torch.from_numpy(tokens[3:68])
    losses = [F.cross_entropy(model(ids[i : i + 8][None])[0].double(), ids[i + 1 : i + 9],
                              reduction="sum").item() for i in range(0, 64, 8)]
    assert found.loss == pytest.approx(sum(losses) / 64, abs=1e-6)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / 64), rel=1e-5)
    num_bytes = int((tokens[4:68] < 256).sum())
    assert num_bytes == 64 - 8
    assert found.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / num_bytes, rel=1e-6)


def test_bits_per_byte_of_gpt2_tokens_count_the_bytes_of_their_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("gpt2")
    text = "Every effort moves you — naïve 😀 text, again and again and again"
    tokens = np.array([*tokenizer.encode_ordinary(text), tokenizer.eot_token])
    file = token_file(tmp_path / "validation.safetensors", tokens, tokenizer="gpt2")
    model = random_model(vocab_size=50257, context_length=1)
    token_slice = choose_slice(file, "mine", start_token=0, num_tokens=None)
    found = evaluate(LoadedModel("x", model, "gpt2"), file, token_slice, microbatch_size=4)
    num_bytes = len(text.encode()) - len("Every")  # the first token is not a target
    assert token_slice.num_tokens == len(tokens) - 1
    assert found.bits_per_byte == pytest.approx(
        found.loss * token_slice.num_tokens / math.log(2) / num_bytes)


def test_the_microbatch_size_does_not_change_the_loss(tmp_path: Path) -> None:
    model = random_model(vocab_size=257, context_length=8)
    tokens = np.random.default_rng(0).integers(0, 257, size=2000)
    file = token_file(tmp_path / "validation.safetensors", tokens)
    token_slice = choose_slice(file, "mine", start_token=None, num_tokens=None)
    assert (token_slice.start_token, token_slice.num_tokens) == (0, 1999)  # the last sequence has 7
    target = LoadedModel("x", model, None)
    losses = [evaluate(target, file, token_slice, microbatch_size=size).loss
              for size in (1, 3, 4, 7, 100)]
    assert losses == pytest.approx([losses[0]] * 5, abs=1e-6)


def test_the_default_slice_is_that_of_the_published_results() -> None:
    class Long:
        path, num_tokens = Path("validation.safetensors"), 100_000_000

    found = choose_slice(Long(), "d", start_token=None, num_tokens=None)
    assert (found.start_token, found.num_tokens) == (50_000_000, 19_660_800)


def test_a_run_has_the_loss_of_its_own_validation(trained: Workplace) -> None:
    result = lab_evaluate(trained, "tiny", "--tokens", str(15 * 2 * 16))
    (title, *cells, tokens, start, of), = rows_of(result)
    loss, perplexity, bits = (cell.split(" [")[0] for cell in cells)
    validated = [r["validation_loss"] for r in read_lines(
        trained.runs_dir / "tiny/metrics.jsonl") if "validation_loss" in r]
    assert float(loss) == pytest.approx(min(validated), abs=1e-6) and len(loss) == 8
    assert float(perplexity) == pytest.approx(math.exp(float(loss)), abs=1e-3)
    assert float(bits) == pytest.approx(float(loss) / math.log(2), rel=0.01)
    assert (tokens, start, of) == ("480", "0", "tiny validation")
    checkpoint = (trained.runs_dir / "tiny/checkpoints/best").readlink().name
    assert title == f"tiny ({checkpoint})"
    record = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")[-1]
    assert record["checkpoint"] == checkpoint and record["num_tokens"] == 480
    assert record["loss"] == pytest.approx(float(loss), abs=1e-6) and record["global_step"] >= 4


def test_several_targets_are_one_table_with_the_lowest_loss_first(
    trained: Workplace, tmp_path: Path
) -> None:
    worse = export(random_model(vocab_size=257, context_length=16), tmp_path / "worse")
    names = [str(worse), "tiny"]
    checkpoint = str(trained.runs_dir / "tiny/checkpoints/latest")
    rows = rows_of(lab_evaluate(trained, *names, checkpoint, "--checkpoint", "latest"))
    assert [row[0].split(" ")[0] for row in rows] in (["tiny", checkpoint, str(worse)],
                                                      [checkpoint, "tiny", str(worse)])
    assert rows[0][1] == rows[1][1] < rows[2][1]


def test_a_model_on_the_hub_is_downloaded_and_evaluated(trained: Workplace, tmp_path: Path) -> None:
    directory = export(random_model(vocab_size=257, context_length=16), tmp_path / "model")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    hub = Hub(files | {"pytorch_model.bin": b"not asked for"}, repository="someone/model",
              kind="models")
    with serving(hub):
        rows = rows_of(lab_evaluate(trained, "someone/model", "--dataset", "tiny",
                                    **hub.environment(tmp_path / "home")))
    assert rows[0][0] == "someone/model"
    assert rows[0][1] == rows_of(lab_evaluate(trained, str(directory), "--dataset", "tiny"))[0][1]
    assert hub.downloads("model.safetensors") and not hub.downloads("pytorch_model.bin")


def test_only_the_split_that_is_measured_is_downloaded(trained: Workplace, tmp_path: Path) -> None:
    files = {f"{split}.safetensors": (trained.datasets_dir / f"tiny/{split}.safetensors")
             .read_bytes() for split in ("train", "validation")}
    options = "--dataset", "someone/tokens", "--tokens", "64"
    with serving(Hub(files, repository="someone/tokens")) as hub:
        environment = hub.environment(tmp_path / "home")
        succeeded(lab_evaluate(trained, "tiny", *options, **environment))
        assert hub.downloads("validation.safetensors") and not hub.downloads("train.safetensors")
        succeeded(lab_evaluate(trained, "tiny", *options, "--split", "train", **environment))
        assert [len(hub.downloads(name)) for name in files] == [1, 1]
    shutil.rmtree(trained.datasets_dir / "someone")


def test_another_architecture_is_refused_before_its_weights_are_downloaded(
    trained: Workplace, tmp_path: Path
) -> None:
    hub = Hub({"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 1000},
              repository="someone/model", kind="models")
    with serving(hub):
        result = lab_evaluate(trained, "someone/model", "--dataset", "tiny",
                              **hub.environment(tmp_path / "home"))
    assert "not a GPT-2: model_type should be 'gpt2'" in error_line(result)
    assert not hub.downloads("model.safetensors")


@pytest.mark.parametrize(("arguments", "message"), [
    (("nix",), "no such run"),
    (("tiny", "--dataset", "nix"), "no dataset there"),
    (("tiny", "--dataset", "../tiny"), "is not a plain name"),
    (("tiny", "--tokens", "5000"), "has 499 tokens to predict after token 0, wanted 5,000"),
    (("tiny", "--start-token", "495", "--tokens", "5"),
     "has 4 tokens to predict after token 495, wanted 5"),
    (("tiny", "--start-token", "500"), "has 0 tokens to predict after token 500"),
    (("tiny", "nix", "--dataset", "tiny"), "no such run"),
    (("tiny@nix",), "no checkpoint 'nix'"),
    (("tiny", "--checkpoints", "latest,nix"), "no checkpoint 'nix'"),
    (("nix@latest",), "no such run"),
])
def test_a_user_error_is_one_line(trained: Workplace, arguments: tuple[str, ...],
                                  message: str) -> None:
    assert message in error_line(lab_evaluate(trained, *arguments))


@torch.no_grad()
def test_models_of_any_context_length_are_evaluated_on_the_same_tokens(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 257, size=60)
    file = token_file(tmp_path / "validation.safetensors", tokens)
    token_slice = choose_slice(file, "mine", start_token=2, num_tokens=50)
    for context_length in (8, 12, 50, 64):
        model = random_model(vocab_size=257, context_length=context_length)
        found = evaluate(LoadedModel("x", model, None), file, token_slice, microbatch_size=2)
        ids, total = torch.from_numpy(tokens[2:53]), 0.0
        for first in range(0, 50, context_length):
            stop = min(first + context_length, 50)
            logits = model(ids[None, first:stop])[0].double()
            total += F.cross_entropy(logits, ids[first + 1 : stop + 1], reduction="sum").item()
        assert found.slice.num_tokens == 50
        assert found.loss == pytest.approx(total / 50, abs=1e-6)


def test_the_training_split_can_be_evaluated(trained: Workplace) -> None:
    row, = rows_of(lab_evaluate(trained, "tiny", "--split", "train", "--tokens", "320"))
    assert row[-1] == "tiny train" and read_lines(
        trained.runs_dir / "tiny/evaluations.jsonl")[-1]["split"] == "train"


def test_weights_that_overflow_in_use_are_one_line(trained: Workplace, tmp_path: Path) -> None:
    model = random_model(vocab_size=257, context_length=16)
    model.final_norm.weight.data.fill_(3e38)
    result = lab_evaluate(trained, str(export(model, tmp_path / "nan")), "--dataset", "tiny")
    assert "its logits are not finite" in error_line(result)


def test_a_pipe_instead_of_weights_is_refused(trained: Workplace, tmp_path: Path) -> None:
    directory = export(random_model(vocab_size=257, context_length=16), tmp_path / "model")
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    result = lab_evaluate(trained, str(directory), "--dataset", "tiny")
    assert "not a whole safetensors file" in error_line(result)


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                  RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        monkeypatch.setattr(__main__.cli, "main", lambda *_, error=error, **__: raise_(error))
        with pytest.raises(SystemExit) as caught:
            __main__.main()
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith("Error: out of memory; set a smaller")
    monkeypatch.setattr(__main__.cli, "main", lambda *_, **__: raise_(RuntimeError("another")))
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback") and error.endswith("RuntimeError: another\n")


def test_a_directory_needs_a_dataset(trained: Workplace, tmp_path: Path) -> None:
    directory = export(random_model(vocab_size=257, context_length=16), tmp_path / "model")
    assert "--dataset: name the dataset to evaluate all targets on (no target is a run)" in (
        error_line(lab_evaluate(trained, str(directory))))


def test_tokens_of_another_tokenizer_are_refused(trained: Workplace, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        write_tokens(trained.datasets_dir / f"other/{split}.safetensors",
                     np.arange(100, dtype=np.uint16), {"tokenizer": "gpt2"})
    result = lab_evaluate(trained, "tiny", "--dataset", "other")
    assert "the tokenizer is gpt2, but that of tiny is bytes" in error_line(result)


def test_a_run_takes_precedence_over_a_directory_of_that_name(trained: Workplace) -> None:
    target = load_model("tiny", runs_dir=trained.runs_dir)
    assert target.run is not None and target.checkpoint is not None


def test_all_checkpoints_of_a_run_are_measured_and_drawn_over_tokens(
    trained: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(held_out, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(lab_charts, "draw_by_hand", lambda path, plot: drawn.append(
        figure := Figure()) or plot(figure) or path)
    write_records(trained.root / "pairs.jsonl", [
        {"sentence_good": "abcd"[:n], "sentence_bad": "wxyz"[-n:]} for n in (1, 2, 3, 4)])
    result = lab_evaluate(trained, "tiny", "--checkpoints", "all", "--with-loss", "--task",
                          f"blimp={trained.root / 'pairs.jsonl'}")
    checkpoints = list_checkpoints(trained.runs_dir / "tiny/checkpoints")
    assert len(checkpoints) > 1
    records = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    assert [(r["checkpoint"], "loss" in r) for r in records] == [
        (checkpoint.name, is_loss) for checkpoint in checkpoints for is_loss in (True, False)]
    losses, tasks = succeeded(result).stdout.split("\n\n")
    for checkpoint in checkpoints:
        assert f"tiny ({checkpoint.name})" in losses and f"tiny ({checkpoint.name})" in tasks
    assert "evaluations-chart.png" in result.stderr
    loss_axes, accuracy_axes = drawn[0].axes
    for axes, key in ((loss_axes, "loss"), (accuracy_axes, "accuracy")):
        curve, *intervals = axes.lines
        found = [record for record in records if key in record]
        assert list(curve.get_xdata()) == [c.meta.tokens for c in checkpoints] == [
            record["trained_tokens"] for record in found]
        assert list(curve.get_ydata()) == [record[key] for record in found]
        assert [list(line.get_ydata()) for line in intervals] == [
            pytest.approx(record[f"{key}_interval"], abs=1e-6) for record in found]


def test_checkpoints_are_named_one_by_one_or_with_their_run(trained: Workplace) -> None:
    first, *_, last = [c.name for c in list_checkpoints(trained.runs_dir / "tiny/checkpoints")]
    for arguments in (("tiny", "--checkpoint", f"{first},{last}"),
                      (f"tiny@{first}", f"tiny@{last}", f"tiny@{last}"), (f"tiny@{last},{first}",),
                      (f"tiny@{first}", "tiny", "--checkpoints", "latest")):
        rows = rows_of(lab_evaluate(trained, *arguments))
        assert sorted(row[0] for row in rows) == sorted([f"tiny ({first})", f"tiny ({last})"])
    chart = trained.runs_dir / "tiny/evaluations-chart.png"
    assert chart.read_bytes().startswith(b"\x89PNG")
    chart.unlink()
    lab_evaluate(trained, f"tiny@{first}")
    assert not chart.exists()  # of one point


def test_a_checkpoint_of_two_names_is_measured_once(trained: Workplace) -> None:
    for checkpoint in list_checkpoints(trained.runs_dir / "tiny/checkpoints")[:-1]:
        shutil.rmtree(checkpoint.path)
    rows = rows_of(lab_evaluate(trained, "tiny", "tiny@latest", "--checkpoints", "best,latest"))
    assert len(rows) == 1 and len(read_lines(trained.runs_dir / "tiny/evaluations.jsonl")) == 1


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_checkpoints_are_left_out_of_all_and_refused_by_name(
    trained: Workplace, damage: str
) -> None:
    first, *others = list_checkpoints(trained.runs_dir / "tiny/checkpoints")
    weights = first.path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] if damage == "cut" else content[:-1] + b"x")
    for names in (f"latest,{first.name}", first.name):
        assert first.name in error_line(lab_evaluate(trained, "tiny", "--checkpoints", names))
    assert not (trained.runs_dir / "tiny/evaluations.jsonl").exists()  # before any work
    result = lab_evaluate(trained, "tiny@all")
    assert sorted(row[0] for row in rows_of(result)) == sorted(
        f"tiny ({checkpoint.name})" for checkpoint in others)
    assert result.stderr.count("warning: left out: ") == 1 and first.name in result.stderr


def test_a_late_error_loses_no_result(trained: Workplace, tmp_path: Path) -> None:
    broken = export(random_model(vocab_size=257, context_length=16), tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"junk")
    result = lab_evaluate(trained, "tiny", str(broken))
    assert isinstance(result.exception, UserError) and "broken" in result.exception.line()
    assert "tiny (" in result.stdout and str(broken) not in result.stdout


def test_the_table_is_printed_before_a_chart_is_drawn(
    trained: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "draw_over_tokens", lambda _: raise_(RuntimeError("drawn")))
    result = lab_evaluate(trained, "tiny")
    assert isinstance(result.exception, RuntimeError) and "tiny (" in result.stdout


def test_a_checkpoint_that_a_run_has_removed_is_replaced_by_the_newest(
    trained: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = list_checkpoints(trained.runs_dir / "tiny/checkpoints")
    monkeypatch.setattr(measure, "choose_models", lambda *_: [
        Chosen("tiny", "20200101Z000000-iteration-0", "latest")])
    assert rows_of(lab_evaluate(trained, "tiny"))[0][0] == f"tiny ({last.name})"


def test_only_runs_have_checkpoints(trained: Workplace, tmp_path: Path) -> None:
    directory = export(random_model(vocab_size=257, context_length=16), tmp_path / "model")
    assert "is no run, so it has no checkpoints" in error_line(
        lab_evaluate(trained, f"{directory}@latest", "--dataset", "tiny"))
    with_at = directory.rename(tmp_path / "model@latest")
    assert rows_of(lab_evaluate(trained, str(with_at), "--dataset", "tiny"))[0][0] == str(with_at)


def test_a_run_without_checkpoints_is_refused(trained: Workplace) -> None:
    trained.add_run("new")
    for arguments in (("new",), ("new@all",)):
        assert "no checkpoint yet; train the run first" in error_line(
            lab_evaluate(trained, *arguments))


def test_the_interval_of_the_loss_is_that_of_the_mean_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "BLOCK_TOKENS", 16)
    model = random_model(vocab_size=257, context_length=8)
    file = token_file(tmp_path / "validation.safetensors",
                      np.random.default_rng(0).integers(0, 256, size=200), tokenizer="bytes")
    token_slice = choose_slice(file, "mine", start_token=0, num_tokens=160)
    found = evaluate(LoadedModel("x", model, "bytes"), file, token_slice, microbatch_size=3)
    ids = torch.from_numpy(file.read(0, 161).astype(np.int64))
    with torch.no_grad():
        losses = [F.cross_entropy(model(ids[i : i + 8][None])[0], ids[i + 1 : i + 9]).item()
                  for i in range(0, 160, 8)]
    blocks = np.reshape(losses, (10, 2)).mean(axis=1)
    half = 2.262 * np.std(blocks, ddof=1) / math.sqrt(10)  # Student's t, 9 degrees of freedom
    assert found.num_sequences == 20
    assert found.loss_interval == pytest.approx((found.loss - half, found.loss + half), abs=1e-5)
    assert found.bits_interval == pytest.approx(
        [bound / math.log(2) for bound in found.loss_interval])  # each token is a byte
    assert found.perplexity_interval == pytest.approx(
        [math.exp(bound) for bound in found.loss_interval])
    record = found.as_record()
    for key in ("loss", "perplexity", "bits_per_byte"):
        low, high = record[f"{key}_interval"]
        assert low < record[key] < high
    for size in (1, 2, 100):
        again = evaluate(LoadedModel("x", model, "bytes"), file, token_slice, microbatch_size=size)
        assert again.loss_interval == pytest.approx(found.loss_interval, abs=1e-6)
    one = choose_slice(file, "mine", start_token=0, num_tokens=16)
    alone = evaluate(LoadedModel("x", model, "bytes"), file, one, microbatch_size=3)
    assert alone.loss_interval is None


def test_a_result_that_comes_while_a_launch_replaces_the_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_text('{"global_step": 4}\n{"global_step": 9}\n')
    checkpoint = SimpleNamespace(name="x", meta=SimpleNamespace(global_step=3, tokens=1))
    target = SimpleNamespace(name="tiny", checkpoint=checkpoint,
                             run=SimpleNamespace(evaluations_path=path))
    evaluation = threading.Thread(target=measure._record, args=(target, {"loss": 1.5}))
    write = metrics_file.write_atomically

    def write_late(*arguments: Any, **options: Any) -> None:
        evaluation.start()
        evaluation.join(0.3)  # it has opened the old file, and waits if it is to
        write(*arguments, **options)

    monkeypatch.setattr(metrics_file, "write_atomically", write_late)
    metrics_file.remove_metrics_from(path, 5)
    evaluation.join()
    assert [record["global_step"] for record in read_lines(path)] == [4, 3]


def test_under_torchrun_it_is_refused(trained: Workplace) -> None:
    assert "start it without torchrun" in error_line(lab_evaluate(trained, "tiny", WORLD_SIZE="2"))
