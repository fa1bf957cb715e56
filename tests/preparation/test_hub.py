"""The genuine hub client, talking to a stand-in on loopback that fails in every way."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import DatasetCard
from safetensors import safe_open
from safetensors.numpy import load_file, save

from preparation.documents import find_documents
from preparation.pipeline import prepare_dataset
from preparation.planning import PrepareOptions
from tests.support.hub_server import Fault, Hub, serving
from tests.support.workplace import (
    PROJECT_DIR,
    Workplace,
    run_command,
    small_disk,
    succeeded,
    torchrun_command,
)

PARTS = [[f"part {i} document {j} " + "x" * (j % 97) for j in range(300)] for i in range(3)]


def parquet(texts: list[str]) -> bytes:
    content = io.BytesIO()
    table = pyarrow.table({"text": texts, "id": [str(i) for i in range(len(texts))]})
    pyarrow.parquet.write_table(table, content, row_group_size=100)
    return content.getvalue()


@pytest.fixture
def texts_hub() -> Iterator[Hub]:
    """A dataset of documents, in FineWeb's layout."""
    files = {f"sample/10BT/{i:03}_00000.parquet": parquet(part) for i, part in enumerate(PARTS)}
    files["sample/100BT/000_00000.parquet"] = parquet(["not asked for"] * 10)
    files["README.md"] = b"---\nlicense: odc-by\n---\n"
    with serving(Hub(files, card={"license": "odc-by", "language": ["en"]})) as hub:
        yield hub


@pytest.fixture
def tokens_hub() -> Iterator[Hub]:
    """A dataset of tokens, with more in the repository than a run needs."""
    steps = np.random.default_rng(0).integers(1, 4, size=400_000)
    tokens = (np.cumsum(steps) % 257).astype(np.uint16)
    files = {"train.safetensors": save({"tokens": tokens}),
             "validation.safetensors": save({"tokens": tokens[:500]}), "README.md": b"hello"}
    with serving(Hub(files, repository="someone/tokens")) as hub:
        yield hub


def prepare(hub: Hub, tmp_path: Path, *arguments: str,
            repository: str = "") -> CompletedProcess[str]:
    return run_command(sys.executable, str(PROJECT_DIR / "prepare_dataset.py"),
                       repository or hub.repository, str(tmp_path / "out"), "--tokenizer", "bytes",
                       *arguments, **hub.environment(tmp_path / "home"))


def fetch(hub: Hub, tmp_path: Path, *, repository: str = "",
          is_patient: bool = True) -> CompletedProcess[str]:
    """Fetch a token dataset in a process of its own; without patience no pause is waited for."""
    code = ("import sys, time\nfrom pathlib import Path\n"
            f"if not {is_patient}: time.sleep = lambda _: None\n"
            "from preparation.providing import provide_dataset\n"
            "from user_error import UserError\n"
            "try:\n    provide_dataset(Path(sys.argv[1]), sys.argv[2])\n"
            "except UserError as error:\n    print(error)\n    sys.exit(error.status)\n")
    return run_command(sys.executable, "-c", code, str(tmp_path / "data"),
                       repository or hub.repository, PYTHONPATH=str(PROJECT_DIR),
                       **hub.environment(tmp_path / "home"))


def local_result(tmp_path: Path) -> dict[str, np.ndarray]:
    """Give the tokens of the same documents, prepared from files."""
    folder = tmp_path / "local"
    folder.mkdir()
    for i, part in enumerate(PARTS):
        (folder / f"{i:03}_00000.parquet").write_bytes(parquet(part))
    prepare_dataset(find_documents(folder), tmp_path / "local-out",
                    PrepareOptions(tokenizer="bytes"))
    return tokens_in(tmp_path / "local-out")


def tokens_in(dataset_dir: Path) -> dict[str, np.ndarray]:
    return {split: load_file(dataset_dir / f"{split}.safetensors")["tokens"]
            for split in ("train", "validation")}


def test_a_subset_is_read_shard_by_shard_and_not_kept(texts_hub: Hub, tmp_path: Path) -> None:
    result = succeeded(prepare(texts_hub, tmp_path, "--subset", "sample/10BT"))
    assert "fetching sample/10BT/000_00000.parquet, 0.00 GB" in result.stderr
    expected = local_result(tmp_path)
    for split, tokens in tokens_in(tmp_path / "out").items():
        assert np.array_equal(tokens, expected[split])
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


def test_a_subset_that_is_not_there_is_said_with_those_that_are(
    texts_hub: Hub, tmp_path: Path
) -> None:
    result = prepare(texts_hub, tmp_path, "--subset", "sample-10BT")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "--subset sample-10BT is no directory there; it has " in result.stderr
    assert "sample" in result.stderr.rpartition("; it has ")[2]
    assert not list(tmp_path.glob(".*"))
    succeeded(prepare(texts_hub, tmp_path, "--subset", "sample/10BT/"))  # as a shell completes it


