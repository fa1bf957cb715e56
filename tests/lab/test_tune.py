"""`lab tune`: the data, the loop, the answers, and the tuned model with its card."""

import dataclasses
import hashlib
import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

from basics.errors import UserError
from gpt import GPTModel
from lab.instruct import instructions
from lab.instruct.instructions import Entry, fetch_default_entries, load_answers, load_entries
from lab.instruct.tuned_model import default_place
from lab.instruct.tuning import IGNORED, TuneOptions, Tuner, encode_entries
from tests.support.lab_cli import (
    HOSTILE,
    TUNABLE,
    active_parts,
    add_tunable_run,
    answers_in,
    entries_of,
    error_line,
    run_lab,
    succeeded,
    tune,
    write_entries,
)
from tokens.tokenizer import load_tokenizer
from trainer.models import LoadedModel, load_model

OPTIONS = TuneOptions(loss_on="response", learning_rate=0.01, weight_decay=0.1, batch_size=4,
                      max_epochs=30, max_new_tokens=20, seed=1)
END = 256


@pytest.fixture
def tuned_place(workplace):
    """A run with a checkpoint, and instructions that all have the same output."""
    return add_tunable_run(workplace)


def encoded(prompt, *, input="", output="Yes.", context_length=192, loss_on="response"):
    return encode_entries([Entry(instruction=prompt, input=input, output=output)],
                          load_tokenizer("bytes"), context_length=context_length, loss_on=loss_on)


def tuner(options=OPTIONS, **model):
    torch.manual_seed(0)
    return Tuner(GPTModel(TUNABLE.model_copy(update=model)), options, pad_id=END)


def test_only_the_response_and_the_end_of_text_are_targets():
    prompt = list(
        b"Below is an instruction that describes a task. Write a response that appropriately"
        b" completes the request.\n\n### Instruction:\na\n\n### Input:\nb\n\n### Response:\n"
    )  # Alpaca's template
    [example] = encoded("a", input="b").examples
    assert example.token_ids == [*prompt, *b"Yes."]
    assert example.targets == [IGNORED] * (len(prompt) - 1) + [*b"Yes.", END]
    [whole] = encoded("a", input="b", loss_on="all").examples
    assert whole.token_ids == example.token_ids
    assert whole.targets == [*prompt[1:], *b"Yes.", END]


def test_entries_longer_than_the_context_are_cut_or_skipped():
    length = len(Entry(instruction="a", output="").prompt())
    fits, cut, full, none = (encoded("a", context_length=length + more) for more in (4, 3, 0, -1))
    assert (fits.num_cut, fits.num_skipped) == (0, 0)
    assert (cut.num_cut, cut.num_skipped) == (1, 0)
    assert cut.examples[0].targets[-4:] == list(b"Yes.")  # all but its end
    assert full.examples[0].targets == [IGNORED] * (length - 1) + list(b"Y")
    assert (none.examples, none.num_cut, none.num_skipped) == ([], 0, 1)


def test_an_end_of_text_marker_in_the_data_is_plain_text():
    [example] = encoded("<|endoftext|>", output="<|endoftext|>").examples
    assert END not in example.token_ids and example.targets.count(END) == 1


def test_the_loss_is_the_mean_over_tokens_for_any_batch_size():
    examples = [encoded("a" * n, output="b" * (n + 1)).examples[0] for n in range(5)]
    losses = []
    for size in (1, 2, 5):
        one = tuner(dataclasses.replace(OPTIONS, batch_size=size))
        losses.append(one.mean_loss(examples))
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    total = count = 0
    for example in examples:
        logits = one.model(torch.tensor([example.token_ids]))[0].log_softmax(-1)
        for place, target in enumerate(example.targets):
            if target != IGNORED:
                total, count = total - logits[place, target].item(), count + 1
    assert losses[0] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(("count", "sizes"), [(1100, (935, 110, 55)), (10, (8, 1, 1))])
def test_the_split_is_that_of_the_book(tmp_path, count, sizes):
    path = write_entries(tmp_path / "data.json", count, output="x")
    found = load_entries(path)
    assert (len(found.train), len(found.test), len(found.validation)) == sizes
    entries = [entry.model_dump() for entry in found.train + found.test + found.validation]
    assert entries == entries_of(path)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_best_epoch_is_restored_when_validation_loss_rises():
    train = [encoded(f"Ask {n}").examples[0] for n in range(8)]
    validation = [encoded(f"Ask {n}", output="Yet!").examples[0] for n in range(3)]
    one, seen = tuner(), []
    one.run(train, validation, seen.append)
    losses = [epoch.validation_loss for epoch in one.epochs]
    assert one.epochs == seen and [epoch.number for epoch in seen] == list(range(len(seen)))
    assert 2 < len(seen) <= OPTIONS.max_epochs  # it falls while "Y" is learnt, then rises
    assert losses[:-1] == sorted(losses[:-1], reverse=True) and losses[-1] > losses[-2]
    assert one.best is one.epochs[-2]
    assert one.mean_loss(validation) == losses[-2]  # bit-identical
    assert not one.model.training


