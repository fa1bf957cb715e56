"""Files and names from a stranger: one line, status 2, nothing changed, no code run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from basics.manifest import MANIFEST, read_manifest, write_manifest
from reporting.charts import draw_charts
from reporting.metrics_file import read_metrics, remove_metrics_from, spent_before
from tests.support.workplace import (
    TINY_MODEL,
    TINY_TRAIN,
    Workplace,
    forked,
    read_lines,
    succeeded,
    write_tokens,
)

LONGEST = 200  # characters, "Error: " and all
SECONDS = 20  # for an answer: five, on a machine that does nothing else
MARK = Path("/tmp") / f"hostile-code-was-run-{os.getpid()}"


class RunsCode:
    """What a pickle can hold to have a command run where it is loaded."""

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {MARK}",)


def header(text: bytes, tensors: bytes = b"") -> bytes:
    """A safetensors file."""
    return struct.pack("<Q", len(text)) + text + tensors


def tokens_header(**changes: object) -> bytes:
    facts = {"dtype": "U16", "shape": [4000], "data_offsets": [0, 8000]} | changes
    return header(json.dumps({"tokens": facts}).encode(), bytes(8000))


def config(**changes: object) -> bytes:
    return json.dumps(changes).encode()


MODEL, TRAIN = json.dumps(TINY_MODEL).encode(), json.dumps(TINY_TRAIN).encode()

CONFIG_CONTENTS = {
    "empty": b"", "no object": b"[]", "null": b"null", "a number": b"7", "cut short": MODEL[:-5],
    "not text": b"\xff\xfe\x00", "binary": bytes(range(256)), "NaN": MODEL[:-1] + b', "x": NaN}',
    "infinity": MODEL[:-1] + b', "x": -Infinity}', "a key twice": MODEL[:-1] + b', "emb_dim": 8}',
    "deep": b'{"a":' * 10**5, "deep lists": b"[" * 10**5 + b"]" * 10**5,
    "large": b"[" + b"0," * 10**6 + b"0]", "control characters": b'{"\\u001b[31m\\n": 1}',
    "a long key": b'{"' + b"k" * 5000 + b'": 1}',
    "many digits": MODEL[:-1] + b', "x": ' + b"9" * 6000 + b"}",
    "a huge exponent": MODEL.replace(b"0.1", b"1e999"),
}
MODEL_VALUES = {
    "emb_dim": [0, -16, 2**70, "16", 16.5, True, None, [16], 10**9], "n_layers": [10**9, 0],
    "context_length": [10**12], "vocab_size": [2**17, 1], "drop_rate": [-0.1, 1, "x"],
    "init": ["../x"],
}
TRAIN_VALUES = {
    "dataset": ["../secret", "/etc", "a/b/c", "tiny\n", "", "a\x1b[31m", "x" * 300, "..", 7],
    "microbatch_size": [10**15, 0, -1, 2.0, "2"], "min_train_tokens": [10**30, 0, -7],
    "start_train_token": [10**18, -1], "validation_batches": [10**12],
    "learning_rate": [-1, "fast"], "random_seed": [-1, 2**64], "head_chunks": [0],
    "precision": ["fp4"], "hang_timeout_seconds": [0, 1e30],
}
TOKEN_FILES = {
    "empty": b"", "seven bytes": b"1234567", "zeros": bytes(100),
    "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "a header of 2**63": struct.pack("<Q", 2**63) + b"{}", "no JSON": header(b"rubbish!"),
    "a list": header(b"[]      "), "deep": header(b'{"a":' * 10**5),
    "no tensors": header(b"{}      "), "int32": tokens_header(dtype="I32", shape=[2000]),
    "float32": tokens_header(dtype="F32", shape=[2000]), "no dtype": tokens_header(dtype="U17"),
    "2-D": tokens_header(shape=[2, 2000]), "0-D": tokens_header(shape=[], data_offsets=[0, 2]),
    "a negative shape": tokens_header(shape=[-4000]), "a huge shape": tokens_header(shape=[2**62]),
    "offsets past the end": tokens_header(data_offsets=[0, 10**9]),
    "offsets backwards": tokens_header(data_offsets=[8000, 0]),
    "another name": tokens_header().replace(b"tokens", b"tokenz"),
    "a pickle": pickle.dumps(RunsCode()), "a page": b"<!DOCTYPE html><html>404</html>",
    "an LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "a control character": tokens_header().replace(b"tokens", b"tok\\u001b[31mens"),
    "a header of many keys": header(b'{"__metadata__":{' + b",".join(
        b'"%x":""' % number for number in range(10**6)) + b"}}"),
}


def old_style_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(RunsCode()))


def new_style_pickle(path: Path) -> None:
    torch.save({"optimizer": RunsCode()}, path)


def bomb(path: Path) -> None:
    torch.save({"optimizer": {}}, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(300 * 2**20))


def changed_optimizer(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        trainer = torch.load(path, weights_only=True)
        change(trainer)
        torch.save(trainer, path)
    return make


class TakesMemory:
    """What a pickle can hold that PyTorch makes, however large it is told to be."""

    def __reduce__(self) -> tuple:
        return bytearray, (2**33,)


def changed_moment(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[Path], None]:
    return changed_optimizer(lambda trainer: trainer["optimizer"]["state"][0].update(
        {name: change(trainer["optimizer"]["state"][0][name])}))


def expanded(size: int) -> torch.Tensor:
    """Eight bytes that pass for any number of numbers."""
    return torch.zeros(1, dtype=torch.float64).expand(size)


def many_tensors(path: Path) -> None:
    facts = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    path.write_bytes(header(("{" + ",".join(
        f'"{number}":{facts}' for number in range(1_500_000)) + "}").encode()))


def weights(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        found = safetensors.numpy.load_file(path)
        change(found)
        safetensors.numpy.save_file(found, path)
    return make


CHECKPOINT_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pickle that runs code": ("optimizer.pt", old_style_pickle),
    "an archive that runs code": ("optimizer.pt", new_style_pickle),
    "weights that run code": ("model.safetensors", old_style_pickle),
    "a bomb": ("optimizer.pt", bomb),
    "no optimizer in it": ("optimizer.pt", changed_optimizer(lambda t: t.pop("optimizer"))),
    "no groups": ("optimizer.pt", changed_optimizer(
        lambda t: t["optimizer"].update(param_groups=[]))),
    "moments of another shape": ("optimizer.pt", changed_optimizer(
        lambda t: t["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)))),
    "a list of states": ("optimizer.pt", changed_optimizer(
        lambda t: t["optimizer"].update(state=[1, 2]))),
    "an expanded moment": ("optimizer.pt", changed_moment(
        "exp_avg", lambda t: expanded(2 * 10**9))),
    "an expanded moment of the right shape": ("optimizer.pt", changed_moment(
        "exp_avg", lambda t: torch.zeros(1).expand(t.shape))),
    "moments that overlap": ("optimizer.pt", changed_moment(
        "exp_avg", lambda t: torch.zeros(10**4)[:t.numel()].view(t.shape))),
    "moments laid out otherwise": ("optimizer.pt", changed_moment(
        "exp_avg", lambda t: t.t().contiguous().t())),
    "no moments": ("optimizer.pt", changed_optimizer(
        lambda t: t["optimizer"]["state"][3].pop("exp_avg"))),
    "a parameter without moments": ("optimizer.pt", changed_optimizer(
        lambda t: t["optimizer"]["state"].pop(3))),
    "a third moment": ("optimizer.pt", changed_optimizer(
        lambda t: t["optimizer"]["state"][0].update(max_exp_avg_sq=torch.zeros(3)))),
    "parameters in another order": ("optimizer.pt", changed_optimizer(
        lambda t: t["optimizer"]["param_groups"][0]["params"].reverse())),
    "a step of another shape": ("optimizer.pt", changed_moment("step", lambda t: torch.zeros(16))),
    "a step below 0": ("optimizer.pt", changed_moment("step", lambda t: t - 10)),
    "a step of no number": ("optimizer.pt", changed_moment("step", lambda t: t * torch.nan)),
    "moments of NaN": ("optimizer.pt", changed_moment("exp_avg", lambda t: t * torch.nan)),
    "moments below 0": ("optimizer.pt", changed_moment("exp_avg_sq", lambda t: t - 1)),
    "moments of integers": ("optimizer.pt", changed_moment("exp_avg", lambda t: t.long())),
    "complex moments": ("optimizer.pt", changed_moment("exp_avg", lambda t: t.cfloat())),
    "sparse moments": ("optimizer.pt", changed_moment("exp_avg", lambda t: t.to_sparse())),
    "a text of moments": ("optimizer.pt", changed_moment("exp_avg", lambda t: "x")),
    "a pickle that takes memory": ("optimizer.pt", lambda p: torch.save(TakesMemory(), p)),
    "weights of NaN": ("model.safetensors", weights(
        lambda w: w["final_norm.weight"].fill(np.nan))),
    "a header of many tensors": ("model.safetensors", many_tensors),
    "seconds beyond all numbers": ("meta.json", lambda p: p.write_text(json.dumps(
        json.loads(p.read_text()) | {"seconds": {"training": 1e308, "waiting": 1e308}}))),
    "seconds below 0": ("meta.json", lambda p: p.write_text(json.dumps(
        json.loads(p.read_text()) | {"seconds": {"training": -1e9}}))),
    "a tensor less": ("model.safetensors", weights(lambda w: w.pop("final_norm.weight"))),
    "a tensor more": ("model.safetensors", weights(lambda w: w.update(x=np.zeros(3)))),
    "weights of another shape": ("model.safetensors", weights(
        lambda w: w.update({"final_norm.weight": np.zeros(17, np.float32)}))),
    "meta without end": ("meta.json", lambda p: p.write_bytes(b'{"a":' * 10**5)),
    "a large meta": ("meta.json", lambda p: p.write_bytes(b" " * 2**21 + b"{}")),
    "a meta with NaN": ("meta.json", lambda p: p.write_text('{"global_step": NaN}')),
    "a step of 10**30": ("meta.json", lambda p: p.write_text(p.read_text().replace(
        '"global_step": 2', '"global_step": ' + "9" * 30))),
    "a negative step": ("meta.json", lambda p: p.write_text(p.read_text().replace(
        '"global_step": 2', '"global_step": -2'))),
    "an unknown tokenizer": ("meta.json", lambda p: p.write_text("{}")),
}
FOUND_OUT_BY = {
    "optimizer.pt": ["cannot be loaded: "], "meta.json": ["damaged: meta.json"],
    "model.safetensors": ["not a whole safetensors file", "but model.json makes it",
                          "cannot be loaded: "],
}
NAMES = ["../tiny", "/etc", "a/b", "", ".", "..", "tiny\n", "t\x1b[31m", "x" * 300, "tiny/", "~",
         "-tiny", "tiny\t", "\u202etiny"]
CHECKPOINT_NAMES = ["../..", "/etc", "latest/..", "x" * 3000, "\x1b[31m", "tiny\nError: no",
                    "20260101Z000000-iteration-9", "best "]


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Have torch imported where all that is run here is forked from."""
    forked("ddp_train.py", ["--help"])


