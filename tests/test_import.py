"""Datasets of others: token files that are imported, the dataset of a run, digests of downloads."""

import hashlib
import io
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

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
    assert imported(out) == (TOKENS.tolist(), TOKENS[:200].tolist())
    metadata = metadata_of(out)
    assert (metadata["num_documents"], metadata["num_tokens"]) == ("4", "1000")
    assert (metadata["tokenizer"], metadata["max_token_id"]) == ("bytes", "256")
    assert not list(out.parent.glob(".*")) and not (out / "tokenizer.json").exists()
    workplace.add_run(train={"dataset": "mine", "min_train_tokens": 64})
    open_run_data(load_run(workplace.runs_dir, "tiny"), out, world_size=1)


def imported(out):
    """Return the tokens of both splits."""
    return tuple(tokens_in(out)[split].tolist() for split in ("train", "validation"))


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), chunk=st.integers(1, 50))
def test_shards_of_llm_c_are_joined_in_the_order_of_their_names(tmp_path_factory, sizes, chunk):
    folder = tmp_path_factory.mktemp("llm_c")
    tokens = TOKENS[: sum(sizes)]
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    files = {f"fineweb_train_{i:06}.bin": llm_c(part) for i, part in enumerate(parts)}
    source = write(folder / "source", files | {"fineweb_val_000000.bin": llm_c(TOKENS[:9])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_bin, "CHUNK_TOKENS", chunk)
        import_tokens(source, folder / "out", "gpt2")
    assert imported(folder / "out") == (tokens.tolist(), TOKENS[:9].tolist())


def test_a_single_file_is_divided_by_its_tokens(tmp_path):
    source = write(tmp_path / "source", {"all.bin": llm_c(TOKENS), "one.bin": b"ab"})
    import_tokens(source / "all.bin", tmp_path / "out", "bytes")
    assert imported(tmp_path / "out") == (TOKENS[:990].tolist(), TOKENS[990:].tolist())
    with pytest.raises(UserError, match="one.bin: has one token; wanted two or more"):
        import_tokens(source / "one.bin", tmp_path / "other", "bytes")


def test_more_files_than_may_be_open_are_imported(tmp_path):
    shards = {f"x_train_{i:06}.bin": TOKENS[i : i + 1].tobytes() for i in range(200)}
    source = write(tmp_path / "source", BOTH | shards)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 100, limits[1]))
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
    assert imported(tmp_path / "out") == (TOKENS.tolist(), TOKENS[:200].tolist())