def test_the_seed_determines_dropout_and_order():
    train = [encoded(f"Ask {n}", output=str(n) * 9).examples[0] for n in range(8)]

    def first_loss(seed, drop_rate):
        one = tuner(dataclasses.replace(OPTIONS, max_epochs=1, seed=seed), drop_rate=drop_rate)
        torch.seed()  # the earlier random state does not matter
        one.run(train, train, lambda epoch: None)
        return one.epochs[1].train_loss

    assert first_loss(1, 0.5) == first_loss(1, 0.5) != first_loss(1, 0.0)
    assert first_loss(1, 0.0) != first_loss(2, 0.0)


def test_the_tuned_model_answers_the_test(tuned_place):
    lines = succeeded(tune(tuned_place, "--max-epochs", "10")).stdout.splitlines()
    assert lines[0] == "tiny: 34 entries for training, 2 for validation, 4 for the test"
    assert lines[1].startswith("epoch 0: before training, validation loss 5.")
    assert lines[2].startswith("epoch 1: train loss ")
    record = answers_in(tuned_place)
    lowest = min(record["epochs"], key=lambda epoch: epoch["validation_loss"])
    assert record["model"] == "tiny" and record["best_epoch"] == lowest["number"]
    assert record["checkpoint"].endswith("-iteration-1")
    assert record["data"] == {"file": str(tuned_place.root / "data.json"), "train": 34,
                              "validation": 2, "test": 4, "cut": 0, "skipped": 0}
    assert record["options"]["learning_rate"] == 0.01 and record["options"]["seed"] == 42
    wanted = [entry | {"answer": "Yes."}
              for entry in entries_of(tuned_place.root / "data.json")[34:38]]
    assert record["answers"] == wanted  # learnt, including where to stop; in the order of the test
    path = tuned_place.runs_dir / "tiny/instruction-answers.json"
    assert [answer.model_dump() for answer in load_answers(path).answers] == wanted
    assert not list(path.parent.glob(".*"))  # no other files were written


@pytest.mark.parametrize(("name", "output"), [("openai-community/gpt2", "gpt2-answers.json"),
                                              ("exports/mine/", "mine-answers.json")])
def test_what_is_no_run_has_its_answers_in_the_current_directory(name, output):
    target = LoadedModel(name, GPTModel(TUNABLE), "gpt2")
    assert default_place(target, "instruction-answers.json", "-answers.json") == Path(output)


def test_cut_and_skipped_entries_are_reported(tuned_place):
    data = tuned_place.root / "data.json"
    entries = entries_of(data)
    entries[0]["output"] = entries[39]["output"] = "long " * 50
    entries[1]["instruction"] = entries[35]["instruction"] = "long " * 50
    data.write_text(json.dumps(entries))
    result = succeeded(tune(tuned_place, "--max-epochs", "1",
                            "--output", str(tuned_place.root / "a" / "b")))
    assert "2 entries cut to the context of 192 tokens, 1 skipped" in result.stdout
    assert "1 questions are longer than the context" in result.stdout
    record = json.loads((tuned_place.root / "a/b").read_text())
    counts = record["data"]
    assert (counts["train"], counts["cut"], counts["skipped"]) == (33, 2, 1)
    assert len(record["answers"]) == 4  # none is skipped in the test, so that files stay comparable


@pytest.mark.parametrize(("content", "message"), [
    ("nonsense", "Invalid JSON"),
    ('{"instruction": "a"}', "should be a valid array"),
    ('[{"instruction": "a", "input": "b"}]', '"0.output" is missing'),
    ('[{"instruction": "a", "output": 3}]', "0.output should be a valid string"),
    ('["text"]', "0 should be"),
    ('[{"instruction": "a", "output": "\\ud800"}]', "Invalid JSON"),
    ("[]", "has 0 entries; give 10 or more"),
    (None, "cannot be read: No such file"),
])
def test_invalid_data_is_a_user_error(tmp_path, content, message):
    path = tmp_path / "data.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_entries(path)
    assert f"{path}: " in str(caught.value) and message in str(caught.value)


def test_errors_are_found_before_tuning(tuned_place):
    data = write_entries(tuned_place.root / "nine.json", 9, output="")
    assert "nine.json: has 9 entries" in error_line(tune(tuned_place, data=data))
    for output in (tuned_place.root, data / "a.json"):
        assert "cannot be written" in error_line(tune(tuned_place, "--output", str(output)))
    assert "no checkpoint 'nix'" in error_line(tune(tuned_place, "--checkpoint", "nix"))
    for option in ("--learning-rate", "--weight-decay"):
        result = tune(tuned_place, option, "nan")
        assert result.exit_code == 2 and f"'{option}': nan is not a finite" in result.stderr
    entries = [entry | {"instruction": "long " * 50}
               for entry in entries_of(tuned_place.root / "data.json")]
    data.write_text(json.dumps(entries))
    assert "has a prompt that fits tiny's context of 192" in error_line(
        tune(tuned_place, data=data))
    assert not (tuned_place.runs_dir / "tiny/instruction-answers.json").exists()


