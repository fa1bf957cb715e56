"""prepare_dataset.py: the tokens and their split, kills, the command, memory."""

import hashlib
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

from basics.errors import UserError
from benchmarks.prepare import build_corpus, peak_memory_of, prepare_as_the_original
from preparation import card, cutting
from preparation.cutting import cut_document
from preparation.encoding import cuts_of, encode_batch, encode_task
from preparation.hub import fetch_dataset
from preparation.journal import Journal
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.sources import python_stdlib
from preparation.token_stream import num_training_documents
from prepare_dataset import MAX_DEFAULT_WORKERS
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.lab_cli import HOSTILE, active_parts
from tests.support.models import WITH_A_SPACE, write_tokenizer, write_tokenizer_with_a_space
from tests.support.optional import given, settings, st
from tests.support.preparation import (
    BYTES,
    DOCUMENTS,
    SLOW_COMMAND,
    contents,
    documents_of,
    find_source,
    metadata_of,
    prepare,
    small_steps,
    stopping_after,
    texts_source,
    tokens_in,
    write_parquet,
    write_source,
)
from tests.support.runs import wait_until
from tests.support.workplace import PROJECT_DIR, run_command, small_disk, succeeded
from tokens.tokenizer import END_OF_TEXT, choose_tokenizer, load_tokenizer

COMMAND = [sys.executable, str(PROJECT_DIR / "prepare_dataset.py")]
PARTS = [
    "a",
    " ",
    "\n",
    "Don't",
    "é",
    "字",
    "\U0001f600",
    "<|",
    "|>",
    END_OF_TEXT[:-1],
    END_OF_TEXT,
]
LETTERS = {
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
}  # merges may go across spaces
LONG = "the cat 它是 " * 60 + " " * 300 + "xyz" * 200 + "\n\n" + "café 12 " * 90
KINDS = ["parquet", "jsonl", "text"]

# --- the tokens and their split


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_99_percent_are_for_training(tmp_path, kind):
    """Empty rows are documents, empty files are none."""
    source = find_source(write_source(kind, tmp_path / "source"))
    dataset = prepare_dataset(source, tmp_path / "out", BYTES)
    found = DOCUMENTS[:150] if kind == "text" else DOCUMENTS
    texts = {"train": found[:-2][:150], "validation": found[-2:]}
    assert documents_of(tmp_path / "out") == [*texts.values()]
    for split in ("validation", "train"):
        count, metadata = dataset.splits[split], metadata_of(tmp_path / "out", split)
        num_bytes = sum(len(text.encode()) for text in texts[split])
        assert metadata["num_text_bytes"] == str(num_bytes) == str(count.num_text_bytes)
        assert metadata["num_tokens"] == str(count.num_tokens)
        assert metadata["num_documents"] == str(len(texts[split]))
    assert metadata["tokenizer"] == "bytes" and metadata["max_token_id"] == "256"
    assert not list(tmp_path.glob(".*")), "an unfinished directory was left behind"


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(max_size=30), max_size=30),
    fraction=st.sampled_from([0.01, 0.1, 0.5, 0.99]),
    step=st.integers(1, 60),
    max_documents=st.one_of(st.none(), st.integers(2, 30)),
)
def test_documents_stay_whole_and_in_order_and_are_counted(
    tmp_path_factory, texts, fraction, step, max_documents
):
    wanted = texts[:max_documents]
    out = tmp_path_factory.mktemp("any") / "out"
    options = replace(BYTES, validation_fraction=fraction, max_documents=max_documents)
    with small_steps(step), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 8)
        if not wanted or not any(wanted):
            with pytest.raises(UserError, match="found; wanted at least 2, with text; "):
                prepare_dataset(texts_source(texts), out, options)
            return
        dataset = prepare_dataset(texts_source(texts), out, options)
    if len(wanted) == 1:  # is divided by its tokens
        tokens = tokens_in(out)
        together = [*wanted[0].encode(), 256]
        assert tokens["train"].tolist() + tokens["validation"].tolist() == together
        assert len(tokens["train"]) == num_training_documents(len(together), fraction)
        return
    train, validation = documents_of(out)
    assert train + validation == wanted
    assert len(train) == num_training_documents(len(wanted), fraction)
    assert dataset.findings.num_empty == wanted.count("")
    assert dataset.num_repeated == sum(text in train for text in validation if text)
    for split, documents in (("train", train), ("validation", validation)):
        num_bytes = sum(len(text.encode()) for text in documents)
        assert metadata_of(out, split)["num_text_bytes"] == str(num_bytes)


