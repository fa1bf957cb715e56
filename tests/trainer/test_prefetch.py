"""--prefetch: everything that a launch needs, before it."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from basics.directory_lock import lock_directory
from basics.errors import UserError
from gpt import GPTModel
from processes.launch import Process
from run_config import ModelConfig, load_run
from tests.support.checkpoints import ONE_PROCESS
from tests.support.checkpoints import save as save_checkpoint
from tests.support.hub_server import Fault, Hub, serving
from tests.support.in_process import assert_refused, run_in_process
from tests.support.models import add_dataset_with_tokenizer, export
from tests.support.network import environment_of_refusal
from tests.support.tokenizers import write_tokenizer
from tests.support.workplace import (
    TINY_MODEL,
    Workplace,
    run_command,
    succeeded,
    write_tokens,
)
from trainer import prefetch

SHORT = {"gradient_accumulation_steps": 1, "min_train_tokens": 128, "validation_batches": 1}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a dataset and a model of the same name."""
    tokens = (np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 257).astype(np.uint16)
    torch.manual_seed(0)
    weights = export(GPTModel(ModelConfig(**TINY_MODEL)), tmp_path / "exported")
    files = {"train.safetensors": save({"tokens": tokens}),
             "validation.safetensors": save({"tokens": tokens[:500]}),
             **{path.name: path.read_bytes() for path in weights.iterdir()}}
    with serving(Hub(files, repository="someone/tiny", kind="any")) as hub:
        yield hub


def prefetched(workplace: Workplace, *arguments: str) -> list[str]:
    result = succeeded(run_in_process(*workplace.arguments("tiny", "--prefetch", *arguments)))
    return result.stdout.splitlines()


def refusal(workplace: Workplace, *arguments: str) -> str:
    """Return the error line of options that are refused; nothing may have been written."""
    before = workplace.files()
    result = run_in_process(*workplace.arguments(*arguments))
    assert_refused(result)
    assert workplace.files() == before
    return result.stderr


def from_hub(workplace: Workplace, **environment: str) -> CompletedProcess[str]:
    """Start ddp_train.py anew: the hub's client reads its settings when it is imported."""
    return run_command(sys.executable, "ddp_train.py", *workplace.arguments("tiny", "--prefetch"),
                       **environment)


def test_all_that_is_there_is_verified_and_nothing_is_written(workplace: Workplace) -> None:
    run_dir = workplace.add_run()
    workplace.add_dataset()
    before = workplace.files()
    descriptor = lock_directory(run_dir)  # as while it trains
    try:
        lines = prefetched(workplace)
    finally:
        os.close(descriptor)
    assert [line.partition(":")[0] for line in lines] == [
        "dataset", "token ids", "tokenizer", "compiled code", "tiny"]
    size = r"0\.01 MB"
    place = re.escape(str(workplace.datasets_dir / "tiny"))
    assert re.fullmatch(rf"dataset: {place}, {size}: found, 0 of 2 files compared with the hub's"
                        r" digests; \d+\.\d s", lines[0])
    assert "are in the vocabulary of 257" in lines[1] and "bytes, 257 ids" in lines[2]
    assert "compiled code: skipped, there is no GPU here" in lines[3]
    assert workplace.files() == before


def test_a_mistake_is_one_line(workplace: Workplace) -> None:
    workplace.add_run(train={"init_from": "nowhere"})
    assert "no dataset there" in refusal(workplace, "tiny", "--prefetch")
    workplace.add_dataset()
    result = run_in_process(*workplace.arguments("tiny", "--prefetch"))
    assert result.returncode == 2 and "init_from: " in result.stderr
    assert result.stderr.count("\n") == 1
    tokens = np.full(4000, 300, dtype=np.uint16)
    write_tokens(workplace.datasets_dir / "tiny/train.safetensors", tokens)
    result = run_in_process(*workplace.arguments("tiny", "--prefetch"))
    assert result.returncode == 2 and "has id 300, outside" in result.stderr


def test_a_tokenizer_of_ones_own_and_weights_in_a_directory(workplace: Workplace) -> None:
    source, _ = add_dataset_with_tokenizer(workplace)
    dataset_dir = workplace.datasets_dir / "tiny"
    write_tokenizer(source, vocab_size=257)
    run_dir = workplace.add_run(train={"init_from": str(source)})
    lines = prefetched(workplace)
    assert lines[2].startswith(f"tokenizer: {dataset_dir / 'tokenizer.json'}, ")
    assert lines[3].startswith(f"initial weights: {source}, ") and ": found, " in lines[3]
    save_checkpoint(run_dir / "checkpoints", 4)
    assert "initial weights: not needed" in prefetched(workplace)[3]


@pytest.mark.thorough  # test_security.py and test_readme.py try both halves
def test_training_needs_no_network_afterwards(workplace: Workplace, hub: Hub) -> None:
    """And what was fetched is fetched once."""
    workplace.add_run(train=SHORT | {"dataset": "someone/tiny", "init_from": "someone/tiny"})
    home = workplace.root / "home"
    lines = succeeded(from_hub(workplace, **hub.environment(home))).stdout.splitlines()
    assert ": downloaded, 2 of 2 files compared" in lines[0]
    assert lines[3].startswith(f"initial weights: {home}/hub/models--someone--tiny/snapshots/")
    assert ": downloaded, 1 of 1 files compared" in lines[3]
    assert sorted(path.name for path in (workplace.runs_dir / "tiny").iterdir()) == [
        "model.json", "train.json"]
    assert {len(hub.downloads(name)) for name in hub.files if name.endswith(".safetensors")} == {1}
    environment = environment_of_refusal(workplace.root / "site", workplace.root / "log")
    away = environment | {"HF_ENDPOINT": "http://192.0.2.1:9", "HF_HOME": str(home)}
    again = succeeded(from_hub(workplace, **away)).stdout
    assert again.count(": found, ") == 2 and "downloaded" not in again
    succeeded(run_command(sys.executable, "ddp_train.py", *workplace.arguments(
        "tiny", "--nproc-per-node", "1"), **away))
    assert (workplace.runs_dir / "tiny/checkpoints/latest").exists()


