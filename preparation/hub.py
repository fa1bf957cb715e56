"""The Hugging Face hub: questions to it, and the token datasets that runs train on."""

import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_download
from huggingface_hub.utils import disable_progress_bars, logging

from basics.errors import FAILED, UserError, as_os_error, first_line
from settings.data import token_file_name
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
    for name in (*{TOKENIZER_FILE} & present, *(token_file_name(split) for split in splits)):
        _download(repository, name, revision=info.sha, local_dir=dataset_dir)


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
            if pause is None or _permanent_reason(error):
                raise explain(subject, error) from None
        time.sleep(pause)
    raise AssertionError


def explain(subject: str, error: Exception) -> UserError:
    """Return the line for an error of the hub: why, and what to do."""
    if reason := _permanent_reason(error):
        return UserError(f"{subject}: {reason}")
    advice = "check the network"
    if _status(error) == 429:
        advice = "set HF_TOKEN, whose limits are higher, or wait some minutes"
    return UserError(
        f"{subject}: {first_line_without_token(error)}; {advice}, then run the same command again",
        FAILED,
    )


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
    if isinstance(error, FileNotFoundError):  # `datasets` has looked for files
        return first_line_without_token(error)
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
