"""`lab new`, and the page about a first model, whose commands are run as they stand there."""

import json
import re
import shlex
from pydoc_data.topics import topics

import numpy as np
import pytest

from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.models import add_dataset_with_tokenizer
from tests.support.preparation import prepare
from tests.support.workplace import PROJECT_DIR, TINY_TRAIN, write_tokens
from tests.support.workplace import succeeded as process_succeeded

PAGE = PROJECT_DIR / "docs/first-model.md"
TEXT_BYTES = 180_000  # enough for more than the 100 steps after which the page stops


def new(workplace, *arguments):
    return run_lab("new", *workplace.arguments(*arguments))


def settings_of(run_dir):
    return tuple(json.loads((run_dir / name).read_text()) for name in ("model.json", "train.json"))


def shape(line):
    """Return a line without its numbers, its spaces, and the words that go with one and many."""
    return re.sub(
        r"\W+",
        " ",
        re.sub(r"\b(documents?|[KMG]iB|k)\b", "", re.sub(r"[\d.,:Zk]*\d[\d.,:Zk]*", "#", line)),
    ).strip()


def test_the_commands_of_the_page_give_what_it_shows(workplace, monkeypatch):
    monkeypatch.chdir(workplace.root)
    texts = workplace.root / "my-texts"
    texts.mkdir()
    size = 0
    for place, text in enumerate(sorted(topics.values())):
        size += len(text)
        if size > TEXT_BYTES:
            break
        (texts / f"{place}.txt").write_text(text)
    run_of = {
        "lab": lambda *arguments: succeeded(run_lab(*arguments)).output,
        "prepare_dataset.py": lambda *arguments: process_succeeded(prepare(*arguments)).stdout,
        "ddp_train.py": lambda *arguments: (
            process_succeeded(workplace.torchrun(1, *arguments)).stdout
        ),
    }
    blocks = re.findall(r"```sh\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    for commands, shown in blocks:
        printed = ""
        for line in commands.splitlines():
            uv, run, program, *arguments = shlex.split(line)
            assert (uv, run) == ("uv", "run")
            printed += run_of[program](*arguments)
        printed = printed.replace(f"{workplace.root}/", "")
        found = [*map(shape, printed.splitlines())]
        for line in shown.splitlines():
            begin, _, rest = line.partition("...")
            assert any(
                one.startswith(shape(begin))
                if not rest and line.endswith("...")
                else one == shape(line)
                for one in found
            ), (line, printed)
    assert (workplace.root / "mine-gpt2/model.safetensors").is_file()
    assert not (workplace.runs_dir / "mine-2/checkpoints").exists()


def test_a_run_for_a_dataset_can_be_trained_at_once(workplace):
    add_dataset_with_tokenizer(workplace)
    workplace.add_run(train={"start_train_token": 3, "start_val_token": 5, "min_train_tokens": 320})
    output = succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "tiny")).output
    model, train = settings_of(workplace.runs_dir / "mine")
    assert train["dataset"] == "tiny" and "start_train_token" not in train
    assert "start_val_token" not in train and train["learning_rate"] == TINY_TRAIN["learning_rate"]
    assert model["vocab_size"] == 257 and "vocab_size" not in output  # as it was
    assert "\n  start_train_token" not in output and "are those of tiny, but for\n" in output
    again = succeeded(new(workplace, "mine-2", "--dataset", "tiny", "--like", "mine")).output
    assert again.splitlines()[0].endswith("model.json and train.json are those of mine")
    assert sorted(path.name for path in (workplace.runs_dir / "mine").iterdir()) == [
        "model.json",
        "train.json",
    ]
    process_succeeded(workplace.torchrun(1, "mine"))


@pytest.mark.parametrize(
    ("num_tokens", "wanted", "steps", "repeats"),
    [
        (100_000, 320, 5, False),  # as long as the other run
        (1000, 64_000, 62, True),  # four passes
        (100_000, -1, 1562, False),  # all
        (65, 64_000, 4, True),
    ],
)
def test_the_length_fits_the_dataset(workplace, num_tokens, wanted, steps, repeats):
    workplace.add_dataset(num_tokens=num_tokens)
    workplace.add_run(
        train={"min_train_tokens": wanted, "microbatch_size": None, "minibatch_size": 2}
    )  # the original's name
    output = succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "tiny")).output
    _, train = settings_of(workplace.runs_dir / "mine")
    assert train["min_train_tokens"] == 64 * steps and train.get("repeat_data", False) == repeats
    assert ("more passes help little" in output) == (steps in (62, 4))
    assert train["validation_interval"] == -(-steps // 10)
    assert (f"only {steps:,} steps" in output) == (steps < 100)


def test_a_short_validation_file_gives_fewer_or_shorter_sequences(workplace):
    workplace.add_dataset()
    workplace.add_run(train={"validation_batches": 3})
    validation = workplace.datasets_dir / "tiny/validation.safetensors"
    write_tokens(validation, np.arange(50, dtype=np.uint16))
    succeeded(new(workplace, "fewer", "--dataset", "tiny", "--like", "tiny"))
    model, train = settings_of(workplace.runs_dir / "fewer")
    assert (model["context_length"], train["validation_sequences"]) == (16, 3)
    write_tokens(validation, np.arange(12, dtype=np.uint16))
    succeeded(new(workplace, "shorter", "--dataset", "tiny", "--like", "tiny"))
    model, train = settings_of(workplace.runs_dir / "shorter")
    assert (model["context_length"], train["validation_sequences"]) == (8, 1)
    write_tokens(validation, np.arange(5, dtype=np.uint16))
    line = error_line(new(workplace, "none", "--dataset", "tiny", "--like", "tiny"))
    assert "has only 5 tokens; prepare more text" in line
    assert not (workplace.runs_dir / "none").exists()


def test_a_dataset_that_names_no_tokenizer_has_the_vocabulary_of_its_ids(workplace):
    workplace.add_dataset(vocab_size=100)
    workplace.add_run(train={"sample_prompts": ["a"]})
    output = succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "tiny")).output
    model, train = settings_of(workplace.runs_dir / "mine")
    assert model["vocab_size"] == 100 and "sample_prompts" not in train
    assert "one more than the largest token id; the dataset names no tokenizer" in output


def test_what_cannot_be_made_is_one_line_and_nothing_is_written(workplace):
    workplace.add_dataset()
    workplace.add_run()
    before = workplace.files()
    for arguments, line in (
        (("tiny", "--dataset", "tiny"), "runs/tiny: is there already; choose another name"),
        (("a b", "--dataset", "tiny"), "run 'a b' is not a plain name"),
        (("new", "--dataset", "none"), "datasets/none: no dataset there; make it with"),
        (("new", "--dataset", "tiny", "--like", "none"), "--like none: no such run; there"),
        (("new", "--dataset", "tiny", "--like", ".."), "--like ..: no such run"),
    ):
        assert line in error_line(new(workplace, *arguments))
    assert workplace.files() == before
