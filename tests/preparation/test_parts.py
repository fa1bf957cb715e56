"""Parts of a preparation, and their join to the bytes that one machine would have made."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basics.errors import UserError
from preparation.parts import Part, join_parts, part_cuts
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.sources import find_documents
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.models import write_tokenizer
from tests.support.preparation import (
    BYTES,
    Stopped,
    contents,
    corrupt,
    prepare,
    stopping_after,
    texts_source,
    write_parquet,
)
from tests.support.workplace import succeeded

SHARDS = [["a", "bb"], ["ccc"], ["d", "", "e"], ["f" * 9], ["g", "h"]]


def prepare_parts(make, folder, options, total):
    """Prepare all parts, each from a source of its own, as on several machines."""
    for number in range(1, total + 1):
        prepare_dataset(make(), folder / f"part{number}",
                        replace(options, part=Part(number, total)))
    return [folder / f"part{number}" for number in range(1, total + 1)]


@settings(max_examples=30, deadline=None)
@given(shards=st.lists(st.lists(st.text(max_size=20), max_size=6), min_size=1, max_size=7),
       total=st.integers(1, 4), fraction=st.sampled_from([0.01, 0.3, 0.9]),
       max_documents=st.one_of(st.none(), st.integers(2, 20)))
def test_joined_parts_have_the_bytes_of_one_machine(tmp_path_factory, shards, total, fraction,
                                                    max_documents):
    folder = tmp_path_factory.mktemp("parts")
    options = replace(BYTES, validation_fraction=fraction, max_documents=max_documents)
    total = min(total, len(shards))
    parts = prepare_parts(lambda: texts_source(*shards), folder, options, total)
    wanted = [text for shard in shards for text in shard][:max_documents]
    if len(wanted) < 2 or not any(wanted):
        with pytest.raises(UserError, match="found; wanted at least 2|has no text: all of its"):
            join_parts(parts, folder / "joined")
        return
    prepare_dataset(texts_source(*shards), folder / "one", options)
    progress = join_parts(parts[::-1], folder / "joined")  # their order does not matter
    assert contents(folder / "joined") == contents(folder / "one")
    assert (progress.num_documents, progress.num_empty) == (len(wanted), wanted.count(""))
    assert not list(folder.glob(".*"))


@settings(max_examples=30, deadline=None)
@given(stops=st.lists(st.integers(0, 30), min_size=1, max_size=8), total=st.integers(1, 3))
def test_parts_stopped_at_any_write_and_repeated_join_to_the_same_bytes(tmp_path_factory, stops,
                                                                        total):
    folder = tmp_path_factory.mktemp("stops")
    prepare_dataset(texts_source(*SHARDS), folder / "one", BYTES)
    parts = [folder / f"part{number}" for number in range(1, total + 1)]
    for number, part in enumerate(parts, start=1):
        for stop in [*stops, None]:
            with stopping_after(stop):
                if not part.exists():
                    prepare_dataset(texts_source(*SHARDS), part,
                                    replace(BYTES, part=Part(number, total)))
    join_parts(parts, folder / "joined")
    assert contents(folder / "joined") == contents(folder / "one")


def test_a_join_that_was_stopped_can_be_repeated(tmp_path, monkeypatch):
    def stop(*_):
        raise Stopped

    prepare_dataset(texts_source(*SHARDS), tmp_path / "one", BYTES)
    parts = prepare_parts(lambda: texts_source(*SHARDS), tmp_path, BYTES, 2)
    partial = tmp_path / ".joined.partial" / "dataset"
    partial.mkdir(parents=True)  # as a kill leaves it
    (partial / "train.safetensors").write_bytes(b"x" * 10**5)
    (partial / "unknown").write_text("x")
    monkeypatch.setattr("preparation.parts.write_card", stop)
    with pytest.raises(Stopped):
        join_parts(parts, tmp_path / "joined")
    monkeypatch.undo()
    assert not (tmp_path / "joined").exists()
    join_parts(parts, tmp_path / "joined")
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("max_documents", [None, 95])
def test_files_that_cannot_be_read_are_left_out_of_the_join_as_of_one_preparation(tmp_path, kind,
                                                                                  max_documents):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(102):
        (folder / f"{i:03}.{kind}").write_text(json.dumps({"text": "x" * i}) + "\n")
    (folder / f"020.{kind}").write_text("neither UTF-8 nor JSON", encoding="utf-16")
    options = replace(BYTES, max_documents=max_documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("preparation.sources.TEXT_FILES_PER_SHARD", 30)
        prepare_dataset(find_documents(folder), tmp_path / "one", options)
        parts = prepare_parts(lambda: find_documents(folder), tmp_path, options, 3)
    assert join_parts(parts, tmp_path / "joined").bad_files == [f"020.{kind}"]
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")
    part_file = tmp_path / "part1/part.json"
    part_file.write_text(part_file.read_text().replace('max_bad_files": 1', 'max_bad_files": 0'))
    with pytest.raises(UserError, match="1 files of all parts could not be read, more than 0"):
        join_parts(parts, tmp_path / "again")


def test_a_cut_in_a_part_with_files_that_cannot_be_read_is_refused(tmp_path):
    folder = write_parquet(tmp_path / "source", *(
        [f"{i} {j} " + "x" * 99 for j in range(20)] for i in range(9)))
    corrupt(folder / "004.parquet", footer=False)  # part 2 has 40 documents that can be read
    for limit, message in ((95, "part2: --max-documents ends in this part, which has"),
                           (100, "part2: --max-documents ends in this part, which has"),
                           (60, ""), (101, "")):
        place = tmp_path / str(limit)
        place.mkdir()
        options = replace(BYTES, max_documents=limit, skip_bad_shards=True)
        parts = prepare_parts(lambda: find_documents(folder), place, options, 3)
        if message:
            with pytest.raises(UserError, match=message):
                join_parts(parts, place / "joined", skip_bad_shards=True)
        else:
            join_parts(parts, place / "joined", skip_bad_shards=True)
            prepare_dataset(find_documents(folder), place / "one", options)
            assert contents(place / "joined") == contents(place / "one")


def test_parts_with_a_tokenizer_of_ones_own(tmp_path):
    options = PrepareOptions(tokenizer=str(write_tokenizer(tmp_path / "own")))
    prepare_dataset(texts_source(*SHARDS), tmp_path / "one", options)
    parts = prepare_parts(lambda: texts_source(*SHARDS), tmp_path, options, 2)
    join_parts(parts, tmp_path / "joined")
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")
    assert (tmp_path / "joined" / "tokenizer.json").exists()


def flip(path, place):
    """Change one bit, as a copy over a bad line or memory may."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


