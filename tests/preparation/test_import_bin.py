import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import DatasetCard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from basics.errors import UserError
from preparation import import_bin
from preparation.import_bin import import_tokens
from run_config import load_run
from tests.support.preparation import prepare, tokens_in
from tests.support.workplace import succeeded
from tokens.batches import open_run_data

TOKENS = (np.arange(1000) * 7 % 257).astype(np.uint16)


def llm_c(tokens, *, magic=20240520, version=1, count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, tokens.size if count is None else count
    return header.tobytes() + tokens.astype("<u2").tobytes()


def write(source, files):
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    return source


def test_a_run_can_read_imported_files_of_nanogpt(workplace, tmp_path):
    source = write(tmp_path / "source", {"train.bin": TOKENS.tobytes(),
                                         "val.bin": TOKENS[:200].tobytes()})
    out = workplace.datasets_dir / "mine"
    result = succeeded(prepare("--import", str(source), str(out), "--tokenizer", "bytes"))
    assert result.stdout.splitlines()[0] == "5 documents, 1,200 tokens"  # 4 and 1 end-of-text
    assert tokens_in(out)["train"].tolist() == TOKENS.tolist()
    assert tokens_in(out)["validation"].tolist() == TOKENS[:200].tolist()
    with safe_open(out / "train.safetensors", framework="numpy") as file:
        assert file.metadata() == {"tokenizer": "bytes", "source": "train.bin",
                                   "num_documents": "4", "num_tokens": "1000",
                                   "max_token_id": "256"}
    card = DatasetCard.load(out / "README.md")
    assert card.data.to_dict()["size_categories"] == ["n<1K"] and "copied unchanged" in card.text
    assert not list(out.parent.glob(".*"))
    workplace.add_run(train={"dataset": "mine", "min_train_tokens": 64})
    run = load_run(workplace.runs_dir, "tiny")
    open_run_data(run, out, world_size=1)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), chunk=st.integers(1, 50))
