"""`lab evaluate`: losses and scores with their intervals, and the choice of models.

lm-eval is the reference of the tasks.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from basics.errors import UserError
from checkpointing import list_checkpoints
from lab.evaluate import measure, scoring
from lab.evaluate.evaluate import table
from lab.evaluate.measure import choose_slice
from lab.evaluate.scoring import MIN_BLOCKS, encode_questions, evaluate, ratio, score, share
from lab.evaluate.tasks import TASKS, Question, Quiz, read_quiz
from lab.publish.export import Extras, write_export
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.lm_eval_tasks import FILES, records_of, tasks_dir, write_records, write_tasks
from tests.support.models import export, random_model
from tests.support.workplace import read_lines, write_tokens
from tokens.token_file import TokenFile
from tokens.tokenizer import load_tokenizer
from trainer.models import LoadedModel

MODEL = {"vocab_size": 257, "context_length": 16}
NAMES = list(TASKS)
MAY_BE_EMPTY = ("activity_label", "ctx_a", "ctx_b", "question", "goal", "UID")


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
    monkeypatch.setattr(scoring, "BLOCK_TOKENS", 16)
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
    ((title, *cells, tokens, start, of),) = rows_of(result)
    loss, perplexity, bits = (cell.split(" [")[0] for cell in cells)
    validated = [
        r["validation_loss"]
        for r in read_lines(trained.runs_dir / "tiny/metrics.jsonl")
        if "validation_loss" in r
    ]
    assert float(loss) == pytest.approx(min(validated), abs=1e-6) and len(loss) == 8
    assert float(perplexity) == pytest.approx(math.exp(float(loss)), abs=1e-3)
    assert float(bits) == pytest.approx(float(loss) / math.log(2), rel=0.01)
    assert (tokens, start, of) == ("480", "0", "tiny validation")
    checkpoint = (trained.runs_dir / "tiny/checkpoints/best").readlink().name
    assert title == f"tiny ({checkpoint})"
    record = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")[-1]
    assert record["checkpoint"] == checkpoint and record["num_tokens"] == 480
    assert record["loss"] == pytest.approx(float(loss), abs=1e-6) and record["global_step"] >= 4


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
    found = share(np.arange(questions) < right)
    assert found.value == right / questions and found.interval == pytest.approx(interval, abs=6e-5)


def test_a_short_text_has_smaller_blocks_of_some_documents_or_no_interval_and_says_why(tmp_path):
    """And no bound of a loss is below 0, whatever the spread."""
    assert ratio(np.array([0.0] * 7 + [1.0]), np.ones(8)).interval == pytest.approx(
        (0, 0.4206), abs=1e-4
    )
    path, model = tmp_path / "validation.safetensors", random_model(vocab_size=257)
    tokens = np.random.default_rng(0).integers(0, 256, size=19_582).astype(np.uint16)
    for num_documents, blocks in (("200", 8), ("16", 4), ("1", 2), (None, 2)):
        metadata = {"tokenizer": "bytes"} | (
            {"num_documents": num_documents} if num_documents else {}
        )
        write_tokens(path, tokens, metadata)
        part = choose_slice(TokenFile(path), "mine")
        record = {"target": "x", "checkpoint": None} | evaluate(
            LoadedModel("x", model, "bytes"), part, microbatch_size=64
        )
        assert record["blocks"] == blocks
        assert (record["loss_interval"] is None) == (blocks < 8)
        assert [f"19,581 tokens are {blocks} blocks" in note for note in table([record]).notes] == [
            True
        ] * (blocks < 8)


def test_without_a_spread_to_measure_there_is_no_interval():
    assert ratio(np.array([3.0]), np.array([8])).interval is None
    for wrong in (np.nan, np.inf):
        assert ratio(np.array([wrong, 1.0]), np.ones(2)).interval is None
    assert ratio(np.full(3, 0.1), np.full(3, 7)).interval == pytest.approx((0.1 / 7, 0.1 / 7))


# Targets and checkpoints


def test_a_model_on_the_hub_is_downloaded_unless_it_is_of_another_architecture(
    trained, tmp_path, monkeypatch
):
    directory = export(random_model(**MODEL), tmp_path / "model")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    hub = Hub(
        files | {"pytorch_model.bin": b"not asked for"}, repository="someone/model", kind="models"
    )
    arguments = "someone/model", "--dataset", "tiny"
    with serving(hub):
        rows = rows_of(lab_evaluate(trained, *arguments, **hub.environment(tmp_path / "home")))
    assert rows[0][0] == "someone/model"
    assert rows[0][1] == rows_of(lab_evaluate(trained, str(directory), "--dataset", "tiny"))[0][1]
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        lab_evaluate(trained, "./model/", "--dataset", "tiny")
    *kept, last = read_lines(trained.runs_dir / "evaluations.jsonl")
    assert last["target"] == str(directory)  # the same from every working directory
    assert [line["target"] for line in kept] == ["someone/model", str(directory)]
    assert kept[0]["loss"] == kept[1]["loss"] and kept[0]["model"].startswith("2 layers, 24 wide")
    compared = run_lab("compare", "someone/model", "--runs-dir", str(trained.runs_dir)).stdout
    assert "someone/model" in compared and f"{kept[0]['loss']:.4f}" in compared
    assert hub.downloads("model.safetensors") and not hub.downloads("pytorch_model.bin")
    other = Hub(
        {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 1000},
        repository="someone/model",
        kind="models",
    )
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
        (row,) = rows_of(lab_evaluate(trained, "tiny", *options, "--split", "train", **environment))
        assert row[-1] == "someone/tokens train"
        assert [len(hub.downloads(name)) for name in files] == [1, 1]


@pytest.mark.parametrize("is_task", [False, True])
def test_all_checkpoints_of_a_run_are_measured_and_drawn_over_tokens(trained, is_task, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(scoring, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(
        "lab.evaluate.evaluate.draw_by_hand",
        lambda path, plot: drawn.append(figure := Figure()) or plot(figure) or path,
    )
    write_records(
        trained.root / "pairs.jsonl",
        [{"sentence_good": "abcd"[:n], "sentence_bad": "wxyz"[-n:]} for n in (1, 2, 3, 4)],
    )
    task = ["--task", f"blimp={trained.root / 'pairs.jsonl'}"] * is_task
    result = lab_evaluate(trained, "tiny", "--checkpoints", "all", *task)
    checkpoints = list_checkpoints(trained.runs_dir / "tiny/checkpoints")
    assert len(checkpoints) > 1 and "evaluations-chart.png" in result.stderr
    records = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    assert [record["checkpoint"] for record in records] == [one.name for one in checkpoints]
    assert {row[0] for row in rows_of(result)} == {f"tiny ({one.name})" for one in checkpoints}
    key, (axes,) = "accuracy" if is_task else "loss", drawn[0].axes
    curve, *intervals = axes.lines
    assert list(curve.get_xdata()) == [record["trained_tokens"] for record in records]
    assert list(curve.get_ydata()) == [record[key] for record in records]
    assert [list(line.get_ydata()) for line in intervals] == [
        record[f"{key}_interval"] for record in records
    ]


def test_each_checkpoint_that_is_named_is_measured_once(trained):
    first, *_, last = [c.name for c in list_checkpoints(trained.runs_dir / "tiny/checkpoints")]
    for arguments in (
        ("tiny", "--checkpoint", f"{first},{last}"),
        (f"tiny@{first}", f"tiny@{last}", f"tiny@{last}"),
        (f"tiny@{first}", "tiny", "tiny@latest", "--checkpoints", "latest"),
    ):
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
        f"tiny ({checkpoint.name})" for checkpoint in others
    )
    assert result.stderr.count("warning: left out: ") == 1 and first.name in result.stderr


def test_the_lowest_loss_comes_first_and_a_late_error_loses_no_result(trained, tmp_path):
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
        (
            "tiny --task nix",
            "--task nix: is unknown; wanted hellaswag, lambada, arc_easy, piqa, blimp",
        ),
        (
            "tiny --task piqa=nix.jsonl",
            "nix.jsonl: not PIQA's questions (No such file or directory)",
        ),
        (
            "tiny --task piqa=pairs.jsonl",
            'not PIQA\'s questions ("goal" is missing; add it); each needs goal, sol1, sol2, label',
        ),
        ("tiny --task piqa=empty", "empty: has no questions; give a .jsonl or .parquet file"),
        (
            "tiny --task blimp=pairs.jsonl",
            "Error: blimp, pairs.jsonl: the choice 'aaaaaaaaaaaaaaaaaaaa'"
            " has 21 tokens, but tiny has a context of 16",
        ),
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
    (trained.root / "empty").mkdir()
    write_records(
        trained.root / "pairs.jsonl",
        [
            {"sentence_good": "a", "sentence_bad": "b"},
            {"sentence_good": "a" * 20, "sentence_bad": "b"},
        ],
    )
    assert message in error_line(lab_evaluate(trained, *arguments.split(" ")))
    assert not (trained.runs_dir / "tiny/evaluations.jsonl").exists()
    assert not (trained.runs_dir / "evaluations.jsonl").exists()


# Tasks


@pytest.mark.thorough  # importing lm-eval alone takes as long as a hundred other tests
def test_lm_eval_gives_an_export_the_same_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # read at the first import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = random_model(vocab_size=50257, context_length=32)  # " the" is often its likeliest token
    model.final_norm.bias.data.fill_(0.5)
    model.head_weight.data[load_tokenizer("gpt2").encode_ordinary(" the")] += 0.2
    target = LoadedModel("x", model, "gpt2")
    directory = write_export(target, tmp_path / "export", Extras("a card"))
    paths = write_tasks(tmp_path / "tasks")
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    theirs = simple_evaluate(
        "hf",
        {"pretrained": str(directory), "dtype": "float32"},
        [f"local_{n}" for n in paths],
        device="cpu",
        task_manager=manager,
        bootstrap_iters=0,
    )["results"]
    names = {
        "accuracy": "acc,none",
        "normalised_accuracy": "acc_norm,none",
        "perplexity": "perplexity,none",
    }
    num_cut = 0
    for name, path in paths.items():
        quiz = read_quiz(name, str(path))
        expected = {key: theirs[f"local_{name}"][names[key]] for key in quiz.figures}
        assert len({0.0, 1.0, *expected.values()}) == 2 + len(expected)  # a mix-up would show
        for size in (1, 3, 100):
            found = score(target, quiz, encode_questions(target, quiz), microbatch_size=size)
            assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5), (
                name,
                size,
            )
            for key, value in expected.items():
                low, high = found[f"{key}_interval"]
                assert low < value < high
        num_cut += found["cut_texts"]
    assert num_cut  # texts longer than the context


def shortened(value):
    """Make texts fit into the tiny run's context of 16 bytes."""
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    is_text = isinstance(value, str) and len(value) > 1 and not value.isidentifier()
    return " ".join(word[:3] for word in value.split()[:2]) + "." if is_text else value