@pytest.fixture
def tiny(workplace: Workplace) -> Workplace:
    workplace.add_run()
    workplace.add_dataset()
    return workplace


def refused(workplace: Workplace, *arguments: str, **environment: str) -> str:
    """Run the trainer, which must not; give its line."""
    before = contents(workplace.root)
    command, began = [*workplace.arguments(), "--", *arguments], time.monotonic()
    result = forked("ddp_train.py", command, environment=environment)
    assert time.monotonic() - began < SECONDS
    assert result.returncode == 2, result.stdout + result.stderr
    line = result.stderr
    assert line.startswith("Error: ") and line.count("\n") == 1 and line.endswith("\n")
    assert len(line) <= LONGEST + 1 and line[:-1].isprintable()
    assert result.stdout == ""
    assert contents(workplace.root) == before
    assert not MARK.exists()
    return line


def contents(root: Path) -> dict[str, str]:
    """Everything below a directory, with a digest of what it holds."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else
            os.readlink(path) if path.is_symlink() else "" for path in root.rglob("*")}


@pytest.mark.parametrize("case", CONFIG_CONTENTS)
@pytest.mark.parametrize("file", ["model.json", "train.json"])
def test_a_config_that_is_none(tiny: Workplace, file: str, case: str) -> None:
    (tiny.runs_dir / "tiny" / file).write_bytes(CONFIG_CONTENTS[case])
    assert file in refused(tiny, "tiny")


@pytest.mark.parametrize(("file", "key", "value"), [
    (file, key, value) for file, table in (("model", MODEL_VALUES), ("train", TRAIN_VALUES))
    for key, values in table.items() for value in values], ids=lambda value: repr(value)[:20])
def test_a_value_that_is_none(tiny: Workplace, file: str, key: str, value: object) -> None:
    path = tiny.runs_dir / "tiny" / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert f"{file}.json" in refused(tiny, "tiny")


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("case", TOKEN_FILES)
def test_a_token_file_that_is_none(tiny: Workplace, split: str, case: str) -> None:
    (tiny.datasets_dir / "tiny" / f"{split}.safetensors").write_bytes(TOKEN_FILES[case])
    line = refused(tiny, "tiny")
    assert "safetensors" in line
    if case == "a header of many keys":  # told by its length alone: to read it takes long
        assert "(a header of 10," in line


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_an_id_outside_the_vocabulary_under_a_lying_header(tiny: Workplace, place: str) -> None:
    tokens = np.zeros(4000, dtype=np.uint16)
    tokens[{"first": 0, "middle": 700, "last": 1536}[place]] = 257
    write_tokens(tiny.datasets_dir / "tiny/train.safetensors", tokens)
    assert "has id 257, outside the model's vocabulary" in refused(tiny, "tiny")


@pytest.mark.parametrize("kind", ["pipe", "directory", "endless"])
@pytest.mark.parametrize("file", ["runs/tiny/train.json", "datasets/tiny/train.safetensors"])
def test_what_is_no_file(tiny: Workplace, file: str, kind: str) -> None:
    path = tiny.root / file
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert path.parent.name in refused(tiny, "tiny")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_a_run_name_that_leads_elsewhere(tiny: Workplace, name: str) -> None:
    assert "is not a plain name" in refused(tiny, name)


@pytest.mark.parametrize("name", CHECKPOINT_NAMES, ids=lambda name: repr(name)[:20])
def test_a_checkpoint_name_that_leads_elsewhere(tiny: Workplace, name: str) -> None:
    assert "no checkpoint" in refused(tiny, "tiny", name)


@pytest.mark.parametrize("root", ["runs", "datasets"])
def test_a_link_that_leads_elsewhere(tiny: Workplace, root: str) -> None:
    inside, outside = tiny.root / root / "tiny", tiny.root / "elsewhere"
    inside.rename(outside)
    inside.symlink_to(outside)
    assert "leads out of" in refused(tiny, "tiny")


@pytest.mark.parametrize("root", ["runs", "datasets"])
def test_links_in_a_circle(tiny: Workplace, root: str) -> None:
    path = tiny.root / root / "tiny"
    shutil.rmtree(path)
    path.symlink_to(path)
    assert "tiny" in refused(tiny, "tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A run that has one checkpoint."""
    workplace = Workplace(tmp_path_factory.mktemp("trained"))
    workplace.add_run(train={"gradient_accumulation_steps": 1})
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "3"))
    return workplace


