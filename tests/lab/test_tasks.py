"""`lab evaluate --task`: questions, scores and errors; lm-eval is the reference."""

import importlib.util
import json
from pathlib import Path

import pytest

from basics.errors import UserError
from lab.evaluate import measure
from lab.evaluate.scoring import encode_questions, score
from lab.evaluate.tasks import TASKS, Question, read_quiz
from lab.publish.export import write_export
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.lm_eval_tasks import records_of, write_records, write_tasks
from tests.support.models import export, random_model
from tests.support.workplace import Workplace, read_lines
from tokens.tokenizer import load_tokenizer
from trainer.models import LoadedModel

NAMES = list(TASKS)
MAY_BE_EMPTY = ("activity_label", "ctx_a", "ctx_b", "question", "goal")  # before the choices
RECORDS = {name: records_of(name, 1)[0] for name in NAMES}


def lab_evaluate(workplace, *arguments, **environment):
    return run_lab(*workplace.arguments("evaluate", *arguments), **environment)


def likes_the(**changes):
    """Return a random model of GPT-2's tokens whose likeliest token is often " the"."""
    model = random_model(vocab_size=50257, **changes)
    model.final_norm.bias.data.fill_(0.5)
    model.head_weight.data[load_tokenizer("gpt2").encode_ordinary(" the")] += 0.2
    return LoadedModel("x", model, "gpt2")


def test_lm_eval_gives_an_export_the_same_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # read at the first import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    target = likes_the(context_length=32)
    directory = write_export(target, tmp_path / "export", "a card")
    paths = write_tasks(tmp_path / "tasks")
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    theirs = simple_evaluate(
        "hf", {"pretrained": str(directory), "dtype": "float32"}, [f"local_{n}" for n in paths],
        device="cpu", task_manager=manager, bootstrap_iters=0)["results"]
    names = {"accuracy": "acc,none", "normalised_accuracy": "acc_norm,none",
             "perplexity": "perplexity,none"}
    num_cut = 0
    for name, path in paths.items():
        quiz = read_quiz(name, str(path))
        for size in (1, 3, 100):
            texts = encode_questions(target, quiz.questions)
            answers = score(target, quiz.questions, texts, microbatch_size=size)
            found = {key: figure(answers) for key, figure in quiz.task.figures.items()}
            expected = {key: theirs[f"local_{name}"][names[key]] for key in found}
            assert {key: figure.value for key, figure in found.items()} == pytest.approx(
                expected, rel=1e-5), (name, size)
            assert len({0.0, 1.0, *expected.values()}) == 2 + len(found)  # a mix-up would show
            for figure in found.values():
                assert figure.interval[0] < figure.value < figure.interval[1]
        num_cut += sum(text.is_cut for of_one in texts for text in of_one)
    assert num_cut  # texts longer than the context


def test_all_tasks_are_one_table_and_one_record_each(trained):
    for name in NAMES:
        write_records(trained.root / f"{name}.jsonl", shortened(records_of(name, 3)))
    arguments = [f"--task={name}={trained.root}/{name}.jsonl" for name in NAMES]
    table = succeeded(lab_evaluate(trained, "tiny", *arguments)).stdout.splitlines()
    assert [line.split()[2] for line in table[2:]] == [
        *NAMES[:-1], "blimp_anaphor_gender_agreement"]
    assert "perplexity [95%]" in table[0] and "loss" not in table[0]
    records = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    assert [record["benchmark"] for record in records] == [
        line.split()[2] for line in table[2:]]
    for record, line in zip(records, table[2:], strict=True):
        low, high = record["accuracy_interval"]
        assert record["split"] is None and record["questions_from"].endswith(".jsonl")
        assert record["questions"] == 3 and 0 <= low <= record["accuracy"] <= high <= 1
        assert f" {record['accuracy']:.4f} [{low:.4f}, {high:.4f}] " in line