def test_all_tasks_are_one_table_and_one_record_each(trained):
    for name in NAMES:
        write_records(trained.root / f"{name}.jsonl", shortened(records_of(name, 3)))
    write_records(
        trained.root / "lambada.jsonl",
        [{"text": "too long for this model"}, {"text": "short enough"}, {"text": "a b"}],
    )
    arguments = [f"--task={name}={trained.root}/{name}.jsonl" for name in NAMES]
    result = succeeded(lab_evaluate(trained, "tiny", *arguments))
    head, _, *lines = result.stdout.splitlines()
    names = [*NAMES[:-1], "blimp_anaphor_gender_agreement"]
    assert [line.split()[2] for line in lines] == names
    assert "perplexity [95%]" in head and "loss" not in head
    records = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    assert [record["benchmark"] for record in records] == names
    for record, line in zip(records, lines, strict=True):
        low, high = record["accuracy_interval"]
        assert record["split"] is None and record["questions_from"].endswith(".jsonl")
        assert record["questions"] == 3 and 0 <= low <= record["accuracy"] <= high <= 1
        assert f" {record['accuracy']:.4f} [{low:.4f}, {high:.4f}] " in line
    assert records[1]["cut_texts"] == 1
    assert "warning: lambada: 1 texts are longer than the context of tiny" in result.stderr


