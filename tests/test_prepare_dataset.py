"""The command: its output and errors, kills, Ctrl-C, worker processes and memory."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.prepare import build_corpus, peak_memory_of, prepare_as_the_original
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.sources import find_documents
from prepare_dataset import MAX_DEFAULT_WORKERS
from tests.support.preparation import (
    DOCUMENTS,
    SLOW_COMMAND,
    contents,
    prepare,
    tokens_in,
    write_parquet,
    write_source,
)
from tests.support.workplace import PROJECT_DIR, run_command, small_disk, succeeded

COMMAND = [sys.executable, str(PROJECT_DIR / "prepare_dataset.py")]
SLOW_COMMAND = [sys.executable, *SLOW_COMMAND]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Eight parquet files with 1 MB of random words; slow_preparation uses workers for it."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randrange(2, 9)))
             for _ in range(2000)]
    return write_parquet(tmp_path_factory.mktemp("corpus") / "source", *(
        [" ".join(generator.choices(words, k=100)) for _ in range(220)] for _ in range(8)))


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    """The dataset of the corpus, prepared in this process."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare_dataset(find_documents(corpus), out, PrepareOptions())
    return out


def test_workers_write_the_same_bytes_as_one_process_and_the_tokens_of_the_original(corpus,
                                                                                    prepared,
                                                                                    tmp_path):
    out = tmp_path / "out"
    succeeded(run_command(*SLOW_COMMAND, str(corpus), str(out), "--workers", "3"))
    assert contents(out) == contents(prepared)
    prepare_as_the_original(corpus, tmp_path / "reference")
    for split, tokens in tokens_in(tmp_path / "reference").items():
        assert np.array_equal(tokens_in(out)[split], tokens)


def test_after_a_kill_the_same_command_continues_to_the_same_bytes(corpus, prepared, tmp_path):
    out, journal = tmp_path / "out", tmp_path / ".out.partial" / "journal.jsonl"
    command = [*SLOW_COMMAND, str(corpus), str(out), "--workers", "2"]
    process = start(command)
    wait_for_lines(journal, 4, process)  # the request and three shards
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    result = succeeded(prepare(str(corpus), str(out)))
    assert re.match(r"continuing after document \d+\n", result.stderr)
    assert contents(out) == contents(prepared)
    assert not list(tmp_path.glob(".*")), "an unfinished directory was left behind"


def start(command, **environment):
    """Start a slow preparation that can be interrupted with Ctrl-C."""
    return subprocess.Popen(
        command, cwd=PROJECT_DIR, env=os.environ | {"PAUSE_SECONDS": "0.3"} | environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))


def wait_for_lines(path, num_lines, process):
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.timeout(1200)
def test_killed_ten_times_at_random_it_ends_with_the_same_bytes(tmp_path, workplace, request):
    if not request.config.getoption("--thorough"):
        pytest.skip("prepares 300 MB of parquet ten times: --thorough")
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
        if out.exists():  # it finished between two kills: begin again
            assert contents(out) == undisturbed
            shutil.rmtree(out)
            seconds *= 0.8  # the machine was faster than before
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
    assert not list(out.parent.glob(".*")), "an unfinished directory was left behind"
    workplace.add_run(model={"vocab_size": 50257, "emb_dim": 8, "context_length": 32},
                      train={"dataset": "mine", "min_train_tokens": 64, "validation_batches": 1})
    succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "1"))


