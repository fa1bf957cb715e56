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

from basics import failpoints
from basics.errors import UserError
from basics.files import aside_of
from benchmarks.prepare import build_corpus, peak_memory_of, prepare_as_the_original
from preparation import cutting
from preparation.cutting import cut_document
from preparation.encoding import cuts_of, encode_task
from preparation.ensure_dataset import provide_dataset
from preparation.hub import fetch_dataset
from preparation.journal import Journal
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.sources import python_stdlib
from preparation.token_stream import num_training_documents
from prepare_dataset import MAX_DEFAULT_WORKERS
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.lab_cli import HOSTILE, active_parts
from tests.support.models import WITH_A_SPACE, write_tokenizer, write_tokenizer_with_a_space
from tests.support.optional import example, given, settings, st
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
from tokens.tokenizer import choose_tokenizer

COMMAND = [sys.executable, str(PROJECT_DIR / "prepare_dataset.py")]
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


def write_texts(kind, texts, folder):
    """Write texts as a source of a kind; return its place, and the documents that it has."""
    folder.mkdir()
    if kind == "parquet":  # two files, and no text where a text is empty
        column = [text or None for text in texts]
        write_parquet(folder, column[:10], column[10:])
    elif kind == "jsonl":
        rows = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / "a.jsonl").write_text("".join(rows[:10]))
        (folder / "b.jsonl").write_text("\n".join(rows[10:]))
    else:  # empty files are no documents
        texts = list(filter(None, texts))
        for i, text in enumerate(texts):
            (folder / f"{i:04}").write_bytes(text.encode())
    return texts


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff"))


LARGE = "a large text " * 40  # is read in pieces


@settings(max_examples=40)
@example([LARGE] * 3, "parquet", 0.5, None, 100, [9])  # in the middle of a document
@example([LARGE] * 3, "jsonl", 0.5, None, 50, [9])
@given(
    st.lists(st.sampled_from(["", "the same", LARGE]) | TEXT, min_size=1, max_size=30).filter(any),
    st.sampled_from(["parquet", "jsonl", "text"]),
    st.sampled_from([0.01, 0.1, 0.5, 0.99]),
    st.one_of(st.none(), st.integers(2, 30)),
    st.integers(1, 200),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_a_dataset_has_the_documents_of_its_source_wherever_it_was_stopped(
    tmp_path_factory, texts, kind, fraction, max_documents, step, stops
):
    """Whole, in their order, counted, and divided; stopped before any writes."""
    folder = tmp_path_factory.mktemp("any")
    source, out = folder / "source", folder / "out"
    wanted = write_texts(kind, texts, source)[:max_documents]
    options = replace(BYTES, validation_fraction=fraction, max_documents=max_documents)
    with small_steps(step), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 8)
        if not any(wanted):
            with pytest.raises(UserError, match="found; wanted at least 2, with text; "):
                prepare_dataset(find_source(source), out, options)
            return
        for stop in stops:
            with stopping_after(stop):
                if not out.exists():
                    prepare_dataset(find_source(source), out, options)
        if not out.exists():
            prepare_dataset(find_source(source), out, options)
        dataset = prepare_dataset(find_source(source), folder / "whole", options)
    assert contents(out) == contents(folder / "whole")
    tokens = tokens_in(out)
    if len(wanted) == 1:  # is divided by its tokens
        together = [*wanted[0].encode(), 256]
        assert tokens["train"].tolist() + tokens["validation"].tolist() == together
        assert len(tokens["train"]) == num_training_documents(len(together), fraction)
        return
    num_train = num_training_documents(len(wanted), fraction)
    train, validation = documents_of(out)
    assert (train, validation) == (wanted[:num_train], wanted[num_train:])
    assert dataset.findings.num_empty == wanted.count("")
    assert dataset.num_repeated == sum(text in train for text in validation if text)
    for split, documents in (("train", train), ("validation", validation)):
        metadata = metadata_of(out, split)
        num_bytes = sum(len(text.encode()) for text in documents)
        assert metadata["num_text_bytes"] == str(num_bytes)
        assert metadata["num_tokens"] == str(num_bytes + len(documents))
        assert metadata["num_documents"] == str(len(documents))


def test_the_split_is_that_of_a_percentage_slice():
    for n in (100, 150, 250, 350, 1000, 14_868_862):  # halves are rounded to the even number
        assert num_training_documents(n, 0.01) == round(99 * n / 100)
    assert num_training_documents(2, 0.01) == 1 == num_training_documents(3, 0.99)


