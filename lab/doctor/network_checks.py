"""Checks of the Hugging Face hub: only where a run needs it, or --online asks for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from basics.errors import UserError, first_line
from lab.doctor.check import Finding, Subject, ok, problem, warning
from lab.doctor.host_checks import existing
from preparation.ensure_dataset import is_complete

ASK_SECONDS = 8.0  # for one answer of the hub
TOKEN_FILES = ("train.safetensors", "validation.safetensors", "tokenizer.json")
ROLES = {"read": "may read only, so lab publish would fail", "write": "may write"}
T = TypeVar("T")


def dataset_to_download(subject: Subject) -> str | None:
    """Return the hub's name of the run's dataset, if it is not on this machine yet."""
    if subject.run is None or "/" not in subject.run.train.dataset:
        return None
    name = subject.run.train.dataset
    return None if is_complete(subject.datasets_dir / name) else name


def model_to_download(subject: Subject) -> str | None:
    """Return the hub's name of the model that the run starts from, if it has not started yet."""
    name = subject.run.train.init_from if subject.run else None
    if not name or (subject.run.checkpoints_dir / "latest").exists():
        return None
    is_here = "/" not in name or Path(name).is_dir()
    return None if is_here else name


def is_asked(subject: Subject) -> bool:
    """Return whether the hub may be asked anything at all."""
    return subject.is_online or bool(dataset_to_download(subject) or model_to_download(subject))


def check_hub(subject: Subject) -> Finding | None:
    """Ask the hub for nothing but an answer, where no repository is asked for."""
    if not subject.is_online or dataset_to_download(subject) or model_to_download(subject):
        return None
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    place = constants.ENDPOINT
    try:
        get_session().head(place, timeout=ASK_SECONDS)
    except Exception as error:  # of whichever HTTP library the client uses
        return warning(f"{place} does not answer ({first_line(error)})",
                       "check the network, a proxy (HTTPS_PROXY) and the clock of this machine")
    return ok(f"{place} answers")


def check_dataset(subject: Subject) -> Finding | None:
    """Check that the run's dataset can be downloaded, and that the disk has room for it."""
    name = dataset_to_download(subject)
    if name is None:
        return None
    from huggingface_hub import HfApi

    try:
        info = _ask(name, lambda: HfApi().dataset_info(
            name, files_metadata=True, timeout=ASK_SECONDS))
    except UserError as error:
        return problem(*_split(error))
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    missing = [file for file in TOKEN_FILES[:2] if file not in sizes]
    if missing:
        return problem(f"{name} on the hub has no {missing[0]}",
                       "name a dataset of token files, or make one with prepare_dataset.py")
    needed = sum(sizes.get(file, 0) for file in TOKEN_FILES)
    free = shutil.disk_usage(existing(subject.datasets_dir)).free
    text = (f"{name} is on the hub: {needed / 1e9:,.1f} GB are downloaded when training starts,"
            f" {free / 1e9:,.1f} GB are free")
    return ok(text) if needed < free else problem(
        text, "make room, or name another place with --datasets-dir")


def check_model(subject: Subject) -> Finding | None:
    """Check that the model that the run starts from can be downloaded."""
    name = model_to_download(subject)
    if name is None:
        return None
    from huggingface_hub import HfApi

    try:
        _ask(name, lambda: HfApi().model_info(name, timeout=ASK_SECONDS))
    except UserError as error:
        return problem(*_split(error))
    return ok(f"{name} is on the hub")


def check_token(subject: Subject) -> Finding | None:
    """Check what the hub's token may do; its text is never shown."""
    if not is_asked(subject):
        return None
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if not get_token():
        return ok("none: enough for public datasets and models, not for lab publish")
    try:
        about = HfApi().whoami()
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise UserError(f"the hub answers {error.response.status_code}") from None
        return warning("the hub refuses it", "store another one: uv run hf auth login")
    except Exception as error:  # its message may repeat the request
        raise UserError(f"the hub does not answer ({type(error).__name__})") from None
    return ok(f"of {about.get('name', 'an unknown user')}: {_scope(about)}")


def _scope(about: dict[str, Any]) -> str:
    """Say what a token may do, from the answer of whoami."""
    token = (about.get("auth") or {}).get("accessToken") or {}
    role = token.get("role")
    if role != "fineGrained":
        return ROLES.get(role, "what it may do is not known")
    fine = token.get("fineGrained") or {}
    places = [scope.get("entity", {}).get("name", "?") for scope in fine.get("scoped") or ()
              if "repo.write" in (scope.get("permissions") or ())]
    if "repo.write" in (fine.get("global") or ()):
        return ROLES["write"]
    return f"may write to {', '.join(places)}" if places else ROLES["read"]


def _ask(name: str, action: Callable[[], T]) -> T:
    from preparation.hub import ask_hub

    return ask_hub(name, action, pauses=())


def _split(error: UserError) -> tuple[str, str]:
    """Return what failed and what to do, which an error's line has behind a semicolon."""
    text, _, advice = str(error).partition("; ")
    return text, advice or "correct the name in train.json, or the hub's token"


CHECKS = {"hub": check_hub, "dataset": check_dataset, "initial model": check_model,
          "hub token": check_token}
