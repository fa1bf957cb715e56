from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from processes.launch import Process
from run_config import TrainConfig, load_run
from tests.support.workplace import TINY_TRAIN, Workplace
from trainer import prefetch
from trainer.compilation import compiled_code_of_run

ALONE = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
TRAIN = TrainConfig(**TINY_TRAIN | {"compile": True})


class Cache:
    """Stands in for PyTorch's cache of this machine: names of compiled parts, joined by spaces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts, self.loads = "", []
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", self.save)
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", self.load)

    def save(self) -> tuple[bytes, SimpleNamespace] | None:
        return (self.parts.encode(), info_of(self.parts)) if self.parts else None

    def load(self, artifacts: bytes) -> SimpleNamespace:
        self.loads.append(artifacts.decode())
        return info_of(self.loads[-1])


def info_of(parts: str) -> SimpleNamespace:
    return SimpleNamespace(artifacts=defaultdict(list, inductor=parts.split()))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(monkeypatch)


def compile_in(run_dir: Path, process: Process = ALONE, train: TrainConfig = TRAIN) -> list[Path]:
    with compiled_code_of_run(run_dir, train, process):
        pass
    return sorted(run_dir.glob("compiled/*"))


def test_what_is_compiled_is_loaded_by_the_next_launch(cache: Cache, tmp_path: Path) -> None:
    cache.parts = "forward backward"
    file, = compile_in(tmp_path)
    assert not cache.loads
    written = file.stat().st_ino
    cache.parts = "forward"
    compile_in(tmp_path)
    assert cache.loads == ["forward backward"] and file.stat().st_ino == written
    cache.parts = "forward validation"
    compile_in(tmp_path)  # something is new
    compile_in(tmp_path)
    assert cache.loads[-1] == "forward validation"


@pytest.mark.parametrize("damage", ["truncated", "a bit", "empty"])
def test_a_damaged_file_is_one_warning_and_is_replaced(
    cache: Cache, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parts = "forward"
    file, = compile_in(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes({"truncated": content[:-3], "a bit": content, "empty": b""}[damage])
    assert compile_in(tmp_path) == [file] and not cache.loads
    line, = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {file}: not used (OSError: ")
    assert line.endswith("), all is compiled anew")
    compile_in(tmp_path)
    assert cache.loads == ["forward"] and not capsys.readouterr().out


@pytest.mark.parametrize("name", ["save_cache_artifacts", "load_cache_artifacts"])
@pytest.mark.parametrize("failure", ["is missing", "fails"])
def test_a_function_that_pytorch_lacks_or_that_fails_is_no_failure(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: str,
    capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("another version\nsecond line")

    cache.parts = "forward"
    file, = compile_in(tmp_path)
    cache.parts = "backward"
    if failure == "fails":
        monkeypatch.setattr(torch.compiler, name, fail)
    else:
        monkeypatch.delattr(torch.compiler, name)
    assert compile_in(tmp_path) == [file]
    assert capsys.readouterr().out.count("\n") == (name == "load_cache_artifacts")


def test_each_device_of_one_node_has_a_file(cache: Cache, tmp_path: Path) -> None:
    cache.parts = "forward"
    processes = [replace(ALONE, rank=rank, local_rank=rank % 2, world_size=4) for rank in range(4)]
    found = [len(compile_in(tmp_path, process)) for process in processes]
    assert found == [1, 2, 2, 2] and cache.loads == ["forward"] * 2  # the second node loads
    assert compile_in(tmp_path / "other", train=TRAIN.model_copy(update={"compile": False})) == []


def test_nothing_compiled_and_a_full_disk_leave_no_file(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    assert compile_in(tmp_path) == []
    cache.parts = "forward"
    monkeypatch.setattr("trainer.compilation.write_atomically", full)
    assert compile_in(tmp_path) == []


def test_prefetch_leaves_the_file(
    cache: Cache, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: object) -> None:
        cache.parts = "forward"

    run_dir = workplace.add_run(train={"compile": True})
    monkeypatch.setattr(prefetch, "Losses", step)
    prefetch._compile_here(load_run(workplace.runs_dir, "tiny"), ALONE)
    assert len(list(run_dir.glob("compiled/*"))) == 1


@pytest.mark.thorough  # compiles
def test_another_machine_finds_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = []
    for machine in ("first", "second"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / machine))
        torch.compiler.reset()
        counters.clear()
        with compiled_code_of_run(tmp_path, TRAIN, ALONE):
            torch.compile(lambda x: x.sin() * 3)(torch.ones(1000))
        hits.append(counters["inductor"]["fxgraph_cache_hit"]
                    + counters["aot_autograd"]["autograd_cache_hit"])
    assert hits[0] == 0 < hits[1]
