"""`lab evaluate`: losses and scores with their intervals, and the choice of models."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from basics.errors import UserError
from checkpointing import list_checkpoints
from lab.evaluate import measure, tasks
from lab.evaluate.evaluate import table
from lab.evaluate.losses import MIN_BLOCKS, evaluate, ratio
from lab.evaluate.measure import choose_slice
from lab.evaluate.tasks import find_tasks, records_of, score
from tests.support.hub_server import Hub, serving
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.lm_eval_tasks import write_own_task, write_tasks
from tests.support.models import export, random_model
from tests.support.stand_ins import refused_network
from tests.support.workplace import read_lines, write_tokens
from tokens.token_file import TokenFile
from tokens.tokenizer import load_tokenizer
from trainer.models import LoadedModel, load_model

MODEL = {"vocab_size": 257, "context_length": 16}


def lab_evaluate(workplace, *arguments, **environment):
    return run_lab(*workplace.arguments("evaluate", *arguments), **environment)


def rows_of(result):
    """Return the cells of the printed table, without its notes."""
    _, _, *lines = succeeded(result).stdout.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


# Losses


@torch.no_grad()
@pytest.mark.parametrize("context_length", [8, 12, 50, 256])
def test_figures_match_their_definitions_for_any_context_and_microbatch(
    context_length, tmp_path, monkeypatch
):
    """The mean over the tokens; the interval of blocks of 16 tokens, or longer sequences."""
    monkeypatch.setattr("lab.evaluate.losses.BLOCK_TOKENS", 16)
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
        assert found["loss"] == pytest.approx(mean, abs=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(
            losses.sum() / math.log(2) / num_bytes, rel=1e-6
        )
        assert found["sequences"] == math.ceil(160 / context_length)
        intervals = [found[f"{key}_interval"] for key in ("loss", "perplexity", "bits_per_byte")]
        n = found["blocks"]
        assert n == len(losses) == {8: 10, 12: 10, 50: 4, 256: 1}[context_length]
        if n < MIN_BLOCKS:
            assert intervals == [None] * 3
            continue
        half = 2.262 * math.sqrt(n / (n - 1) * ((losses - mean * counts) ** 2).sum()) / 160
        assert intervals[0] == pytest.approx([mean - half, mean + half], abs=1e-5)
        assert intervals[1] == pytest.approx(np.exp(intervals[0]).tolist(), rel=1e-5)
        assert intervals[2][0] < found["bits_per_byte"] < intervals[2][1]


def test_the_default_slice_is_that_of_the_published_results():
    class Long:
        path, num_tokens = Path("validation.safetensors"), 100_000_000

    found = choose_slice(Long(), "d")
    assert (found.start_token, found.num_tokens) == (50_000_000, 19_660_800)


def test_a_run_has_the_loss_of_its_own_validation(trained):
    result = lab_evaluate(trained, "tiny", "--tokens", str(15 * 2 * 16))
    ((title, loss, *_),) = rows_of(result)
    assert "\nmeasured on 480 tokens of tiny validation from token 0\n" in result.stdout
    assert "this is not the run's own validation loss" in result.stdout
    lines = read_lines(trained.runs_dir / "tiny/metrics.jsonl")
    validated = min(line["validation_loss"] for line in lines if "validation_loss" in line)
    assert float(loss.split(" [")[0]) == pytest.approx(validated, abs=1e-6)
    checkpoint = (trained.runs_dir / "tiny/checkpoints/best").readlink().name
    assert title == f"tiny ({checkpoint})"
    record = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")[-1]
    assert record["checkpoint"] == checkpoint and record["num_tokens"] == 480
    assert record["loss"] == pytest.approx(validated, abs=1e-6) and record["global_step"] >= 4


# Intervals


@pytest.mark.parametrize(
    ("right", "questions", "interval"),
    [
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),  # 1 / (1 + n / z^2), and 1 minus that
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),  # Newcombe 1998, table I
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilsons_interval_is_the_published_one(right, questions, interval):
    pytest.importorskip("scipy")
    scores = [1.0] * right + [0.0] * (questions - right)
    found = tasks.interval_of("acc", right / questions, scores)
    assert found == pytest.approx(interval, abs=6e-5)


@pytest.mark.parametrize(("num_documents", "blocks"), [("200", 8), ("16", 4), ("1", 2), (None, 2)])
def test_a_short_text_has_smaller_blocks_of_some_documents_or_no_interval_and_says_why(
    tmp_path, num_documents, blocks
):
    path, model = tmp_path / "validation.safetensors", random_model(vocab_size=257)
    tokens = np.random.default_rng(0).integers(0, 256, size=19_582).astype(np.uint16)
    documents = {"num_documents": num_documents} if num_documents else {}
    write_tokens(path, tokens, {"tokenizer": "bytes"} | documents)
    part = choose_slice(TokenFile(path), "mine")
    record = evaluate(LoadedModel("x", model, "bytes"), part, microbatch_size=64)
    assert record["blocks"] == blocks and (record["loss_interval"] is None) == (blocks < 8)
    notes = table([{"target": "x", "checkpoint": None} | record]).notes
    assert notes[1].startswith("no interval: ") == (blocks < 8)


@pytest.mark.parametrize(
    ("losses", "counts", "interval"),
    [
        ([0.0] * 7 + [1.0], [1] * 8, (0, 0.4206)),  # no loss is below 0, whatever the spread
        ([0.1] * 3, [7] * 3, (0.1 / 7, 0.1 / 7)),
        ([3.0], [8], None),
        ([math.nan, 1.0], [1, 1], None),
        ([math.inf, 1.0], [1, 1], None),
    ],
)
def test_without_a_spread_to_measure_there_is_no_interval(losses, counts, interval):
    found = ratio(np.array(losses), np.array(counts)).interval
    assert found == (interval and pytest.approx(interval, abs=1e-4))


# Targets and checkpoints


def test_a_model_on_the_hub_is_downloaded_unless_it_is_of_another_architecture(trained, tmp_path):
    directory = export(random_model(**MODEL), tmp_path / "model")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    files["pytorch_model.bin"] = b"not asked for"
    others = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 1000}
    hub, other = (Hub(each, repository="someone/model", kind="models") for each in (files, others))
    arguments = "someone/model", "--dataset", "tiny"
    with serving(hub):
        result = lab_evaluate(trained, *arguments, **hub.environment(tmp_path / "home"))
    ((name, loss, *_),) = rows_of(result)
    assert name == "someone/model"
    assert loss == rows_of(lab_evaluate(trained, str(directory), "--dataset", "tiny"))[0][1]
    first, second = read_lines(trained.runs_dir / "evaluations.jsonl")
    assert [first["target"], second["target"]] == ["someone/model", str(directory)]
    assert first["loss"] == second["loss"] and first["model"].startswith("2 layers, 24 wide")
    assert hub.downloads("model.safetensors") and not hub.downloads("pytorch_model.bin")
    with serving(other):
        result = lab_evaluate(trained, *arguments, **other.environment(tmp_path / "other"))
    assert "not a GPT-2: model_type should be 'gpt2'" in error_line(result)
    assert not other.downloads("model.safetensors")


def test_only_the_split_that_is_measured_is_downloaded(trained, tmp_path):
    files = {
        f"{split}.safetensors": (trained.datasets_dir / f"tiny/{split}.safetensors").read_bytes()
        for split in ("train", "validation")
    }
    options = "--dataset", "someone/tokens", "--tokens", "64"
    with serving(Hub(files, repository="someone/tokens")) as hub:
        environment = hub.environment(tmp_path / "home")
        succeeded(lab_evaluate(trained, "tiny", *options, **environment))
        assert hub.downloads("validation.safetensors") and not hub.downloads("train.safetensors")
        result = lab_evaluate(trained, "tiny", *options, "--split", "train", **environment)
        assert "measured on 64 tokens of someone/tokens train from token 0" in result.stdout
        assert [len(hub.downloads(name)) for name in files] == [1, 1]


@pytest.fixture
def drawn(monkeypatch):
    """The charts of a command."""
    figures: list[Figure] = []

    def draw(path, plot):
        figures.append(Figure())
        plot(figures[-1])
        return path

    monkeypatch.setattr("lab.evaluate.evaluate.draw_by_hand", draw)
    return figures


def test_all_checkpoints_of_a_run_are_measured_and_drawn_over_tokens(trained, monkeypatch, drawn):
    monkeypatch.setattr("lab.evaluate.losses.BLOCK_TOKENS", 64)
    result = lab_evaluate(trained, "tiny", "--checkpoints", "all")
    checkpoints = list_checkpoints(trained.runs_dir / "tiny/checkpoints")
    assert len(checkpoints) > 1 and "evaluations-chart.png" in result.stderr
    records = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    assert [record["checkpoint"] for record in records] == [one.name for one in checkpoints]
    assert {row[0] for row in rows_of(result)} == {f"tiny ({one.name})" for one in checkpoints}
    curve, *intervals = drawn[0].axes[0].lines
    assert list(curve.get_xdata()) == [record["trained_tokens"] for record in records]
    assert list(curve.get_ydata()) == [record["loss"] for record in records]
    found = [list(line.get_ydata()) for line in intervals]
    assert found == [record["loss_interval"] for record in records]


def test_each_checkpoint_that_is_named_is_measured_once(trained, drawn):
    first, *_, last = [c.name for c in list_checkpoints(trained.runs_dir / "tiny/checkpoints")]
    steps = lab_evaluate(trained, "tiny", "--checkpoint", f"{first},{last}").stderr.splitlines()
    assert steps[:2] == [
        f"tiny: step 5, checkpoint {first}; the newest is of step 10",
        f"tiny: step 10, checkpoint {last}",
    ]
    for arguments in (
        ("tiny", "--checkpoint", f"{first},{last}"),
        (f"tiny@{first}", f"tiny@{last}", f"tiny@{last}"),
        (f"tiny@{first}", "tiny", "tiny@latest", "--checkpoints", "latest"),
    ):
        rows = rows_of(lab_evaluate(trained, *arguments))
        assert sorted(row[0] for row in rows) == sorted([f"tiny ({first})", f"tiny ({last})"])


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
        f"tiny ({checkpoint.name})" for checkpoint in others
    )
    assert result.stderr.count("warning: left out: ") == 1 and first.name in result.stderr


def test_the_lowest_loss_comes_first_and_a_late_error_loses_no_result(
    trained, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")  # a path is long
    worse, broken = (export(random_model(**MODEL), tmp_path / name) for name in ("a@1", "broken"))
    (broken / "model.safetensors").write_bytes(b"junk")
    checkpoint = str(trained.runs_dir / "tiny/checkpoints/latest")
    result = lab_evaluate(trained, str(worse), "tiny@latest", checkpoint, str(broken))
    assert isinstance(result.exception, UserError) and "broken" in result.exception.line()
    rows = [line.split() for line in result.stdout.splitlines()[2:5]]
    assert {rows[0][0], rows[1][0]} == {"tiny", checkpoint} and rows[2][0] == str(worse)
    assert rows[0][2] == rows[1][2] < rows[2][1]  # the losses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nix", "no such run"),
        ("tiny --dataset nix", "no dataset there"),
        ("tiny --dataset other", "the tokenizer is gpt2, but that of tiny is bytes"),
        ("tiny --start-token 495 --tokens 5", "has 4 tokens to predict after token 495, wanted 5"),
        ("tiny --checkpoints latest,nix", "no checkpoint 'nix'"),
        ("new", "no checkpoint yet; train the run first"),
        ("model", "--dataset: name the dataset to evaluate all targets on (no target is a run)"),
        ("model@latest --dataset tiny", "is no run, so it has no checkpoints"),
    ],
)
def test_a_user_error_is_one_line_and_nothing_is_recorded(trained, arguments, message, monkeypatch):
    monkeypatch.chdir(trained.root)
    trained.add_run("new")
    export(random_model(**MODEL), trained.root / "model")
    write_tokens(
        trained.datasets_dir / "other/validation.safetensors",
        np.arange(100, dtype=np.uint16),
        {"tokenizer": "gpt2"},
    )
    assert message in error_line(lab_evaluate(trained, *arguments.split(" ")))
    assert not (trained.runs_dir / "tiny/evaluations.jsonl").exists()
    assert not (trained.runs_dir / "evaluations.jsonl").exists()


# Tasks


@pytest.fixture
def lm_eval(monkeypatch):
    """lm-eval without the index of its own tasks, which takes seconds."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks")
    only_files = partial(lm_eval_tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", only_files)


QUESTIONS = [
    {"question": "abc", "choices": ["x", "yyyy", "zz"], "right": 1},
    {"question": "Which?", "choices": ["x yz", "é"], "right": 0},
    {"question": "abc" * 7, "choices": ["x", "a longer one"], "right": 1},  # does not fit
    {"question": "", "choices": ["ab", "cd"], "right": 1},
]


@torch.no_grad()
def log_probability(model, question, choice):
    """Return the log probability of a choice after a question and a space, byte by byte."""
    tokens = [*(question.encode() or [256]), *f" {choice}".encode()][-17:]
    logits = model(torch.tensor([tokens[:-1]]))[0].double()
    losses = F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return -losses[-len(f" {choice}".encode()) :].sum().item()


def test_scores_of_a_task_file_are_those_of_a_plain_calculation(
    trained, lm_eval, monkeypatch, tmp_path, drawn
):
    """For each checkpoint; offline; with records, JSON alone on stdout, a table and a chart."""
    load = measure.load_model

    def load_and_print(*arguments, **options):
        print("a library's line")
        return load(*arguments, **options)

    monkeypatch.setattr(measure, "load_model", load_and_print)
    monkeypatch.chdir(trained.root)
    write_own_task(trained.root, QUESTIONS)
    weights = export(random_model(**MODEL), trained.root / "weights")
    command = ("tiny@all", str(weights), "--task", "capitals.yaml", "--json")
    with refused_network(tmp_path / "log"):
        result = lab_evaluate(trained, *command)
    assert not (tmp_path / "log").exists(), (tmp_path / "log").read_text()
    *own, other = checked(succeeded(result).stdout).models
    checkpoints = list_checkpoints(trained.runs_dir / "tiny/checkpoints")
    assert [model.checkpoint for model in own] == [one.name for one in checkpoints]
    assert (other.name, other.checkpoint) == (str(weights), None) and len(own) > 1
    places = [*(one.path for one in checkpoints), weights]
    for shown, place in zip((*own, other), places, strict=True):
        model = load_model(str(place), runs_dir=trained.runs_dir).model
        is_right, is_right_by_length = [], []
        for question in QUESTIONS:
            choices = question["choices"]
            found = np.array([log_probability(model, question["question"], c) for c in choices])
            by_length = found / [len(choice) for choice in choices]
            is_right.append(np.argmax(found) == question["right"])
            is_right_by_length.append(np.argmax(by_length) == question["right"])
        (score,) = shown.tasks
        assert score.accuracy == np.mean(is_right)
        assert score.normalised_accuracy == np.mean(is_right_by_length)
        assert (score.benchmark, score.questions, score.cut_texts) == ("capitals", 4, 2)
    records = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    for shown, record in zip(own, records, strict=True):
        assert record == record | shown.tasks[0].model_dump(exclude_unset=True)
    assert "warning: capitals: 2 texts are longer than the context of tiny" in result.stderr
    best = max(records, key=lambda record: record["normalised_accuracy"])
    low, high = best["normalised_accuracy_interval"]
    first = table(records).rows[0]
    assert f"{best['normalised_accuracy']:.4f} [{low:.4f}, {high:.4f}]" in first
    curve, *_ = drawn[0].axes[0].lines
    assert list(curve.get_ydata()) == [record["normalised_accuracy"] for record in records]


# Of 40 questions, by the project's own scorer, which lm-eval has replaced.
EARLIER_SCORES = {
    "hellaswag": {"accuracy": 0.25, "normalised_accuracy": 0.225, "cut_texts": 4},
    "lambada": {"accuracy": 0.3, "perplexity": 2431268459.5985637, "cut_texts": 0},
    "arc_easy": {"accuracy": 0.175, "normalised_accuracy": 0.225, "cut_texts": 0},
    "piqa": {"accuracy": 0.475, "normalised_accuracy": 0.4, "cut_texts": 0},
    "blimp": {"accuracy": 0.425, "cut_texts": 0},
}


@pytest.mark.thorough  # the index of all tasks, and GPT-2's vocabulary, take seconds
def test_lm_evals_own_tasks_have_the_scores_that_they_had(tmp_path):
    pytest.importorskip("lm_eval")
    model = random_model(vocab_size=50257, context_length=32)  # " the" is often its likeliest token
    model.final_norm.bias.data.fill_(0.5)
    model.head_weight.data[load_tokenizer("gpt2").encode_ordinary(" the")] += 0.2
    files = find_tasks(tuple(map(str, write_tasks(tmp_path))))
    names = set(EARLIER_SCORES) - {"lambada"} | {"lambada_openai"}
    assert names <= set(files.manager.all_tasks)
    found = score(LoadedModel("x", model, "gpt2"), files, 8)
    for (name, expected), record in zip(EARLIER_SCORES.items(), found, strict=True):
        assert record["benchmark"] == f"local_{name}" and record["questions"] == 40
        assert {key: record[key] for key in expected} == pytest.approx(expected, rel=1e-5)
        figures = {key for key in record if f"{key}_interval" in record}
        assert figures == set(expected) - {"cut_texts"}
        for key in figures:
            low, high = record[f"{key}_interval"]
            assert low < record[key] < high
            assert record["higher_is_better"][key] == (key != "perplexity")
    with pytest.raises(UserError, match="hellaswagg: is no task of lm-eval.* mean hellaswag"):
        find_tasks(("hellaswagg",))


def result_of(parts, groups):
    """Return what lm-eval returns for a group of two tasks, of 3 questions and 1."""
    samples = {
        name: [
            {"filter": kind, "acc": right, "f1": (0, 1), "arguments": [("a", {"until": []})]}
            for right in scores
            for kind in ("none", "strict-match")
        ]
        for name, scores in (("one", [1.0, 0.0, 1.0]), ("two", [0.0]))
    }
    of_tasks = {
        name: {"alias": name, "acc,none": 0.5, "f1,strict-match": 0.25, "acc_stderr,none": "N/A"}
        for name in ("all", "one", "two")
    }
    return {
        "results": of_tasks,
        "groups": groups,
        "group_subtasks": parts,
        "samples": samples,
        "configs": {name: {"dataset_path": "a/b", "test_split": "test"} for name in samples},
        "n-samples": {name: {"effective": len(each) // 2} for name, each in samples.items()},
        "higher_is_better": {name: {"acc": True, "f1": False} for name in of_tasks},
    }


def test_a_group_has_one_record_if_it_has_one_score_else_each_of_its_tasks_has_one():
    target = LoadedModel("x", random_model(vocab_size=257), "bytes")
    parts = {"all": ["one", "two"]}
    (group,) = records_of(target, result_of(parts, {"all": {}}), None)
    assert group == {
        "benchmark": "all",
        "questions": 4,
        "questions_from": "a/b",
        "split": "test",
        "cut_texts": 0,
        "accuracy": 0.5,
        "accuracy_interval": [0.150039, 0.849961],  # Wilson's, of 2 in 4
        "f1_strict_match": 0.25,
        "f1_strict_match_interval": None,
        "higher_is_better": {"accuracy": True, "f1_strict_match": False},
    }
    for result in (result_of(parts, {}), result_of({}, {})):
        one, two = records_of(target, result, Path("own/tasks.yaml"))
        assert [(each["benchmark"], each["questions"]) for each in (one, two)] == [
            ("one", 3),
            ("two", 1),
        ]
        assert (one["questions_from"], one["split"]) == ("tasks.yaml", None)
        rows = table([record | {"target": "x", "checkpoint": None} for record in (one, two)]).rows
        assert rows[0][-2:] == ["0.2500", "3"]


def test_of_a_figure_that_is_better_if_lower_the_lowest_comes_first():
    records = [
        {
            "target": str(value),
            "checkpoint": None,
            "benchmark": "wikitext",
            "questions": 9,
            "word_perplexity": value,
            "word_perplexity_interval": None,
            "higher_is_better": {"word_perplexity": False},
        }
        for value in (30.0, 20.0, 25.0)
    ]
    assert [row[0] for row in table(records).rows] == ["20.0", "25.0", "30.0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "nix.yaml: is no task of lm-eval, and no file; give a YAML file"),
        ("junk", "lm-eval cannot score tiny ("),
        ("- task: [", "lm-eval cannot score tiny ("),
        ("task: a\ndataset_path: json\ndataset_kwargs: {data_files: nix.jsonl}", "nix.jsonl"),
        (  # the answer does not fit
            [{"question": "a", "choices": ["b" * 20, "c"], "right": 0}],
            "(assert len(continuation_enc) <= self.max_length); its context is 16 tokens",
        ),
    ],
)
def test_a_task_that_cannot_be_scored_is_one_line(trained, lm_eval, content, message, monkeypatch):
    monkeypatch.chdir(trained.root)
    name = "nix.yaml"
    if isinstance(content, list):
        name = write_own_task(trained.root, content).name
    elif content is not None:
        Path(name).write_text(content)
    line = error_line(lab_evaluate(trained, "tiny", "--task", name))
    assert message in line and f"--task {name}: " in line
    assert not (trained.runs_dir / "tiny/evaluations.jsonl").exists()


def test_tasks_without_lm_eval_say_how_to_install_it(trained, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = error_line(lab_evaluate(trained, "tiny", "--task", "hellaswag"))
    assert "needs the package lm-eval: uv run --extra tasks lab evaluate" in line


def test_the_table_of_losses_fits_80_columns():
    record = {
        "target": "gpt2-small-1gpu",
        "checkpoint": "20260101Z120000-iteration-11999",
        "loss": 3.1,
        "loss_interval": (3.0, 3.2),
        "perplexity": 22.2,
        "perplexity_interval": (20.0, 25.0),
        "bits_per_byte": 1.01,
        "bits_per_byte_interval": (1.0, 1.1),
        "num_tokens": 10,
        "blocks": 9,
        "dataset": "d",
        "split": "validation",
        "start_token": 0,
    }
    assert max(map(len, table([record]).terminal(80).splitlines())) <= 80
