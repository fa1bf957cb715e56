"""The real hub client with a local hub that fails in many ways."""

import gzip
import io
import json
import os
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import DatasetCard
from safetensors import safe_open
from safetensors.numpy import save

from basics.errors import UserError
from preparation import hub
from preparation.ensure_dataset import is_complete, provide_dataset
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.sources import find_documents
from tests.support.hub_server import (
    Fault,
    Hub,
    serving,
    tokens_hub_fixture,  # noqa: F401
    used_in_this_process,
)
from tests.support.preparation import prepare, tokens_in
from tests.support.workplace import (
    PROJECT_DIR,
    small_disk,
    succeeded,
)

PARTS = [[f"part {i} document {j} " + "x" * (j % 97) for j in range(300)] for i in range(3)]


def parquet(texts):
    content = io.BytesIO()
    table = pyarrow.table({"text": texts, "id": [str(i) for i in range(len(texts))]})
    pyarrow.parquet.write_table(table, content, row_group_size=100)
    return content.getvalue()


@pytest.fixture
def texts_hub():
    """A dataset of documents, in FineWeb's layout."""
    files = {f"sample/10BT/{i:03}_00000.parquet": parquet(part) for i, part in enumerate(PARTS)}
    files["sample/100BT/000_00000.parquet"] = parquet(["not asked for"] * 10)
    files["README.md"] = b"---\nlicense: odc-by\n---\n"
    with serving(Hub(files, card={"license": "odc-by", "language": ["en"]})) as hub:
        yield hub


def prepare_from(hub, tmp_path, *arguments, repository=""):
    """Prepare a dataset of documents on the hub, in this process."""
    with used_in_this_process(hub, tmp_path / "home"):
        return prepare(repository or hub.repository, str(tmp_path / "out"),
                       "--tokenizer", "bytes", *arguments)


def fetch(hub, tmp_path, *, repository=""):
    """Download a dataset of tokens, in this process."""
    with used_in_this_process(hub, tmp_path / "home"):
        provide_dataset(tmp_path / "data", repository or hub.repository)


def local_result(tmp_path):
    """Return the tokens of the same documents, prepared from files."""
    folder = tmp_path / "local"
    folder.mkdir()
    for i, part in enumerate(PARTS):
        (folder / f"{i:03}_00000.parquet").write_bytes(parquet(part))
    prepare_dataset(find_documents(folder), tmp_path / "local-out",
                    PrepareOptions(tokenizer="bytes"))
    return tokens_in(tmp_path / "local-out")


def assert_tokens_as_local(tmp_path):
    """Compare the tokens in tmp_path/out with those of the same texts as local files."""
    expected = local_result(tmp_path)
    for split, tokens in tokens_in(tmp_path / "out").items():
        assert np.array_equal(tokens, expected[split])


def test_a_subset_is_downloaded_shard_by_shard_and_deleted(texts_hub, tmp_path):
    result = succeeded(prepare_from(texts_hub, tmp_path, "--subset", "sample/10BT"))
    assert "downloading sample/10BT/000_00000.parquet, 0.00 GB" in result.stderr
    assert_tokens_as_local(tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "train.safetensors", "validation.safetensors"]
    left = {path for path in tmp_path.rglob("*.parquet") if "local" not in path.parts}
    assert not left and not list(tmp_path.glob(".*"))
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["source"] == "someone/texts sample/10BT"
    assert metadata["revision"] == texts_hub.sha
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "odc-by" and card.data.to_dict()["source_datasets"] == [
        "someone/texts"]
    assert texts_hub.sha in card.text


def test_raw_files_can_be_kept(texts_hub, tmp_path):
    succeeded(prepare_from(texts_hub, tmp_path, "--subset", "sample/10BT/",  # as shells complete
                           "--keep-raw", str(tmp_path / "raw")))
    names = [f"sample/10BT/{i:03}_00000.parquet" for i in range(3)]
    assert all((tmp_path / "raw" / name).read_bytes() == texts_hub.files[name] for name in names)


