"""Datasets of others: token files that are imported, the dataset of a run, digests of downloads."""

import hashlib
import io
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import DatasetCard

from basics.errors import UserError
from preparation import import_bin
from preparation.ensure_dataset import digest_of_download, provide_dataset, verify_digests
from preparation.import_bin import import_tokens
from run_config import load_run
from tests.support.models import write_tokenizer
from tests.support.optional import given, settings, st
from tests.support.preparation import decoded, metadata_of, prepare, texts_source, tokens_in
from tests.support.workplace import succeeded
from tokens.batches import open_run_data
from tokens.tokenizer import choose_tokenizer

TOKENS = (np.arange(1000) * 7 % 257).astype(np.uint16)
BOTH = {"train.bin": TOKENS.tobytes(), "val.bin": TOKENS[:200].tobytes()}  # as nanoGPT has them
CONTENT = b"some tokens"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def llm_c(tokens, *, magic=20240520, version=1, count=None, kind="<u2"):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, tokens.size if count is None else count
    return header.tobytes() + tokens.astype(kind).tobytes()


def npy(tokens):
    content = io.BytesIO()
    np.save(content, tokens)
    return content.getvalue()


def write(source, files):
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    return source


def test_a_run_can_read_imported_files_of_nanogpt(workplace, tmp_path):
    source, out = write(tmp_path / "source", BOTH), workplace.datasets_dir / "mine"
    left = out.with_name(".mine.partial") / "dataset/tokenizer.json"  # by an import that was killed
    left.parent.mkdir(parents=True)
    left.write_text("of another tokenizer")
    result = succeeded(prepare("--import", str(source), str(out), "--tokenizer", "bytes"))
    assert result.stdout.splitlines()[0] == "5 documents, 1,200 tokens"  # 4 and 1 end-of-text
    assert tokens_in(out)["train"].tolist() == TOKENS.tolist()
    assert tokens_in(out)["validation"].tolist() == TOKENS[:200].tolist()
    assert metadata_of(out) == {
        "tokenizer": "bytes",
        "source": "train.bin",
        "num_documents": "4",
        "num_tokens": "1000",
        "max_token_id": "256",
    }
    card = DatasetCard.load(out / "README.md")
    assert card.data.task_categories == ["text-generation"] and "bytes of text" not in card.text
    assert not list(out.parent.glob(".*")) and not (out / "tokenizer.json").exists()
    workplace.add_run(train={"dataset": "mine", "min_train_tokens": 64})
    open_run_data(load_run(workplace.runs_dir, "tiny"), out, world_size=1)


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), chunk=st.integers(1, 50))
def test_shards_of_llm_c_are_joined_in_the_order_of_their_names(tmp_path_factory, sizes, chunk):
    folder = tmp_path_factory.mktemp("llm_c")
    parts = np.split(TOKENS[: sum(sizes)], np.cumsum(sizes)[:-1])
    files = {f"fineweb_train_{i:06}.bin": llm_c(part) for i, part in enumerate(parts)}
    source = write(folder / "source", files | {"fineweb_val_000000.bin": llm_c(TOKENS[:9])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_bin, "CHUNK_TOKENS", chunk)
        import_tokens(source, folder / "out", "gpt2")
    tokens = tokens_in(folder / "out")
    assert tokens["train"].tolist() == TOKENS[: sum(sizes)].tolist()
    assert tokens["validation"].tolist() == TOKENS[:9].tolist()


def test_a_single_file_is_divided_by_its_tokens(tmp_path):
    source = write(tmp_path / "source", {"all.bin": llm_c(TOKENS), "one.bin": b"ab"})
    import_tokens(source / "all.bin", tmp_path / "out", "bytes")
    tokens = tokens_in(tmp_path / "out")
    assert tokens["train"].tolist() == TOKENS[:990].tolist()
    assert tokens["validation"].tolist() == TOKENS[990:].tolist()
    with pytest.raises(UserError, match="one.bin: has one token; wanted two or more"):
        import_tokens(source / "one.bin", tmp_path / "other", "bytes")


def test_more_files_than_may_be_open_are_imported(tmp_path):
    source = write(
        tmp_path / "source",
        BOTH | {f"x_train_{i:06}.bin": TOKENS[i : i + 1].tobytes() for i in range(200)},
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 100, limits[1])
        )
        import_tokens(source, tmp_path / "out", "bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert tokens_in(tmp_path / "out")["train"].tolist() == [*TOKENS, *TOKENS[:200]]


def wide_llm_c(tokens):
    return llm_c(np.asarray(tokens), magic=20240801, version=7, kind="<u4")


@pytest.mark.parametrize(
    "files",
    [
        {"x_train_0.bin": wide_llm_c(TOKENS), "x_val_0.bin": wide_llm_c(TOKENS[:200])},
        *(
            {"train.npy": npy(TOKENS.astype(kind)), "val.npy": npy(TOKENS[:200])}
            for kind in ("<u2", "<u4", "<i8", ">u2")
        ),
    ],
)
def test_tokens_are_as_wide_as_the_header_of_their_file_says(tmp_path, files):
    import_tokens(write(tmp_path / "source", files), tmp_path / "out", "bytes")
    assert tokens_in(tmp_path / "out")["train"].tolist() == TOKENS.tolist()
    assert tokens_in(tmp_path / "out")["validation"].tolist() == TOKENS[:200].tolist()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (TOKENS.astype("<u4"), "32-bit tokens (every second 16-bit number is small)"),
        (TOKENS.astype("<u4") + 70_000, "32-bit tokens (every second 16-bit number is small)"),
        (TOKENS.astype("<i8"), "64-bit tokens (every second 16-bit number is small)"),
    ],
)
def test_wider_tokens_without_a_header_are_refused_and_can_be_converted(
    tmp_path, monkeypatch, tokens, said
):
    source = write(
        tmp_path / "source", {"train.bin": tokens.tobytes()} | {"val.bin": TOKENS[:200].tobytes()}
    )
    with pytest.raises(UserError) as caught:
        import_tokens(source, tmp_path / "out", "bytes")
    assert f"train.bin: looks like {said}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.chdir(source)
    exec(str(caught.value).split("convert it: ")[1], {"np": np})
    (source / "train.bin").unlink()
    (source / "val.bin").rename(tmp_path / "val.bin")
    np.save("val.npy", TOKENS[:200])
    if tokens.max() > 2**16:
        with pytest.raises(UserError, match="train.npy: token 0 has id 70000, outside the voc"):
            import_tokens(source, tmp_path / "out", "bytes")
    else:
        import_tokens(source, tmp_path / "out", "bytes")
        assert tokens_in(tmp_path / "out")["train"].tolist() == TOKENS.tolist()