@pytest.fixture
def resumable(trained: Workplace, tmp_path: Path) -> tuple[Workplace, Path]:
    shutil.copytree(trained.root, tmp_path / "copy", symlinks=True)
    workplace = Workplace(tmp_path / "copy")
    (checkpoint,) = (workplace.runs_dir / "tiny/checkpoints").glob("*-iteration-2")
    return workplace, checkpoint


def vouch(checkpoint: Path) -> None:
    """Write a manifest that agrees with whatever lies there, as a stranger would."""
    written = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, global_step=written.global_step, tokens=written.tokens)


@pytest.mark.parametrize("case", CHECKPOINT_FILES)
def test_a_checkpoint_from_a_stranger(resumable: tuple[Workplace, Path], case: str) -> None:
    workplace, checkpoint = resumable
    file, make = CHECKPOINT_FILES[case]
    make(checkpoint / file)
    vouch(checkpoint)
    before, began = contents(workplace.root), time.monotonic()
    result = workplace.torchrun(1, "tiny", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    assert time.monotonic() - began < SECONDS
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert result.returncode != 0 and len(lines) == 1 and len(lines[0]) <= LONGEST
    assert "exitcode  : 2" in result.stderr and "checkpointing.py\", line" not in result.stderr
    # What the manifest vouches for is found out by reading it.
    assert any(words in lines[0] for words in FOUND_OUT_BY[file])
    assert contents(workplace.root) == before
    assert not MARK.exists()


def test_a_checkpoint_that_is_a_link_is_none(resumable: tuple[Workplace, Path]) -> None:
    workplace, checkpoint = resumable
    elsewhere = checkpoint.rename(workplace.root / checkpoint.name)
    checkpoint.symlink_to(elsewhere)
    assert "no checkpoint" in refused(workplace, "tiny", checkpoint.name)


@pytest.mark.parametrize("content", [b"", b"7", b"[]", b'{"seconds": "x", "global_step": 0}',
                                     b'{"a":' * 10**5, b"\xff\xfe", b'{"global_step": 1e99}',
                                     b'{"seconds": null, "usd": {}}', b"NaN"],
                         ids=lambda content: repr(content)[:20])
def test_records_that_are_none_are_passed_over(tmp_path: Path, content: bytes) -> None:
    metrics, summary = tmp_path / "metrics.jsonl", tmp_path / "summary.json"
    good = b'{"global_step": 0, "seconds": 3.5}\n'
    metrics.write_bytes(content + b"\n" + good)
    summary.write_bytes(content)
    assert spent_before(metrics, summary) == (3.5, 0.0)
    remove_metrics_from(metrics, 1)
    assert read_metrics(metrics)[-1] == json.loads(good)
    draw_charts(tmp_path, read_metrics(metrics))


def test_a_run_goes_on_from_damaged_records(resumable: tuple[Workplace, Path]) -> None:
    workplace, _ = resumable
    for file in ("metrics.jsonl", "summary.json"):
        (workplace.runs_dir / "tiny" / file).write_bytes(b"\xff{" + b'{"a":' * 10**5)
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "1"))
    assert [r["global_step"] for r in read_lines(workplace.runs_dir / "tiny/metrics.jsonl")] == [3]


@pytest.mark.parametrize("seed", range(12))
def test_real_files_with_random_damage(resumable: tuple[Workplace, Path], seed: int) -> None:
    """A few bytes changed, left out or repeated: a checkpoint is refused, whichever file it was."""
    workplace, checkpoint = resumable
    rng = random.Random(seed)
    path = rng.choice(sorted(checkpoint.iterdir()))
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    match rng.choice(["flip", "cut", "insert"]):
        case "flip":
            content[place] ^= 1 << rng.randrange(8)
        case "cut":
            del content[place : place + rng.randrange(1, 99)]
        case "insert":
            content[place:place] = rng.randbytes(rng.randrange(1, 99))
    path.write_bytes(content)
    assert "damaged: " in refused(workplace, "tiny")


def test_nothing_is_unpickled_that_could_run_code() -> None:
    for path in Path(__file__).parents[1].glob("**/*.py"):
        if ".venv" in path.parts or path.parts[-2] == "tests":
            continue
        text = path.read_text()
        assert text.count("torch.load(") == text.count("weights_only=True"), path
        assert "weights_only=False" not in text and "shell=True" not in text, path
        assert not {f"import {name}\n" for name in ("pickle", "dill")} & set(text.splitlines(True))
