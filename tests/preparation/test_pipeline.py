"""Documents to a dataset: which tokens, how far a kill or an error throws it back, what it says."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import DatasetCard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from basics.errors import UserError
from benchmarks.prepare import build_corpus, peak_memory_of, prepare_as_the_original
from preparation import documents, pipeline, progress_display
from preparation.documents import Source, TextsShard, find_documents, python_stdlib
from preparation.ensure_dataset import provide_dataset
from preparation.journal import Journal
from preparation.pipeline import prepare_dataset
from preparation.planning import PrepareOptions, num_training_documents
from preparation.token_file_writer import TokenFileWriter, token_file_header
from prepare_dataset import MOST_WORKERS
from tests.support.workplace import PROJECT_DIR, Workplace, run_command, small_disk, succeeded
from tokens.tokenizer import load_tokenizer

DOCUMENTS = [f"document {i}: naïve 🎉 <|endoftext|>" for i in range(150)] + [""] * 2
BYTES = PrepareOptions(tokenizer="bytes")
COMMAND = [sys.executable, str(PROJECT_DIR / "prepare_dataset.py")]


def decoded(path: Path) -> list[str]:
    tokens = load_file(path)["tokens"]
    assert tokens.dtype == np.uint16
    ends = np.flatnonzero(tokens == 256)
    assert ends[-1] == len(tokens) - 1, "the last document has no end-of-text token"
    return [bytes(d[:-1].astype(np.uint8)).decode() for d in np.split(tokens, ends + 1)[:-1]]


def contents(dataset_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(dataset_dir.iterdir())}


def texts_source(*shards: list[str]) -> Source:
    return Source("texts", [TextsShard(f"shard {i}", texts) for i, texts in enumerate(shards)])


def write_parquet(folder: Path, *parts: list[str | None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(parts):
        table = pyarrow.table({"text": pyarrow.array(part, pyarrow.string()),
                               "id": [str(n) for n in range(len(part))]})
        pyarrow.parquet.write_table(table, folder / f"{i:03}.parquet")
    return folder


def write_source(kind: str, source_dir: Path) -> Path:
    source_dir.mkdir()
    if kind == "parquet":
        write_parquet(source_dir / "sample" / "10BT", DOCUMENTS[:100],
                      [text or None for text in DOCUMENTS[100:]])
        (source_dir / "README.md").write_text("not a document")
    elif kind == "jsonl":
        lines = [json.dumps({"text": text}) for text in DOCUMENTS]
        (source_dir / "a.jsonl").write_text("\n".join(lines[:50]) + "\n\n")
        (source_dir / "b.jsonl").write_text("\n".join(lines[50:]))
    else:
        for i, text in enumerate(DOCUMENTS):
            (source_dir / f"{i:04}.txt").write_text(text)
    return source_dir


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text"])
def test_the_first_99_percent_train_and_the_rest_validates(tmp_path: Path, kind: str) -> None:
    source = find_documents(write_source(kind, tmp_path / "source"))
    progress = prepare_dataset(source, tmp_path / "out", BYTES)
    assert (progress.train.num_documents, progress.validation.num_documents) == (150, 2)
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[:150]
    assert decoded(tmp_path / "out" / "validation.safetensors") == DOCUMENTS[150:]
    assert progress.num_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert progress.num_characters == sum(len(text) for text in DOCUMENTS)
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["tokenizer"] == "bytes" and metadata["num_documents"] == "150"
    assert int(metadata["num_tokens"]) == progress.train.num_tokens
    assert metadata["max_token_id"] == "256"
    assert [path.name for path in tmp_path.glob(".*")] == [], "something was left behind"


def test_a_pattern_names_files_and_a_file_itself(tmp_path: Path) -> None:
    source_dir = write_source("jsonl", tmp_path / "source")
    by_pattern = find_documents(f"{source_dir}/[ab].jsonl")
    assert [shard.name for shard in by_pattern.shards] == ["a.jsonl", "b.jsonl"]
    assert [shard.name for shard in find_documents(f"{tmp_path}/*/b*").shards] == ["source/b.jsonl"]
    prepare_dataset(find_documents(source_dir / "a.jsonl"), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[:50][:-1]


@settings(max_examples=100, deadline=None)
@given(shards=st.lists(st.lists(st.text(max_size=30), max_size=10), min_size=1, max_size=6),
       fraction=st.sampled_from([0.01, 0.1, 0.5, 0.99]),
       max_documents=st.one_of(st.none(), st.integers(2, 30)))
def test_any_documents_are_split_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[str]], fraction: float,
    max_documents: int | None
) -> None:
    wanted = [text for shard in shards for text in shard][:max_documents]
    out = tmp_path_factory.mktemp("any") / "out"
    options = replace(BYTES, validation_fraction=fraction, max_documents=max_documents)
    if len(wanted) < 2:
        with pytest.raises(UserError, match="in all; wanted at least 2"):
            prepare_dataset(texts_source(*shards), out, options)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("preparation.documents.TEXTS_A_TASK", 3)
        patch.setattr("preparation.cutting.LARGE_DOCUMENT", 8)
        prepare_dataset(texts_source(*shards), out, options)
    train, validation = (decoded(out / f"{s}.safetensors") for s in ("train", "validation"))
    assert train + validation == wanted
    assert len(train) == num_training_documents(len(wanted), fraction)


def test_the_boundary_is_that_of_a_percentage_slice() -> None:
    for n in (100, 150, 250, 350, 1000, 14_868_862):  # halves go to the even number
        assert num_training_documents(n, 0.01) == round(99 * n / 100)
    assert num_training_documents(2, 0.01) == 1 == num_training_documents(3, 0.99)


def test_gpt2_tokens_with_a_literal_end_of_text_as_text(tmp_path: Path) -> None:
    prepare_dataset(texts_source(["a<|endoftext|>b", "c"]), tmp_path / "out", PrepareOptions())
    tokens = load_file(tmp_path / "out" / "train.safetensors")["tokens"]
    assert tokens.tolist() == [64, 27, 91, 437, 1659, 5239, 91, 29, 65, 50256]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus in FineWeb's layout: 8 shards of 3 MB of text."""
    folder = tmp_path_factory.mktemp("corpus") / "sample" / "10BT"
    build_corpus(folder, 24 * 10**6, num_files=8)
    return folder