@pytest.mark.parametrize(
    "tokens",
    [
        [0, 1, 2, 3, 4] * 200,
        [*range(17)] * 60,
        [0] * 1000,  # few letters
        [300, 2] * 30,
        [300, 16] + [300, 2] * 400,
    ],
)  # too few tokens to tell, and a large second one
def test_small_ids_are_not_taken_for_halves_of_wide_ones(tmp_path, tokens):
    source = write(
        tmp_path / "source", BOTH | {"train.bin": np.array(tokens, dtype="<u2").tobytes()}
    )
    import_tokens(source, tmp_path / "out", "gpt2")
    assert tokens_in(tmp_path / "out")["train"].tolist() == tokens


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"train.bin": llm_c(TOKENS, count=999)},
            "train.bin: 3024 bytes; wanted 3022 for 999 tokens",
        ),
        ({"train.bin": llm_c(TOKENS)[:-1]}, "train.bin: 3023 bytes; wanted 3024"),
        *(
            (
                {"train.bin": llm_c(TOKENS, magic=magic, version=version)},
                f"train.bin: is of llm.c's format {magic} version {version}; wanted tokens",
            )
            for magic, version in ((20240520, 2), (20240801, 1), (20240326, 3), (20240328, 1))
        ),
        (
            {"train.bin": wide_llm_c([5, 65535, 65536])},
            "token 1 has id 65535, outside the vocabulary of 257; name another tokenizer",
        ),
        ({"train.bin": wide_llm_c([5, 6])[:-2]}, "train.bin: 1030 bytes; wanted 1032 for 2 tokens"),
        (
            {"train.bin": None, "train.npy": npy(np.array([5, -1]))},
            "token 1 has id 18446744073709551615, outside",
        ),
        ({"train.bin": None, "train.npy": npy(TOKENS)[:-9]}, "train.npy: not a whole .npy file: "),
        (
            {"train.bin": None, "train.npy": npy(np.array([{}]))},
            "train.npy: not a whole .npy file: ",
        ),
        (
            {"train.bin": None, "train.npy": npy(np.zeros(9))},
            "holds float64 of shape .9,.; wanted a v",
        ),
        ({"train.npy": npy(TOKENS)}, "source: has .bin and .npy files of train; move some away"),
        ({"train.bin": TOKENS.tobytes()[:-1]}, "train.bin: 1999 bytes; wanted 1998"),
        ({"train.bin": b""}, "train.bin: 0 bytes"),
        ({"train.bin": None, "train.npy": TOKENS.tobytes()}, "train.npy: not a whole .npy file: "),
        *(
            (
                {"train.bin": None, name: b"version https://git-lfs.github.com/spec/v1\noid 0\n"},
                "LFS",
            )
            for name in ("train.bin", "train.npy")
        ),
        (
            {"train.bin": np.array([5, 257, 6], dtype=np.uint16).tobytes()},
            "train.bin: token 1 has id 257, outside the vocabulary of 257; name another tokenizer",
        ),
        ({"meta.pkl": b"x"}, "meta.pkl defines another vocabulary"),
        ({"val.bin": None}, r"no val.bin or \*_val_\*.bin; wanted"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path, files, message):
    wanted = {name: content for name, content in (BOTH | files).items() if content is not None}
    source = write(tmp_path / "source", wanted)
    with pytest.raises(UserError, match=message):
        import_tokens(source, tmp_path / "out", "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def write_with_datatrove(folder, own, num_documents, **options):
    """Let datatrove itself tokenise documents, as two of its tasks do; a third one has none."""
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    for rank in (0, 2, 1):
        step = DocumentTokenizer(str(folder), str(own / "tokenizer.json"), **options)
        documents = [Document(text=f"the cat {rank} {i}", id="") for i in range(num_documents)]
        step.run(documents if rank != 1 else [], rank=rank, world_size=3)


def documents_in(tokens, end_of_text):
    """Divide tokens into documents, which end with an end-of-text token."""
    *documents, rest = np.split(tokens, np.flatnonzero(tokens == end_of_text) + 1)
    assert not rest.size
    return [document.tolist() for document in documents]


@pytest.mark.parametrize(("width", "is_shuffled"), [(2, False), (4, False), (2, True)])
def test_files_of_datatrove_are_imported_by_their_documents(tmp_path, width, is_shuffled):
    own, source = write_tokenizer(tmp_path / "own"), tmp_path / "source"
    options = {} if is_shuffled else {"shuffle_documents": False}  # it shuffles by default
    write_with_datatrove(source, own, 150, eos_token="<|endoftext|>", **options)
    assert not (source / "00001_unshuffled.ds").stat().st_size
    if width == 4:  # as it does with more than 65,535 entries
        for path in source.glob("*.ds"):
            path.write_bytes(np.fromfile(path, "<u2").astype("<u4").tobytes())
    tokenizer = choose_tokenizer(str(own))
    texts = [f"the cat {rank} {i}" for rank in (0, 2) for i in range(150)]
    ids = [[*tokenizer.encode_ordinary(text), tokenizer.eot_token] for text in texts]
    arguments = ("--import", str(source), "--tokenizer", str(own))
    succeeded(prepare(*arguments, str(tmp_path / "out")))
    tokens = tokens_in(tmp_path / "out")
    found = {split: documents_in(tokens[split], tokenizer.eot_token) for split in tokens}
    if is_shuffled:  # within each file
        assert len(found["train"]) == 297 and found["train"] != ids[:297]
        assert sorted(found["train"] + found["validation"]) == sorted(ids)
    else:
        assert found == {"train": ids[:297], "validation": ids[297:]}
    assert metadata_of(tmp_path / "out", "validation")["num_documents"] == "3"
    refused = prepare("--import", str(source), str(tmp_path / "x"))
    assert ", not of gpt2; name its tokenizer with --tokenizer" in refused.stderr
    (index,) = source.glob("00002*.index")
    index.unlink()
    assert f"{index.name}: no such file" in prepare(*arguments, str(tmp_path / "x")).stderr
    shutil.rmtree(source)
    write_with_datatrove(source, own, 3)
    assert "give DocumentTokenizer an eos_token" in prepare(*arguments, str(tmp_path / "x")).stderr


def test_imported_tokens_may_be_those_of_a_tokenizer_of_ones_own(tmp_path):
    own, source = write_tokenizer(tmp_path / "own"), tmp_path / "source"
    write(source, {"train.bin": np.array([5, 299], dtype="<u2").tobytes(), "val.bin": b"ab"[:0]})
    np.array([5, 6, 0, 299], dtype="<u2").tofile(source / "val.bin")
    arguments = ("--import", str(source), "--tokenizer", str(own))
    succeeded(prepare(*arguments, str(tmp_path / "out")))
    assert (tmp_path / "out/tokenizer.json").exists()
    np.array([300], dtype="<u2").tofile(source / "val.bin")
    assert (
        "id 300, outside the vocabulary of 300; name another"
        in prepare(*arguments, str(tmp_path / "other")).stderr
    )


# --- the dataset of a run, and digests of downloads


def test_the_standard_library_is_prepared_when_it_is_named(workplace, monkeypatch):
    out = workplace.datasets_dir / "python-stdlib"
    monkeypatch.setattr("preparation.sources.python_stdlib", lambda: texts_source(["a", "b"]))
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
    path.write_bytes(b"prepared here")  # later, so it is not the downloaded one
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