def test_shards_of_llm_c_are_joined_in_the_order_of_their_names(tmp_path_factory, sizes, chunk):
    folder = tmp_path_factory.mktemp("llm_c")
    parts = np.split(TOKENS[:sum(sizes)], np.cumsum(sizes)[:-1])
    files = {f"fineweb_train_{i:06}.bin": llm_c(part) for i, part in enumerate(parts)}
    source = write(folder / "source", files | {"fineweb_val_000000.bin": llm_c(TOKENS[:9])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_bin, "CHUNK_TOKENS", chunk)
        import_tokens([source], folder / "out", "gpt2")
    tokens = tokens_in(folder / "out")
    assert tokens["train"].tolist() == TOKENS[:sum(sizes)].tolist()
    assert tokens["validation"].tolist() == TOKENS[:9].tolist()


@pytest.mark.parametrize(("train", "message"), [
    (llm_c(TOKENS, count=999), r"train.bin: 3024 bytes; wanted 3022 for 999 tokens"),
    (llm_c(TOKENS)[:-1], "train.bin: 3023 bytes; wanted 3024"),
    (llm_c(TOKENS, version=2), "version 2 of llm.c's format; wanted version 1, with 16-bit tokens"),
    (TOKENS.tobytes()[:-1], "train.bin: 1999 bytes; wanted 1998"),
    (b"", "train.bin: 0 bytes"),
    (np.array([5, 257, 6], dtype=np.uint16).tobytes(),
     r"train.bin: token 1 has id 257, outside the vocabulary of --tokenizer bytes \(257\)"),
])
def test_files_with_a_wrong_size_version_or_token_id(tmp_path, train, message):
    source = write(tmp_path / "source", {"train.bin": train, "val.bin": TOKENS.tobytes()})
    with pytest.raises(UserError, match=message):
        import_tokens([source], tmp_path / "out", "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_import_that_was_killed_leaves_nothing_to_the_next_one(tmp_path):
    source = write(tmp_path / "source", {"train.bin": TOKENS.tobytes(),
                                         "val.bin": TOKENS.tobytes()})
    left = tmp_path / ".out.partial/dataset/tokenizer.json"
    left.parent.mkdir(parents=True)
    left.write_text("of another tokenizer")
    import_tokens([source], tmp_path / "out", "bytes")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "train.safetensors", "validation.safetensors"]


def test_a_single_file_is_divided_by_its_tokens(tmp_path):
    source = write(tmp_path / "source", {"all.bin": llm_c(TOKENS)})
    succeeded(prepare("--import", str(source / "all.bin"), str(tmp_path / "out"),
                      "--tokenizer", "bytes"))
    tokens = tokens_in(tmp_path / "out")
    assert tokens["train"].tolist() == TOKENS[:990].tolist()
    assert tokens["validation"].tolist() == TOKENS[990:].tolist()


def test_more_files_than_may_be_open_are_imported(tmp_path):
    source = write(tmp_path / "source", {"val.bin": TOKENS.tobytes()} | {
        f"fineweb_train_{i:06}.bin": TOKENS[i:i + 1].tobytes() for i in range(200)})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (
            len(list(Path("/proc/self/fd").iterdir())) + 100, limits[1]))
        import_tokens([source], tmp_path / "out", "bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert tokens_in(tmp_path / "out")["train"].tolist() == TOKENS[:200].tolist()


def test_tokens_of_another_vocabulary_are_refused(tmp_path):
    source = write(tmp_path / "source", {
        "train.bin": TOKENS.tobytes(), "val.bin": TOKENS.tobytes(), "meta.pkl": b"x"})
    with pytest.raises(UserError, match="meta.pkl defines another vocabulary"):
        import_tokens([source], tmp_path / "out", "gpt2")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_full_disk_is_reported_before_anything_is_copied(tmp_path, monkeypatch):
    source = write(tmp_path / "source", {
        "train.bin": TOKENS.tobytes(), "val.bin": TOKENS.tobytes()})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3999))
    with pytest.raises(UserError, match="4.00 kB free; tokens need 4.00 kB or more"
                       ) as caught:
        import_tokens([source], tmp_path / "out", "gpt2")
    assert caught.value.status == 4
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4000))
    import_tokens([source], tmp_path / "out", "gpt2")


@pytest.mark.parametrize("option", [("--max-documents", "10"), ("--text-column", "a"),
                                    ("--validation-fraction", "0.3")])
def test_other_options_are_refused_with_import(tmp_path, option):
    result = prepare("--import", str(tmp_path), str(tmp_path / "out"), *option)
    assert result.returncode == 2 and "the only other options that it accepts" in result.stderr


def test_missing_files_and_an_output_that_is_not_empty(tmp_path):
    source = write(tmp_path / "source", {"train.bin": TOKENS.tobytes()})
    with pytest.raises(UserError, match=r"no val.bin or \*_val_\*.bin; wanted"):
        import_tokens([source], tmp_path / "out", "bytes")
    with pytest.raises(UserError, match="is not empty"):
        import_tokens([source], source, "bytes")


def dataset(path, token, lengths, tokenizer="bytes"):
    """Write a dataset of documents of one token, repeated; both splits hold the same."""
    path.mkdir()
    for split in ("train", "validation"):
        tokens = [id for length in lengths for id in [token] * length + [256]]
        save_file({"tokens": np.array(tokens, dtype=np.uint16)}, path / f"{split}.safetensors",
                  metadata={"tokenizer": tokenizer})
    return path


def documents_in(tokens):
    """Return the token and the length of each document, with its end-of-text token."""
    texts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    assert texts[-1].size == 0
    assert all(len(set(text[:-1].tolist())) == 1 for text in texts[:-1])
    return [(int(text[0]), text.size) for text in texts[:-1]]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=60), min_size=2,
                        max_size=3),
       shares=st.lists(st.sampled_from([5.0, 30.0, 70.0]), min_size=3, max_size=3),
       chunk=st.integers(1, 50))