def test_the_split_is_that_of_a_percentage_slice():
    for n in (100, 150, 250, 350, 1000, 14_868_862):  # halves are rounded to the even number
        assert num_training_documents(n, 0.01) == round(99 * n / 100)
    assert num_training_documents(2, 0.01) == 1 == num_training_documents(3, 0.99)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@settings(max_examples=200)
@given(texts=st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), max_size=8))
def test_a_batch_has_the_tokens_of_its_texts(texts, name):
    found, tokenizer = encode_batch(texts, load_tokenizer(name)), load_tokenizer(name)
    assert [ids.tolist() for ids in found] == [tokenizer.encode_ordinary(text) for text in texts]
    assert all(ids.dtype == np.uint16 for ids in found)


def test_the_dataset_of_the_demo_has_its_tokens(tmp_path):
    """Of the text that this Python has: tokens are bytes, so another tokenizer is not needed."""
    prepare_dataset(python_stdlib(), tmp_path / "out", BYTES)
    found = b"".join(part.astype("<u2").tobytes() for part in tokens_in(tmp_path / "out").values())
    chunks = python_stdlib().chunks(None, "none")
    texts = [piece.data.decode() for chunk in chunks for piece in chunk.pieces]
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    assert digests == sorted(set(digests)), "each once, in the order of their digests"
    wanted = [token for text in texts for token in [*text.encode(), 256]]
    assert found == np.array(wanted, "<u2").tobytes()
    assert len(found) > 10**7 and 'The "if" statement' in "".join(texts)


def test_validation_documents_that_are_trained_on_are_counted(tmp_path):
    texts = [f"text {i}" for i in range(190)]
    prepare_dataset(
        texts_source(texts + texts[:10]), tmp_path / "out", replace(BYTES, validation_fraction=0.1)
    )
    found = metadata_of(tmp_path / "out")
    assert found["num_validation_documents_in_training"] == "10"
    line = "10 of 20 validation documents are in the training split too"
    assert line in (tmp_path / "out/README.md").read_text()
    (tmp_path / "a.jsonl").write_text('{"text": "the same"}\n' * 100)
    result = succeeded(prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "same")))
    assert "warning: 1 of 1 validation document is in" in result.stdout


# --- a tokenizer of one's own