def test_losses_and_tasks_are_one_json_document_on_stdout(trained, monkeypatch):
    write_records(questions := trained.root / "piqa.jsonl", shortened(records_of("piqa", 3)))
    monkeypatch.setattr(measure, "read_quiz",
                        lambda *wanted: print("a library's line") or read_quiz(*wanted))
    weights = export(random_model(vocab_size=257, context_length=16), trained.root / "weights")
    task = f"--task=piqa={questions}", "--json"
    own, other = checked(succeeded(lab_evaluate(
        trained, "tiny@latest", str(weights), "--with-loss", "--dataset", "tiny",
        *task)).stdout).models
    by_loss, by_task = read_lines(trained.runs_dir / "tiny/evaluations.jsonl")
    assert (own.name, own.checkpoint, own.trained_tokens) == (
        "tiny", by_loss["checkpoint"], by_loss["trained_tokens"])
    assert by_loss.items() >= own.loss.model_dump().items() and own.loss.loss > 0
    assert by_task["accuracy"] == own.tasks[0].accuracy and by_task["questions"] == 3
    assert by_task["accuracy_interval"] == own.tasks[0].accuracy_interval
    assert (other.name, other.checkpoint, other.trained_tokens) == (str(weights), None, None)
    assert other.loss and len(other.tasks) == 1
    (alone,) = checked(succeeded(lab_evaluate(trained, "tiny", *task)).stdout).models
    assert alone.loss is None and alone.tasks[0].questions == 3


def shortened(value):
    """Make texts fit into the tiny run's context of 16 bytes."""
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    is_text = isinstance(value, str) and len(value) > 1 and not value.isidentifier()
    return " ".join(word[:3] for word in value.split()[:2]) + "." if is_text else value


def test_hellaswag_is_cleaned_of_markup(tmp_path):
    record = {"ind": 4, "activity_label": "Baking", "ctx_a": "A man [step] stands  there.",
              "ctx_b": "he [title] opens", "label": "2", "split": "val",
              "endings": ["the oven.", " a [x] window", "his eyes [title] sleeps", "the door"]}
    for suffix in ("jsonl", "parquet"):
        path = tmp_path / f"hellaswag_val.{suffix}"
        write_records(path, [record])
        assert read_quiz("hellaswag", str(path)).questions == [Question(
            "Baking: A man stands there. He. opens",
            ["the oven.", "a window", "his eyes. sleeps", "the door"], 2)]


def test_the_formats_of_the_authors_are_read(tmp_path):
    arc = {"id": "x", "answerKey": "2", "question": {"stem": "Why?", "choices": [
        {"text": "so", "label": "1"}, {"text": "no", "label": "2"}]}}
    write_records(tmp_path / "ARC-Easy-Test.jsonl", [arc])
    assert read_quiz("arc_easy", str(tmp_path / "ARC-Easy-Test.jsonl")).questions == [
        Question("Question: Why?\nAnswer:", ["so", "no"], 1)]
    write_records(tmp_path / "valid.jsonl", [
        {"goal": "Sit", "sol1": "a chair", "sol2": "a fork"}] * 2)
    (tmp_path / "valid-labels.lst").write_text("0\n1\n")
    assert [question.right for question in read_quiz(
        "piqa", str(tmp_path / "valid.jsonl")).questions] == [0, 1]
    (tmp_path / "valid-labels.lst").write_text("0\n")
    with pytest.raises(UserError, match="valid.jsonl: not PIQA's questions .*sol2, label"):
        read_quiz("piqa", str(tmp_path / "valid.jsonl"))


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
    path, good = tmp_path / "val.jsonl", json.dumps(RECORDS[name])
    contents = ["", "\n", "junk", "[]", "{}", "[" * 10_000, "\xff"]
    for column in TASKS[name].columns.split(", "):
        for wrong in (None, -1, 7, [], {}, ["a", ""], *[""] * (column not in MAY_BE_EMPTY)):
            contents.append(f"{good}\n{json.dumps(RECORDS[name] | {column: wrong})}")
    for content in contents:
        path.write_text(content, encoding="latin-1")
        with pytest.raises(UserError) as caught:
            read_quiz(name, str(path))
        assert TASKS[name].title in str(caught.value) and str(path) in str(caught.value), content


@pytest.mark.parametrize(("arguments", "message"), [
    (("--task", "nix"), "--task nix: is unknown; wanted hellaswag, lambada, arc_easy, piqa, blimp"),
    (("--task", "piqa=nix.jsonl"), "nix.jsonl: no such file"),
    (("--benchmark", "hellaswag", "nix.jsonl"), "nix.jsonl: no such file"),
    (("--task", "blimp=pairs.jsonl", "--task", "blimp=pairs.jsonl"), "blimp is there twice"),
    (("--task", "piqa=pairs.jsonl"), "not PIQA's questions (KeyError: 'goal'); each needs goal,"),
    (("--task", "piqa=empty"), "empty: has no .jsonl or .parquet file"),
    (("--with-loss", "--task", "blimp=pairs.jsonl"),
     "Error: blimp, pairs.jsonl, question 2: a choice has 21 tokens, but tiny has a context of 16"),
])
def test_a_user_error_is_one_line(trained, arguments, message, monkeypatch):
    monkeypatch.chdir(trained.root)
    (trained.root / "empty").mkdir()
    write_records(trained.root / "pairs.jsonl", [
        {"sentence_good": "a", "sentence_bad": "b"}, {"sentence_good": "a" * 20,
                                                      "sentence_bad": "b"}])
    assert message in error_line(lab_evaluate(trained, "tiny", *arguments))
    assert not (trained.runs_dir / "tiny/evaluations.jsonl").exists()