def test_the_same_bytes_for_any_number_of_workers_and_the_originals_tokens(
    corpus: Path, tmp_path: Path
) -> None:
    for workers in ("1", "3"):
        succeeded(run_command(*COMMAND, str(corpus), str(tmp_path / workers),
                              "--workers", workers))
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    prepare_as_the_original(corpus, tmp_path / "reference")
    for split in ("train", "validation"):
        ours, reference = (load_file(tmp_path / place / f"{split}.safetensors")["tokens"]
                           for place in ("1", "reference"))
        assert np.array_equal(ours, reference)


def test_killed_ten_times_at_random_it_ends_with_the_same_bytes(
    corpus: Path, tmp_path: Path, workplace: Workplace, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--thorough"):  # 300 MB of parquet
        corpus = tmp_path / "sample" / "10BT"
        build_corpus(corpus, 750 * 10**6, num_files=24)
    command = [*COMMAND, str(corpus), "--workers", "2"]
    started = time.monotonic()
    succeeded(run_command(*command, str(tmp_path / "undisturbed")))
    seconds = time.monotonic() - started
    undisturbed = contents(tmp_path / "undisturbed")
    out = workplace.datasets_dir / "mine"
    generator = random.Random(0)
    num_killed = 0
    while num_killed < 10:
        if out.exists():  # it got there between two kills: once more from the start
            assert contents(out) == undisturbed
            shutil.rmtree(out)
            seconds *= 0.8  # the machine has become quicker
        process = subprocess.Popen([*command, str(out)], stderr=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL)
        try:
            assert process.wait(generator.uniform(0.3, 0.95) * seconds) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            num_killed += process.wait() == -signal.SIGKILL
    if not out.exists():
        succeeded(run_command(*command, str(out)))
    assert contents(out) == undisturbed
    assert not list(out.parent.glob(".*")), "something was left behind"
    workplace.add_run(model={"vocab_size": 50257, "emb_dim": 8, "context_length": 32},
                      train={"dataset": "mine", "min_train_tokens": 64, "validation_batches": 1})
    succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "1"))


class Stopped(Exception):
    pass


@settings(max_examples=60, deadline=None)
@given(shards=st.lists(st.lists(st.text(max_size=20), max_size=6), min_size=1, max_size=6),
       stops=st.lists(st.integers(0, 25), max_size=6))