def test_each_document_has_the_ids_of_its_text_and_the_tokenizer_is_beside_them(tmp_path):
    own, out = write_tokenizer(tmp_path / "own"), tmp_path / "out"
    source = write_source("jsonl", tmp_path / "source")
    succeeded(prepare(str(source), str(out), "--tokenizer", str(own)))
    tokenizer = choose_tokenizer(str(own))
    wanted = [
        token
        for text in DOCUMENTS
        for token in [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
    ]
    assert np.concatenate(list(tokens_in(out).values())).tolist() == wanted
    assert (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    assert metadata_of(out)["tokenizer"] == choose_tokenizer(str(own)).name
    text = (out / "README.md").read_text()
    assert "tokenizer `tokenizer.json`" in text and "with the id 0" in text
    assert "- sha256" not in text
    files = contents(out)
    with (
        serving(Hub(files, repository="someone/own")) as hub,
        used_in_this_process(hub, tmp_path / "home"),
    ):
        fetch_dataset(tmp_path / "downloaded", "someone/own", ["train", "validation"])
    for name in ("tokenizer.json", "train.safetensors", "validation.safetensors"):
        assert (tmp_path / "downloaded" / name).read_bytes() == files[name]
    order = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert order[0].endswith("tokenizer.json"), "with all token files, a dataset counts as complete"


@pytest.mark.parametrize("kind", WITH_A_SPACE)
def test_the_bytes_of_text_are_those_of_the_documents_also_where_a_space_is_added(tmp_path, kind):
    """Of both splits, and of the first documents; a space that is added is no loss."""
    own = str(write_tokenizer_with_a_space(tmp_path / "own", kind))
    documents = [f"{' ' * (i % 7 == 0)}the cat 它 {'at' * (i % 5)}" for i in range(200)]
    documents[150:152] = "", "\n"
    options = PrepareOptions(tokenizer=own, validation_fraction=0.3)
    for limit, num_train in ((200, 140), (100, 70)):
        out = tmp_path / str(limit)
        dataset = prepare_dataset(
            texts_source(documents), out, replace(options, max_documents=limit)
        )
        splits = {"train": documents[:num_train], "validation": documents[num_train:limit]}
        for split, texts in splits.items():
            found = metadata_of(out, split)
            assert found["num_documents"] == str(len(texts))
            assert found["num_text_bytes"] == str(sum(len(text.encode()) for text in texts))
        assert dataset.losses.num_sampled and not dataset.losses.num_changed


@pytest.mark.parametrize(
    ("changes", "text", "example"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "the  cat", "'the  cat' became 't"),
        ({"normalizer": {"type": "Lowercase"}}, "The cat", "'The cat' became 'the cat'"),
    ],
)
def test_a_tokenizer_that_loses_text_is_said(tmp_path, changes, text, example):
    own = write_tokenizer(tmp_path / "own", **changes)
    (tmp_path / "a.jsonl").write_text(
        f"{json.dumps({'text': text})}\n" * 3 + '{"text": "a"}\n{"text": "b"}\n'
    )
    result = succeeded(
        prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "out"), "--tokenizer", str(own))
    )
    line = "warning: the tokenizer loses text: 3 of 5 sampled texts do not come back"
    assert f"{line} ({example}" in result.stdout
    assert metadata_of(tmp_path / "out")["num_text_bytes"] == str(len(text) * 3 + 1)
    assert "loses text: 3 of 5" in (tmp_path / "out/README.md").read_text()


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut documents after 64 bytes, and fill tasks with 200."""
    monkeypatch.setattr(cutting, "LARGE_DOCUMENT", 64)
    with small_steps(200):
        yield


@pytest.mark.parametrize("changes", [{}, LETTERS], ids=["as gpt2", "across spaces"])
def test_cutting_a_document_does_not_change_its_ids(changes, tmp_path, small_pieces):
    own = write_tokenizer(tmp_path / "own", texts=[LONG] * 2)
    if changes:
        model = json.loads((own / "tokenizer.json").read_text())["model"]
        model["vocab"]["eĠ"] = len(model["vocab"])
        model["merges"].insert(0, ["e", "Ġ"])
        write_tokenizer(own, texts=[LONG] * 2, model=model, **changes)
    tokenizer = choose_tokenizer(str(own))
    forced = list(cut_document([LONG.encode()], "any", "long"))
    naive = [token for piece in forced for token in tokenizer.encode_ordinary(piece.data.decode())]
    ids = tokenizer.encode_ordinary(LONG)
    assert len(forced) > 20 and naive != ids
    pieces = list(cut_document([LONG.encode()], cuts_of(tokenizer), "long"))
    assert encode_task(pieces, tokenizer).tokens.tolist() == [*ids, tokenizer.eot_token]
    assert (len(pieces) == 1) == bool(changes)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(LONG)
    prepare_dataset(
        find_source(f"{tmp_path}/*.txt"), tmp_path / "out", PrepareOptions(tokenizer=str(own))
    )
    assert tokens_in(tmp_path / "out")["train"].tolist() == [*ids, tokenizer.eot_token]


def test_a_document_that_cannot_be_cut_is_refused_if_it_is_too_long(monkeypatch):
    monkeypatch.setattr(cutting, "MAX_UNCUT", 2**20)
    with pytest.raises(UserError, match="long.txt: a document of more than 1 million characters"):
        list(cut_document([b"x" * (2**20 + 1000)], "none", "long.txt"))


# --- disks, outputs and the card


def test_a_too_small_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3000))
    source = texts_source(["a" * 10_000, "b" * 10_000])
    with pytest.raises(UserError, match="3.00 kB free; tokens need 4.00 kB or more") as caught:
        prepare_dataset(source, tmp_path / "out", BYTES)
    assert caught.value.status == 4 and list(tmp_path.iterdir()) == []


def test_the_dataset_card_is_valid_and_its_code_works(tmp_path, monkeypatch):
    prepare_dataset(texts_source(["a" * 1200, "b"]), tmp_path / "out", BYTES)
    readme = DatasetCard.load(tmp_path / "out" / "README.md")
    data = readme.data.to_dict()
    assert data["license"] == "unknown" and "language" not in data
    assert data["task_categories"] == ["text-generation"]
    assert "1,203 tokens, 1,201 bytes of text, 1.00 per token." in readme.text
    assert "| `train.safetensors` | 1 | 1,201 | 6,506 |" in readme.text
    code = readme.text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["tokens"]) == 1024


def test_hostile_names_stay_text(tmp_path):
    """Even if each character of a long path takes six bytes of the token files' headers."""
    folder = tmp_path / HOSTILE / ("\x01" * 250) / ("\x01" * 250)
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / name).write_text(name)
    (folder / f"c{HOSTILE}").write_bytes(b"\0")
    prepare_dataset(find_source(folder), tmp_path / "out", BYTES)
    text = (tmp_path / "out" / "README.md").read_text()
    assert ": is binary" in text and not active_parts(text)
    assert (tmp_path / "out/train.safetensors").read_bytes().index(b"}}  ") < 4104