def test_the_demo_has_each_text_of_the_standard_library_once_in_the_order_of_their_digests():
    chunks = python_stdlib().chunks(None, "none")
    texts = [piece.data for chunk in chunks for piece in chunk.pieces]
    digests = [hashlib.sha256(text).digest() for text in texts]
    assert digests == sorted(set(digests))
    assert sum(map(len, texts)) > 5 * 10**6 and b'The "if" statement' in b"".join(texts)


def test_validation_documents_that_are_trained_on_are_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the same"}\n' * 100)
    result = succeeded(prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "same")))
    assert "warning: 1 of 1 validation document is in" in result.stdout
    assert metadata_of(tmp_path / "same")["num_validation_documents_in_training"] == "1"


# --- a tokenizer of one's own


def test_each_document_has_the_ids_of_its_text_and_the_tokenizer_is_beside_them(tmp_path):
    own, out = write_tokenizer(tmp_path / "own"), tmp_path / "out"
    prepare_dataset(texts_source(DOCUMENTS), out, PrepareOptions(tokenizer=str(own)))
    tokenizer = choose_tokenizer(str(own))
    ids = [[*tokenizer.encode_ordinary(text), tokenizer.eot_token] for text in DOCUMENTS]
    assert np.concatenate([*tokens_in(out).values()]).tolist() == sum(ids, [])
    assert (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    assert metadata_of(out)["tokenizer"] == tokenizer.name
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
    """Of both splits; a space that is added is no loss."""
    own = str(write_tokenizer_with_a_space(tmp_path / "own", kind))
    documents = [f"{' ' * (i % 7 == 0)}the cat 它 {'at' * (i % 5)}" for i in range(200)]
    documents[150:152] = "", "\n"
    options = PrepareOptions(tokenizer=own, validation_fraction=0.3, max_documents=180)
    dataset = prepare_dataset(texts_source(documents), tmp_path / "out", options)
    for split, texts in (("train", documents[:126]), ("validation", documents[126:180])):
        found = metadata_of(tmp_path / "out", split)["num_text_bytes"]
        assert found == str(sum(len(text.encode()) for text in texts))
    assert dataset.losses.num_sampled and not dataset.losses.num_changed


@pytest.mark.parametrize(
    ("changes", "text", "example"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "the  cat", "'the  cat' became 't"),
        ({"normalizer": {"type": "Lowercase"}}, "The cat", "'The cat' became 'the cat'"),
    ],
)
def test_a_tokenizer_that_loses_text_is_said(tmp_path, changes, text, example):
    own = str(write_tokenizer(tmp_path / "own", **changes))
    rows = [json.dumps({"text": each}) for each in (text, text, text, "a", "b")]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    result = succeeded(prepare(f"{tmp_path}/a.jsonl", str(tmp_path / "out"), "--tokenizer", own))
    line = "warning: the tokenizer loses text: 3 of 5 sampled texts do not come back"
    assert f"{line} ({example}" in result.stdout
    assert metadata_of(tmp_path / "out")["num_text_bytes"] == str(len(text) * 3 + 1)


@pytest.mark.parametrize("changes", [{}, LETTERS], ids=["as gpt2", "across spaces"])
def test_cutting_a_document_does_not_change_its_ids(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "LARGE_DOCUMENT", 64)
    own = write_tokenizer(tmp_path / "own", texts=[LONG] * 2)
    if changes:
        model = json.loads((own / "tokenizer.json").read_text())["model"]
        model["vocab"]["eĠ"] = len(model["vocab"])
        model["merges"].insert(0, ["e", "Ġ"])
        write_tokenizer(own, texts=[LONG] * 2, model=model, **changes)
    tokenizer = choose_tokenizer(str(own))
    ids = [*tokenizer.encode_ordinary(LONG), tokenizer.eot_token]
    forced = list(cut_document([LONG.encode()], "any", "long"))
    assert len(forced) > 20 and encode_task(forced, tokenizer).tokens.tolist() != ids
    pieces = list(cut_document([LONG.encode()], cuts_of(tokenizer), "long"))
    assert (len(pieces) == 1) == bool(changes)
    assert encode_task(pieces, tokenizer).tokens.tolist() == ids


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
    assert readme.data.to_dict()["license"] == "unknown"
    assert "1,203 tokens, 1,201 bytes of text, 1.00 per token." in readme.text
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
    monkeypatch.chdir(tmp_path / "here")
    place = "is a mount point or the current directory"
    for output, message in (
        (tmp_path / "full", "is not empty"),
        (tmp_path / "full/mine", "is not empty"),
        (Path("."), place),
        (Path("/proc"), place),
    ):
        with pytest.raises(UserError, match=message):
            prepare_dataset(source, output, BYTES)
    assert (tmp_path / "full/mine").read_text() == "mine" and not list(tmp_path.glob(".*"))