def test_stopped_at_any_write_it_goes_on_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[str]], stops: list[int]
) -> None:
    """Writes are counted: tokens, flushes, journal lines, headers, the card, the last rename."""
    if sum(map(len, shards)) < 2:
        return
    folder = tmp_path_factory.mktemp("stops")
    prepare_dataset(texts_source(*shards), folder / "undisturbed", BYTES)
    for stop in [*stops, None]:
        if (folder / "out").exists():
            break
        left = SimpleNamespace(writes=stop)

        def stopping(function, left=left):
            def wrapper(*arguments, **keywords):
                if left.writes == 0:
                    raise Stopped
                if left.writes is not None:
                    left.writes -= 1
                return function(*arguments, **keywords)
            return wrapper

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((TokenFileWriter, "add"), (TokenFileWriter, "flush"),
                                (Journal, "add"), (Journal, "begin"), (Journal, "publish"),
                                (pipeline, "write_card")):
                patch.setattr(owner, name, stopping(getattr(owner, name)))
            try:
                prepare_dataset(texts_source(*shards), folder / "out", BYTES)
            except Stopped:
                pass
    assert contents(folder / "out") == contents(folder / "undisturbed")


@pytest.mark.parametrize("num_bytes", [0, 1, 10, -1, -30])
def test_a_journal_cut_anywhere_is_read_up_to_its_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    shards = [["a", "b"], ["c"], ["d"]]
    prepare_dataset(texts_source(*shards), tmp_path / "undisturbed", BYTES)
    monkeypatch.setattr(Journal, "publish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    monkeypatch.undo()
    path = tmp_path / ".out.partial" / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:num_bytes])
    prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("num_bytes", [1, 100, 5000])
