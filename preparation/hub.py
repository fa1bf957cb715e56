"""The Hugging Face hub: token datasets to train on, and documents to prepare them from."""

import contextlib
import errno
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, logging
from tqdm import tqdm

from basics.errors import FAILED, UserError, as_os_error, first_line, one_line
from preparation.choosing import WILDCARDS, SourceOptions, choose_files, config_patterns
from preparation.reading import file_tasks
from preparation.sources import Request, Shard, Source, source_of
from tokens.tokenizer import TOKENIZER_FILE

PAUSES = (1, 5, 20)  # seconds before each further attempt, beside those of the client
TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP statuses
LEFTOVER_SECONDS = 600  # a partial file that was not written for so long is abandoned
NO_REPOSITORY = (
    "there is no such repository, or it is private: check the name, or set HF_TOKEN to"
    " a token that may read it (`uv run hf auth login` stores one)"
)
OFFLINE = (
    "it is not on this machine, and HF_HUB_OFFLINE keeps the client from asking for it: unset that,"
    " or fetch it first (ddp_train.py RUN --prefetch)"
)
REASONS: tuple[tuple[type[Exception], str], ...] = (  # the first that fits; empty: it may pass
    (errors.OfflineModeIsEnabled, OFFLINE),
    (
        errors.GatedRepoError,
        "you must accept its conditions on its web page first, then set HF_TOKEN",
    ),
    (errors.RepositoryNotFoundError, NO_REPOSITORY),
    (errors.RevisionNotFoundError, "there is no such revision"),
    (errors.LocalEntryNotFoundError, ""),  # the hub does not answer
    (errors.EntryNotFoundError, "there is no such file"),
)
T = TypeVar("T")


def fetch_dataset(dataset_dir: Path, repository: str, splits: Sequence[str]) -> None:
    """Download splits of a token dataset. One process of all that share the directory.

    Files get their final names when complete; complete files are not downloaded again. Raises:
    UserError: the hub cannot be reached or has no such dataset for this user; OSError: a full disk.
    """
    info = ask_hub(repository, lambda: HfApi().dataset_info(repository))
    present = {file.rfilename for file in info.siblings or ()}
    # The tokenizer first: a dataset with all token files counts as complete.
    for name in (*{TOKENIZER_FILE} & present, *(f"{split}.safetensors" for split in splits)):
        _download(repository, name, revision=info.sha, local_dir=dataset_dir)


@dataclass(frozen=True, kw_only=True)
class HubShard(Shard):
    """A file on the hub; it is on this machine only while it is read, unless it is kept."""

    repository: str
    revision: str | None
    raw_dir: Path
    is_kept: bool

    def fetch(self) -> None:
        hide_progress_bars()  # there is one already
        if self.missing_bytes():
            tqdm.write(
                one_line(f"downloading {self.name}, {self.num_bytes / 1e9:.2f} GB"), file=sys.stderr
            )
        _download(self.repository, self.name, revision=self.revision, local_dir=self.raw_dir)

    def missing_bytes(self) -> int:
        return 0 if (self.raw_dir / self.name).exists() else self.num_bytes

    def release(self) -> None:
        if not self.is_kept:
            (self.raw_dir / self.name).unlink(missing_ok=True)


def hub_source(options: SourceOptions, *, raw_dir: Path) -> Source:
    """Find the documents of a dataset on the hub; see `find_source`."""
    repository = options.source
    is_kept = options.keep_raw is not None
    raw_dir = options.keep_raw or raw_dir
    info = ask_hub(
        repository, lambda: HfApi().dataset_info(repository, revision=options.revision or None)
    )
    entries = ask_hub(repository, lambda: _files(repository, options.subset, info.sha))
    check_names(repository, [entry.path for entry in entries])
    entries.sort(key=lambda entry: entry.path)
    files = {entry.path: entry for entry in entries}
    card = info.card_data
    patterns = config_patterns(card.to_dict() if card else {})
    kinds, chosen = choose_files(files, options, f"{repository} on the hub", patterns)
    shards = []
    for path in chosen:
        entry = files[path]
        shards.append(
            HubShard(
                name=path,
                identity=entry.lfs.sha256 if entry.lfs else entry.blob_id,
                num_bytes=entry.size,
                tasks=partial(file_tasks, [raw_dir / path], raw_dir, options),
                repository=repository,
                revision=info.sha,
                raw_dir=raw_dir,
                is_kept=is_kept,
            )
        )
    licences = _names(card and card.license, "unknown")
    request = Request(
        source=options.label(),
        revision=info.sha or "",
        title=repository,
        licence=licences if len(licences) > 1 else licences[0],
        languages=_names(card and card.language, "en"),
        hub_name=repository,
    )
    return replace(source_of(options, request, shards, kinds), raw_dir=raw_dir, keeps_raw=is_kept)


