"""`lab tokenizer`, and the whole path: a dataset, a run, its text, its evaluation, its export."""

import json
import os
import re
import shlex
import shutil

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer, GPT2LMHeadModel

from lab.tokenizer import train_tokenizer
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.sources import find_documents
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.models import TEXTS
from tests.support.preparation import corrupt, write_parquet, write_source
from tests.support.runs import made_once, refused
from tests.support.workplace import Workplace, read_lines
from tests.support.workplace import succeeded as process_succeeded
from tokens.batches import byte_lengths
from tokens.tokenizer import choose_tokenizer
from trainer.models import load_model

WORDS = ["the cat sat", "on the mat", "naïve 🎉 café", "and the hat", "它是它的", "it's 1234"]


def lab_tokenizer(source, output, *arguments):
    return run_lab("tokenizer", str(source), "--output", str(output), *arguments)


def test_a_tokenizer_is_trained_always_to_the_same_file(tmp_path):
    source = write_source("jsonl", tmp_path / "source")
    outputs = [tmp_path / "a", tmp_path / "b"]
    left = tmp_path / ".b.tokenizer-partial/tokenizer"  # by a command that was killed
    left.mkdir(parents=True)
    (left / "tokenizer.json").write_text("{")
    for output in outputs:
        result = succeeded(lab_tokenizer(source, output, "--vocab-size", "280"))
        assert "280 entries, from " in result.stdout
    first, second = ((output / "tokenizer.json").read_bytes() for output in outputs)
    assert first == second
    assert choose_tokenizer(str(outputs[0])).load().n_vocab == 280
    theirs = AutoTokenizer.from_pretrained(outputs[0])
    assert theirs.eos_token_id == 0 and theirs.decode(theirs.encode(WORDS[2])) == WORDS[2]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "a", "b"}
    succeeded(lab_tokenizer(source, tmp_path / "least", "--vocab-size", "257"))  # without merges
    least = choose_tokenizer(str(tmp_path / "least")).load()
    assert len(least.encode_ordinary("the cat")) == 7


def test_as_many_damaged_files_as_in_a_preparation_are_left_out(tmp_path):
    source = tmp_path / "source"
    write_parquet(source, *([text, f"{text} {i}"] for i in range(100) for text in TEXTS[:1]))
    corrupt(source / "007.parquet", footer=False)
    result = succeeded(lab_tokenizer(source, tmp_path / "a", "--vocab-size", "258"))
    assert "left out: " in result.stderr and "007.parquet" in result.stderr
    corrupt(source / "009.parquet", footer=True)
    line = error_line(lab_tokenizer(source, tmp_path / "b", "--vocab-size", "258"))
    assert "009.parquet" in line and "of the files cannot be read, more than 1: replace" in line


def test_the_number_of_cores_does_not_change_the_file(monkeypatch):
    found = set()
    for parallel in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        found.add(train_tokenizer(iter(TEXTS * 50), vocab_size=320))
    assert len(found) == 1


def test_only_so_much_text_is_read(tmp_path):
    write_parquet(tmp_path / "source", ["abcabc " * 100_000, "abcabc " * 100_000, "z" * 500_000])
    output = tmp_path / "a"
    result = succeeded(lab_tokenizer(tmp_path / "source", output, "--vocab-size", "260",
                                     "--max-megabytes", "1"))
    num_bytes = int(result.stdout.split("from ")[1].split(" ")[0].replace(",", ""))
    assert 10**6 <= num_bytes < 10**6 + 2**19  # it ends with a piece of a document
    assert b'"zz"' not in (output / "tokenizer.json").read_bytes()


def test_a_user_error_is_one_line_and_writes_nothing(tmp_path):
    source, output = write_source("txt", tmp_path / "source"), tmp_path / "out"
    for size in ("256", "65537", "-1"):
        result = lab_tokenizer(source, output, "--vocab-size", size)
        assert result.exit_code == 2 and f"{size} is not in the range 257<=x<=65536" in (
            result.stderr)
    line = error_line(lab_tokenizer(source, output, "--vocab-size", "4096"))
    assert "bytes of text give " in line and "entries, not 4,096; give more text, or a" in line
    assert "no such file or directory" in error_line(
        lab_tokenizer(tmp_path / "nix", output, "--vocab-size", "300"))
    assert "is not empty" in error_line(lab_tokenizer(source, source, "--vocab-size", "300"))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_the_next_command_can_be_pasted_into_a_shell(tmp_path):
    source, output = tmp_path / "my documents", tmp_path / "it's mine"
    source.mkdir()
    lines = [json.dumps({"body text": text}) for text in TEXTS]
    (source / "a.jsonl").write_text("\n".join(lines))
    result = succeeded(lab_tokenizer(source, output, "--vocab-size", "280",
                                     "--text-column", "body text"))
    line = next(line for line in result.stdout.splitlines() if "prepare_dataset.py" in line)
    assert shlex.split(line.split(": ", 1)[1]) == [
        "uv", "run", "prepare_dataset.py", str(source), "datasets/NAME", "--tokenizer",
        str(output), "--text-column", "body text"]