def test_token_files_that_lack_what_the_journal_says_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    shards = [["a", "b"], ["c"], ["d"]]
    monkeypatch.setattr(pipeline, "write_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    monkeypatch.undo()
    path = tmp_path / ".out.partial" / "dataset" / "train.safetensors"
    os.truncate(path, max(path.stat().st_size - num_bytes, 0))
    prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b", "c"]


def test_killed_while_it_tidies_up_it_can_be_made_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("preparation.journal.shutil.rmtree", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
    monkeypatch.undo()
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a"]
    shutil.rmtree(tmp_path / "out")
    prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a"]


def test_a_shard_that_is_mended_is_gone_on_with(tmp_path: Path) -> None:
    parts = [[f"{i}-{j}-{random.Random(i * 99 + j).random()}" for j in range(50)] for i in range(3)]
    folder = write_parquet(tmp_path / "source", *parts)
    whole = (folder / "001.parquet").read_bytes()
    corrupt(folder / "001.parquet", footer=False)
    with pytest.raises(UserError, match="001.parquet: not a whole parquet file.*mend it"):
        prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    (folder / "001.parquet").write_bytes(whole)
    progress = prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    assert progress.bad_shards == [] and progress.train.num_documents == 148


def test_a_shard_left_out_by_an_earlier_start_is_not_left_out_unasked(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "source", ["a", "b"], ["c"], ["d"])
    corrupt(folder / "001.parquet", footer=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_dataset(find_documents(folder), tmp_path / "out",
                            replace(BYTES, skip_bad_shards=True))
    with pytest.raises(UserError, match="001.parquet: not a whole parquet file"):
        prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)


def unfinished(source: Source, out: Path, options: PrepareOptions = BYTES) -> None:
    """Leave a preparation whose last shard is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.shards[-1].__class__, "tasks", stop_at(source.shards[-1].name))
        with pytest.raises(Stopped):
            prepare_dataset(source, out, options)


def stop_at(name: str):
    original = TextsShard.tasks

    def tasks(shard):
        if shard.name == name:
            raise Stopped
        return original(shard)
    return tasks


@pytest.mark.parametrize(("options", "message"), [
    (replace(BYTES, tokenizer="gpt2"), "tokenizer was bytes, is gpt2"),
    (replace(BYTES, validation_fraction=0.5), "validation fraction was 0.01, is 0.5"),
    (replace(BYTES, max_documents=3), "max documents was None, is 3"),
])
def test_a_changed_option_is_refused_with_the_reason(
    tmp_path: Path, options: PrepareOptions, message: str
) -> None:
    source = texts_source(["a", "b"], ["c"])
    unfinished(source, tmp_path / "out")
    with pytest.raises(UserError, match=message) as caught:
        prepare_dataset(source, tmp_path / "out", options)
    assert str(tmp_path / ".out.partial") in str(caught.value) and "\n" not in str(caught.value)
    prepare_dataset(source, tmp_path / "out", BYTES)  # the first one can still be finished
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b"]


def test_where_no_shard_is_done_another_option_is_no_trouble(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"content": "a"}\n{"content": "b"}\n')
    with pytest.raises(UserError, match="it has: content"):
        prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    prepare_dataset(find_documents(folder, text_column="content"), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a"]


def test_a_count_for_which_all_was_read_is_kept(tmp_path: Path, monkeypatch) -> None:
    source_dir = write_source("jsonl", tmp_path / "source")
    count, counted = documents.count_lines, []

    def counting(path: Path) -> int:
        counted.append(path.name)
        if counted == ["a.jsonl", "b.jsonl"]:
            raise Stopped
        return count(path)

    monkeypatch.setattr(documents, "count_lines", counting)
    with pytest.raises(Stopped):
        prepare_dataset(find_documents(source_dir), tmp_path / "out", BYTES)
    with (tmp_path / ".out.partial/counts.jsonl").open("ab") as file:
        file.write(b'{"name": "b.js')  # as a loss of power would leave it
    prepare_dataset(find_documents(source_dir), tmp_path / "out", BYTES)
    assert counted == ["a.jsonl", "b.jsonl", "b.jsonl"]
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[:150]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("shards", "message"), [
    ([["a", "B"], ["c"]], "shard 0 has changed"),
    ([["a", "b"]], "shard 1 is gone"),
    ([["a", "b"], ["c"], ["d"]], "shard 2 is new"),
])
def test_a_changed_source_is_refused_with_the_reason(
    tmp_path: Path, shards: list[list[str]], message: str
) -> None:
    unfinished(texts_source(["a", "b"], ["c"]), tmp_path / "out")
    with pytest.raises(UserError, match=f"differs: {message}"):
        prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)


def test_a_file_that_changed_is_told_by_its_size_and_time(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "source", ["a", "b"], ["c"])
    before = find_documents(folder)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), folder / "001.parquet")
    after = find_documents(folder)
    assert before.shards[0].identity == after.shards[0].identity
    assert before.shards[1].identity != after.shards[1].identity


def test_what_is_counted_once_is_not_counted_again(tmp_path: Path, monkeypatch) -> None:
    source = texts_source(["a", "b"], ["c"])
    unfinished(source, tmp_path / "out")
    counted = []
    monkeypatch.setattr(TextsShard, "facts", lambda shard: counted.append(shard))
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert counted == [] and (tmp_path / "out/train.safetensors").exists()


def corrupt(path: Path, *, footer: bool) -> None:
    content = bytearray(path.read_bytes())
    place = len(content) - 6 if footer else 8
    content[place:place + 40] = b"\xff" * len(content[place:place + 40])
    path.write_bytes(content)


@pytest.mark.parametrize("footer", [False, True])
def test_a_corrupt_shard_stops_with_its_name_or_is_skipped_and_counted(
    tmp_path: Path, footer: bool
) -> None:
    generator = random.Random(0)
    parts = [[f"{i}-{j}-{generator.random()}" for j in range(50)] for i in range(4)]
    folder = write_parquet(tmp_path / "source", *parts)
    corrupt(folder / "001.parquet", footer=footer)
    options = replace(BYTES, validation_fraction=0.25)
    with pytest.raises(UserError, match="001.parquet: not a whole parquet file.*--skip-bad-") as e:
        prepare_dataset(find_documents(folder), tmp_path / "out", options)
    assert "\n" not in str(e.value) and not (tmp_path / "out").exists()
    progress = prepare_dataset(find_documents(folder), tmp_path / "out",
                               replace(options, skip_bad_shards=True))
    assert progress.bad_shards == ["001.parquet"]
    train = decoded(tmp_path / "out" / "train.safetensors")
    validation = decoded(tmp_path / "out" / "validation.safetensors")
    assert train + validation == parts[0] + parts[2] + parts[3]
    # Where the count is known, the boundary stays where it was: 150 of 200 documents.
    assert len(validation) == (38 if footer else 50)
    assert "1 shards (001.parquet)" in (tmp_path / "out" / "README.md").read_text()


def test_half_a_bad_shard_leaves_nothing(tmp_path: Path) -> None:
    source_dir = write_source("jsonl", tmp_path / "source")
    with (source_dir / "a.jsonl").open("a") as file:
        file.write("\n{broken")
    with pytest.raises(UserError, match="a.jsonl: line 53 is no JSON object"):
        prepare_dataset(find_documents(source_dir), tmp_path / "out", BYTES)
    progress = prepare_dataset(find_documents(source_dir), tmp_path / "out",
                               replace(BYTES, skip_bad_shards=True))
    assert progress.bad_shards == ["a.jsonl"]
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[50:150]


def test_nothing_left_for_validation_is_said(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "source", ["a"] * 99, ["b"])
    corrupt(folder / "001.parquet", footer=False)
    with pytest.raises(UserError, match="nothing is left for validation.safetensors"):
        prepare_dataset(find_documents(folder), tmp_path / "out",
                        replace(BYTES, skip_bad_shards=True))


def test_a_disk_that_is_too_small_is_said_before_the_start(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=150))
    with pytest.raises(UserError, match="0.0 GB free; tokens will take 0.0 GB or more"):
        prepare_dataset(texts_source(["a" * 50, "b" * 50]), tmp_path / "out", BYTES)
    assert list(tmp_path.iterdir()) == []
    prepare_dataset(texts_source(["a" * 50, "b" * 50]), tmp_path / "out", PrepareOptions())


def test_a_disk_that_fills_up_is_said_and_leaves_what_can_be_gone_on_with(
    tmp_path: Path, monkeypatch
) -> None:
    source = texts_source(["a", "b"], ["c"], ["d"])
    flush, flushes = TokenFileWriter.flush, []

    def full(writer: TokenFileWriter) -> None:
        flushes.append(writer)
        if len(flushes) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(writer)

    monkeypatch.setattr(TokenFileWriter, "flush", full)
    with pytest.raises(UserError, match="the disk is full; .* goes on behind shard 1") as caught:
        prepare_dataset(source, tmp_path / "out", BYTES)
    assert caught.value.status == 4
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b", "c"]


def test_a_full_disk_has_a_status_of_its_own(tmp_path: Path) -> None:
    source_dir, disk = tmp_path / "source", tmp_path / "disk"
    write_parquet(source_dir, ["two words " * 100_000] * 4)
    disk.mkdir()
    with small_disk(disk, "500k"):
        result = run_command(*COMMAND, str(source_dir), str(disk / "out"))
        assert result.returncode == 4 and result.stderr.count("\n") == 1, result.stderr
        assert "the disk is full; make room" in result.stderr
        assert not (disk / "out").exists()


def test_progress_is_a_bar_or_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_display, "LINE_INTERVAL", -1)
    source = texts_source(["a"] * 30, ["b"] * 30, ["c"] * 30)
    unfinished(source, tmp_path / "out")
    assert re.search(r"^60 of 90 documents, 0 M tokens, \d+\.\d\d M tokens/s, 00:00 left$",
                     capsys.readouterr().err, re.MULTILINE)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert terminal.getvalue().startswith("going on behind document 60 of 90\n")
    assert re.search(r" 67%\|.*\| 60 documents \[00:00<", terminal.getvalue())
    assert re.search(r"100%\|.*\| 90 documents \[.*<.*, 0 M tokens, \d+\.\d\d M tokens/s\]",
                     terminal.getvalue())


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    with Journal(tmp_path / "out"):
        with pytest.raises(UserError, match="another process is preparing this dataset"):
            prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
        assert (tmp_path / ".out.partial").exists()


def test_a_killed_worker_is_one_line(corpus: Path, tmp_path: Path) -> None:
    code = ("import preparation.encoding as e, os, sys, prepare_dataset as p\n"
            "def die(*_): os._exit(9)\n"
            "e.encode_task = die\n"
            "if __name__ == '__main__':\n"
            "    p.main([sys.argv[1], sys.argv[2], '--workers', '2'])\n")
    script = tmp_path / "script.py"
    script.write_text(code)
    result = run_command(sys.executable, str(script), str(corpus), str(tmp_path / "out"),
                         PYTHONPATH=str(PROJECT_DIR))
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and "a worker process was killed" in result.stderr


def hear_of_ctrl_c() -> None:
    """Undo what a shell does to what it runs in the background, these tests for one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_is_one_line_and_leaves_no_process(corpus: Path, tmp_path: Path) -> None:
    for attempt in range(5):  # it may be done before it hears of anything
        output = tmp_path / f"out-{attempt}"
        process = subprocess.Popen([*COMMAND, str(corpus), str(output), "--workers", "1"],
                                   text=True, stderr=subprocess.PIPE, start_new_session=True,
                                   preexec_fn=hear_of_ctrl_c)
        journal = tmp_path / f".{output.name}.partial" / "journal.jsonl"
        while not journal.exists() and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, stderr = process.communicate(timeout=60)
        if process.returncode != 0:
            break
    assert process.returncode == 130
    assert stderr.strip() == "Interrupted; the same command goes on from there"
    deadline = time.monotonic() + 30
    while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout:
        assert time.monotonic() < deadline, "a process lives on"
        time.sleep(0.05)


def test_the_card_is_one_that_the_hub_reads(tmp_path: Path) -> None:
    prepare_dataset(texts_source(["a" * 1200, "b"]), tmp_path / "out", BYTES)
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    data = card.data.to_dict()
    assert data["license"] == "unknown" and data["language"] == ["en"]
    assert data["task_categories"] == ["text-generation"] and data["size_categories"] == ["n<1K"]
    assert "1,203 tokens of the" in card.text and "(1.00 characters per\ntoken)" in card.text
    assert "| `train.safetensors` | 1 | 1,201 | 6,506 |" in card.text
    code = card.text.split("```python\n")[1].split("```")[0]
    script = f"import os; os.chdir({str(tmp_path / 'out')!r})\n{code}\nassert len(tokens) == 1024"
    succeeded(run_command(sys.executable, "-c", script))  # what it says about loading works


@settings(max_examples=100, deadline=None)
@given(source=st.text(max_size=400), num_tokens=st.integers(0, 2**40))
def test_a_header_of_any_source_has_its_room(source: str, num_tokens: int) -> None:
    header = token_file_header({"source": source, "tokenizer": "gpt2"}, num_tokens)
    assert len(header) == 4104 and int.from_bytes(header[:8], "little") == 4096
    read = json.loads(header[8:])
    assert read["__metadata__"]["source"] == source
    assert read["tokens"] == {"dtype": "U16", "shape": [num_tokens],
                              "data_offsets": [0, 2 * num_tokens]}


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.integers(0, 50), max_size=8), kept=st.integers(0, 8))
def test_a_writer_goes_on_behind_any_token(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int], kept: int
) -> None:
    path = tmp_path_factory.mktemp("writer") / "t.safetensors"
    tokens = np.arange(sum(parts), dtype=np.uint16)
    ends = np.cumsum([0, *parts])
    writer = TokenFileWriter(path)
    for start, end in zip(ends, ends[1:], strict=False):
        writer.add(tokens[start:end])
    writer.close()
    with pytest.raises(Exception, match="Error|header"):
        load_file(path)  # without its header it is no token file
    num_kept = int(ends[min(kept, len(parts))])
    writer = TokenFileWriter(path, num_tokens=num_kept)
    writer.add(tokens[num_kept:])
    writer.finish({"source": "a"})
    assert np.array_equal(load_file(path)["tokens"], tokens)