def test_an_output_is_empty_or_new_and_can_be_replaced(tmp_path, monkeypatch):
    source = texts_source(["a", "b"])
    for name in ("disk", "full", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    prepare_dataset(source, tmp_path / "link", BYTES)
    assert documents_of(tmp_path / "disk") == [["a"], ["b"]]
    (tmp_path / "full/mine").write_text("mine")
    for output in ("full", "full/mine"):
        with pytest.raises(UserError, match="is not empty"):
            prepare_dataset(source, tmp_path / output, BYTES)
    assert (tmp_path / "full/mine").read_text() == "mine"
    monkeypatch.chdir(tmp_path / "here")
    for output in (Path("."), Path("/proc")):
        with pytest.raises(UserError, match="is a mount point or the current directory"):
            prepare_dataset(source, output, BYTES)
    assert not list(tmp_path.glob(".*"))


# --- kills and resuming


@pytest.fixture(scope="module")
def sources_and_datasets(tmp_path_factory):
    """Sources of each kind, and the datasets that are made of them without a stop."""
    folder = tmp_path_factory.mktemp("sources")
    made = {}
    for kind in KINDS:
        source = write_source(kind, folder / kind)
        prepare_dataset(find_source(source), folder / f"{kind}-out", BYTES)
        made[kind] = source, contents(folder / f"{kind}-out")
    return made


@settings(max_examples=30)
@given(
    stops=st.lists(st.integers(0, 120), min_size=1, max_size=8),
    kind=st.sampled_from(KINDS),
    step=st.integers(50, 2000),
)
def test_stopped_at_any_write_it_continues_to_the_same_bytes(
    sources_and_datasets, tmp_path_factory, stops, kind, step
):
    source, wanted = sources_and_datasets[kind]
    out = tmp_path_factory.mktemp("stops") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 16)
        with small_steps(step):
            for stop in [*stops, None]:
                with stopping_after(stop):
                    if not out.exists():
                        prepare_dataset(find_source(source), out, BYTES)
    assert contents(out) == wanted