def test_a_tokenizer_is_trained_on_the_split_that_is_asked_for(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for split, text in (("train", "ab"), ("test", "xy")):
        (source / f"{split}.jsonl").write_text(json.dumps({"text": f"{text} " * 500}))
    found = []
    for number, arguments in enumerate(([], ["--split", "test"])):
        output = tmp_path / str(number)
        succeeded(lab_tokenizer(source, output, "--vocab-size", "258", *arguments))
        found.append(json.loads((output / "tokenizer.json").read_text())["model"]["merges"])
    assert found == [[["a", "b"]], [["x", "y"]]]


def train_both(root):
    """Train two tiny runs on the same text: one in tokens of its own, one in bytes."""
    workplace = Workplace(root)
    documents = workplace.root / "documents"
    documents.mkdir()
    for number in range(100):
        text = " ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(60))
        (documents / f"{number:03}.txt").write_text(text)
    succeeded(lab_tokenizer(documents, workplace.root / "own", "--vocab-size", "300"))
    for name, tokenizer, size in (("own", str(workplace.root / "own"), 304),
                                  ("bytes", "bytes", 257)):
        prepare_dataset(find_documents(documents), workplace.datasets_dir / name,
                        PrepareOptions(tokenizer=tokenizer, validation_fraction=0.1))
        workplace.add_run(name, model={"vocab_size": size}, train={
            "dataset": name, "min_train_tokens": 20 * 64, "validation_interval": 10,
            "sample_prompts": ["the naïve"] if name == "own" else None})
        process_succeeded(workplace.torchrun(1, name))


@pytest.fixture
def trained(tmp_path_factory, tmp_path):
    root = made_once(tmp_path_factory, "own-tokenizer", train_both)
    return Workplace(shutil.copytree(root, tmp_path / "workplace", symlinks=True))


def target_of(workplace, name="own"):
    return load_model(name, runs_dir=workplace.runs_dir, device=torch.device("cpu"))


def test_a_run_writes_text_of_its_tokenizer_and_bits_per_byte(trained):
    samples = read_lines(trained.runs_dir / "own/samples.jsonl")
    assert len(samples) == 2 and all(sample["text"] for sample in samples)
    for name in ("own", "bytes"):
        records = read_lines(trained.runs_dir / name / "metrics.jsonl")
        validated = [record for record in records if "validation_loss" in record]
        summary = json.loads((trained.runs_dir / name / "summary.json").read_text())
        assert summary["tokenizer"] == target_of(trained, name).tokenizer_name
        assert summary["validation_bits_per_byte"] == validated[-1]["validation_bits_per_byte"]
    ratio = validated[-1]["validation_loss"] / validated[-1]["validation_bits_per_byte"]
    assert ratio == pytest.approx(0.6931, rel=0.02)  # bytes; end-of-text tokens add none


def test_a_run_needs_no_dataset_to_write_text_and_to_be_exported(trained, tmp_path):
    output = tmp_path / "export"
    shutil.rmtree(trained.datasets_dir / "own")
    shutil.rmtree(trained.root / "own")
    checkpoint = trained.runs_dir / "own/checkpoints/best"
    assert "tokenizer.json" in json.loads((checkpoint / "manifest.json").read_text())["files"]
    where = ("--runs-dir", str(trained.runs_dir))
    text = succeeded(run_lab("generate", "own", "--prompt", "the naïve", *where)).stdout
    assert text.startswith("the naïve")
    succeeded(run_lab("publish", "own", "--output", str(output), *where, HF_TOKEN=""))
    ours, theirs = target_of(trained), GPT2LMHeadModel.from_pretrained(output).eval()
    tokenizer, automatic = ours.load_tokenizer(), AutoTokenizer.from_pretrained(output)
    prompt = "the cat's naïve 🎉 它\n\n hat"
    ids = tokenizer.encode_ordinary(prompt)
    assert automatic(prompt, add_special_tokens=False).input_ids == ids
    assert (automatic.eos_token_id, theirs.config.eos_token_id) == (0, 0)
    tokens = torch.tensor([ids[:16]])
    with torch.no_grad():
        assert (ours.model(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    exported = load_model(str(output), runs_dir=trained.runs_dir)
    assert exported.tokenizer_name == ours.tokenizer_name
    assert succeeded(run_lab("generate", str(output), "--prompt", "the naïve")).stdout == text
    assert "(tokenizer.json)" in (output / "README.md").read_text()


def test_bits_per_byte_compare_runs_with_different_tokenizers(trained):
    compare = ("compare", "--runs-dir", str(trained.runs_dir))
    assert "the bits are not of the same text" in succeeded(run_lab(*compare)).stdout
    result = succeeded(run_lab(*trained.arguments("evaluate", "own", "bytes")))
    rows = [re.sub(r"\[.*?\]", "", line).split() for line in result.stdout.splitlines()[2:]]
    bits = [float(row[4]) for row in rows]
    assert bits == sorted(bits) and {row[0] for row in rows} == {"own", "bytes"}
    records = {name: read_lines(trained.runs_dir / name / "evaluations.jsonl")[-1]
               for name in ("own", "bytes")}
    for name, record in records.items():
        target = target_of(trained, name)
        file = trained.datasets_dir / name / "validation.safetensors"
        tokens = load_file(file)["tokens"]
        lengths = byte_lengths(target.load_tokenizer(), num_ids=304)
        num_bytes = int(lengths[tokens[1:]].sum())
        assert record["num_tokens"] == len(tokens) - 1
        assert record["bits_per_byte"] == pytest.approx(
            record["loss"] * record["num_tokens"] / 0.6931471805599453 / num_bytes)
    text_bytes = sum(path.stat().st_size
                     for path in sorted((trained.root / "documents").iterdir())[-10:])
    assert abs(num_bytes - text_bytes) < 3  # the first token is not predicted
    assert records["own"]["num_tokens"] < records["bytes"]["num_tokens"] / 1.5
    table = succeeded(run_lab(*compare)).stdout
    assert "sorted by bits per byte of the test loss" in table
    assert "losses (nats per token) do not compare" in table and "not of the same text" not in table


def test_text_of_another_tokenizer_or_other_text_is_not_measured(trained):
    assert "validation.safetensors: the tokenizer is bytes, but that of own is sha256:" in (
        error_line(run_lab(*trained.arguments("evaluate", "own", "--dataset", "bytes"))))
    assert "--start-token and --tokens would choose different text" in error_line(
        run_lab(*trained.arguments("evaluate", "own", "bytes", "--tokens", "100")))
    documents = trained.root / "documents"
    changed = documents / "099.txt"
    changed.write_text(changed.read_text() + "!")  # the number of documents stays the same
    shutil.rmtree(trained.datasets_dir / "bytes")
    prepare_dataset(find_documents(documents), trained.datasets_dir / "bytes",
                    PrepareOptions(tokenizer="bytes", validation_fraction=0.1))
    assert "the targets were trained on different ones: own and bytes" in error_line(
        run_lab(*trained.arguments("evaluate", "own", "bytes")))


def test_a_dataset_without_its_tokenizer_is_refused_by_the_trainer(trained):
    trained.add_run("new", model={"vocab_size": 304}, train={"dataset": "own"})
    path = trained.datasets_dir / "own/tokenizer.json"
    content = path.read_text()
    for damaged, message in (
        (content.replace('"use_regex": true', '"use_regex": false', 1),
         "has changed: the tokens were made with the tokenizer sha256:"),
        (content[:1000], "not a whole tokenizer.json"), (None, "tokenizer.json: no such file")):
        path.unlink() if damaged is None else path.write_text(damaged)
        assert message in refused(trained, "new").replace(os.linesep, "")


def test_a_damaged_copy_makes_a_checkpoint_damaged(trained):
    for path in (trained.runs_dir / "own/checkpoints").glob("*/tokenizer.json"):
        path.write_text(path.read_text().replace("true", "True", 1))
    assert "tokenizer.json has changed since it was written" in error_line(
        run_lab(*trained.arguments("evaluate", "own")))