@pytest.mark.parametrize("content", ["file", "directory"])
def test_an_output_that_is_not_empty_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    if content == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        prepare_dataset(texts_source(["a", "b"]), out, BYTES)
    assert (out if content == "file" else out / "mine").read_text() == "mine"


def test_an_output_behind_a_link_and_one_that_cannot_be_replaced(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    prepare_dataset(texts_source(["a", "b"]), tmp_path / "link", BYTES)
    assert decoded(tmp_path / "disk" / "train.safetensors") == ["a"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for output in (Path("."), Path("/proc")):
        with pytest.raises(UserError, match="mount point, or where you are; name a directory in"):
            prepare_dataset(texts_source(["a", "b"]), output, BYTES)
    assert not list(tmp_path.glob(".*"))


def test_only_the_wanted_documents_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * 1000}) for _ in range(20_000)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{broken"]))
    read = []
    with pytest.MonkeyPatch.context() as patch:
        original = pipeline.Encoder._submit
        patch.setattr(pipeline.Encoder, "_submit",
                      lambda *arguments: read.append(1) or original(*arguments))
        progress = prepare_dataset(find_documents(tmp_path / "a.jsonl"), tmp_path / "out",
                                   replace(BYTES, max_documents=10))
    assert progress.train.num_documents == 9 and len(read) < 3


def test_a_directory_has_texts_and_no_pipes(tmp_path: Path) -> None:
    for name in ("a.txt", "b.TXT", "README.md", "convert.py"):
        (tmp_path / name).write_text("x")
    os.mkfifo(tmp_path / "c.txt")
    assert find_documents(tmp_path).shards[0].facts().num_documents == 2
    assert find_documents(f"{tmp_path}/*.py").shards[0].facts().num_documents == 1


def test_hidden_directories_and_datasets_are_not_read_as_documents(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for path in ("a.txt", "b.TXT", ".git/c.txt"):
        (tmp_path / path).write_text("text")
    prepare_dataset(find_documents(tmp_path), tmp_path / "out", BYTES)  # brings a README.md
    assert find_documents(tmp_path).shards[0].facts().num_documents == 2


@pytest.mark.parametrize("source", ["nowhere/x.jsonl", "a**b/*.jsonl", "x" * 300])
def test_sources_that_cannot_even_be_looked_for_are_one_line(tmp_path: Path, source: str) -> None:
    result = run_command(*COMMAND, source, str(tmp_path / "out"))
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith(f"Error: {source}"[:60])
    assert list(tmp_path.iterdir()) == []


def test_file_names_of_any_bytes_and_links_to_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (b"\xff.jsonl", b"two\nlines.jsonl"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text('{"text": "a"}\n')
    prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    (folder / "z.jsonl").symlink_to("nothing")
    with pytest.raises(UserError, match="z.jsonl: is a link to nowhere"):
        find_documents(folder)


def test_a_share_that_is_no_number_is_refused(tmp_path: Path) -> None:
    result = run_command(*COMMAND, "python-stdlib", str(tmp_path / "out"),
                         "--validation-fraction", "nan")
    assert result.returncode == 2 and "wanted a number between 0 and 1" in result.stderr


def test_an_empty_output_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "validation.safetensors") == ["b"]


@pytest.mark.parametrize(("make", "message"), [
    (lambda d: None, "no documents; wanted files ending in"),
    (lambda d: (d / "one.txt").write_text("x"), "1 document in all; wanted at least 2"),
    (lambda d: (d / "a.parquet").write_bytes(b"PAR1 no"), "a.parquet: not a whole parquet file"),
    (lambda d: pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"]}), d / "a.parquet"),
     "has no column 'text'; it has: body"),
    (lambda d: pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), d / "a.parquet"),
     "column 'text' is of type int64; wanted text"),
    (lambda d: [(d / "a.jsonl").write_text("{}"), (d / "b.parquet").write_bytes(b"")],
     "holds both JSON lines and parquet"),
])
def test_sources_that_cannot_be_used(tmp_path: Path, make, message: str) -> None:
    source_dir = tmp_path / "source"
    source_dir.mkdir()
    make(source_dir)
    with pytest.raises(UserError, match=message) as caught:
        prepare_dataset(find_documents(source_dir), tmp_path / "out", BYTES)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or directory, nor the owner/name"):
        find_documents(tmp_path / "nowhere")


