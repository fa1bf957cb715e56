"""--subset and --split."""

import json

import pytest

from basics.errors import UserError
from preparation.choosing import Choice, config_patterns, listed, split_of
from preparation.sources import find_documents
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.preparation import prepare
from tests.support.workplace import succeeded

NAMES = ["data/en/a.parquet", "data/de/a.parquet", "sample/10BT/a.parquet", "sample/10BT/b.parquet"]


@pytest.mark.parametrize(("subset", "wanted"), [
    ("", NAMES), ("data", NAMES[:2]), ("data/en", NAMES[:1]), ("sample/*", NAMES[2:]),
    ("*/??", NAMES[:2]), ("*BT", NAMES[2:]), ("data/[d]*", NAMES[1:2]), ("english", NAMES[:1]),
    ("*glish", NAMES[:1]),
])
def test_a_subset_is_a_directory_a_config_or_a_pattern(subset, wanted):
    configs = {"english": {"": ["data/en/*"]}, "10BT": {"train": ["nothing/*"]}}
    assert list(Choice(subset).of_subset(NAMES, "here", configs)) == wanted


def test_a_subset_that_matches_nothing_lists_what_there_is():
    with pytest.raises(UserError, match=r"^here: --subset fr matches no directory; there are data,"
                                        r" data/de, data/en, sample, sample/10BT$"):
        Choice("fr").of_subset(NAMES, "here")
    names = [f"CC-{year}" for year in range(2000, 2030)]
    assert listed(names, like="CC-2019").startswith("CC-2019, ")
    assert listed(names, like="CC-2019").endswith(" and 25 more")


def test_the_patterns_of_configs_in_every_form():
    assert config_patterns({"configs": [
        {"config_name": "a", "data_files": "a/*"},
        {"config_name": "b", "data_files": [{"split": "train", "path": ["b/*", "c/*"]},
                                            {"split": "dev", "path": "e"}, ["f", ["g"]]]},
        {"config_name": "c", "data_dir": "d"}, {"config_name": "d", "data_files": 7}, "noise",
        {"config_name": "e", "data_dir": "h", "data_files": [{"path": "i", "split": "own"}, 7]},
    ]}) == {"a": {"": ["a/*"]}, "b": {"train": ["b/*", "c/*"], "validation": ["e"],
                                      "": ["f", "g"]},
            "c": {"": ["d/*"]}, "d": {}, "e": {"own": ["h/i"]}}
    assert config_patterns({"configs": "noise"}) == config_patterns({}) == {}


@pytest.mark.parametrize(("path", "split"), [
    ("data/train-00000-of-00004.parquet", "train"), ("test.jsonl", "test"),
    ("wiki_valid.jsonl", "validation"), ("dev/0.parquet", "validation"),
    ("TRAIN/0.parquet", "train"), ("test/train-0.parquet", "train"),
    ("train00.jsonl", "train"), ("contest.jsonl", ""), ("trains/a.jsonl", ""),
    ("latest-0.parquet", ""), ("eval_0.jsonl", "test"),
])
def test_the_split_that_a_name_says(path, split):
    assert split_of(path) == split


@pytest.mark.parametrize(("names", "split", "wanted", "line"), [
    (["train-0", "train-1", "test-0"], "", ["train-0", "train-1"],
     "train (2 files), leaving out test (1 file); --split chooses others"),
    (["train", "other", "dev"], "", ["train"], "leaving out validation (1 file), other (1 file)"),
    (["a", "b", "test"], "", ["a", "b"], "taking other (2 files), leaving out test (1 file)"),
    (["test-0", "test-1"], "", ["test-0", "test-1"], "taking test (2 files)"),
    (["a", "b"], "", ["a", "b"], ""), (["train"], "", ["train"], ""),
    (["train-0", "test-0"], "test", ["test-0"], ""),
    (["train", "valid"], "validation", ["valid"], ""),
    (["train", "valid"], "dev", ["valid"], ""),
    (["x/train-0", "x/test-0"], "*-0", ["x/train-0", "x/test-0"], ""),
    (["x/train-0", "y/train-1"], "train-1", ["y/train-1"], ""),
])
def test_the_split_that_is_taken(names, split, wanted, line, capsys):
    assert Choice(split=split).of_split({name: name for name in names}, "here") == wanted
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == bool(line)


@pytest.mark.parametrize(("names", "split", "message"), [
    (["dev", "test"], "", "has files of test and validation, none of train; choose"),
    (["train-0", "train-1", "a"], "test", r"--split test matches no file; there are train \(2"),
])
def test_a_split_that_there_is_not(names, split, message):
    with pytest.raises(UserError, match=message):
        Choice(split=split).of_split({name: name for name in names}, "here")