def test_only_needed_shards_are_downloaded(texts_hub, tmp_path):
    succeeded(prepare_from(texts_hub, tmp_path, "--subset", "sample/10BT",
                           "--max-documents", "300"))
    assert texts_hub.downloads("000_00000.parquet") and not texts_hub.downloads("001_00000.parquet")


def test_nothing_but_a_file_itself_is_asked_for_before_it_is_read(texts_hub, tmp_path):
    succeeded(prepare_from(texts_hub, tmp_path, "--subset", "sample/10BT"))
    assert [len(texts_hub.downloads(f"sample/10BT/00{i}_00000.parquet")) for i in range(3)] == [
        1, 1, 1]


@pytest.fixture
def lines_hub():
    """A dataset of three JSON lines files, one of them compressed."""
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in part).encode()
             for part in PARTS]
    files = {"000.jsonl": lines[0], "001.json.gz": gzip.compress(lines[1]), "002.jsonl": lines[2]}
    with serving(Hub(files)) as hub:
        yield hub


def test_json_lines_on_the_hub_are_downloaded_once(lines_hub, tmp_path):
    result = succeeded(prepare_from(lines_hub, tmp_path))
    assert "900 documents" in result.stdout
    assert [len(lines_hub.downloads(name)) for name in lines_hub.files] == [1, 1, 1]
    assert_tokens_as_local(tmp_path)
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        assert file.metadata()["num_documents"] == "891"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "train.safetensors", "validation.safetensors"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("card", "licence", "languages"), [
    ({"license": ["mit", "cc0-1.0"], "language": ["en", False]}, ["mit", "cc0-1.0"], ["en"]),
    ({"license": ["mit"], "language": "de"}, "mit", ["de"]),
    ({"license": {"name": "own"}, "language": 7}, "{'name': 'own'}", ["7"]),
    ({"license": [], "language": None}, "unknown", ["en"]),
])
def test_a_card_may_list_licences_and_name_them_oddly(lines_hub, tmp_path, card, licence,
                                                      languages):
    lines_hub.card = card
    succeeded(prepare_from(lines_hub, tmp_path, "--max-documents", "9"))
    found = DatasetCard.load(tmp_path / "out/README.md").data
    assert (found.license, found.language) == (licence, languages)