@pytest.mark.parametrize("is_task", [False, True])
def test_what_was_measured_is_one_json_document_on_stdout(trained, is_task, monkeypatch):
    write_records(questions := trained.root / "piqa.jsonl", shortened(records_of("piqa", 3)))
    monkeypatch.setattr(
        measure,
        "load_model",
        lambda *wanted, load=measure.load_model, **more: (
            print("a library's line") or load(*wanted, **more)
        ),
    )
    weights = export(random_model(**MODEL), trained.root / "weights")
    own, other = checked(
        succeeded(
            lab_evaluate(
                trained,
                "tiny@latest",
                str(weights),
                "--dataset",
                "tiny",
                "--json",
                *[f"--task=piqa={questions}"] * is_task,
            )
        ).stdout
    ).models
    (record,) = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    assert (own.name, own.checkpoint, own.trained_tokens) == (
        "tiny",
        record["checkpoint"],
        record["trained_tokens"],
    )
    assert (other.name, other.checkpoint, other.trained_tokens) == (str(weights), None, None)
    for model in (own, other):
        assert (model.loss is None, len(model.tasks)) == (is_task, int(is_task))
    shown = own.tasks[0] if is_task else own.loss
    assert record == record | shown.model_dump(exclude_unset=True)


def test_minimal_pairs_are_named_by_their_kind_and_may_be_many_files(tmp_path):
    pair = {"sentence_good": "a b.", "sentence_bad": "b a.", "UID": "some_island"}
    (tmp_path / "data").mkdir()
    for number, kind in enumerate(("some_island", "other_island")):
        write_records(tmp_path / f"data/{number}.jsonl", [pair | {"UID": kind}] * 2)
    one = read_quiz("blimp", str(tmp_path / "data/0.jsonl"))
    assert (one.name, len(one.questions)) == ("blimp_some_island", 2)
    both = read_quiz("blimp", str(tmp_path / "data"))
    assert (both.name, len(both.questions)) == ("blimp", 4)
    write_records(tmp_path / "own.jsonl", [{"sentence_good": "a", "sentence_bad": "b"}])
    own = read_quiz("blimp", str(tmp_path / "own.jsonl"))
    assert (own.name, own.source, own.split) == ("blimp", "own.jsonl", None)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_without_valid_questions_is_a_user_error(name, tmp_path):
    path, record = tmp_path / "val.jsonl", records_of(name, 1)[0]
    contents = ["", "\n", "junk", "[]", "{}", "[" * 10_000, "\xff"]
    for column in TASKS[name].model_fields:
        for wrong in (None, -1, 7, [], {}, ["a", ""], *[""] * (column not in MAY_BE_EMPTY)):
            contents.append(f"{json.dumps(record)}\n{json.dumps(record | {column: wrong})}")
    for content in contents:
        path.write_text(content, encoding="latin-1")
        with pytest.raises(UserError) as caught:
            read_quiz(name, str(path))
        assert TASKS[name].__name__ in str(caught.value) and str(path) in str(caught.value), content