def test_raw_files_can_be_kept(texts_hub: Hub, tmp_path: Path) -> None:
    succeeded(prepare(texts_hub, tmp_path, "--subset", "sample/10BT",
                      "--keep-raw", str(tmp_path / "raw")))
    names = [f"sample/10BT/{i:03}_00000.parquet" for i in range(3)]
    assert all((tmp_path / "raw" / name).read_bytes() == texts_hub.files[name] for name in names)


def test_only_the_shards_that_are_needed_are_fetched(texts_hub: Hub, tmp_path: Path) -> None:
    succeeded(prepare(texts_hub, tmp_path, "--subset", "sample/10BT", "--max-documents", "300"))
    # The first file is read whole, the second not even for its footer.
    assert texts_hub.downloads("000_00000.parquet") and not texts_hub.downloads("001_00000.parquet")


def test_json_lines_on_the_hub_are_counted_first(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PARTS[0]).encode()
    with serving(Hub({"data.jsonl.gz": gzip.compress(lines)})) as hub:
        result = succeeded(prepare(hub, tmp_path))
    assert "300 documents" in result.stdout


def test_killed_while_it_fetches_it_goes_on_with_the_commit_it_began_with(
    texts_hub: Hub, tmp_path: Path
) -> None:
    # The third shard's footer can be read, the shard itself not.
    texts_hub.faults = [Fault("002_00000.parquet", times=-1, spared=2, status=503)]
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
    begun_with, texts_hub.sha = texts_hub.sha, "f" * 40
    texts_hub.faults, texts_hub.requests = [], []
    succeeded(prepare(texts_hub, tmp_path, "--subset", "sample/10BT"))
    assert not texts_hub.downloads("000_00000.parquet"), "a finished shard came again"
    expected = local_result(tmp_path)
    for split, tokens in tokens_in(tmp_path / "out").items():
        assert np.array_equal(tokens, expected[split])
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        assert file.metadata()["revision"] == begun_with


def test_two_ranks_download_once_and_only_what_a_run_needs(
    tokens_hub: Hub, workplace: Workplace, tmp_path: Path
) -> None:
    workplace.add_run(train={"dataset": tokens_hub.repository})
    command = [*torchrun_command(2, "ddp_train.py"), *workplace.arguments("tiny")]
    succeeded(run_command(*command, **tokens_hub.environment(tmp_path / "home")))
    assert [len(tokens_hub.downloads(name)) for name in
            ("train.safetensors", "validation.safetensors", "README.md")] == [1, 1, 0]
    assert tokens_hub.num_bytes == sum(len(tokens_hub.files[f"{split}.safetensors"])
                                       for split in ("train", "validation"))


def first_bytes(ranges: list[str]) -> list[int]:
    return [int(part.removeprefix("bytes=").split("-")[0] or 0) for part in ranges]


def test_a_broken_download_is_resumed_where_it_broke(tmp_path: Path) -> None:
    """The client writes 10 MB at a time."""
    tokens = save({"tokens": np.arange(18 * 10**6, dtype=np.uint32).astype(np.uint16)})
    validation = save({"tokens": np.zeros(9, dtype=np.uint16)})
    files = {"train.safetensors": tokens, "validation.safetensors": validation}
    with serving(Hub(files)) as hub:
        hub.faults = [Fault("train.safetensors", cut_after=14 * 10**6),
                      Fault("train.safetensors", cut_after=12 * 10**6)]
        succeeded(fetch(hub, tmp_path, is_patient=False))
        starts = first_bytes(hub.downloads("train.safetensors"))
    assert starts[0] == 0 and 10**7 <= starts[1] <= 14 * 10**6, starts
    assert starts[2] >= starts[1] + 10**7
    assert (tmp_path / "data" / "train.safetensors").read_bytes() == tokens