def test_a_text_that_loses_its_beginning_is_reported(trained):
    write_records(trained.root / "words.jsonl", [{"text": "too long for this model"},
                                                 {"text": "short enough"}])
    result = lab_evaluate(trained, "tiny", "--task", f"lambada={trained.root}/words.jsonl")
    assert ("warning: lambada: 1 texts are longer than the context of tiny and lost their"
            " beginning, as in lm-eval") in succeeded(result).stderr


def test_equal_choices_are_a_tie_that_the_first_one_wins():
    """In different batches, their log probabilities could differ in the last bit."""
    target = LoadedModel("x", random_model(vocab_size=257, context_length=32), "bytes")
    questions = [Question("a" * n, ["b" * 9, "b" * 9, "c" * 5], right=1) for n in range(1, 22)]
    texts = encode_questions(target, questions)
    found = score(target, questions, texts, microbatch_size=1)
    assert not found.right.any() and not found.normalised.any()


@pytest.mark.parametrize(("name", "wanted", "others"), [
    ("hellaswag", ["data/validation-00000-of-00001.parquet"], ["data/train-00000.parquet"]),
    ("lambada", ["default/test/0000.parquet"], ["de/test/0000.parquet", "README.md"]),
    ("lambada", ["data/lambada_test.jsonl"], ["data/lambada_test_de.jsonl"]),
    ("arc_easy", ["ARC-Easy/test-00000-of-00001.parquet"],
     ["ARC-Challenge/test-00000-of-00001.parquet", "ARC-Easy/train-00000-of-00001.parquet"]),
    ("piqa", ["plain_text/validation-00000-of-00001.parquet"], ["plain_text/test-0.parquet"]),
    ("blimp", ["a_island/train-00000-of-00001.parquet", "b_island/train-00000-of-00001.parquet"],
     ["README.md"]),
])
def test_questions_are_downloaded_from_the_hub(name, wanted, others, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    write_records(path := tmp_path / Path(wanted[0]).name, records_of(name, 3))
    hub = Hub(dict.fromkeys(wanted, path.read_bytes()) | dict.fromkeys(others, b"x"),
              repository="someone/questions")
    with serving(hub), used_in_this_process(hub, tmp_path / "home"):
        quiz = read_quiz(name, "someone/questions")
    assert len(quiz.questions) == 3 * len(wanted)
    assert (quiz.source, quiz.split) == ("someone/questions", None)
    assert not any(hub.downloads(other) for other in others)


def test_nothing_is_downloaded_for_a_target_that_does_not_exist(tmp_path):
    with serving(Hub({}, repository="Rowan/hellaswag")) as hub:
        result = lab_evaluate(Workplace(tmp_path), "nix", "--task", "hellaswag",
                              **hub.environment(tmp_path / "home"))
        assert "no such run" in error_line(result) and not hub.requests


def test_a_hub_dataset_without_the_questions_is_a_user_error(tmp_path):
    hub = Hub({"README.md": b"x"}, repository="someone/questions")
    with (serving(hub), used_in_this_process(hub, tmp_path / "home"),
          pytest.raises(UserError, match="has no file of PIQA's questions; give baber/piqa or")):
        read_quiz("piqa", "someone/questions")


def test_the_default_datasets_are_those_of_lm_eval():
    """What the hub's test server cannot show: the names that the tasks have in lm-eval."""
    tasks = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks"
    for name, file in (("hellaswag", "hellaswag/hellaswag.yaml"), ("piqa", "piqa/piqa.yaml"),
                       ("lambada", "lambada/lambada_openai.yaml"),
                       ("arc_easy", "arc/arc_easy.yaml"), ("blimp", "blimp/_template_yaml")):
        assert f"dataset_path: {TASKS[name].hub_name}\n" in (tasks / file).read_text()
