from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

from basics import failpoints
from basics.directory_lock import lock_directory
from basics.errors import UserError
from lab.instruct.instructions import Entry, load_entries
from lab.instruct.tune import default_model_output
from lab.instruct.tuning import Tuner
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.markdown import HOSTILE, active_parts
from tests.support.tuning import (
    MODEL,
    add_tunable_run,
    answers_in,
    entries_of,
    tune,
    tune_arguments,
)
from tests.support.workplace import Workplace, forked
from tokens.tokenizer import load_tokenizer
from trainer.models import LoadedModel, load_model

EPOCHS = ("--max-epochs", "4")
Failing = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def tuned_place(workplace: Workplace) -> Workplace:
    return add_tunable_run(workplace)


@pytest.fixture
def with_dropout(tuned_place: Workplace) -> Workplace:
    """A run with dropout, whose masks must be the same after a kill."""
    path = tuned_place.runs_dir / "tiny/model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"drop_rate": 0.1}))
    return tuned_place


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Make places of the code fail while a block runs."""
    @contextmanager
    def failing_at(fault: str) -> Iterator[None]:
        failpoints._hits.clear()
        with monkeypatch.context() as patched:
            patched.setenv(failpoints.VARIABLE, fault)
            yield
    return failing_at


def tuned_dir(workplace: Workplace) -> Path:
    return workplace.runs_dir / "tiny/tuned"


def progress_dir(workplace: Workplace) -> Path:
    return workplace.runs_dir / "tiny/.tuned.progress"


def result_of(workplace: Workplace) -> dict[str, bytes]:
    """Return all that a tuning leaves: the answers, and the files of the tuned model."""
    assert not list((workplace.runs_dir / "tiny").glob(".*"))
    answers = workplace.runs_dir / "tiny/instruction-answers.json"
    return {path.name: path.read_bytes() for path in (answers, *tuned_dir(workplace).iterdir())}


def card_of(workplace: Workplace) -> ModelCard:
    return ModelCard.load(tuned_dir(workplace) / "README.md")


def question(number: int, *, text: str = "") -> dict[str, str]:
    return {"instruction": f"Ask {number}", "input": text, "output": ""}


def test_the_tuned_model_is_kept_with_the_weights_of_the_best_epoch(
    tuned_place: Workplace
) -> None:
    succeeded(tune(tuned_place, "--max-epochs", "10"))
    tuned = load_model(str(tuned_dir(tuned_place)), runs_dir=tuned_place.runs_dir)
    assert tuned.tokenizer_name == "bytes" and tuned.model.config.drop_rate == 0
    theirs = GPT2LMHeadModel.from_pretrained(tuned_dir(tuned_place)).eval()
    base = load_model("tiny", runs_dir=tuned_place.runs_dir)
    with torch.no_grad():
        ours, hub, before = (model(torch.arange(30).view(2, 15))
                             for model in (tuned.model, theirs, base.model))
    assert (ours - hub.logits).abs().max() < 1e-4 and (ours - before).abs().max() > 0.01
    for entry, answered in zip(load_entries(tuned_place.root / "data.json").entries[34:38],
                               answers_in(tuned_place)["answers"], strict=True):
        shown = run_lab("generate", str(tuned_dir(tuned_place)), "--prompt", entry.prompt(),
                        "--temperature", "0", "--max-new-tokens", "20")
        assert succeeded(shown).stdout == f"{entry.prompt()} {answered['answer']}\n"


def test_evaluate_takes_a_tuned_model(tuned_place: Workplace) -> None:
    tuned_place.add_dataset()
    succeeded(tune(tuned_place, "--max-epochs", "1"))
    result = run_lab("evaluate", str(tuned_dir(tuned_place)), "--dataset", "tiny", "--runs-dir",
                     str(tuned_place.runs_dir), "--datasets-dir", str(tuned_place.datasets_dir))
    assert str(tuned_dir(tuned_place))[-20:] in succeeded(result).stdout


@pytest.mark.parametrize("text", ["", "näive\n  {{ text }} <|x|>\n"])
def test_the_chat_template_renders_the_prompt_of_the_tuning(
    tuned_place: Workplace, text: str
) -> None:
    succeeded(tune(tuned_place, "--max-epochs", "1", "--max-new-tokens", "1"))
    tokenizer = AutoTokenizer.from_pretrained(tuned_dir(tuned_place))
    entry = Entry(instruction=" Äsk \n\"'\\n {% x %}", input=text, output="Yes.")
    message = {"role": "user", "content": entry.instruction, "input": entry.input}
    joined = f"{entry.instruction}\n\n### Input:\n{text}" if text else entry.instruction
    for messages in ([message], [{"role": "user", "content": joined}]):
        for add in (True, False):
            assert tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add) == entry.prompt()
    found = tokenizer.apply_chat_template([message], tokenize=True, return_dict=False)
    assert found == load_tokenizer("bytes").encode_ordinary(entry.prompt())
    answered = [message, {"role": "assistant", "content": "Yes."}, message]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == (
        f"{entry.prompt()}Yes.<|endoftext|>{entry.prompt()}")
    with pytest.raises(Exception, match="user and assistant messages only"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_a_pipeline_answers_messages_as_the_test_was_answered(tuned_place: Workplace) -> None:
    succeeded(tune(tuned_place, "--max-epochs", "10"))
    answered = answers_in(tuned_place)["answers"][0]
    generator = pipeline("text-generation", model=str(tuned_dir(tuned_place)))
    [found] = generator([{"role": "user", "content": answered["instruction"]}],
                        max_new_tokens=20, do_sample=False)
    assert found["generated_text"][-1]["content"].strip() == answered["answer"] == "Yes."


def test_the_card_says_what_the_model_was_tuned_on(tuned_place: Workplace) -> None:
    succeeded(tune(tuned_place, "--max-epochs", "2", "--max-new-tokens", "1"))
    card, record = card_of(tuned_place), answers_in(tuned_place)
    facts = card.data.to_dict()
    assert facts["tags"] == ["gpt2", "ddp-train", "instruction-tuning"]
    assert "license" not in facts and "base_model" not in facts
    data = tuned_place.root / "data.json"
    for wanted in ("# tiny-tuned", f"`tiny` after 0 tokens (checkpoint `{record['checkpoint']}`)",
                   "| file | data.json |", f"| SHA-256 | {load_entries(data).sha256} |",
                   "| entries | 40 |", "| for training, validation, the test | 34, 2, 4 |",
                   "| learning rate, constant (AdamW) | 0.01 |", "| seed | 42 |",
                   "| loss computed on | the response only |", 'model=".")',
                   f"| 2 | {record['epochs'][2]['train_loss']:.6f} |"):
        assert wanted in card.text, wanted
    assert str(tuned_place.root) not in card.content and "/tmp" not in card.content


def test_the_card_names_a_base_model_of_the_hub_and_hides_directories(
    tuned_place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeded(tune(tuned_place, "--max-epochs", "1", "--max-new-tokens", "1"))
    monkeypatch.chdir(tuned_place.root)
    base = tuned_dir(tuned_place).rename(tuned_place.root / HOSTILE)
    (tuned_place.root / "data.json").rename(f"{HOSTILE}.json")
    command = ("--data", f"{HOSTILE}.json", "--max-epochs", "1", "--max-new-tokens", "1")
    succeeded(run_lab("tune", str(base), *command))
    card = ModelCard.load(f"{HOSTILE}-tuned/README.md")
    assert HOSTILE.replace("`", "'") + "`, fine-tuned" in card.text
    assert str(tuned_place.root) not in card.content and not active_parts(card.content)
    monkeypatch.setattr("trainer.models._download", lambda name: base)
    succeeded(run_lab("tune", "someone/gpt", *command, "--model-output", "other"))
    card = ModelCard.load("other/README.md")
    assert card.data.base_model == "someone/gpt" and "# gpt-tuned" in card.text


@pytest.mark.parametrize("fault", ["tune.saved:kill:hit=2", "tune.rename:kill:hit=2"])
def test_a_kill_resumes_at_the_last_epoch_bit_for_bit(
    with_dropout: Workplace, fault: str
) -> None:
    def run(**environment: str) -> CompletedProcess[str]:  # all with as many threads
        return forked("lab/__main__.py", tune_arguments(with_dropout, *EPOCHS),
                      environment=environment | {"CUDA_VISIBLE_DEVICES": ""})

    assert run().returncode == 0
    wanted = result_of(with_dropout)
    killed = run(**{failpoints.VARIABLE: fault})
    assert killed.returncode == -9, killed.stderr
    assert (progress_dir(with_dropout) / "state.safetensors").is_file()
    lines = run().stdout.splitlines()
    number = 2 if "saved" in fault else 1
    assert lines[1] == f"continuing after epoch {number}, which an earlier command has finished"
    assert lines[2].startswith(f"epoch {number + 1}: train loss ")
    assert result_of(with_dropout) == wanted


@pytest.mark.parametrize("hit", [1, 2, 3, 4])
def test_it_resumes_after_every_epoch(with_dropout: Workplace, failing: Failing, hit: int) -> None:
    succeeded(tune(with_dropout, *EPOCHS))
    wanted = result_of(with_dropout)
    with failing(f"tune.saved:raise:hit={hit}"):
        assert isinstance(tune(with_dropout, *EPOCHS).exception, RuntimeError)
    assert f"continuing after epoch {hit}," in succeeded(tune(with_dropout, *EPOCHS)).stdout
    assert result_of(with_dropout) == wanted


def test_a_kill_while_answering_trains_nothing_again(
    tuned_place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rising = [question(i) | {"output": " Yet!" if i >= 38 else " Yes."} for i in range(40)]
    (tuned_place.root / "data.json").write_text(json.dumps(rising))
    lines = succeeded(tune(tuned_place, "--max-epochs", "30")).stdout
    assert "validation loss rose" in lines
    wanted = result_of(tuned_place)
    with monkeypatch.context() as broken:
        broken.setattr("reporting.sampling.generate_tokens", lambda *_: 1 / 0)
        assert isinstance(tune(tuned_place, "--max-epochs", "30").exception, ZeroDivisionError)
    monkeypatch.setattr(Tuner, "_train", lambda *_: pytest.fail("trained again"))
    succeeded(tune(tuned_place, "--max-epochs", "30"))
    assert result_of(tuned_place) == wanted


@pytest.mark.parametrize(("change", "words"), [
    (("--seed", "7"), "another seed"), (("--weight-decay", "0.2"), "another weight decay"),
    ("data", "another data"), ("model", "another base model"),
])
def test_another_file_or_option_starts_anew(tuned_place: Workplace, failing,
                                            change: str | tuple[str, ...], words: str) -> None:
    with failing("tune.saved:raise:hit=2"):
        assert tune(tuned_place, *EPOCHS).exception
    if change == "data":
        entries = entries_of(tuned_place.root / "data.json")
        entries[3]["output"] = " No."
        (tuned_place.root / "data.json").write_text(json.dumps(entries))
    elif change == "model":
        [path] = (tuned_place.runs_dir / "tiny/checkpoints").glob("*-iteration-*/model.safetensors")
        weights = load_file(path)
        weights["final_norm.bias"] += 0.1
        tensors_path = path.with_name("other")
        save_file(weights, tensors_path)
        tensors_path.replace(path)
        _write_manifest_again(path.parent)
    options = change if isinstance(change, tuple) else ()
    result = succeeded(tune(tuned_place, *EPOCHS, *options))
    assert f"is of a tuning with {words}: starting anew" in result.stdout
    found = result_of(tuned_place)
    assert len(answers_in(tuned_place)["epochs"]) == 5
    succeeded(tune(tuned_place, *EPOCHS, *options))
    assert result_of(tuned_place) == found


def _write_manifest_again(checkpoint: Path) -> None:
    from basics.manifest import MANIFEST, read_manifest, write_manifest

    old = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, global_step=old.global_step, tokens=old.tokens)


@pytest.mark.parametrize("damage", ["cut", "junk", "empty", "no epochs"])
def test_a_damaged_state_starts_anew(tuned_place: Workplace, failing: Failing, damage: str) -> None:
    succeeded(tune(tuned_place, *EPOCHS))
    wanted = result_of(tuned_place)
    with failing("tune.saved:raise:hit=2"):
        assert tune(tuned_place, *EPOCHS).exception
    path = progress_dir(tuned_place) / "state.safetensors"
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 9)
    elif damage == "no epochs":
        with safe_open(path, framework="pt") as file:
            record = json.loads(file.metadata()["tuning"]) | {"epochs": []}
        save_file(load_file(path), path, {"tuning": json.dumps(record)})
    elif damage == "junk":
        save_file({"weights/x": torch.zeros(1)}, path)
    else:
        path.write_bytes(b"")
    assert ": starting anew" in succeeded(tune(tuned_place, *EPOCHS)).stdout
    assert result_of(tuned_place) == wanted


def test_a_full_disk_loses_no_epoch(tuned_place: Workplace, failing: Failing) -> None:
    with failing("tune.rename:full:hit=3"):
        result = tune(tuned_place, *EPOCHS)
    assert isinstance(result.exception, UserError) and result.exception.status == 4
    assert [path.name for path in progress_dir(tuned_place).iterdir()] == ["state.safetensors"]
    assert "continuing after epoch 2," in succeeded(tune(tuned_place, *EPOCHS)).stdout


def test_two_tunings_of_one_run_do_not_mix(tuned_place: Workplace) -> None:
    progress_dir(tuned_place).mkdir()
    lock = lock_directory(progress_dir(tuned_place))
    result = tune(tuned_place, *EPOCHS)
    os.close(lock)
    assert isinstance(result.exception, UserError)
    assert "another lab tune is at work here" in result.exception.line()
    assert not tuned_dir(tuned_place).exists()


def test_a_model_output_that_holds_something_else_is_refused(tuned_place: Workplace) -> None:
    other = tuned_place.root / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    before = tuned_place.files()
    error = error_line(tune(tuned_place, "--model-output", str(other)))
    assert "holds other files (thesis.txt)" in error and "--model-output" in error
    assert tuned_place.files() == before


def test_the_model_that_is_tuned_is_not_replaced(tuned_place: Workplace) -> None:
    succeeded(tune(tuned_place, "--max-epochs", "1", "--max-new-tokens", "1"))
    base = tuned_dir(tuned_place)
    (tuned_place.root / "link").symlink_to(base)
    before = tuned_place.files()
    for name in (base, tuned_place.root / "link"):
        error = error_line(run_lab("tune", str(name), "--data", str(tuned_place.root / "data.json"),
                                   "--model-output", str(base)))
        assert "is the model that is to be tuned" in error
    assert tuned_place.files() == before


def test_a_tuning_replaces_the_model_of_an_earlier_one(tuned_place: Workplace) -> None:
    for seed in ("1", "2"):
        succeeded(tune(tuned_place, "--max-epochs", "1", "--max-new-tokens", "1", "--seed", seed))
    assert "| seed | 2 |" in card_of(tuned_place).text


@pytest.mark.parametrize(("name", "output"), [("openai-community/gpt2", "gpt2-tuned"),
                                              ("exports/mine/", "mine-tuned")])
def test_the_model_goes_to_the_current_directory_unless_of_a_run(name: str, output: str) -> None:
    from gpt import GPTModel

    assert default_model_output(LoadedModel(name, GPTModel(MODEL), "gpt2")) == Path(output)
