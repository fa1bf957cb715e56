import json
import os
import re
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from basics.errors import UserError
from reporting.run_log import batch_arithmetic
from run_config import load_run
from tests.support.models import write_tokenizer
from tests.support.workplace import write_tokens
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatches, open_run_data, read_ahead
from tokens.token_file import TokenFile
from tokens.tokenizer import choose_tokenizer

PLAN = BatchPlan(microbatch_size=2, gradient_accumulation_steps=1, world_size=1,
                 context_length=4, num_steps=2)
CPU = torch.device("cpu")


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
    assert second_read.wait(timeout=10), "the second microbatch is not read while the first is used"
    found = [first, *batches]
    assert [batch.token_ids[0, 0].item() for batch in found] == [32, 0, 16]
    assert [batch.index for batch in found] == [4, 0, 2]
    assert reads == [32, 0, 16]


def test_a_reading_error_reaches_the_caller(tmp_path):
    tokens = np.arange(41, dtype=np.uint16)
    tokens[20] = 999
    write_tokens(tmp_path / "t.safetensors", tokens)
    data = microbatches(tmp_path / "t.safetensors", vocab_size=999)
    with pytest.raises(UserError, match="token 20 has id 999, outside the model's vocabulary of"):
        list(read_ahead(data, [0, 1, 2], device=CPU))


@pytest.mark.parametrize(("tensors", "message"), [
    (None, "no such token file"),
    (b"<html>not found</html>", "not a whole safetensors file"),
    ({"tokens": np.zeros(50, dtype=np.int32)}, r"tokens is I32 of shape \[50\]; wanted a U16 vec"),
    ({"tokens": np.zeros((5, 10), dtype=np.uint16)}, r"tokens is U16 of shape \[5, 10\]"),
    ({"ids": np.zeros(50, dtype=np.uint16)}, "contains ids; wanted one tensor called tokens"),
])
def test_missing_damaged_and_other_token_files(tmp_path, tensors, message):
    path = tmp_path / "train.safetensors"
    if isinstance(tensors, bytes):
        path.write_bytes(tensors)
    elif tensors is not None:
        save_file(tensors, path)
    with pytest.raises(UserError, match=message) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_could_block_is_no_token_file(tmp_path):
    path = tmp_path / "train.safetensors"
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="train.safetensors: is not a file; delete it"):
        TokenFile(path)


def opened(workplace, *, world_size=1, model=None, train=None):
    """Open the dataset of a new run."""
    name = f"run-{uuid.uuid4().hex}"
    workplace.add_run(name, model=model, train=train)
    return open_run_data(load_run(workplace.runs_dir, name), workplace.datasets_dir / "tiny",
                         world_size=world_size)


SEQUENCES = {"validation_batches": None, "microbatch_size": 7}


def test_the_last_validation_microbatch_may_be_smaller(workplace):
    workplace.add_dataset()  # 500 validation tokens: 31 sequences of 16 and a target
    data = opened(workplace, train=SEQUENCES | {"validation_sequences": 31}).validation
    assert len(data) == 5 and data.num_tokens == 31 * 16
    shapes = [tuple(batch.token_ids.shape) for batch in read_ahead(data, range(5), device=CPU)]
    assert shapes == [(7, 16)] * 4 + [(3, 16)]
    assert data[4].tolist() == data.token_file.read(28 * 16, 31 * 16 + 1).tolist()


@pytest.mark.parametrize(("train", "message"), [
    (SEQUENCES | {"validation_sequences": 32}, "validation_sequences is 32, .* has 31 from"),
    ({"start_val_token": 450}, "validation_batches is 3, which are 6 seq.*, but .* has 3 from"),
    ({"min_train_tokens": 10**6}, "or set repeat_data"),
    ({"min_train_tokens": -1, "repeat_data": True}, "repeat_data needs min_train"),
    ({"repeat_data": True, "start_train_token": 3990}, "; lower min_train"),
])
def test_too_few_tokens_are_refused_before_training(workplace, train, message):
    workplace.add_dataset()
    with pytest.raises(UserError, match=message):
        opened(workplace, train=train, world_size=2)