def test_an_output_that_appears_meanwhile_is_kept(tmp_path):
    out = tmp_path / "out"
    journal = Journal(out)
    journal.dataset_dir.mkdir(parents=True)
    prepare_dataset(texts_source(["a", "b"]), tmp_path / "other", BYTES)
    shutil.copytree(tmp_path / "other", out)
    with pytest.raises(OSError, match="not empty"):
        journal.publish()
    assert documents_of(out) == [["a"], ["b"]]


def test_only_an_earlier_dataset_is_replaced_and_only_when_that_is_asked_for(tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare_dataset(texts_source(["a", "b"]), out, BYTES)
    again = replace(BYTES, replace=True)
    with pytest.raises(
        UserError, match="is not empty; name another output, or replace .*--replace"
    ):
        prepare_dataset(texts_source(["c", "d"]), out, BYTES)
    # Until the new one is complete, the earlier one is there.
    with small_steps(1), stopping_after(6):
        prepare_dataset(texts_source(["c", "d"]), out, again)
    assert documents_of(out) == [["a"], ["b"]]
    prepare_dataset(texts_source(["c", "d"]), out, again)
    assert documents_of(out) == [["c"], ["d"]] and not list(tmp_path.glob(".*"))
    # An error between the two renames puts the earlier one back, and a kill is mended by the next
    # command, even one that fails.
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setenv(failpoints.VARIABLE, "replace:raise")
        prepare_dataset(texts_source(["e", "f"]), out, again)
    assert documents_of(out) == [["c"], ["d"]]
    out.rename(aside_of(out))
    with pytest.raises(UserError, match="--replace"):
        prepare_dataset(texts_source(["e", "f"]), out, BYTES)
    assert documents_of(out) == [["c"], ["d"]]
    out.rename(aside_of(out))
    provide_dataset(out, "out")  # what a launch does first
    shutil.copytree(out, aside_of(out))  # as a kill after the second rename leaves it
    with pytest.raises(UserError, match="--replace"):
        prepare_dataset(texts_source(["e", "f"]), out, BYTES)
    assert documents_of(out) == [["c"], ["d"]] and not aside_of(out).exists()


@pytest.mark.parametrize("others", [["notes.txt"], ["tokenizer.json/mine"]])
def test_a_directory_with_other_files_is_never_replaced(tmp_path, others):
    out = tmp_path / "out"
    again = replace(BYTES, replace=True)
    prepare_dataset(texts_source(["a", "b"]), out, BYTES)
    journal = Journal(out, replace=True)
    for name in others:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    with pytest.raises(UserError, match=r"is not empty \((notes.txt|tokenizer.json)\)"):
        prepare_dataset(texts_source(["c", "d"]), out, again)
    # Also if they have appeared while the new one was written.
    shutil.copytree(out, journal.dataset_dir)
    with pytest.raises(UserError, match="is not empty"):
        journal.publish()
    assert all((out / name).read_text() == "mine" for name in others)
    card_alone = tmp_path / "project"
    card_alone.mkdir()
    (card_alone / "README.md").write_text("mine")
    with pytest.raises(UserError, match="is not empty; name another output, or delete"):
        prepare_dataset(texts_source(["c", "d"]), card_alone, again)


# --- kills and resuming


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
        ("abc", {"tokenizer": "gpt2"}, "tokenizer was bytes, is gpt2"),
        ("abc", {"tokenizer": "own"}, "tokenizer was bytes, is sha256:"),
        ("abc", {"validation_fraction": 0.5}, "validation fraction was 0.01, is 0.5"),
        ("abc", {"max_documents": 3}, "max documents was none, is 3"),
        ("aBc", {}, "files was "),
    ],
)
def test_a_changed_option_or_source_is_refused(tmp_path, monkeypatch, texts, options, message):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "own")
    leave_unfinished([*"abc"], tmp_path / "out")
    with pytest.raises(UserError, match=f"differs: {message}"):
        prepare_dataset(texts_source([*texts]), tmp_path / "out", replace(BYTES, **options))
    prepare_dataset(texts_source([*"abc"]), tmp_path / "out", BYTES)  # the first one
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