@pytest.mark.parametrize(
    ("tokens", "num_bits"),
    [(TOKENS.astype("<u4"), 32), (TOKENS.astype("<u4") + 70_000, 32), (TOKENS.astype("<i8"), 64)],
)
def test_wider_tokens_without_a_header_are_refused_and_can_be_converted(
    tmp_path, monkeypatch, tokens, num_bits
):
    source = write(tmp_path / "source", BOTH | {"train.bin": tokens.tobytes()})
    with pytest.raises(UserError, match=f"train.bin: looks like {num_bits}-bit tokens") as caught:
        import_tokens(source, tmp_path / "out", "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.chdir(source)
    exec(str(caught.value).split("convert it: ")[1], {"np": np})
    np.save("val.npy", TOKENS[:200])
    for name in BOTH:
        (source / name).unlink()
    if tokens.max() > 2**16:
        with pytest.raises(UserError, match="train.npy: token 0 has id 70000, outside the voc"):
            import_tokens(source, tmp_path / "out", "bytes")
    else:
        import_tokens(source, tmp_path / "out", "bytes")
        assert imported(tmp_path / "out") == (TOKENS.tolist(), TOKENS[:200].tolist())


@pytest.mark.parametrize(
    "tokens",
    [
        [0, 1, 2, 3, 4] * 200,
        [0] * 1000,  # few letters
        [300, 2] * 30,  # too few tokens to tell
        [300, 16] + [300, 2] * 400,  # a large second one
    ],
)
def test_small_ids_are_not_taken_for_halves_of_wide_ones(tmp_path, tokens):
    content = np.array(tokens, dtype="<u2").tobytes()
    source = write(tmp_path / "source", BOTH | {"train.bin": content})
    import_tokens(source, tmp_path / "out", "gpt2")
    assert tokens_in(tmp_path / "out")["train"].tolist() == tokens


NO_BIN = {"train.bin": None}
NOT_WHOLE = "train.npy: not a whole .npy file: "
POINTER = b"version https://git-lfs.github.com/spec/v1\noid 0\n"
OTHER_FORMATS = ((20240520, 2), (20240801, 1), (20240326, 3), (20240328, 1))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.bin": llm_c(TOKENS, count=999)}, "train.bin: 3024 bytes; wanted 3022 for 999"),
        ({"train.bin": llm_c(TOKENS)[:-1]}, "train.bin: 3023 bytes; wanted 3024"),
        *(
            (
                {"train.bin": llm_c(TOKENS, magic=magic, version=version)},
                f"train.bin: is of llm.c's format {magic} version {version}; wanted tokens",
            )
            for magic, version in OTHER_FORMATS
        ),
        ({"train.bin": wide_llm_c([5, 65535, 65536])}, "token 1 has id 65535, outside the voc"),
        ({"train.bin": wide_llm_c([5, 6])[:-2]}, "train.bin: 1030 bytes; wanted 1032 for 2 tokens"),
        (NO_BIN | {"train.npy": npy(np.array([5, -1]))}, "token 1 has id 18446744073709551615, "),
        (NO_BIN | {"train.npy": npy(TOKENS)[:-9]}, NOT_WHOLE),
        (NO_BIN | {"train.npy": npy(np.array([{}]))}, NOT_WHOLE),  # a pickle
        (NO_BIN | {"train.npy": TOKENS.tobytes()}, NOT_WHOLE),
        (NO_BIN | {"train.npy": npy(np.zeros(9))}, "holds float64 of shape .9,.; wanted a v"),
        (NO_BIN | {"train.npy": POINTER}, "LFS"),
        ({"train.bin": POINTER}, "LFS"),
        ({"train.npy": npy(TOKENS)}, "source: has .bin and .npy files of train; move some away"),
        ({"train.bin": TOKENS.tobytes()[:-1]}, "train.bin: 1999 bytes; wanted 1998"),
        ({"train.bin": b""}, "train.bin: 0 bytes"),
        ({"train.bin": b"\5\0\1\1"}, "train.bin: token 1 has id 257, outside the vocabulary of"),
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


@pytest.mark.parametrize(("width", "is_shuffled"), [(2, False), (4, False), (2, True)])
def test_files_of_datatrove_are_imported_by_their_documents(tmp_path, width, is_shuffled):
    own, source = write_tokenizer(tmp_path / "own"), tmp_path / "source"
    options = {} if is_shuffled else {"shuffle_documents": False}  # it shuffles by default
    write_with_datatrove(source, own, 150, eos_token="<|endoftext|>", **options)
    if width == 4:  # as it does with more than 65,535 entries
        for path in source.glob("*.ds"):
            path.write_bytes(np.fromfile(path, "<u2").astype("<u4").tobytes())
    import_tokens(source, tmp_path / "out", str(own))
    tokenizer = choose_tokenizer(str(own))
    texts = [f"the cat {rank} {i}" for rank in (0, 2) for i in range(150)]
    found = []
    for split, num_documents in (("train", 297), ("validation", 3)):
        tokens = tokens_in(tmp_path / "out")[split]
        *documents, rest = np.split(tokens, np.flatnonzero(tokens == tokenizer.eot_token) + 1)
        assert len(documents) == num_documents and not rest.size
        found += [tokenizer.decode(document[:-1].tolist()) for document in documents]
    assert metadata_of(tmp_path / "out", "validation")["num_documents"] == "3"
    # Shuffled within each file.
    assert (found == texts) != is_shuffled and sorted(found) == sorted(texts)


def test_files_of_datatrove_that_cannot_be_imported(tmp_path):
    own, source = write_tokenizer(tmp_path / "own"), tmp_path / "source"
    write_with_datatrove(source, own, 9, eos_token="<|endoftext|>")
    with pytest.raises(UserError, match=", not of gpt2; name its tokenizer with --tokenizer"):
        import_tokens(source, tmp_path / "out", "gpt2")
    (index,) = source.glob("00002*.index")
    index.unlink()
    with pytest.raises(UserError, match=f"{index.name}: no such file"):
        import_tokens(source, tmp_path / "out", str(own))
    write_with_datatrove(tmp_path / "without", own, 3)
    with pytest.raises(UserError, match="give DocumentTokenizer an eos_token"):
        import_tokens(tmp_path / "without", tmp_path / "out", str(own))


def test_imported_tokens_may_be_those_of_a_tokenizer_of_ones_own(tmp_path):
    own = str(write_tokenizer(tmp_path / "own"))
    source = write(tmp_path / "source", {"train.bin": b"\5\0\6\0", "val.bin": b"\5\0"})
    import_tokens(source, tmp_path / "out", own)
    assert (tmp_path / "out/tokenizer.json").exists()
    import_tokens(source, tmp_path / "out", "gpt2", replace=True)  # nothing of the earlier one
    assert not (tmp_path / "out/tokenizer.json").exists()
    np.array([300], dtype="<u2").tofile(source / "val.bin")
    with pytest.raises(UserError, match="id 300, outside the vocabulary of 300; name another"):
        import_tokens(source, tmp_path / "other", own)


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
    (tmp_path / DIGEST).write_bytes(CONTENT)
    (tmp_path / "0123456789012345678901234567890123456789").write_bytes(CONTENT)  # of git
    files = [tmp_path / "model.safetensors", tmp_path / "config.json"]
    files[0].symlink_to(tmp_path / DIGEST)
    files[1].symlink_to(tmp_path / "0123456789012345678901234567890123456789")
    assert verify_digests(files) == 1
    (tmp_path / DIGEST).write_bytes(b"x")
    with pytest.raises(UserError, match="model.safetensors: is damaged"):
        verify_digests(files)