def test_ctrl_c_is_one_line_and_leaves_no_process(corpus, tmp_path):
    out = tmp_path / "out"
    process = start([*SLOW_COMMAND, str(corpus), str(out), "--workers", "2"])
    wait_for_lines(tmp_path / ".out.partial" / "journal.jsonl", 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.strip() == "Interrupted; run the same command again to continue"
    deadline = time.monotonic() + 30
    while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout:
        assert time.monotonic() < deadline, "a process is still running"
        time.sleep(0.05)


def test_a_killed_worker_is_one_line(corpus, tmp_path):
    result = run_command(*SLOW_COMMAND, str(corpus), str(tmp_path / "out"), "--workers", "2",
                         WORKER_DIES="1")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and "a worker process was killed" in result.stderr


def test_a_full_disk_has_its_own_exit_status(tmp_path):
    source_dir, disk = tmp_path / "source", tmp_path / "disk"
    write_parquet(source_dir, ["two words " * 100_000] * 4)
    disk.mkdir()
    with small_disk(disk, "500k"):
        result = prepare(str(source_dir), str(disk / "out"))
        assert result.returncode == 4 and result.stderr.count("\n") == 1, result.stderr
        assert "the disk is full; free some space" in result.stderr
        assert not (disk / "out").exists()


@pytest.mark.parametrize("source", ["nowhere/x.jsonl", "a**b/*.jsonl", "x" * 300])
def test_invalid_names_of_sources_are_one_line(tmp_path, source):
    result = prepare(source, str(tmp_path / "out"))
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith(f"Error: {source}"[:60])
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_a_run_cannot_give_is_refused_before_anything_is_written(tmp_path):
    result = prepare("python-stdlib", str(tmp_path / "my ü set"))
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "may have only a-z, A-Z, 0-9, '.', '-' and '_', a letter or digit" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_validation_fraction_that_is_not_a_number_is_refused(tmp_path):
    write_source("jsonl", tmp_path / "source")
    result = prepare(str(tmp_path / "source"), str(tmp_path / "out"),
                     "--validation-fraction", "nan")
    assert result.returncode == 2 and "wanted a number between 0 and 1" in result.stderr


@pytest.mark.parametrize("options", [["--revision", "x"], ["--keep-raw", "x"]])
def test_options_for_the_hub_are_refused_with_local_files(tmp_path, options):
    result = prepare(str(tmp_path), str(tmp_path / "out"), *options)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "need a dataset on the hub" in result.stderr


def test_the_command_prints_counts_and_refuses_to_overwrite(tmp_path):
    source_dir = write_source("parquet", tmp_path / "source")
    arguments = [str(source_dir), str(tmp_path / "out"), "--tokenizer", "bytes"]
    result = succeeded(run_command(*COMMAND, *arguments))
    first, empty, train, validation = result.stdout.splitlines()
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert first == (f"152 documents, {size + 152:,} tokens, {size:,} bytes of text, 0.87"
                     " characters per token")
    assert empty == "documents without text: 2"
    assert "train.safetensors: 150 documents" in train and "2 documents, 2 tokens" in validation
    again = prepare(*arguments)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1 and "is not empty" in again.stderr


def test_preparing_does_not_import_torch():
    code = ("import sys, prepare_dataset, preparation.pipeline, preparation.hub,"
            " preparation.import_bin, tokens.batch_plan\nassert 'torch' not in sys.modules")
    succeeded(run_command(sys.executable, "-c", code, PYTHONPATH=str(PROJECT_DIR)))


def test_memory_stays_small_with_large_documents(tmp_path):
    """Ten documents of 13 MB. The peak is 290 MiB, and 510 MiB if all tokens stay in memory."""
    line = json.dumps({"text": "All work and no play. " * 600_000})
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * 10)
    _, peak = peak_memory_of([*COMMAND, tmp_path / "a.jsonl", tmp_path / "out",
                              "--tokenizer", "bytes", "--workers", "2"])
    assert peak < 400 * 2**20, f"{peak / 2**20:.0f} MiB"


@pytest.fixture(scope="module")
def large_corpus(request, tmp_path_factory):
    """A corpus in FineWeb's layout: 8 shards of 3 MB of text."""
    if not request.config.getoption("--thorough"):
        pytest.skip("tokenises 100 MB and more: --thorough")
    folder = tmp_path_factory.mktemp("large") / "sample" / "10BT"
    build_corpus(folder, 24 * 10**6, num_files=8)
    return folder


def test_memory_stays_small_with_the_largest_default_number_of_workers(large_corpus, tmp_path):
    folder = copies_of(large_corpus, 4, tmp_path / "corpus")
    _, peak = peak_memory_of([*COMMAND, folder, tmp_path / "out",
                              "--workers", str(MAX_DEFAULT_WORKERS)])
    assert peak < 2**30, f"{peak / 2**20:.0f} MiB"


def copies_of(corpus, copies, folder):
    """Return a pattern of files: links that lead out of a directory are not read."""
    folder.mkdir()
    for copy in range(copies):
        for path in corpus.iterdir():
            (folder / f"{copy}-{path.name}").symlink_to(path)
    return folder / "*.parquet"


@pytest.mark.parametrize("kind", ["lines", "escaped", "repeated", "groups"])
def test_memory_stays_small_with_documents_of_100_mb_in_every_form(tmp_path, request, kind):
    if not request.config.getoption("--thorough"):
        pytest.skip("tokenises 200 MB and more: --thorough")
    folder = tmp_path / "source"
    folder.mkdir()
    if kind == "lines":
        line = json.dumps({"text": "All work and no play. " * 4_500_000})
        with (folder / "a.jsonl").open("w") as file:
            file.writelines(f"{line}\n" for _ in range(3))
    elif kind == "escaped":  # 33 MB of Cyrillic, each letter as six characters
        line = json.dumps({"text": "Работа без отдыха " * 1_030_000})
        (folder / "a.jsonl").write_text(f"{line}\n{line}\n")
    elif kind == "repeated":  # 18 MB, stored once for all twelve rows
        write_parquet(folder, ["All work and no play. " * 820_000] * 12)
    else:  # large row groups
        texts = [f"{i} All work and no play. " * 2000 for i in range(4000)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet",
                                    row_group_size=1000, use_dictionary=False)
    _, peak = peak_memory_of([*COMMAND, folder, tmp_path / "out", "--tokenizer", "bytes",
                              "--workers", "4"])
    assert peak < 2**30, f"{peak / 2**20:.0f} MiB"


def test_memory_does_not_grow_with_the_input(large_corpus, tmp_path):
    peaks = []
    for copies in (1, 6):
        folder = copies_of(large_corpus, copies, tmp_path / f"corpus{copies}")
        _, peak = peak_memory_of([*COMMAND, folder, tmp_path / f"out{copies}", "--workers", "2"])
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 60 * 2**20, [f"{peak / 2**20:.0f} MiB" for peak in peaks]