def test_equal_choices_are_a_tie_that_the_first_one_wins():
    """In different batches, their log probabilities could differ in the last bit."""
    target = LoadedModel("x", random_model(vocab_size=257, context_length=32), "bytes")
    quiz = Quiz(
        "piqa",
        ("accuracy", "normalised_accuracy"),
        [Question("a" * n, ["b" * 9, "b" * 9, "c" * 5], right=1) for n in range(1, 22)],
        "",
        None,
    )
    found = score(target, quiz, encode_questions(target, quiz), microbatch_size=1)
    assert found["accuracy"] == found["normalised_accuracy"] == 0


# Questions on the hub


@pytest.mark.parametrize(
    ("name", "wanted", "others"),
    [
        ("hellaswag", ["data/validation-00000-of-00001.parquet"], ["data/train-00000.parquet"]),
        ("lambada", ["default/test/0000.parquet"], ["de/test/0000.parquet", "README.md"]),
        ("lambada", ["data/lambada_test.jsonl"], ["data/lambada_test_de.jsonl"]),
        (
            "arc_easy",
            ["ARC-Easy/test-00000-of-00001.parquet"],
            ["ARC-Challenge/test-00000-of-00001.parquet", "ARC-Easy/train-00000-of-00001.parquet"],
        ),
        ("piqa", ["plain_text/validation-00000-of-00001.parquet"], ["plain_text/test-0.parquet"]),
        (
            "blimp",
            ["a_island/train-00000-of-00001.parquet", "b_island/train-00000-of-00001.parquet"],
            ["README.md"],
        ),
    ],
)
def test_questions_are_downloaded_from_the_hub(name, wanted, others, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    write_records(path := tmp_path / Path(wanted[0]).name, records_of(name, 3))
    hub = Hub(
        dict.fromkeys(wanted, path.read_bytes()) | dict.fromkeys(others, b"x"),
        repository="someone/questions",
    )
    with serving(hub), used_in_this_process(hub, tmp_path / "home"):
        quiz = read_quiz(name, "someone/questions")
    assert len(quiz.questions) == 3 * len(wanted)
    assert (quiz.source, quiz.split) == ("someone/questions", None)
    assert not any(hub.downloads(other) for other in others)


def test_a_hub_dataset_without_the_questions_is_a_user_error(tmp_path):
    hub = Hub({"README.md": b"x"}, repository="someone/questions")
    with (
        serving(hub),
        used_in_this_process(hub, tmp_path / "home"),
        pytest.raises(UserError, match="has no file of PIQA's questions; give baber/piqa or"),
    ):
        read_quiz("piqa", "someone/questions")


def test_the_default_datasets_are_those_of_lm_eval():
    """What the hub's test server cannot show: the names that the tasks have in lm-eval."""
    for name, task in TASKS.items():
        file = "blimp/_template_yaml" if name == "blimp" else FILES[name][0]
        assert f"dataset_path: {task.hub_name}\n" in (tasks_dir() / file).read_text()