@pytest.mark.parametrize(("num_writes", "num_documents"), [(6, 1), (24, 4)])
def test_what_is_already_read_is_said_also_after_the_last_document(
    tmp_path, capsys, num_writes, num_documents
):
    texts = ["a", "b", "c", "d"]
    leave_unfinished(texts, tmp_path / "out", num_writes=num_writes)
    prepare_dataset(texts_source(texts), tmp_path / "out", BYTES)
    assert capsys.readouterr().err == f"continuing after document {num_documents}\n"


def leave_unfinished(texts, out, options=BYTES, num_writes=6):
    """Stop a preparation after its first document."""
    with small_steps(1), stopping_after(num_writes):
        prepare_dataset(texts_source(texts), out, options)
    assert not out.exists() and Journal(out).path.exists()


@pytest.mark.parametrize("num_writes", [6, 21])  # after the first and after the last document
@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        *(("journal.json", size) for size in (0, 1, -1)),
        *(("dataset/train.safetensors", size) for size in (0, 4100, -1)),
        *(("documents.bin", size) for size in (0, 23)),
        ("dataset", None),  # was published, by a launch that was killed before the journal went
    ],
)
def test_a_file_that_is_shorter_than_it_should_be_is_written_again(
    tmp_path, name, num_bytes, num_writes
):
    texts = ["a", "b", "c", "d"]
    prepare_dataset(texts_source(texts), tmp_path / "undisturbed", BYTES)
    leave_unfinished(texts, tmp_path / "out", num_writes=num_writes)
    path = tmp_path / ".out.partial" / name
    if num_bytes is None:
        shutil.rmtree(path)
    else:
        os.truncate(path, num_bytes if num_bytes >= 0 else path.stat().st_size + num_bytes)
    prepare_dataset(texts_source(texts), tmp_path / "out", BYTES)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (None, replace(BYTES, tokenizer="gpt2"), "tokenizer was bytes, is gpt2"),
        (None, replace(BYTES, tokenizer="own"), "tokenizer was bytes, is sha256:"),
        (None, replace(BYTES, validation_fraction=0.5), "validation fraction was 0.01, is 0.5"),
        (None, replace(BYTES, max_documents=3), "max documents was none, is 3"),
        (["a", "B", "c"], BYTES, "files was "),
    ],
)
def test_a_changed_option_or_source_is_refused(tmp_path, monkeypatch, texts, options, message):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "own")
    leave_unfinished(["a", "b", "c"], tmp_path / "out")
    with pytest.raises(UserError, match=f"differs: {message}") as caught:
        prepare_dataset(texts_source(texts or ["a", "b", "c"]), tmp_path / "out", options)
    assert str(tmp_path / ".out.partial") in str(caught.value)
    prepare_dataset(texts_source(["a", "b", "c"]), tmp_path / "out", BYTES)  # the first one
    assert documents_of(tmp_path / "out") == [["a", "b"], ["c"]]


def test_two_preparations_of_one_output_are_refused(tmp_path):
    with Journal(tmp_path / "out").locked():
        with pytest.raises(UserError, match="another process is preparing this dataset"):
            prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
        assert (tmp_path / ".out.partial").exists()


