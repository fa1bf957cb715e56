"""The prose corpus: sentences only, in a fixed order, from packages that apt-get downloads."""

import gzip
import io
import json
import tarfile

import pytest
from click.testing import CliRunner

from benchmarks import prose
from benchmarks.prose import main

SENTENCE = ("The words of this paragraph number {} go on until they are long enough to be kept, and"
            " then they end with a full stop.")
PAGE = (b"<html><head><title>No</title></head><body><nav>" + SENTENCE.format("menu").encode()
        + b"</nav><p>{}</p><pre>" + SENTENCE.format("code").encode() + b"</pre></body></html>")
NUMBERS = "one two three four five".split()


def page(number):
    return PAGE.replace(b"{}", SENTENCE.format(number).encode())


def add_package(folder, name, files):
    """Write a package that the stand-in for dpkg-deb unpacks: a tar file."""
    with tarfile.open(folder / f"{name}_1.0_all.deb", "w") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(f"usr/share/doc/{path}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins for apt-get and dpkg-deb, and the folder of packages that they know."""
    known, commands = tmp_path / "known", tmp_path / "bin"
    known.mkdir()
    commands.mkdir()
    for name, body in {
        "apt-get": f'shift\nfor name; do cp {known}/"$name"_*.deb . || '
                   '{ echo "E: no $name" >&2; exit 100; }; done',
        "dpkg-deb": 'mkdir "$3"\ntar -xf "$2" -C "$3"',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setattr(prose, "DOCUMENT_CHARACTERS", 150)
    return known


def run(output, *names):
    return CliRunner().invoke(main, [str(output), *(f"--package={name}" for name in names)])


def texts(output):
    return [json.loads(line)["text"] for line in (output / "prose.jsonl").open()]


def test_keeps_each_sentence_once_and_nothing_else(packages, tmp_path):
    add_package(packages, "pages", {
        "one.html": page("one"), "again.html": page("one"), "link.de.html": page("German"),
        "genindex.html": page("index"), "two.html": page("two"), "LICENSE": page("licence"),
        "short.html": PAGE.replace(b"{}", b"It is too short."),
        "code.html": PAGE.replace(b"{}", b"x = y[0] + f(2) * {3: 4};  " * 9 + b"."),
    })
    pod = f"=head1 NAME\n\nI<{SENTENCE.format('three')[:9]}>{SENTENCE.format('three')[9:]}\n\n"
    add_package(packages, "words", {
        "four.dict.dz": gzip.compress(f"four\n\n  {SENTENCE.format('four')}".encode()),
        "three.pod": f"{pod}    {SENTENCE.format('code')}\n".encode(),
    })
    result = run(tmp_path / "out", "pages", "words")
    assert result.exit_code == 0, result.output
    assert sorted(texts(tmp_path / "out")) == sorted(map(SENTENCE.format, NUMBERS[:4]))


def test_the_order_is_the_same_each_time_and_another_version_is_reported(packages, tmp_path):
    add_package(packages, "dict-devil", {f"{index}.html": page(number * 10)
                                         for index, number in enumerate(NUMBERS)})
    add_package(packages, "a", {"page.html": page("first")})
    for output, names in (("out", ("a", "dict-devil")), ("again", ("dict-devil", "a"))):
        result = run(tmp_path / output, *names)
        assert result.exit_code == 0 and "dict-devil is 1.0;" in result.output
    assert texts(tmp_path / "out") == texts(tmp_path / "again")
    assert texts(tmp_path / "out") != [SENTENCE.format(word) for word in
                                       ("first", *(number * 10 for number in NUMBERS))]


def test_a_package_that_apt_lacks_is_one_line(packages, tmp_path):
    result = run(tmp_path / "out", "nothing")
    assert result.exit_code == 2 and "E: no nothing" in result.output
    assert result.output.count("\n") == 1 and not (tmp_path / "out").exists()
