"""Malformed sources and outputs: one line, exit status 2, and no dataset."""

import gzip
import io
import os
import random
import struct
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from preparation import reading
from tests.support.preparation import prepare, tokens_in

LONGEST = 200  # characters of an error line


def parquet(column=None, *, name="text", **options):
    content = io.BytesIO()
    table = pyarrow.table({name: column or [f"document {i}" for i in range(300)]})
    pyarrow.parquet.write_table(table, content, **options)
    return content.getvalue()


WHOLE = parquet()
LINES = b'{"text": "some text"}\n' * 20
SOURCES: dict[str, tuple[str, bytes]] = {
    "empty": ("a.parquet", b""), "four bytes": ("a.parquet", b"PAR1"),
    "only magic": ("a.parquet", b"PAR1PAR1"), "no magic": ("a.parquet", b"\x00" * 1000),
    "a footer longer than the file": ("a.parquet", WHOLE[:-8] + struct.pack("<I", 10**9) + b"PAR1"),
    "a footer of 2**32": ("a.parquet", WHOLE[:-8] + b"\xff\xff\xff\xffPAR1"),
    "a footer of noise": ("a.parquet", WHOLE[:-600] + random.Random(0).randbytes(592) + WHOLE[-8:]),
    "cut in the middle": ("a.parquet", WHOLE[: len(WHOLE) // 2]),
    "no head": ("a.parquet", WHOLE[len(WHOLE) // 2:]),
    "encrypted": ("a.parquet", WHOLE[:-4] + b"PARE"),
    "pages of noise": ("a.parquet", WHOLE[:10] + b"\xff" * 400 + WHOLE[410:]),
    "a column of numbers": ("a.parquet", parquet([1, 2, 3])),
    "a column of lists": ("a.parquet", parquet([["a"], ["b"]])),
    "a column of objects": ("a.parquet", parquet([{"a": "b"}])),
    "another column": ("a.parquet", parquet(name="t\x1b[31mext")),
    "an LFS pointer": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "a page": ("a.parquet", b"<!DOCTYPE html><html>404</html>"),
    "deep": ("a.jsonl", LINES + b'{"text": ' + b"[" * 10**5),
    "NaN": ("a.jsonl", LINES + b'{"text": NaN}\n'), "no object": ("a.jsonl", LINES + b"[1, 2]\n"),
    "no text": ("a.jsonl", LINES + b'{"title": "x"}\n'),
    "text of an object": ("a.jsonl", LINES + b'{"text": {"text": "x"}}\n'),
    "many digits": ("a.jsonl", LINES + b'{"text": ' + b"9" * 10**5 + b"}\n"),
    "noise": ("a.jsonl", random.Random(1).randbytes(10**5)), "cut": ("a.jsonl", LINES[:-10]),
    "UTF-16": ("a.jsonl", LINES.decode().encode("utf-16")),
    "a control character": ("a\x1b[31m.jsonl", b"{}\n"), "a new line": ("a\nb.jsonl", b"{}\n"),
    "no gzip": ("a.jsonl.gz", LINES), "half a gzip": ("a.jsonl.gz", gzip.compress(LINES)[:-12]),
    "a wrong checksum": ("a.jsonl.gz", gzip.compress(LINES)[:-8] + bytes(8)),
    "a line longer than memory": ("a.jsonl.gz", gzip.compress(bytes(2**21), 1)),
    "no zstandard": ("a.jsonl.zst", LINES), "nothing": ("a.jsonl.zst", b""),
}
OUTPUTS = ["", "\x1b[31m/../../proc/out", "/proc/out", "/dev/null", "/dev/null/out",
           "x" * 300, "source", "a-file", "loop/out"]


def refused(folder, *arguments):
    """Run the command, which must fail and create nothing; return its error line."""
    before = {str(path) for path in folder.rglob("*")}
    result = prepare(*arguments, "--tokenizer", "bytes")
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "Traceback" not in result.stderr and len(line) <= LONGEST and line.isprintable()
    assert {str(path) for path in folder.rglob("*") if ".partial" not in str(path)} == before
    return line


@pytest.mark.parametrize("case", SOURCES)
def test_a_malformed_source(tmp_path, monkeypatch, case):
    monkeypatch.setattr(reading, "LONGEST_LINE", 2**20)
    monkeypatch.setattr(reading, "TASK_BYTES", 2**18)
    name, content = SOURCES[case]
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_bytes(content)
    line = refused(tmp_path, str(source), str(tmp_path / "out"))
    assert name.split("\x1b")[0].split("\n")[0] in line or case == "nothing"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "train.bin"])
def test_a_link_that_leads_out_of_the_source_is_skipped(tmp_path, name):
    source, secret, kind = tmp_path / "source", tmp_path / "secret", Path(name).suffix
    source.mkdir()
    content = {".txt": b"secret", ".jsonl": b'{"text": "secret"}\n', ".bin": b"s\0e\0"}[kind]
    secret.write_bytes(content)
    (source / name).symlink_to(secret)
    own, inner = ("b_train.bin", "b_val.bin") if kind == ".bin" else (f"b{kind}", f"c{kind}")
    (source / own).write_bytes(content.replace(b"s", b"S"))
    (source / inner).symlink_to(source / own)
    result = prepare(str(source), str(tmp_path / "out"), "--tokenizer", "bytes",
                     *["--import"] * (kind == ".bin"))
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert f"{source}/{name}: leads out of" in line
    tokens = [token for part in tokens_in(tmp_path / "out").values() for token in part]
    assert tokens.count(ord("S")) == 2 and ord("s") not in tokens


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: repr(output)[:20])
def test_an_output_that_cannot_be_created(tmp_path, monkeypatch, output):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a-file").write_bytes(b"mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path, str(source), str(tmp_path / output) if output else "")
    assert (tmp_path / "a-file").read_bytes() == b"mine"
    assert os.listdir(source) == ["a.jsonl"]


@pytest.mark.parametrize("seed", range(20))
def test_real_parquet_with_random_damage(tmp_path, seed):
    """The damage is an error, or does not change the text: never a traceback, crash or hang."""
    rng, content = random.Random(seed), bytearray(parquet(use_dictionary=False))
    for _ in range(rng.randrange(1, 6)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    (tmp_path / "a.parquet").write_bytes(content)
    result = prepare(str(tmp_path / "a.parquet"), str(tmp_path / "out"), "--tokenizer", "bytes")
    assert result.returncode in (0, 2) and "Traceback" not in result.stderr
    assert (result.returncode == 0) == (tmp_path / "out/train.safetensors").exists()
