"""The tuned model: its weights, its chat template, its card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

from lab.instruct.instructions import Entry, load_entries
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.markdown import HOSTILE, active_parts
from tests.support.tuning import add_tunable_run, answers_in, tune
from tests.support.workplace import Workplace
from tokens.tokenizer import load_tokenizer
from trainer.models import load_model


@pytest.fixture
def tuned_place(workplace: Workplace) -> Workplace:
    return add_tunable_run(workplace)


def tuned_dir(workplace: Workplace) -> Path:
    return workplace.runs_dir / "tiny/tuned"


def card_of(workplace: Workplace) -> ModelCard:
    return ModelCard.load(tuned_dir(workplace) / "README.md")


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
    for entry, answered in zip(load_entries(tuned_place.root / "data.json").test,
                               answers_in(tuned_place)["answers"], strict=True):
        shown = run_lab("generate", str(tuned_dir(tuned_place)), "--prompt", entry.prompt(),
                        "--temperature", "0", "--max-new-tokens", "20")
        assert succeeded(shown).stdout == f"{entry.prompt()} {answered['answer']}\n"
    tuned_place.add_dataset()
    evaluated = run_lab(*tuned_place.arguments(
        "evaluate", str(tuned_dir(tuned_place)), "--dataset", "tiny"))
    assert str(tuned_dir(tuned_place)) in succeeded(evaluated).stdout


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
