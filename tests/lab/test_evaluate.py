"""`lab evaluate`: losses on held-out tokens, their intervals, and the choice of models."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from basics.errors import UserError
from checkpointing import list_checkpoints
from lab import __main__
from lab.evaluate import held_out, results
from lab.evaluate.held_out import choose_slice, evaluate
from tests.support.hub_server import Hub, serving
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.lm_eval_tasks import write_records
from tests.support.models import export, random_model
from tests.support.workplace import read_lines, write_tokens
from tokens.token_file import TokenFile
from trainer.models import LoadedModel

MODEL = {"vocab_size": 257, "context_length": 16}


def lab_evaluate(workplace, *arguments, **environment):
    return run_lab(*workplace.arguments("evaluate", *arguments), **environment)


def rows_of(result):
    """Return the cells of the printed table."""
    _, _, *lines = succeeded(result).stdout.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def raise_(error):
    raise error


@torch.no_grad()
@pytest.mark.parametrize("context_length", [8, 12, 50, 256])
def test_figures_match_their_definitions_for_any_context_and_microbatch(context_length, tmp_path,
                                                                        monkeypatch):
    """The mean over the slice's tokens; the interval of blocks of 16 tokens, or longer sequences.
    """
    monkeypatch.setattr(held_out, "BLOCK_TOKENS", 16)
    tokens = np.random.default_rng(0).integers(0, 256, size=170).astype(np.uint16)
    tokens[10:150:7] = 256  # ends of text: 20 among the targets
    path = tmp_path / "validation.safetensors"
    write_tokens(path, tokens, {"tokenizer": "bytes"})
    part = choose_slice(TokenFile(path), "mine", start_token=3, num_tokens=160)
    model = random_model(vocab_size=257, context_length=context_length)
    ids, blocks = torch.from_numpy(tokens[3:164].astype(np.int64)), {}
    for first in range(0, 160, context_length):
        stop = min(first + context_length, 160)
        logits = model(ids[None, first:stop])[0].double()
        loss = F.cross_entropy(logits, ids[first + 1 : stop + 1], reduction="sum").item()
        block = blocks.setdefault(first // 16, np.zeros(2))
        block += loss, stop - first
    losses, counts = np.array(list(blocks.values())).T
    mean, num_bytes = losses.sum() / 160, int((tokens[4:164] < 256).sum())
    assert num_bytes == 160 - 20
    for size in (1, 3, 100):
        found = evaluate(LoadedModel("x", model, "bytes"), part, microbatch_size=size)
        loss, perplexity, bits = found.figures.values()
        assert loss.value == pytest.approx(mean, abs=1e-6)
        assert perplexity.value == pytest.approx(math.exp(mean), rel=1e-5)
        assert bits.value == pytest.approx(losses.sum() / math.log(2) / num_bytes, rel=1e-6)
        assert found.facts["sequences"] == math.ceil(160 / context_length)
        if context_length == 256:
            assert loss.interval is perplexity.interval is bits.interval is None  # of one block
            continue
        n = len(losses)
        t = {10: 2.262, 4: 3.182}[n]  # Student's
        half = t * math.sqrt(n / (n - 1) * ((losses - mean * counts) ** 2).sum()) / 160
        assert loss.interval == pytest.approx((mean - half, mean + half), abs=1e-5)
        assert perplexity.interval == pytest.approx(
            [math.exp(bound) for bound in loss.interval], rel=1e-5)
        assert bits.interval[0] < bits.value < bits.interval[1]


def test_the_default_slice_is_that_of_the_published_results():
    class Long:
        path, num_tokens = Path("validation.safetensors"), 100_000_000

    found = choose_slice(Long(), "d")
    assert (found.start_token, found.num_tokens) == (50_000_000, 19_660_800)


def test_a_run_has_the_loss_of_its_own_validation(trained):
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


def test_several_targets_are_one_table_with_the_lowest_loss_first(trained, tmp_path):
    worse = export(random_model(**MODEL), tmp_path / "worse@1")
    checkpoint = str(trained.runs_dir / "tiny/checkpoints/latest")
    rows = rows_of(lab_evaluate(trained, str(worse), "tiny", checkpoint, "--checkpoint", "latest"))
    assert [row[0].split(" ")[0] for row in rows] in (["tiny", checkpoint, str(worse)],
                                                      [checkpoint, "tiny", str(worse)])
    assert rows[0][1] == rows[1][1] < rows[2][1]


def test_a_model_on_the_hub_is_downloaded_unless_it_is_of_another_architecture(trained, tmp_path):
    directory = export(random_model(**MODEL), tmp_path / "model")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    hub = Hub(files | {"pytorch_model.bin": b"not asked for"}, repository="someone/model",
              kind="models")
    arguments = "someone/model", "--dataset", "tiny"
    with serving(hub):
        rows = rows_of(lab_evaluate(trained, *arguments, **hub.environment(tmp_path / "home")))
    assert rows[0][0] == "someone/model"
    assert rows[0][1] == rows_of(lab_evaluate(trained, str(directory), "--dataset", "tiny"))[0][1]
    assert hub.downloads("model.safetensors") and not hub.downloads("pytorch_model.bin")
    other = Hub({"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 1000},
                repository="someone/model", kind="models")
    with serving(other):
        result = lab_evaluate(trained, *arguments, **other.environment(tmp_path / "other"))
    assert "not a GPT-2: model_type should be 'gpt2'" in error_line(result)
    assert not other.downloads("model.safetensors")


def test_only_the_split_that_is_measured_is_downloaded(trained, tmp_path):
    files = {f"{split}.safetensors": (trained.datasets_dir / f"tiny/{split}.safetensors")
             .read_bytes() for split in ("train", "validation")}
    options = "--dataset", "someone/tokens", "--tokens", "64"
    with serving(Hub(files, repository="someone/tokens")) as hub:
        environment = hub.environment(tmp_path / "home")
        succeeded(lab_evaluate(trained, "tiny", *options, **environment))
        assert hub.downloads("validation.safetensors") and not hub.downloads("train.safetensors")
        row, = rows_of(lab_evaluate(trained, "tiny", *options, "--split", "train", **environment))
        assert row[-1] == "someone/tokens train"
        assert [len(hub.downloads(name)) for name in files] == [1, 1]


@pytest.mark.parametrize(("arguments", "message"), [
    ("nix", "no such run"),
    ("nix@latest", "no such run"),
    ("tiny --dataset nix", "no dataset there"),
    ("tiny --dataset ../tiny", "is not a plain name"),
    ("tiny --dataset other", "the tokenizer is gpt2, but that of tiny is bytes"),
    ("tiny --tokens 5000", "has 499 tokens to predict after token 0, wanted 5,000"),
    ("tiny --start-token 495 --tokens 5", "has 4 tokens to predict after token 495, wanted 5"),
    ("tiny@nix", "no checkpoint 'nix'"),
    ("tiny --checkpoints latest,nix", "no checkpoint 'nix'"),
    ("new", "no checkpoint yet; train the run first"),
    ("new@all", "no checkpoint yet; train the run first"),
    ("model", "--dataset: name the dataset to evaluate all targets on (no target is a run)"),
    ("model@latest --dataset tiny", "is no run, so it has no checkpoints"),
])
def test_a_user_error_is_one_line(trained, arguments, message, monkeypatch):
    monkeypatch.chdir(trained.root)
    trained.add_run("new")
    export(random_model(**MODEL), trained.root / "model")
    write_tokens(trained.datasets_dir / "other/validation.safetensors",
                 np.arange(100, dtype=np.uint16), {"tokenizer": "gpt2"})
    assert message in error_line(lab_evaluate(trained, *arguments.split(" ")))


def test_under_torchrun_it_is_refused(trained):
    assert "start it without torchrun" in error_line(lab_evaluate(trained, "tiny", WORLD_SIZE="2"))


def test_out_of_memory_is_one_line(monkeypatch, capsys):
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


def test_all_checkpoints_of_a_run_are_measured_and_drawn_over_tokens(trained, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(held_out, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(results, "draw_by_hand", lambda path, plot: drawn.append(
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


def test_each_checkpoint_that_is_named_is_measured_once(trained):
    first, *_, last = [c.name for c in list_checkpoints(trained.runs_dir / "tiny/checkpoints")]
    for arguments in (("tiny", "--checkpoint", f"{first},{last}"),
                      (f"tiny@{first}", f"tiny@{last}", f"tiny@{last}"),
                      (f"tiny@{first}", "tiny", "tiny@latest", "--checkpoints", "latest")):
        rows = rows_of(lab_evaluate(trained, *arguments))
        assert sorted(row[0] for row in rows) == sorted([f"tiny ({first})", f"tiny ({last})"])
    chart = trained.runs_dir / "tiny/evaluations-chart.png"
    assert chart.read_bytes().startswith(b"\x89PNG")
    chart.unlink()
    lab_evaluate(trained, f"tiny@{first}")
    assert not chart.exists()  # of one point


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_checkpoints_are_left_out_of_all_and_refused_by_name(trained, damage):
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


def test_a_late_error_loses_no_result(trained, tmp_path):
    broken = export(random_model(**MODEL), tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"junk")
    result = lab_evaluate(trained, "tiny", str(broken))
    assert isinstance(result.exception, UserError) and "broken" in result.exception.line()
    assert "tiny (" in result.stdout and str(broken) not in result.stdout
