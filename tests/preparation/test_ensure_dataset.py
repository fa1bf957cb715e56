"""The dataset of a run, found or made, and the digests of downloads."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from basics.errors import UserError
from preparation.ensure_dataset import digest_of_download, provide_dataset, verify_digests
from tests.support.preparation import decoded, texts_source

CONTENT = b"some tokens"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_a_missing_dataset_is_an_error(workplace):
    with pytest.raises(UserError, match="no dataset there; make it with prepare_dataset.py"):
        provide_dataset(workplace.datasets_dir / "mine", "mine")
    workplace.add_dataset("mine")
    provide_dataset(workplace.datasets_dir / "mine", "mine")


def test_the_standard_library_is_prepared_when_it_is_named(workplace, monkeypatch):
    out = workplace.datasets_dir / "python-stdlib"
    monkeypatch.setattr("preparation.standard_library.python_stdlib",
                        lambda: texts_source(["a", "b"]))
    with ThreadPoolExecutor(3) as pool:  # as nodes that share the directory
        list(pool.map(lambda _: provide_dataset(out, "python-stdlib"), range(3)))
    assert decoded(out / "train.safetensors") == ["a"]
    assert [path.name for path in out.parent.iterdir()] == ["python-stdlib"]



def downloaded(directory, record):
    path = directory / "train.safetensors"
    path.write_bytes(CONTENT)
    os.utime(path, (1000, 1000))
    records = directory / ".cache/huggingface/download"
    records.mkdir(parents=True)
    (records / f"{path.name}.metadata").write_text(record)
    return path


def test_a_file_is_compared_with_the_hubs_digest(tmp_path):
    path = downloaded(tmp_path, f"commit\n{DIGEST}\n1000.5\n")
    assert verify_digests([path]) == 1
    path.write_bytes(b"other tokens")
    os.utime(path, (1000, 1000))
    with pytest.raises(UserError, match="train.safetensors: is damaged: .*; delete it and run"):
        verify_digests([path])


def test_a_file_that_was_written_later_is_not_the_downloaded_one(tmp_path):
    path = downloaded(tmp_path, f"commit\n{DIGEST}\n1000.5\n")
    path.write_bytes(b"prepared here")
    assert digest_of_download(path) is None and verify_digests([path]) == 0


@pytest.mark.parametrize("record", ["", "commit\nab12\n1000\n", f"commit\n{DIGEST}\n", "\0"])
def test_an_unusable_record_is_none(tmp_path, record):
    assert digest_of_download(downloaded(tmp_path, record)) is None


def test_in_the_clients_cache_the_name_is_the_digest(tmp_path):
    (tmp_path / "blobs").mkdir()
    for name in (DIGEST, "0123456789012345678901234567890123456789"):
        (tmp_path / "blobs" / name).write_bytes(CONTENT)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.symlink_to(tmp_path / "blobs" / DIGEST)
    config.symlink_to(tmp_path / "blobs/0123456789012345678901234567890123456789")
    assert verify_digests([weights, config]) == 1
    (tmp_path / "blobs" / DIGEST).write_bytes(b"x")
    with pytest.raises(UserError, match="model.safetensors: is damaged"):
        verify_digests([weights])