@pytest.mark.parametrize("options", [["--subset", "x"], ["--keep-raw", "x"]])
def test_what_is_for_the_hub_is_refused_elsewhere(tmp_path: Path, options: list[str]) -> None:
    result = run_command(*COMMAND, str(tmp_path), str(tmp_path / "out"), *options)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "are for a dataset on the hub" in result.stderr


def test_the_command_prepares_and_counts(tmp_path: Path) -> None:
    source_dir = write_source("parquet", tmp_path / "source")
    command = [*COMMAND, str(source_dir), str(tmp_path / "out"), "--tokenizer", "bytes"]
    result = succeeded(run_command(*command))
    first, train, validation = result.stdout.splitlines()
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert first == (f"152 documents, {size + 152:,} tokens, {size:,} bytes of text, 0.87"
                     " characters per token")
    assert "train.safetensors: 150 documents" in train and "2 documents, 2 tokens" in validation
    again = run_command(*command)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1 and "is not empty" in again.stderr


def test_preparing_needs_no_torch() -> None:
    code = ("import sys, prepare_dataset, preparation.pipeline, preparation.hub,"
            " preparation.foreign_tokens\nassert 'torch' not in sys.modules")
    succeeded(run_command(sys.executable, "-c", code, PYTHONPATH=str(PROJECT_DIR)))