def test_the_tokenizer_is_that_of_the_metadata_or_of_the_vocabulary_size(workplace):
    path = workplace.add_dataset() / "train.safetensors"
    for metadata, vocab_size, name in (({"tokenizer": "bytes"}, 300, "bytes"), (None, 257, "bytes"),
                                       (None, 50257, "gpt2"), (None, 300, None)):
        write_tokens(path, np.zeros(4000, dtype=np.uint16), metadata)
        assert opened(workplace, model={"vocab_size": vocab_size}).tokenizer_name == name


@pytest.mark.parametrize(("tokenizer", "num_ids"), [("own", 300), ("bytes", 257),
                                                    ("gpt2", 50257)])
def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(workplace, tokenizer, num_ids):
    dataset_dir = workplace.add_dataset()
    if tokenizer == "own":
        tokenizer = choose_tokenizer(str(write_tokenizer(dataset_dir))).name
    write_tokens(dataset_dir / "train.safetensors", np.zeros(4000, dtype=np.uint16),
                 {"tokenizer": tokenizer})
    opened(workplace, model={"vocab_size": num_ids})
    with pytest.raises(UserError, match=f"model.json: vocab_size is {num_ids - 1:,}, but the"
                                        f" tokenizer of .* has {num_ids:,} entries; set it to"):
        opened(workplace, model={"vocab_size": num_ids - 1})


@pytest.mark.parametrize("start", [0, 7])
def test_repeated_data_is_a_circle_for_every_split(workplace, start):
    """50 tokens from the start on are three whole sequences of 16, which follow each other."""
    tokens = np.arange(start + 50, dtype=np.uint16)
    write_tokens(workplace.add_dataset() / "train.safetensors", tokens)
    circle = start + np.arange(8 * 16 + 1) % 48
    settings = {"repeat_data": True, "min_train_tokens": 8 * 16, "start_train_token": start,
                "gradient_accumulation_steps": None, "global_batch_size": 8}
    for size in (1, 2, 8):
        data = opened(workplace, train=settings | {"microbatch_size": size})
        assert (data.plan.num_steps, data.plan.epoch_tokens, len(data.train)) == (1, 48, 8 // size)
        for index in range(8 // size):
            part = slice(index * size * 16, (index + 1) * size * 16 + 1)
            assert data.train[index].tolist() == circle[part].tolist()
    line = batch_arithmetic(data.plan)[1]
    assert line == "1 steps = 128 tokens, 2.67 times the dataset's 48"


def private_bytes():
    """Return the anonymous memory of this process, in bytes: not shared, and not of a file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+)", text, re.MULTILINE)[1]) * 1024


def test_reading_a_file_of_20_gib_needs_little_memory(tmp_path):
    """The file is sparse, and its microbatches are from all of its parts."""
    path, num_tokens = tmp_path / "train.safetensors", 10 * 2**30
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [num_tokens],
                                    "data_offsets": [0, 2 * num_tokens]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2 * num_tokens)
    before, plan = private_bytes(), replace(PLAN, microbatch_size=12, context_length=1024)
    data = Microbatches(TokenFile(path), plan, start_token=0, vocab_size=50257)
    assert sum(1 for _ in read_ahead(data, range(0, len(data), len(data) // 200), device=CPU)) > 200
    assert private_bytes() - before < 100 * 2**20


def test_a_stated_id_outside_the_vocabulary_is_refused_at_the_start(workplace):
    write_tokens(workplace.add_dataset() / "train.safetensors", np.zeros(4000, dtype=np.uint16),
                 {"max_token_id": "257"})
    with pytest.raises(UserError, match="states ids up to 257, outside the model's vocabulary"):
        opened(workplace)