NOT_WHOLE = "part2: train.safetensors or documents.bin is not whole; copy or prepare the part again"


@pytest.mark.parametrize(("change", "message"), [
    (lambda part: flip(part / "train.safetensors", 8 + 4096), NOT_WHOLE),
    (lambda part: flip(part / "train.safetensors", 300), NOT_WHOLE),
    (lambda part: flip(part / "documents.bin", 8), NOT_WHOLE),
    (lambda part: os.truncate(part / "documents.bin", 24), NOT_WHOLE),
    (lambda part: (part / "train.safetensors").unlink(), "part2/train.safetensors: is missing; co"),
    (lambda part: (part / "part.json").write_text("{}"), "part.json: cannot be read, or is damag"),
    (shutil.rmtree, "part2: is not a part"),
    (lambda part: part.rename(part.with_name(".part2.partial")), "part2: is an unfinished part; r"),
])
def test_a_part_that_is_missing_or_damaged_is_refused(tmp_path, change, message):
    parts = prepare_parts(lambda: texts_source(*SHARDS), tmp_path, BYTES, 3)
    change(tmp_path / "part2")
    with pytest.raises(UserError, match=message) as caught:
        join_parts(parts, tmp_path / "joined")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "joined").exists() and not (tmp_path / ".joined.partial").exists()


def test_missing_and_repeated_parts_are_refused(tmp_path):
    parts = prepare_parts(lambda: texts_source(*SHARDS), tmp_path, BYTES, 4)
    with pytest.raises(UserError, match="part 2, 4 of 4 missing; prepare it with --part 2/4"):
        join_parts([parts[0], parts[2]], tmp_path / "joined")
    with pytest.raises(UserError, match="part1 and .*part1 are both part 1/4"):
        join_parts([*parts, parts[0]], tmp_path / "joined")