def test_what_killed_downloads_left_is_removed(tokens_hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "data" / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    (folder / "old.incomplete").write_bytes(b"half")
    os.utime(folder / "old.incomplete", (0, 0))
    (folder / "new.incomplete").write_bytes(b"half")  # another node may be writing it
    succeeded(fetch(tokens_hub, tmp_path))
    assert [path.name for path in folder.glob("*.incomplete")] == ["new.incomplete"]


@pytest.mark.parametrize("fault", [
    Fault("/api/datasets", status=503), Fault("/api/datasets", status=500),
    Fault("/api/datasets", status=429, headers={"Retry-After": "0"}),
    Fault("train.safetensors", status=502), Fault("train.safetensors", status=503, times=2),
    Fault("train.safetensors", status=429, headers={"Retry-After": "0"}),
    Fault("train.safetensors", status=500, method="HEAD"),
])
def test_what_passes_is_tried_again(tokens_hub: Hub, tmp_path: Path, fault: Fault) -> None:
    tokens_hub.faults = [fault]
    succeeded(fetch(tokens_hub, tmp_path, is_patient=False))
    assert fault.times == 0
    assert (tmp_path / "data" / "train.safetensors").read_bytes() == tokens_hub.files[
        "train.safetensors"]


@pytest.mark.parametrize(("fault", "message"), [
    (Fault("/api/datasets", times=-1, status=404, headers={"X-Error-Code": "RepoNotFound"}),
     "there is no such repository, or it is private: check the name, or set HF_TOKEN"),
    (Fault("/api/datasets", times=-1, status=401), "there is no such repository, or it is private"),
    (Fault("/api/datasets", times=-1, status=403, headers={"X-Error-Code": "GatedRepo"}),
     "asks for consent first: give it on its page there, then set HF_TOKEN"),
    (Fault("/api/datasets", times=-1, status=503), "check the network, and type the same command"),
    (Fault("train.safetensors", times=-1, status=503), "check the network, and type the same"),
    (Fault("train.safetensors", times=-1, cut_after=1000), "check the network, and type the same"),
    (Fault("train.safetensors", times=-1, status=404, method="HEAD",
           headers={"X-Error-Code": "EntryNotFound"}), "there is no such file"),
])
def test_what_stays_is_one_line_that_says_what_to_do(
    tokens_hub: Hub, tmp_path: Path, fault: Fault, message: str
) -> None:
    tokens_hub.faults = [fault]
    result = fetch(tokens_hub, tmp_path, is_patient=False)
    assert result.returncode == 2, result.stderr
    assert result.stdout.count("\n") == 1 and message in result.stdout
    assert tokens_hub.repository in result.stdout and "Traceback" not in result.stderr
    assert not (tmp_path / "data" / "train.safetensors").exists()
    assert len(tokens_hub.requests) < 100


@pytest.mark.parametrize("size", ["4k", "100k"])
def test_a_full_disk_while_it_fetches_is_one_line(
    tokens_hub: Hub, tmp_path: Path, size: str
) -> None:
    (tmp_path / "data").mkdir()
    with small_disk(tmp_path / "data", size):
        result = fetch(tokens_hub, tmp_path, is_patient=False)
    assert result.returncode == 4 and "Traceback" not in result.stderr
    assert result.stdout == (f"{tmp_path / 'data'}: cannot be written: No space left on device;"
                             " make room, or name another place\n")


def test_a_repository_that_nobody_has(tokens_hub: Hub, tmp_path: Path) -> None:
    result = fetch(tokens_hub, tmp_path, repository="someone/else")
    assert result.returncode == 2 and "someone/else on the Hugging Face hub: there is no such" in (
        result.stdout)
    result = prepare(tokens_hub, tmp_path, repository="someone/else")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*out*"))


def test_documents_are_wanted_of_a_repository_of_tokens(tokens_hub: Hub, tmp_path: Path) -> None:
    result = prepare(tokens_hub, tmp_path)
    assert result.returncode == 2 and "name a directory of documents with --subset" in result.stderr


def test_a_hub_that_nobody_answers_for_is_one_line(tmp_path: Path) -> None:
    hub = Hub({}, endpoint="http://127.0.0.1:9")  # nobody listens there
    result = fetch(hub, tmp_path, is_patient=False)
    assert result.returncode == 2 and result.stdout.count("\n") == 1
    assert "check the network" in result.stdout


def test_a_half_downloaded_dataset_is_never_trained_on(
    tokens_hub: Hub, workplace: Workplace, tmp_path: Path
) -> None:
    tokens_hub.faults = [Fault("validation.safetensors", times=-1, status=404, method="HEAD",
                               headers={"X-Error-Code": "EntryNotFound"})]
    workplace.add_run(train={"dataset": tokens_hub.repository})
    command = [sys.executable, str(PROJECT_DIR / "ddp_train.py"), *workplace.arguments("tiny")]
    result = run_command(*command, **tokens_hub.environment(tmp_path / "home"))
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "validation.safetensors on the Hugging Face hub: there is no such file" in result.stderr
    assert not (workplace.runs_dir / "tiny" / "metrics.jsonl").exists()
    tokens_hub.faults, tokens_hub.requests = [], []  # it appears
    succeeded(run_command(*command, **tokens_hub.environment(tmp_path / "home")))
    assert not tokens_hub.downloads("train.safetensors"), "what was whole came again"