def test_losses_that_are_not_finite_do_not_prevent_answers(tuned_place, monkeypatch):
    monkeypatch.setattr(Tuner, "_train", lambda *_: math.nan)
    succeeded(tune(tuned_place, "--max-epochs", "1", "--max-new-tokens", "1"))
    record = answers_in(tuned_place)
    assert [epoch["train_loss"] for epoch in record["epochs"]] == [None, None]
    assert len(record["answers"]) == 4


@contextmanager
def serving(content, *, status=200, cut=0):
    """Serve one file; yield its address and the list of requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            requests.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - cut])

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/data.json", requests
    finally:
        server.shutdown()
        server.server_close()


def test_the_data_of_the_book_is_downloaded_once(tuned_place, monkeypatch):
    content = (tuned_place.root / "data.json").read_bytes()
    with serving(content) as (url, requests):
        monkeypatch.setattr(instructions, "DEFAULT_URL", url)
        for _ in range(2):
            succeeded(run_lab("tune", *tuned_place.arguments("tiny"), "--max-epochs", "1",
                              "--max-new-tokens", "1"))
    assert len(requests) == 1
    assert [path.name for path in tuned_place.datasets_dir.iterdir()] == ["instruction-data.json"]
    assert (tuned_place.datasets_dir / "instruction-data.json").read_bytes() == content


@pytest.mark.parametrize(("answer", "message"), [
    ({"content": b"[]", "status": 404}, "HTTP Error 404"),
    ({"content": b"<html>log in</html>"}, "Invalid JSON"),
    ({"content": b"[" + b" " * 5000 + b"]", "cut": 9}, "IncompleteRead"),
    ({"content": b" " * 6000}, "it has more than 5,999 bytes"),
    (None, "refused"),
])
def test_a_failed_download_names_the_alternative(tmp_path, monkeypatch, answer, message):
    monkeypatch.setattr(instructions, "MAX_DOWNLOAD_BYTES", 5999)
    with serving(**answer or {"content": b""}) as (url, _):
        monkeypatch.setattr(instructions, "DEFAULT_URL", url)
        if answer is not None:
            line = failed_download(tmp_path)
    if answer is None:  # nobody listens there any more
        line = failed_download(tmp_path)
    assert message in line and "name it with --data FILE" in line
    assert not list(tmp_path.iterdir())


def failed_download(directory):
    with pytest.raises(UserError) as caught:
        fetch_default_entries(directory / "datasets")
    return str(caught.value)


def tuned_dir(workplace):
    return workplace.runs_dir / "tiny/tuned"


def card_of(workplace):
    return ModelCard.load(tuned_dir(workplace) / "README.md")


def test_the_tuned_model_is_kept_with_the_weights_of_the_best_epoch(tuned_place):
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
    generator = pipeline("text-generation", model=str(tuned_dir(tuned_place)))
    [found] = generator([{"role": "user", "content": entry.instruction}], max_new_tokens=20,
                        do_sample=False)
    assert found["generated_text"][-1]["content"].strip() == answered["answer"] == "Yes."
    tuned_place.add_dataset()
    evaluated = run_lab(*tuned_place.arguments(
        "evaluate", str(tuned_dir(tuned_place)), "--dataset", "tiny"))
    assert str(tuned_dir(tuned_place)) in succeeded(evaluated).stdout


@pytest.mark.parametrize("text", ["", "näive\n  {{ text }} <|x|>\n"])
def test_the_chat_template_renders_the_prompt_of_the_tuning(tuned_place, text):
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


def test_the_card_says_what_the_model_was_tuned_on(tuned_place):
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


def test_the_card_names_a_base_model_of_the_hub_and_hides_directories(tuned_place, monkeypatch):
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


def test_a_model_output_that_holds_something_else_is_refused(tuned_place):
    other = tuned_place.root / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    before = tuned_place.files()
    error = error_line(tune(tuned_place, "--model-output", str(other)))
    assert "holds other files (thesis.txt)" in error and "--model-output" in error
    assert tuned_place.files() == before


def test_the_model_that_is_tuned_is_not_replaced(tuned_place):
    succeeded(tune(tuned_place, "--max-epochs", "1", "--max-new-tokens", "1"))
    base = tuned_dir(tuned_place)
    (tuned_place.root / "link").symlink_to(base)
    before = tuned_place.files()
    for name in (base, tuned_place.root / "link"):
        error = error_line(run_lab("tune", str(name), "--data", str(tuned_place.root / "data.json"),
                                   "--model-output", str(base)))
        assert "is the model that is to be tuned" in error
    assert tuned_place.files() == before