@pytest.mark.parametrize(("options", "shards", "message"), [
    (replace(BYTES, tokenizer="gpt2"), SHARDS, "tokenizer is bytes, and gpt2"),
    (replace(BYTES, validation_fraction=0.5), SHARDS, "validation fraction is 0.01, and 0.5"),
    (replace(BYTES, max_documents=3), SHARDS, "max documents is None, and 3"),
    (BYTES, [*SHARDS[:4], ["g", "hi"]], "the names or sizes of the source's files differed"),
])
def test_parts_of_different_preparations_are_refused(tmp_path, options, shards, message):
    prepare_dataset(texts_source(*SHARDS), tmp_path / "a", replace(BYTES, part=Part(1, 2)))
    prepare_dataset(texts_source(*shards), tmp_path / "b", replace(options, part=Part(2, 2)))
    with pytest.raises(UserError, match=f"a and .*b do not belong together: {message}"):
        join_parts([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")


def test_parts_of_different_numbers_and_sources_are_refused(tmp_path):
    source = texts_source(*SHARDS)
    prepare_dataset(source, tmp_path / "a", replace(BYTES, part=Part(1, 2)))
    prepare_dataset(source, tmp_path / "b", replace(BYTES, part=Part(2, 3)))
    with pytest.raises(UserError, match="they are parts 1/2 and 2/3"):
        join_parts([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")
    prepare_dataset(replace(source, revision="other"), tmp_path / "c",
                    replace(BYTES, part=Part(2, 2)))
    with pytest.raises(UserError, match="revision is none, and other"):
        join_parts([tmp_path / "a", tmp_path / "c"], tmp_path / "joined")


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "-1/2", ""])
def test_a_part_that_there_cannot_be_is_one_line(tmp_path, text):
    result = prepare("source", str(tmp_path / "out"), f"--part={text}")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"--part {text}: wanted I/N with I from 1 to N, such as 2/4" in result.stderr


def test_more_parts_than_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="--part 1/6: texts has only 5 shards.*; use fewer parts"):
        prepare_dataset(texts_source(*SHARDS), tmp_path / "out", replace(BYTES, part=Part(1, 6)))


@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=30), num_parts=st.integers(1, 30))
def test_parts_have_about_the_same_size_and_none_is_empty(sizes, num_parts):
    num_parts = min(num_parts, len(sizes))
    cuts = part_cuts(sizes, num_parts)
    assert cuts[0] == 0 and cuts[-1] == len(sizes) and len(cuts) == num_parts + 1
    assert all(first < second for first, second in zip(cuts, cuts[1:], strict=False))
    if len(set(sizes)) == 1 and sizes[0] and len(sizes) % num_parts == 0:
        assert {b - a for a, b in zip(cuts, cuts[1:], strict=False)} == {len(sizes) // num_parts}


def test_the_commands_of_several_machines_and_of_the_join(tmp_path):
    """JSON lines on the hub: each machine downloads its files, once, and counts no others."""
    files = {f"{i}.jsonl": "".join(json.dumps({"text": f"{i} {j}"}) + "\n"
                                   for j in range(30 + i)).encode() for i in range(4)}
    with serving(Hub(files)) as hub, used_in_this_process(hub, tmp_path / "home"):
        arguments = ["--tokenizer", "bytes", "--validation-fraction", "0.3"]
        succeeded(prepare(hub.repository, str(tmp_path / "one"), *arguments))
        for number in (1, 2):
            hub.requests.clear()
            commit = ["--revision", hub.sha] if number == 2 else []
            result = succeeded(prepare(hub.repository, str(tmp_path / f"part{number}"), *arguments,
                                       "--part", f"{number}/2", *commit))
            advice = f"use --revision {hub.sha} on the other machines\n"
            assert (advice in result.stdout) == (number == 1)
            first = 2 * (number - 1)
            assert [len(hub.downloads(name)) for name in sorted(files)] == [
                int(first <= i < first + 2) for i in range(4)]
            assert f"{61 if number == 1 else 65} documents" in result.stdout
    command = [str(tmp_path / "part1"), str(tmp_path / "part2"), str(tmp_path / "joined"), "--join"]
    refused = prepare(*command, "--tokenizer", "bytes")
    assert refused.returncode == 2 and "--join takes all but the parts from them" in refused.stderr
    assert "126 documents" in succeeded(prepare(*command)).stdout
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")
    again = prepare(*command)
    assert again.returncode == 2 and "is not empty" in again.stderr
    several = prepare(*command[:2], str(tmp_path / "new"))
    assert several.returncode == 2 and "wanted one SOURCE and one OUTPUT" in several.stderr