# --- the command: worker processes, kills, Ctrl-C, errors and memory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Eight parquet files with 1 MB of random words; a slow preparation uses workers for it."""
    generator = random.Random(0)
    words = [
        "".join(generator.choices("etaoinshrdlu", k=generator.randrange(2, 9))) for _ in range(2000)
    ]
    return write_parquet(
        tmp_path_factory.mktemp("corpus") / "source",
        *([" ".join(generator.choices(words, k=100)) for _ in range(220)] for _ in range(8)),
    )


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    """The dataset of the corpus, prepared in this process."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare_dataset(find_source(corpus), out, PrepareOptions())
    return out


def test_workers_write_the_bytes_of_one_process_and_the_tokens_of_the_original(
    corpus, prepared, tmp_path
):
    out = tmp_path / "out"
    succeeded(run_command(*SLOW_COMMAND, str(corpus), str(out), "--workers", "3"))
    assert contents(out) == contents(prepared)
    prepare_as_the_original(corpus, tmp_path / "reference")
    for split, tokens in tokens_in(tmp_path / "reference").items():
        assert np.array_equal(tokens_in(out)[split], tokens)


def test_workers_write_the_bytes_of_one_process_with_a_tokenizer_of_ones_own(corpus, tmp_path):
    arguments = (str(corpus), "--tokenizer", str(write_tokenizer(tmp_path / "own")))
    succeeded(run_command(*SLOW_COMMAND, *arguments, str(tmp_path / "two"), "--workers", "2"))
    succeeded(prepare(*arguments, str(tmp_path / "one")))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_after_kills_the_same_command_continues_to_the_same_bytes(
    corpus, prepared, tmp_path, request
):
    out = tmp_path / "out"
    kills = [4]  # journals that are waited for, of 10
    if request.config.getoption("--thorough"):
        corpus, prepared, kills = tmp_path / "source", tmp_path / "whole", [1] * 30
        build_corpus(corpus, 8 * 10**6, num_files=3)
        prepare_dataset(find_source(corpus), prepared, PrepareOptions())
    for num_journals in kills:
        process = start_until_journal(num_journals, tmp_path, str(corpus), str(out))
        time.sleep(random.uniform(0, 0.2))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
    result = succeeded(prepare(str(corpus), str(out)))
    assert re.match(r"continuing after document [\d,]+\n", result.stderr)
    assert contents(out) == contents(prepared)
    assert not list(tmp_path.glob(".*")), "an unfinished directory was left behind"


def start_until_journal(number, folder, *arguments):
    """Start a preparation that can be interrupted with Ctrl-C; return after so many journals.

    It goes on, but at most for two more.
    """
    journals = folder / "journals"
    journals.write_text("")
    process = subprocess.Popen(
        [*SLOW_COMMAND, *arguments, "--workers", "2"],
        cwd=PROJECT_DIR,
        env=os.environ | {"JOURNALS": str(journals), "LAST_JOURNAL": str(number + 2)},
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until(lambda: journals.stat().st_size >= number)
    return process


def test_ctrl_c_is_one_line_and_leaves_no_process(corpus, tmp_path):
    process = start_until_journal(1, tmp_path, str(corpus), str(tmp_path / "out"))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.strip() == "Interrupted; run the same command again to continue"
    wait_until(
        lambda: not subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout
    )


def test_a_killed_worker_is_one_line(corpus, tmp_path):
    result = run_command(
        *SLOW_COMMAND, str(corpus), str(tmp_path / "out"), "--workers", "2", WORKER_DIES="1"
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and "a worker process was killed" in result.stderr


def test_a_full_disk_has_its_own_exit_status(tmp_path):
    source_dir, disk = tmp_path / "source", tmp_path / "disk"
    write_parquet(source_dir, ["two words " * 100_000] * 4)
    disk.mkdir()
    with small_disk(disk, "500k"):
        result = prepare(str(source_dir), str(disk / "out"))
        assert result.returncode == 4 and result.stderr.count("\n") == 1, result.stderr
        assert "No space left on device; make room" in result.stderr
        assert not (disk / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/x.jsonl"], "nowhere/x.jsonl: no such file"),
        (["a**b/*.jsonl"], "a**b/*.jsonl: not"),
        (["x" * 300], "x" * 40),
        (["s", "--revision", "x"], "needs a dataset on the hub"),
        (["s", "--validation-fraction", "nan"], "nan is not a finite number"),
        (["s", "--tokenizer", "nowhere"], "nowhere"),
        (["s", "t"], "t: is a second SOURCE; wanted one SOURCE and one OUTPUT"),
        (["python-stdlib", "--text-column", "x"], "python-stdlib: has no --config"),
        (["tokens"], "tokens: is a prepared dataset already: train on it (lab new RUN --dataset)"),
        (["s", "--encoding", "klingon"], "--encoding klingon: is no encoding that Python knows"),
        (["s", "--encoding", "hex"], "--encoding hex: is no encoding"),
        (["s", "--document-separator", "x"], "--document-separator is for text files"),
        (["s", "--split", "test"], "has no split test; choose one with --split: train"),
        (["python-stdlib", "--split", "x"], "has no --config, --split, --text-col"),
        (["s", "--repeat"], "--repeat: is for a mix; name its datasets with --mix"),
        (["s", "t", "u"], "wanted one SOURCE and one OUTPUT"),
        (["--import", "s", "--max-documents", "9"], "--max-documents: is not for --import"),
        (["s", "my ü set"], "may have only a-z, A-Z, 0-9, '.', '-' and '_', a letter or digit"),
    ],
)
def test_wrong_arguments_are_one_line_and_write_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_source("jsonl", tmp_path / "s")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/train.safetensors").touch()
    result = prepare(*arguments, *["out"] * ("ü" not in arguments[-1]))
    assert result.returncode == 2 and result.stderr.startswith("Error: "), result.stderr
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "tokens"]


def test_the_command_prints_its_progress_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "LINE_INTERVAL", -1)
    source_dir = write_source("parquet", tmp_path / "source")
    result = succeeded(prepare(str(source_dir), str(tmp_path / "out"), "--tokenizer", "bytes"))
    assert re.search(r"[\d.]+kB \[.*B/s, .*001.parquet, 0 M tokens\]\n", result.stderr)
    first, empty, train, validation, next_command = result.stdout.splitlines()
    assert next_command == (
        f"make a run for it: uv run lab new RUN --dataset out --datasets-dir {tmp_path}"
    )
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert first == (
        f"152 documents, {size + 152:,} tokens, {size:,} bytes of text, 0.97 per token"
    )
    assert empty == "documents without text: 2"
    assert "train.safetensors: 150 documents" in train and "2 documents, 2 tokens" in validation


def test_the_help_fits_on_a_screen():
    result = run_command(*COMMAND, "--help", COLUMNS="80")
    assert len(succeeded(result).stdout.splitlines()) <= 40


@pytest.mark.thorough  # tokenises 100 MB and more
def test_memory_does_not_grow_with_the_input_or_the_largest_default_number_of_workers(tmp_path):
    peaks = []
    for copies, workers in ((1, 2), (6, 2), (4, MAX_DEFAULT_WORKERS)):
        folder = tmp_path / f"{copies}" / "sample" / "10BT"
        build_corpus(folder, copies * 24 * 10**6, num_files=8 * copies)
        out = tmp_path / f"out{copies}"
        peaks.append(peak_memory_of([*COMMAND, folder, out, "--workers", str(workers)]))
    assert peaks[1] < peaks[0] + 60 and peaks[2] < 512, peaks


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["a text", "separated", "long lines", "row groups"])
def test_memory_stays_small_with_large_documents_and_files(tmp_path, kind):
    folder, arguments = tmp_path / "source", []
    folder.mkdir()
    text = "All work and no play. " * 400_000  # 9 MB
    if kind == "a text":
        (folder / "a.txt").write_text(text * 10)
    elif kind == "separated":
        (folder / "a.txt").write_text("###".join([text] * 10))
        arguments = ["--document-separator", "###"]
    elif kind == "long lines":
        (folder / "a.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 10)
    else:
        texts = [f"{i} All work and no play. " * 2000 for i in range(4000)]
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts}), folder / "a.parquet", use_dictionary=False
        )
    command = [*COMMAND, folder, tmp_path / "out", "--tokenizer", "bytes", "--workers", "4"]
    assert peak_memory_of([*command, *arguments]) < 512