def test_memory_is_small_whatever_the_documents(tmp_path: Path) -> None:
    """One document of 100 MB, in one row and one row group with small ones, 4 bytes a character at
    the end so that it is no plain ASCII; it is read and written twice."""
    large = "All work and no play makes a dull model. " * 2_500_000 + "🎉"
    folder = write_parquet(tmp_path / "source", ["small", large, None, "", "small"], [large])
    _, peak = peak_memory_of([*COMMAND, folder, tmp_path / "out", "--tokenizer", "gpt2",
                              "--validation-fraction", "0.2", "--workers", "2"])
    assert peak < 2**30, f"{peak / 2**20:.0f} MiB"
    train = load_file(tmp_path / "out" / "train.safetensors")["tokens"]
    tokenizer = load_tokenizer("gpt2")
    first, second, *_ = np.split(train, np.flatnonzero(train == 50256) + 1)
    assert tokenizer.decode(first[:-1].tolist()) == "small"
    sentence = tokenizer.encode(large[:41 * 10])
    assert np.array_equal(second[:len(sentence) - 1], sentence[:-1])
    assert len(second) == 10 * 2_500_000 + len(tokenizer.encode(" 🎉")) + 1


def test_memory_is_small_with_as_many_workers_as_there_may_be(
    corpus: Path, tmp_path: Path
) -> None:
    folder = copies_of(corpus, 4, tmp_path / "corpus")
    _, peak = peak_memory_of([*COMMAND, folder, tmp_path / "out", "--workers", str(MOST_WORKERS)])
    assert peak < 2**30, f"{peak / 2**20:.0f} MiB"


