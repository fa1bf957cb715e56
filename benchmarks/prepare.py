"""prepare_dataset.py beside tiktoken alone and the original's method.

    uv run python -m benchmarks.prepare

Gives tokens per second, in turn and in new processes, of: prepare_dataset.py; one process per core
that only encodes text in memory; and the method of the original, which keeps all in memory. The
first and the last are timed from start to end, and must write the same tokens.
"""

import ast
import multiprocessing
import random
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from safetensors.numpy import load_file

from basics.machine import PROJECT_DIR, num_cpu_cores
from tokens.tokenizer import load_tokenizer

MEAN_SENTENCES = 30  # FineWeb's documents have about 3,000 characters
AS_THE_ORIGINAL = (
    "import sys; from pathlib import Path; from benchmarks import prepare;"
    " prepare.prepare_as_the_original(*map(Path, sys.argv[1:]))"
)


def prose() -> list[str]:
    """Collect the sentences of the docstrings and the reference manual in the standard library."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        with suppress(SyntaxError, ValueError):
            texts += [
                node.value
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and len(node.value) > 200
            ]
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(" ".join(texts).split()))
    return [sentence for sentence in sentences if 20 < len(sentence) < 400]


def build_corpus(folder: Path, num_bytes: int, *, num_files: int = 4) -> None:
    """Write parquet files with FineWeb's columns: num_bytes of text, 1,000 rows per row group."""
    generator, sentences = random.Random(0), prose()
    folder.mkdir(parents=True)
    for number in range(num_files):
        rows, size = [], 0
        while size < num_bytes / num_files:
            count = 1 + int(generator.expovariate(1 / MEAN_SENTENCES))
            rows.append(
                "\n".join(
                    " ".join(generator.choices(sentences, k=min(6, count - first)))
                    for first in range(0, count, 6)
                )
            )
            size += len(rows[-1].encode())
        ids = [f"<urn:uuid:{generator.getrandbits(128):032x}>" for _ in rows]
        table = pyarrow.table(
            {
                "text": rows,
                "id": ids,
                "dump": ["CC-MAIN-2024-10"] * len(rows),
                "url": [f"https://example.org/{i}" for i in ids],
                "language": ["en"] * len(rows),
                "language_score": [0.95] * len(rows),
                "token_count": [len(row) // 4 for row in rows],
            }
        )
        pyarrow.parquet.write_table(
            table, folder / f"{number:03}_00000.parquet", row_group_size=1000, compression="zstd"
        )


def peak_memory_of(command: Sequence[str | Path]) -> float:
    """Run a command; return the peak PSS of its process tree in MiB, sampled five times a second.

    PSS counts shared pages once. Raises: subprocess.CalledProcessError.
    """
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            total = 0
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.Error, ProcessLookupError):  # it has ended
                    total += each.memory_full_info().pss
            peak = max(peak, total)
            time.sleep(0.2)
        if process.returncode:
            output.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, output.read())
    return peak / 2**20


def bare_rate(corpus: Path, num_workers: int) -> float:
    """Return the tokens per second of one process per core, with all text already in memory."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(num_workers), context.SimpleQueue()
    processes = [
        context.Process(target=_encode_share, args=(corpus, share, barrier, results))
        for share in range(num_workers)
    ]
    for process in processes:
        process.start()
    starts, ends, num_tokens = zip(*[results.get() for _ in processes], strict=True)
    for process in processes:
        process.join()
    return sum(num_tokens) / (max(ends) - min(starts))


def _encode_share(corpus: Path, share: int, barrier, results) -> None:
    tokenizer: Any = load_tokenizer("gpt2")
    column = pyarrow.parquet.read_table(corpus, columns=["text"])["text"]
    texts = column.to_pylist()[share :: barrier.parties]
    barrier.wait()
    start = time.perf_counter()
    num_tokens = sum(tokenizer.encode_to_numpy(text, disallowed_special=()).size for text in texts)
    results.put((start, time.perf_counter(), num_tokens + len(texts)))


def prepare_as_the_original(corpus: Path, output: Path) -> None:
    """Load everything, encode batches into lists with tiktoken's threads, concatenate and save.

    The original reads with Hugging Face's datasets, which first copies the corpus into a
    memory-mapped Arrow file and returns slices of rows with all their columns.
    """
    import torch
    from safetensors.torch import save_file

    tokenizer: Any = load_tokenizer("gpt2")
    cache = output.with_name("cache.arrow")
    table = pyarrow.parquet.read_table(corpus)
    with pyarrow.ipc.new_stream(cache, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(cache))).read_all()
    num_train = round(len(table) * 0.99)
    output.mkdir()
    for split, part in (("validation", table[num_train:]), ("train", table[:num_train])):
        results = []
        for first in range(0, len(part), 1000):
            tokens: list[int] = []
            rows = part.slice(first, 1000).to_pydict()
            for ids in tokenizer.encode_batch(rows["text"], allowed_special={"<|endoftext|>"}):
                tokens.extend(ids)
                tokens.append(tokenizer.eot_token)
            results.append(torch.tensor(tokens, dtype=torch.uint16))
        save_file({"tokens": torch.cat(results)}, output / f"{split}.safetensors")


@click.command()
@click.argument("corpus", type=click.Path(path_type=Path), required=False)
@click.option(
    "--megabytes",
    default=750,
    show_default=True,
    help="Text in the generated corpus; its parquet files have two fifths of this size.",
)
@click.option("--repeats", default=3, show_default=True)
@click.option("--workers", default=num_cpu_cores(), show_default=True)
def main(corpus: Path | None, megabytes: int, repeats: int, workers: int) -> None:
    """Measure on CORPUS, a directory of parquet files, or on a generated one."""
    with tempfile.TemporaryDirectory() as folder:
        if corpus is None:
            corpus = Path(folder) / "sample" / "10BT"
            build_corpus(corpus, megabytes * 10**6)
        output = Path(folder) / "tokens"
        commands: dict[str, list[str | Path]] = {
            "ours": [
                sys.executable,
                PROJECT_DIR / "prepare_dataset.py",
                corpus,
                output,
                "--workers",
                str(workers),
            ],
            "original": [sys.executable, "-c", AS_THE_ORIGINAL, corpus, output],
        }
        rates: dict[str, list[float]] = {"ours": [], "bare": [], "original": []}
        for _ in range(repeats):
            tokens = []
            for name, command in commands.items():
                shutil.rmtree(output, ignore_errors=True)
                started = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                seconds = time.perf_counter() - started
                tokens.append(
                    np.concatenate(
                        [
                            load_file(output / f"{split}.safetensors")["tokens"]
                            for split in ("validation", "train")
                        ]
                    )
                )
                rates[name].append(tokens[-1].size / seconds)
            assert np.array_equal(tokens[0], tokens[1])
            rates["bare"].append(bare_rate(corpus, workers))
        click.echo(f"{workers} workers, medians of {repeats}")
        for name, command in commands.items():  # at last: measuring it slows the command
            shutil.rmtree(output)
            click.echo(f"{name:>9} peak memory {peak_memory_of(command):,.0f} MiB")
    for name, found in rates.items():
        rate = statistics.median(found)
        click.echo(
            f"{name:>9} {rate / 1e6:6.2f} M tokens/s, ours / {name}:"
            f" {statistics.median(rates['ours']) / rate:.2f}"
        )


if __name__ == "__main__":
    main()