@pytest.mark.parametrize("tokenizer", ["gpt2", "own"])
def test_workers_write_the_bytes_of_one_process_and_the_tokens_of_the_original(
    corpus, tmp_path, tokenizer
):
    one, out, name = tmp_path / "one", tmp_path / "out", tokenizer
    if tokenizer == "own":
        name = str(write_tokenizer(tmp_path / "own"))
    arguments = [str(corpus), str(out), "--tokenizer", name, "--workers", "3"]
    succeeded(run_command(*SLOW_COMMAND, *arguments))
    prepare_dataset(find_source(corpus), one, PrepareOptions(tokenizer=name))
    assert contents(out) == contents(one)
    if tokenizer == "gpt2":
        prepare_as_the_original(corpus, tmp_path / "reference")
        for split, tokens in tokens_in(tmp_path / "reference").items():
            assert np.array_equal(tokens_in(out)[split], tokens)


def test_after_kills_the_same_command_continues_to_the_same_bytes(corpus, tmp_path, request):
    out, whole = tmp_path / "out", tmp_path / "whole"
    kills = [4]  # journals that are waited for, of 10
    if request.config.getoption("--thorough"):
        corpus, kills = tmp_path / "source", [1] * 30
        build_corpus(corpus, 8 * 10**6, num_files=3)
    prepare_dataset(find_source(corpus), whole, PrepareOptions())
    for num_journals in kills:
        process = start_until_journal(num_journals, tmp_path, str(corpus), str(out))
        time.sleep(random.uniform(0, 0.2))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
    result = succeeded(prepare(str(corpus), str(out)))
    assert re.match(r"continuing after document [\d,]+\n", result.stderr)
    assert contents(out) == contents(whole)
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
        (["a**b/*.jsonl"], "a**b/*.jsonl: not"),
        (["s/texts"], "no such file or directory, and not the owner/name"),
        (["owner/a.jsonl.gz"], "owner/a.jsonl.gz: no such file"),
        (["hf://datasets/name"], "hf://datasets/name: wanted hf://datasets/owner/name/pattern"),
        (["s", "--revision", "x"], "needs a dataset on the hub"),
        (["s", "--validation-fraction", "nan"], "nan is not a finite number"),
        (["s", "--tokenizer", "nowhere"], "nowhere"),
        (["s", "t"], "t: is a second SOURCE; wanted one SOURCE and one OUTPUT"),
        (["python-stdlib", "--text-column", "x"], "python-stdlib: has no --config"),
        (["tokens"], "tokens: is a prepared dataset already: train on it (lab new RUN --dataset)"),
        (["s", "--encoding", "klingon"], "--encoding klingon: is no encoding that Python knows"),
        (["s", "--document-separator", "x"], "--document-separator is for text files"),
        (["s", "--split", "test"], "has no split test; choose one with --split: train"),
        (["s", "--repeat"], "--repeat: is for a mix; name its datasets with --mix"),
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


TEXT_OF_9_MB = "All work and no play. " * 400_000


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.txt", TEXT_OF_9_MB * 10, []),
        ("a.txt", f"{TEXT_OF_9_MB}###" * 10, ["--document-separator", "###"]),
        ("a.jsonl", f"{json.dumps({'text': TEXT_OF_9_MB})}\n" * 10, []),
        ("many", None, ["--workers", str(MAX_DEFAULT_WORKERS)]),  # tokenises 100 MB
        ("a.parquet", None, []),  # large groups of rows
    ],
    ids=["a text", "separated", "long lines", "many files", "row groups"],
)
def test_memory_stays_small_with_large_documents_and_files(tmp_path, name, content, options):
    source = tmp_path / name
    if content is not None:
        source.write_text(content)
    elif name == "many":
        build_corpus(source, 4 * 24 * 10**6, num_files=32)
    else:
        texts = [f"{i} All work and no play. " * 2000 for i in range(4000)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source, use_dictionary=False)
    command = [*COMMAND, source, tmp_path / "out", "--tokenizer", "bytes", "--workers", "4"]
    assert peak_memory_of([*command, *options]) < 512


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
