"""--prefetch: everything that a launch needs, before it."""

import os
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from basics.errors import UserError
from basics.files import lock_directory
from gpt import GPTModel
from processes.command_line import Options
from run_config import ModelConfig
from tests.support.hub_server import Fault, Hub, serving
from tests.support.models import ONE_PROCESS, add_dataset_with_tokenizer, export, write_tokenizer
from tests.support.runs import assert_refused, run_in_process
from tests.support.workplace import TINY_MODEL, run_command, succeeded, write_tokens
from trainer import prefetch
from trainer.microbatch_trial import Trial, check_idle

SHORT = {"gradient_accumulation_steps": 1, "min_train_tokens": 128, "validation_batches": 1}


def run_prefetch(workplace):
    return run_in_process(*workplace.arguments("tiny", "--prefetch"))


def prefetched(workplace):
    return succeeded(run_prefetch(workplace)).stdout.splitlines()


def test_all_that_is_there_is_verified_and_nothing_is_written(workplace):
    source, _ = add_dataset_with_tokenizer(workplace)
    write_tokenizer(source, vocab_size=257)
    run_dir = workplace.add_run(train={"init_from": str(source)})
    dataset_dir, before = workplace.datasets_dir / "tiny", workplace.files()
    descriptor = lock_directory(run_dir)  # as while it trains
    try:
        lines = prefetched(workplace)
    finally:
        os.close(descriptor)
    assert re.fullmatch(rf"dataset: {dataset_dir}: found, [\d.]+ MB, 0 of 3 files compared with the"
                        r" hub's digests", lines[0])
    assert lines[1].startswith("token ids: ") and "are in the vocabulary of 257" in lines[1]
    assert lines[2].startswith(f"tokenizer: {dataset_dir / 'tokenizer.json'}, ")
    assert lines[3].startswith(f"initial weights: {source}: ")
    assert lines[4].startswith("compiled code: skipped, there is no GPU here")
    assert lines[5].endswith("all that a launch needs is on this machine") and len(lines) == 6
    assert workplace.files() == before


def test_a_mistake_is_one_line(workplace):
    def refuses(message):
        result = run_prefetch(workplace)
        assert result.returncode == 2 and message in result.stderr
        assert result.stderr.count("\n") == 1

    run_dir = workplace.add_run(train={"init_from": "nowhere"})
    before = workplace.files()
    refuses("no dataset there")
    assert workplace.files() == before
    workplace.add_dataset()
    refuses("init_from: ")
    shutil.rmtree(run_dir)
    workplace.add_run()
    write_tokens(workplace.datasets_dir / "tiny/train.safetensors",
                 np.full(4000, 300, dtype=np.uint16))
    refuses("has id 300, outside")


@pytest.fixture
def hub(tmp_path):
    """A hub with a dataset and a model of the same name."""
    tokens = (np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 257).astype(np.uint16)
    torch.manual_seed(0)
    weights = export(GPTModel(ModelConfig(**TINY_MODEL)), tmp_path / "exported")
    files = {"train.safetensors": save({"tokens": tokens}),
             "validation.safetensors": save({"tokens": tokens[:500]}),
             **{path.name: path.read_bytes() for path in weights.iterdir()}}
    with serving(Hub(files, repository="someone/tiny", kind="any")) as hub:
        yield hub


def test_what_is_downloaded_is_verified(workplace, hub):
    def from_hub():
        """Start ddp_train.py anew: the hub's client reads its settings when it is imported."""
        return run_command(sys.executable, "ddp_train.py",
                           *workplace.arguments("tiny", "--prefetch"), **hub.environment(home))

    home = workplace.root / "home"
    workplace.add_run(train=SHORT | {"dataset": "someone/tiny", "init_from": "someone/tiny"})
    hub.faults.append(Fault("/api/", times=-1, status=401))
    result = from_hub()
    assert_refused(result)
    assert "someone/tiny on the Hugging Face hub" in result.stderr
    hub.faults.clear()
    lines = succeeded(from_hub()).stdout.splitlines()
    assert ": downloaded, " in lines[0] and ", 2 of 2 files compared" in lines[0]
    assert lines[3].startswith(f"initial weights: {home}/hub/models--someone--tiny/snapshots/")
    assert ", 1 of 1 files compared" in lines[3]
    path = workplace.datasets_dir / "someone/tiny/train.safetensors"
    found, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    result = from_hub()
    assert result.returncode == 2 and "is damaged: its SHA-256 is not" in result.stderr


@pytest.mark.parametrize("fits", [True, False])
def test_the_step_is_compiled_by_as_many_processes_as_train(workplace, monkeypatch, capsys, fits):
    run_dir, asked = workplace.add_run(train={"compile": True}), []
    workplace.add_dataset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "cache")
    monkeypatch.setattr(prefetch, "try_microbatch", lambda *task, **options: (
        asked.append((*task[1:], options)), Trial(2, fits))[1])
    options = Options("tiny", datasets_dir=workplace.datasets_dir, runs_dir=workplace.runs_dir)
    with nullcontext() if fits else pytest.raises(UserError, match=(
            f"{run_dir}/train.json: microbatch_size 2 does not fit into the memory; make it")):
        prefetch.prefetch_run("ddp_train.py", options, replace(ONE_PROCESS, world_size=4))
    assert ("compiled code: cache, of 4 processes\n" in capsys.readouterr().out) == fits
    assert asked == [(2, 4, {"prefetches": True})]


def test_a_gpu_in_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * 2**30, 80 * 2**30))
    with pytest.raises(UserError, match="GPU 0 is in use, 10.0 of 80.0 GiB are free"):
        check_idle(torch.device("cuda", 0))


@pytest.mark.thorough
def test_a_run_compiles_nothing_afterwards(workplace):
    workplace.add_run(train=SHORT | {"compile": True})
    workplace.add_dataset()
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(workplace.root / "cache")}
    command = [sys.executable, "ddp_train.py", *workplace.arguments(
        "tiny", "--nproc-per-node", "2")]
    succeeded(run_command(*command, "--prefetch", **cache))
    kept = set((workplace.root / "cache/fxgraph").glob("*/*"))
    assert kept
    succeeded(run_command(*command, **cache))
    assert set((workplace.root / "cache/fxgraph").glob("*/*")) == kept