def test_killed_during_a_download_it_continues_with_the_same_commit(texts_hub, tmp_path):
    texts_hub.faults = [Fault("002_00000.parquet", times=-1, status=503)]
    process = subprocess.Popen(
        [sys.executable, str(PROJECT_DIR / "prepare_dataset.py"), texts_hub.repository,
         str(tmp_path / "out"), "--tokenizer", "bytes", "--subset", "sample/10BT"],
        env=os.environ | texts_hub.environment(tmp_path / "home"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    journal = tmp_path / ".out.partial" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") == 3):  # two whole shards
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    first_commit, texts_hub.sha = texts_hub.sha, "f" * 40
    texts_hub.faults, texts_hub.requests = [], []
    succeeded(prepare_from(texts_hub, tmp_path, "--subset", "sample/10BT"))
    assert not texts_hub.downloads("000_00000.parquet"), "a finished shard was downloaded again"
    assert_tokens_as_local(tmp_path)
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        assert file.metadata()["revision"] == first_commit


def test_a_branch_that_gets_a_commit_meanwhile_is_continued_with_the_one_it_had(lines_hub,
                                                                                tmp_path):
    arguments = "--revision", "main-2"
    lines_hub.branches = {"main-2": "a" * 40}
    last = sorted(lines_hub.files)[-1]
    lines_hub.faults = [Fault(last, times=-1, status=403)]
    refused = prepare_from(lines_hub, tmp_path, *arguments)
    assert refused.returncode == 2 and (tmp_path / ".out.partial" / "journal.jsonl").exists()
    lines_hub.branches, lines_hub.faults = {"main-2": "b" * 40}, []
    other = prepare_from(lines_hub, tmp_path, "--revision", "b" * 40)
    assert other.returncode == 2 and "revision was aaaaaaa" in other.stderr
    lines_hub.requests.clear()
    succeeded(prepare_from(lines_hub, tmp_path, *arguments))
    assert [len(lines_hub.downloads(name)) for name in sorted(lines_hub.files)][:-1] == [
        0] * (len(lines_hub.files) - 1)
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        assert file.metadata()["revision"] == "a" * 40


def test_only_the_two_token_files_are_downloaded(tokens_hub, tmp_path):
    for _ in range(2):  # the second time there is nothing to do
        fetch(tokens_hub, tmp_path)
    assert [len(tokens_hub.downloads(name)) for name in
            ("train.safetensors", "validation.safetensors", "README.md")] == [1, 1, 0]
    assert tokens_hub.num_bytes == sum(len(tokens_hub.files[f"{split}.safetensors"])
                                       for split in ("train", "validation"))


def first_bytes(ranges):
    return [int(part.removeprefix("bytes=").split("-")[0] or 0) for part in ranges]


def test_a_broken_download_continues_where_it_broke(tmp_path):
    """huggingface_hub writes 10 MB at a time."""
    tokens = save({"tokens": np.arange(18 * 10**6, dtype=np.uint32).astype(np.uint16)})
    validation = save({"tokens": np.zeros(9, dtype=np.uint16)})
    files = {"train.safetensors": tokens, "validation.safetensors": validation}
    with serving(Hub(files)) as hub:
        hub.faults = [Fault("train.safetensors", cut_after=14 * 10**6),
                      Fault("train.safetensors", cut_after=12 * 10**6)]
        fetch(hub, tmp_path)
        starts = first_bytes(hub.downloads("train.safetensors"))
    assert starts[0] == 0 and 10**7 <= starts[1] <= 14 * 10**6, starts
    assert starts[2] >= starts[1] + 10**7
    assert (tmp_path / "data" / "train.safetensors").read_bytes() == tokens


def test_partial_files_of_killed_downloads_are_removed(tokens_hub, tmp_path):
    folder = tmp_path / "data" / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    (folder / "old.incomplete").write_bytes(b"half")
    os.utime(folder / "old.incomplete", (0, 0))
    (folder / "new.incomplete").write_bytes(b"half")  # another node may be writing it
    fetch(tokens_hub, tmp_path)
    assert [path.name for path in folder.glob("*.incomplete")] == ["new.incomplete"]


@pytest.mark.parametrize("fault", [
    Fault("/api/datasets", status=503), Fault("/api/datasets", status=500),
    Fault("/api/datasets", status=429, headers={"Retry-After": "0"}),
    Fault("train.safetensors", status=502), Fault("train.safetensors", status=503, times=2),
    Fault("train.safetensors", status=429, headers={"Retry-After": "0"}),
    Fault("train.safetensors", status=500, method="HEAD"),
])
def test_transient_errors_are_retried(tokens_hub, tmp_path, fault):
    tokens_hub.faults = [fault]
    fetch(tokens_hub, tmp_path)
    assert fault.times == 0
    assert (tmp_path / "data" / "train.safetensors").read_bytes() == tokens_hub.files[
        "train.safetensors"]


@pytest.mark.parametrize(("fault", "message"), [
    (Fault("/api/datasets", times=-1, status=404, headers={"X-Error-Code": "RepoNotFound"}),
     "there is no such repository, or it is private: check the name, or set HF_TOKEN"),
    (Fault("/api/datasets", times=-1, status=401), "there is no such repository, or it is private"),
    (Fault("/api/datasets", times=-1, status=403, headers={"X-Error-Code": "GatedRepo"}),
     "you must accept its conditions on its web page first, then set HF_TOKEN"),
    (Fault("/api/datasets", times=-1, status=503), "check the network, then run the same command"),
    (Fault("train.safetensors", times=-1, status=503), "check the network, then run the same"),
    (Fault("/api/datasets", times=-1, status=429), "set HF_TOKEN, whose limits are higher, or"),
    (Fault("train.safetensors", times=-1, status=429, headers={"Retry-After": "0"}),
     "set HF_TOKEN, whose limits are higher, or"),
    (Fault("train.safetensors", times=-1, cut_after=1000), "check the network, then run the same"),
    (Fault("train.safetensors", times=-1, status=404, method="HEAD",
           headers={"X-Error-Code": "EntryNotFound"}), "there is no such file"),
])
def test_permanent_errors_are_one_line_that_says_what_to_do(tokens_hub, tmp_path, fault, message):
    tokens_hub.faults = [fault]
    with pytest.raises(UserError) as caught:
        fetch(tokens_hub, tmp_path)
    line = str(caught.value)
    assert caught.value.status == (1 if "run the same command again" in line else 2)
    assert "\n" not in line
    assert message in line and tokens_hub.repository in line
    assert not (tmp_path / "data" / "train.safetensors").exists()
    assert len(tokens_hub.requests) < 100


@pytest.mark.parametrize(("said", "times", "outcome"), [
    ("CAS service error : ReqwestMiddleware Error", 2, "whole"),
    ("CAS service error : ReqwestMiddleware Error", 99, "check the network, then run the same"),
    ("IO Error: No space left on device (os error 28)", 99, "No space left on device; make room"),
])
def test_errors_of_hf_xet_are_retried_like_a_lost_connection(tokens_hub, tmp_path, monkeypatch,
                                                             said, times, outcome):
    failures, download = iter(range(times)), hub.hf_hub_download

    def failing(*arguments, **keywords):
        if next(failures, None) is not None:
            raise RuntimeError(f"Data processing error: {said}")
        return download(*arguments, **keywords)

    monkeypatch.setattr(hub, "hf_hub_download", failing)
    if outcome == "whole":
        fetch(tokens_hub, tmp_path)
        assert is_complete(tmp_path / "data")
    else:
        with pytest.raises(UserError, match=outcome) as caught:
            fetch(tokens_hub, tmp_path)
        assert caught.value.status == (4 if "space" in said else 1)


@pytest.mark.parametrize("size", ["4k", "100k"])
def test_a_full_disk_during_a_download_is_one_line(tokens_hub, tmp_path, size):
    (tmp_path / "data").mkdir()
    with small_disk(tmp_path / "data", size), pytest.raises(UserError) as caught:
        fetch(tokens_hub, tmp_path)
    assert caught.value.status == 4
    assert str(caught.value).startswith(
        f"{tmp_path / 'data'}: cannot be written: No space left on device; ")


def test_a_missing_repository(tokens_hub, tmp_path):
    with pytest.raises(UserError, match="someone/else on the Hugging Face hub: there is no such"):
        fetch(tokens_hub, tmp_path, repository="someone/else")
    result = prepare_from(tokens_hub, tmp_path, repository="someone/else")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*out*"))


def test_a_repository_of_tokens_has_no_documents(tokens_hub, tmp_path):
    result = prepare_from(tokens_hub, tmp_path)
    assert result.returncode == 2 and "name a directory of documents with --subset" in result.stderr


def test_no_connection_to_the_hub_is_one_line(tmp_path):
    hub = Hub({}, endpoint="http://127.0.0.1:9")  # no server listens there
    with pytest.raises(UserError, match="check the network") as caught:
        fetch(hub, tmp_path)
    assert "\n" not in str(caught.value) and caught.value.status == 1


def test_a_partly_downloaded_dataset_is_completed_later(tokens_hub, tmp_path):
    tokens_hub.faults = [Fault("validation.safetensors", times=-1, status=404, method="HEAD",
                               headers={"X-Error-Code": "EntryNotFound"})]
    with pytest.raises(UserError, match="validation.safetensors on the Hugging Face hub: there is"):
        fetch(tokens_hub, tmp_path)
    assert not is_complete(tmp_path / "data")
    tokens_hub.faults, tokens_hub.requests = [], []  # now the file exists
    fetch(tokens_hub, tmp_path)
    assert is_complete(tmp_path / "data")
    assert not tokens_hub.downloads("train.safetensors"), "a complete file was downloaded again"