def copies_of(corpus: Path, copies: int, folder: Path) -> Path:
    folder.mkdir()
    for copy in range(copies):
        for path in corpus.iterdir():
            (folder / f"{copy}-{path.name}").symlink_to(path)
    return folder


@pytest.mark.parametrize("kind", ["lines", "escaped", "repeated", "groups"])
def test_memory_is_small_with_many_workers_on_large_documents(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    if kind == "lines":
        line = json.dumps({"text": "All work and no play. " * 4_500_000})
        with (folder / "a.jsonl").open("w") as file:
            file.writelines(f"{line}\n" for _ in range(3))
    elif kind == "escaped":  # 100 MB of Cyrillic, each letter as six characters
        line = json.dumps({"text": "Работа без отдыха " * 3_030_000})
        (folder / "a.jsonl").write_text(f"{line}\n{line}\n")
    elif kind == "repeated":  # 18 MB once in the file, and once more for each of its rows
        write_parquet(folder, ["All work and no play. " * 820_000] * 12)
    else:
        texts = [f"{i} All work and no play. " * 2000 for i in range(4000)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet",
                                    row_group_size=1000, use_dictionary=False)
    _, peak = peak_memory_of([*COMMAND, folder, tmp_path / "out", "--tokenizer", "bytes",
                              "--workers", "4"])
    assert peak < 2**30, f"{peak / 2**20:.0f} MiB"


def test_memory_does_not_grow_with_the_input(corpus: Path, tmp_path: Path) -> None:
    peaks = []
    for copies in (1, 6):
        folder = copies_of(corpus, copies, tmp_path / f"corpus{copies}")
        _, peak = peak_memory_of([*COMMAND, folder, tmp_path / f"out{copies}", "--workers", "2"])
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 60 * 2**20, [f"{peak / 2**20:.0f} MiB" for peak in peaks]


def test_the_standard_library_is_the_same_every_time() -> None:
    first, second = (python_stdlib().shards[0] for _ in range(2))
    assert first.identity == second.identity
    text = "".join(piece.text for task in first.tasks() for piece in task.pieces())
    assert len(text) > 5_000_000 and "def " in text
    assert "The \"if\" statement" in text, "the reference documentation is missing"


def test_a_dataset_that_nobody_has_is_refused(workplace: Workplace) -> None:
    with pytest.raises(UserError, match="no dataset there; make it with prepare_dataset.py"):
        provide_dataset(workplace.datasets_dir / "mine", "mine")
    workplace.add_dataset("mine")
    provide_dataset(workplace.datasets_dir / "mine", "mine")


def test_the_standard_library_is_provided_where_it_is_named(
    workplace: Workplace, monkeypatch
) -> None:
    out = workplace.datasets_dir / "python-stdlib"
    monkeypatch.setattr("preparation.documents.python_stdlib", lambda: texts_source(["a", "b"]))
    provide_dataset(out, "python-stdlib")
    assert decoded(out / "train.safetensors") == ["a"]
    assert [path.name for path in out.parent.iterdir()] == ["python-stdlib"]