@pytest.mark.parametrize(("choice", "wanted"), [
    (Choice(), ["en/a", "de/a"]), (Choice("english"), ["en/a"]), (Choice("en"), ["en/a"]),
    (Choice(split="test"), ["en/b", "de/b"]), (Choice("*", "own"), ["de/c"]),
    (Choice("german", "test"), ["de/b"]), (Choice(split="train"), ["en/a", "de/a"]),
])
def test_the_splits_of_a_card_are_those_of_files_whose_names_say_none(choice, wanted):
    configs = {"english": {"train": ["en/a"], "test": ["en/b"]},
               "german": {"train": ["de/a"], "test": ["de/b"], "own": ["de/[c]"]}}
    names = ["en/a", "en/b", "de/a", "de/b", "de/c", "en/test-named"]
    inside = choice.of_subset(names, "here", configs)
    found = choice.of_split(inside, "here", configs)
    assert [name for name in found if "named" not in name] == wanted
    assert ("en/test-named" in found) == (choice == Choice(split="test"))


def test_a_line_says_that_all_configs_of_a_card_are_taken(capsys):
    configs = {"english": {"": ["data/en/*"]}, "german": {"": ["data/de/*"]}}
    for choice, card in ((Choice(), configs), (Choice("german"), configs), (Choice(), {}),
                         (Choice(), {"default": {"": ["*"]}})):
        choice.of_subset(NAMES, "here", card)
    assert capsys.readouterr().err == (
        "here: taking all of its configs, english, german; --subset chooses some\n")


def test_a_local_directory_has_subsets_and_splits(tmp_path, capsys):
    for name in ("en/train-0", "en/test-0", "de/train-0"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n")

    def found(**choice):
        return [shard.name for shard in find_documents(tmp_path, choice=Choice(**choice)).shards]

    assert found() == ["de/train-0.jsonl", "en/train-0.jsonl"]
    assert "leaving out test (1 file)" in capsys.readouterr().err
    assert found(subset="e*", split="test") == ["en/test-0.jsonl"]
    assert find_documents(tmp_path, choice=Choice("en", "test")).name == f"{tmp_path} en split test"
    pattern = find_documents(f"{tmp_path}/en/*.jsonl")  # it names the files itself
    assert [shard.name for shard in pattern.shards] == ["test-0.jsonl", "train-0.jsonl"]
    with pytest.raises(UserError, match="--subset needs a directory"):
        find_documents(f"{tmp_path}/en/*.jsonl", choice=Choice("en"))
    with pytest.raises(UserError, match="--subset x matches no directory; there are de, en"):
        find_documents(tmp_path, choice=Choice("x"))


def test_text_files_are_not_taken_for_splits(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text("text")
    assert find_documents(tmp_path).shards[0].num_files == 2
    assert find_documents(tmp_path, choice=Choice(split="test")).shards[0].num_files == 1


def test_on_the_hub_train_is_taken_and_another_split_can_be_chosen(tmp_path):
    def lines(name):
        return "".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(9)).encode()

    files = {f"{folder}/{split}-00000-of-00001.jsonl": lines(folder + split)
             for folder in ("en", "de", "fr") for split in ("train", "test")}
    card = {"configs": [{"config_name": "germanic", "data_files": ["en/*", "de/*"]}]}
    with serving(Hub(files, card=card)) as hub, used_in_this_process(hub, tmp_path / "home"):
        def prepared(number, *arguments):
            hub.requests.clear()
            result = succeeded(prepare(hub.repository, str(tmp_path / str(number)),
                                       "--tokenizer", "bytes", *arguments))
            return result.stdout + result.stderr

        out = prepared(0, "--subset", "[ef]*")
        assert "taking train (2 files), leaving out test (2 files); --split chooses others" in out
        assert "18 documents" in out and not hub.downloads("test-00000-of-00001.jsonl")
        out = prepared(1, "--subset", "germanic", "--split", "test")
        assert "18 documents" in out and "taking" not in out
        assert {path for _, path, _ in hub.requests if "/resolve/" in path} == {
            f"/datasets/{hub.repository}/resolve/{hub.sha}/{folder}/test-00000-of-00001.jsonl"
            for folder in ("en", "de")}
        result = prepare(hub.repository, str(tmp_path / "3"), "--subset", "it")
        assert result.returncode == 2 and result.stderr.count("\n") == 1
        assert "it matches no directory; there are de, en, fr, germanic (and" in result.stderr