def test_a_mix_has_the_shares_of_tokens_everywhere_and_repeats_no_document(tmp_path_factory,
                                                                           lengths, shares, chunk):
    folder, shares = tmp_path_factory.mktemp("mix"), shares[:len(lengths)]
    sources = [dataset(folder / str(number), number, own) for number, own in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_bin, "CHUNK_TOKENS", chunk)
        patch.setattr(import_bin, "CHUNK_DOCUMENTS", chunk)
        import_tokens(sources, folder / "out", "bytes", shares)
    found = documents_in(tokens_in(folder / "out")["train"])
    own_documents = [[size for number, size in found if number == source]
                     for source in range(len(sources))]
    for own, given_lengths in zip(own_documents, lengths, strict=True):
        assert own == [length + 1 for length in given_lengths[:len(own)]]  # in order, once
    assert any(len(own) == len(given_lengths) for own, given_lengths
               in zip(own_documents, lengths, strict=True))  # ends where one has no more
    counts = np.zeros(len(sources))
    for number, size in found:  # at no place is a dataset a document or more ahead of its share
        counts[number] += size
        due = counts[number] / shares[number]
        for other, share in enumerate(shares):
            next_size = next_of(lengths[other], int(counts[other]))
            assert next_size is None or (counts[other] + next_size) / share >= due - 1e-9


def next_of(lengths, num_tokens):
    """Return the size of the document that comes after so many tokens."""
    ends = np.cumsum([length + 1 for length in lengths])
    rest = [length + 1 for length, end in zip(lengths, ends, strict=True) if end > num_tokens]
    return rest[0] if rest else None


def test_a_mix_can_be_trained_on_and_says_what_is_in_it(workplace, tmp_path):
    one, two = (dataset(tmp_path / name, token, [40] * 30) for name, token in (("a", 1), ("b", 2)))
    out = workplace.datasets_dir / "mixed"
    command = ("--import", "--share", "75", "--share", "25", str(one), str(two))
    result = succeeded(prepare(*command, str(out), "--tokenizer", "bytes"))
    assert result.stdout.splitlines()[0] == "80 documents, 3,280 tokens"  # 30 + 10, twice
    with safe_open(out / "train.safetensors", framework="numpy") as file:
        assert file.metadata()["source"] == "a 75, b 25"
    assert "a and b" in DatasetCard.load(out / "README.md").text
    workplace.add_run(train={"dataset": "mixed", "min_train_tokens": 64})
    open_run_data(load_run(workplace.runs_dir, "tiny"), out, world_size=1)


@pytest.mark.parametrize(("arguments", "message"), [
    (("--import", "--share", "1", "a", "b"), "1 times --share for 2 SOURCEs; wanted one for each"),
    (("--share", "1", "a"), "--share mixes datasets that are prepared already; add --import"),
    (("--import", "--share", "0", "a"), "--share"),
    (("--import", "--share", "nan", "--share", "1", "a", "b"), "nan is not a finite number"),
    (("--import", "--share", "1", "--share", "1", "a", "half"), "half/validation.safetensors: no"),
    (("--import", "--share", "1", "--share", "1", "a", "other"),
     "other/train.safetensors: its tokenizer is gpt2; set --tokenizer"),
    (("--import", "--share", "1", "--share", "1", "a", "no"), "no/train.safetensors: no such"),
    (("--import", "--share", "1", "--share", "1", "a", "endless"),
     "endless/train.safetensors: no token ends a document"),
])
def test_datasets_that_cannot_be_mixed(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    dataset(tmp_path / "a", 1, [9]), dataset(tmp_path / "b", 2, [9])
    dataset(tmp_path / "other", 2, [9], "gpt2")
    endless = dataset(tmp_path / "endless", 3, [9])
    save_file({"tokens": np.arange(9, dtype=np.uint16)}, endless / "train.safetensors",
              metadata={"tokenizer": "bytes"})
    (dataset(tmp_path / "half", 2, [9]) / "validation.safetensors").unlink()
    before = sorted(tmp_path.iterdir())
    result = prepare(*arguments, "out", "--tokenizer", "bytes")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before
