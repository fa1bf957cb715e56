"""Make sure that the dataset of a run is on this machine, and that downloads are whole."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from filelock import FileLock

from basics.errors import UserError, writing_to
from basics.files import put_back, sha256_of
from basics.text import did_you_mean
from run_config import TrainConfig
from settings.data import DATASET_NAME, SPLITS, token_file_name

STDLIB_DATASET = "python-stdlib"  # every machine has this text: prepared when it is first used
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_NAMES = 10  # of datasets, in an error
CLOCK_SECONDS = 1.0  # a file's time may be that much later than its record's


def provide_datasets(datasets_dir: Path, config: TrainConfig) -> None:
    """Provide a run's dataset, and those of its validation sets. As `provide_dataset`."""
    provide_dataset(datasets_dir / config.dataset, config.dataset, splits_of(config))
    for name in config.validation_datasets:
        provide_dataset(datasets_dir / name, name, ["validation"])


def splits_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the splits of its dataset that a run reads: `validation` names other sets."""
    return ("train",) if config.validation else SPLITS


def provide_dataset(dataset_dir: Path, name: str, splits: Sequence[str] = SPLITS) -> None:
    """Prepare or download a dataset if it is not on this machine. One process of each node.

    Only `splits` are downloaded. Raises: UserError: there is no such dataset, or it cannot be
    downloaded or written.
    """
    if not re.fullmatch(DATASET_NAME, name):
        raise UserError(
            f"dataset {name[:60]!r}: wanted the name that prepare_dataset.py gave to a directory,"
            " or of a dataset on the hub: owner/name"
        )
    if is_complete(dataset_dir, splits):
        return
    put_back(dataset_dir)
    if is_complete(dataset_dir, splits):
        return
    if "/" not in name and name != STDLIB_DATASET:
        raise no_dataset(dataset_dir, splits)
    lock_path = dataset_dir.with_name(f".{dataset_dir.name}.lock")
    with writing_to(dataset_dir):
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock_path):  # nodes may share the directory: one fetches, the others wait
            if is_complete(dataset_dir, splits):
                pass
            elif name == STDLIB_DATASET:
                from preparation.pipeline import PrepareOptions, prepare_dataset
                from preparation.sources import python_stdlib

                prepare_dataset(python_stdlib(), dataset_dir, PrepareOptions(tokenizer="bytes"))
            else:
                from preparation.hub import fetch_dataset

                fetch_dataset(dataset_dir, name, splits)
            lock_path.unlink(missing_ok=True)


def no_dataset(dataset_dir: Path, splits: Sequence[str]) -> UserError:
    """Return the error for a dataset that is neither on this machine nor one of the hub."""
    missing = [split for split in splits if not is_complete(dataset_dir, [split])]
    if len(missing) < len(splits):
        return UserError(
            f"{dataset_dir / token_file_name(missing[0])}: is missing, beside the other split's"
            " file: move the directory away, and prepare the dataset again"
        )
    found = dataset_dir.parent.glob(f"[!.]*/{token_file_name('train')}")
    prepared = sorted(path.parent.name for path in found)
    advice = did_you_mean(dataset_dir.name, [STDLIB_DATASET, *prepared])
    if prepared and not advice:
        advice = f" (there are: {', '.join(prepared[:MAX_NAMES])})"
    return UserError(
        f"{dataset_dir}: no dataset there{advice}; make it: uv run prepare_dataset.py SOURCE"
        f" {dataset_dir}, or name one on the hub: owner/name"
    )


def is_complete(dataset_dir: Path, splits: Sequence[str] = SPLITS) -> bool:
    """Return whether token files exist under their final names."""
    return all((dataset_dir / token_file_name(split)).is_file() for split in splits)


def verify_digests(paths: Iterable[Path]) -> int:
    """Compare files with their known digests; return how many have one. Raises: UserError: a file
    is damaged, or cannot be read."""
    num_known = 0
    for path in paths:
        if (known := digest_of_download(path)) is not None:
            try:
                found = sha256_of(path)
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from None
            if found != known:
                raise UserError(
                    f"{path}: is damaged: its SHA-256 is not what the hub gave for it;"
                    " delete it and run the same command again"
                )
            num_known += 1
    return num_known


def digest_of_download(path: Path) -> str | None:
    """Return the SHA-256 that the hub gave for a file; None if it is not known.

    In the hub client's cache it is the name of the file that a link leads to. In a directory of
    our own the client keeps a record of three lines: the commit, the digest, the time in seconds.
    """
    digest = path.resolve().name
    if not path.is_symlink():
        record = path.parent / ".cache/huggingface/download" / f"{path.name}.metadata"
        try:
            _, digest, written_at = record.read_text().splitlines()[:3]
            if path.stat().st_mtime - CLOCK_SECONDS > float(written_at):
                return None  # the file was written later
        except (OSError, ValueError):
            return None
    return digest if SHA256.fullmatch(digest) else None