def _names(listed: Any, default: str) -> list[str]:
    """Return what a dataset's card lists under a key: a text, or several."""
    values = listed if isinstance(listed, list) else [listed]
    return [str(value) for value in values if value] or [default]


def _files(repository: str, subset: str, revision: str | None) -> list[RepoFile]:
    """List the files of the directory `subset`; of the whole repository if it is none."""

    def files_in(directory: str | None) -> list[RepoFile]:
        tree = HfApi().list_repo_tree(
            repository, directory, recursive=True, revision=revision, repo_type="dataset"
        )
        return [entry for entry in tree if isinstance(entry, RepoFile)]

    if subset and not WILDCARDS & set(subset):
        with contextlib.suppress(errors.EntryNotFoundError):
            return files_in(subset)
    return files_in(None)


def ask_hub(subject: str, action: Callable[[], T], *, pauses: Sequence[float] = PAUSES) -> T:
    """Do something with the hub; after errors that may be transient, pause and try again.

    Raises: UserError: it failed; says why, and what to do. OSError: the disk is full.
    """
    logging.set_verbosity_error()  # the client prints its retries, and what servers warn of, raw
    subject += " on the Hugging Face hub"
    for pause in (*pauses, None):
        try:
            return action()
        except (
            errors.HTTPError,
            errors.EntryNotFoundError,
            OSError,
            ValueError,
            RuntimeError,
        ) as error:
            on_disk = as_os_error(error) if isinstance(error, RuntimeError) else error  # of hf_xet
            if getattr(on_disk, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
                raise on_disk from None
            if reason := _permanent_reason(error):
                raise UserError(f"{subject}: {reason}") from None
            if pause is None:
                advice = "check the network"
                if _status(error) == 429:
                    advice = "set HF_TOKEN, whose limits are higher, or wait some minutes"
                raise UserError(
                    f"{subject}: {first_line_without_token(error)}; {advice}, then run the same"
                    " command again",
                    FAILED,
                ) from None
        time.sleep(pause)
    raise AssertionError


def _permanent_reason(error: Exception) -> str:
    """Return why another attempt cannot help; empty if it may."""
    if constants.HF_HUB_OFFLINE and isinstance(error, errors.LocalEntryNotFoundError):
        return OFFLINE
    for kind, reason in REASONS:
        if isinstance(error, kind):
            return reason
    status = _status(error)
    if status in (401, 403):
        return NO_REPOSITORY
    may_help = isinstance(error, errors.HTTPError | OSError | RuntimeError)
    return "" if may_help and status in (None, *TRANSIENT) else first_line_without_token(error)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def first_line_without_token(error: Exception) -> str:
    """Return the first line of an error; a server may repeat the request's token in it."""
    token = get_token()
    return first_line(Exception(str(error).replace(token, "***")) if token else error)


def hide_progress_bars() -> None:
    """Keep the client from drawing bars, which show the names of files as they are."""
    disable_progress_bars()


def check_names(repository: str, names: Sequence[str]) -> None:
    """Check that all files stay inside the download directory. Raises: UserError."""
    for name in names:
        if ".." in name.split("/") or name.startswith("/"):
            raise UserError(
                f"{repository} on the hub: {name[:60]!r} is no name inside a"
                " repository; use another dataset"
            )


def _download(repository: str, name: str, *, revision: str | None, local_dir: Path) -> None:
    """Download a file. After a broken connection the download continues where it stopped; the
    partial file of a killed process cannot be used again, so it is deleted."""
    for path in (local_dir / ".cache" / "huggingface" / "download").rglob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # another download has just finished it
            if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                path.unlink()
    ask_hub(
        f"{repository}: {name}",
        lambda: hf_hub_download(
            repository, name, repo_type="dataset", revision=revision, local_dir=local_dir
        ),
    )