def test_a_hub_that_does_not_answer_is_one_line(workplace: Workplace, hub: Hub) -> None:
    workplace.add_run(train=SHORT | {"dataset": "someone/tiny"})
    hub.faults.append(Fault("/api/", times=-1, status=401))
    result = from_hub(workplace, **hub.environment(workplace.root / "home"))
    assert_refused(result)
    assert "someone/tiny on the Hugging Face hub" in result.stderr


def test_a_damaged_download_is_found(workplace: Workplace, hub: Hub) -> None:
    workplace.add_run(train=SHORT | {"dataset": "someone/tiny"})
    environment = hub.environment(workplace.root / "home")
    succeeded(from_hub(workplace, **environment))
    path = workplace.datasets_dir / "someone/tiny/train.safetensors"
    found, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    result = run_in_process(*workplace.arguments("tiny", "--prefetch"))
    assert result.returncode == 2 and "is damaged: its SHA-256 is not" in result.stderr


@pytest.mark.parametrize(("num_processes", "num_gpus", "count", "said"), [
    (8, 8, 8, "compiled for 8 GPUs"), (16, 2, 2, "compiled for 2 GPUs"), (1, 0, 1, "compiled"),
    (4, 0, 1, "compiled")])
def test_one_process_compiles_for_each_gpu_as_the_runs_processes(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, num_processes: int, num_gpus: int,
    count: int, said: str
) -> None:
    workplace.add_run(train={"compile": True})
    workplace.add_dataset()
    cache, asked = workplace.root / "cache", []

    def start(*_: object, num_processes: int) -> int:
        asked.append((num_processes, os.environ[prefetch.COMPILES_FOR]))
        (cache / "fxgraph/a").mkdir(parents=True, exist_ok=True)
        (cache / "fxgraph/a/b").write_bytes(bytes(2_500_000))
        return 0

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(prefetch, "start_torchrun", start)
    monkeypatch.setattr(prefetch, "num_gpus", lambda: num_gpus)
    run = load_run(workplace.runs_dir, "tiny")
    with redirect_stdout(io.StringIO()) as output:
        assert prefetch._compile("ddp_train.py", run, num_processes)
        assert prefetch._compile("ddp_train.py", run, num_processes)
    first, second = output.getvalue().splitlines()
    assert first.startswith(f"compiled code: {cache}, 2.50 MB: {said}; ") and ": found" in second
    assert asked == [(count, str(num_processes))] * 2


def test_a_compilation_that_failed_is_the_status(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.add_run(train={"compile": True})
    monkeypatch.setattr(prefetch, "start_torchrun", lambda *_, **__: 2)
    with pytest.raises(SystemExit) as ended:
        prefetch._compile("ddp_train.py", load_run(workplace.runs_dir, "tiny"), 1)
    assert ended.value.code == 2


def test_a_gpu_in_use_is_left_alone(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.add_run()
    run = load_run(workplace.runs_dir, "tiny")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 2**30, 80 * 2**30))
    process = Process(0, 0, 1, torch.device("cuda", 0))
    with pytest.raises(UserError, match="GPU 0 is in use, 10.0 of 80.0 GiB are free") as caught:
        prefetch._compile_here(run, process)
    assert caught.value.status == 1


def test_a_microbatch_that_does_not_fit_is_refused(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run_dir = workplace.add_run()
    monkeypatch.setattr(prefetch, "Losses", run_out)
    with pytest.raises(UserError) as caught:
        prefetch._compile_here(load_run(workplace.runs_dir, "tiny"), ONE_PROCESS)
    assert caught.value.status == 2 and str(caught.value).startswith(
        f"{run_dir / 'train.json'}: microbatch_size 2 does not fit into the memory of cpu; make it"
        " smaller, or set")


def test_a_missing_tracker_and_a_full_disk_are_found(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = workplace.add_run(train={"tracker": "trackio"})
    workplace.add_dataset()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "needs the package trackio" in refusal(workplace, "tiny", "--prefetch")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5, total=50))
    workplace.add_run("other")
    result = run_in_process(*workplace.arguments("other", "--prefetch"))
    assert result.returncode == 2 and "the disk has 0.00 GB free" in result.stderr
    (run_dir.parent / "other/summary.json").write_text('{"status": "finished"}')
    succeeded(run_in_process(*workplace.arguments("other", "--prefetch")))


@pytest.mark.thorough
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_compiles_nothing_afterwards(workplace: Workplace, num_processes: int) -> None:
    workplace.add_run(train=SHORT | {"compile": True})
    workplace.add_dataset()
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(workplace.root / "cache")}
    command = [sys.executable, "ddp_train.py", *workplace.arguments(
        "tiny", "--nproc-per-node", str(num_processes))]
    assert ": compiled; " in succeeded(run_command(*command, "--prefetch", **cache)).stdout
    kept = set((workplace.root / "cache/fxgraph").glob("*/*"))
    assert kept
    assert ": found; " in succeeded(run_command(*command, "--prefetch", **cache)).stdout
    succeeded(run_command(*command, **cache))
    assert set((workplace.root / "cache/fxgraph").glob("*/*")) == kept
