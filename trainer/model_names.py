"""Which model a name means: a run's, a directory of weights, or one on the hub. Without torch."""

import re
from collections.abc import Iterable
from pathlib import Path

from basics.checkpoint_files import directory_of
from basics.entry_points import say_torch_loads
from basics.errors import UserError
from run_config import NamedRun, find_run, is_run_dir, no_such_run, plain_name

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def check_before_torch(names: Iterable[str], runs_dir: Path) -> None:
    """Check the names of models, then say what the next seconds are for. Raises: UserError."""
    for name in names:
        find_model(name, runs_dir)
    say_torch_loads()


def find_model(text: str, runs_dir: Path) -> NamedRun | None:
    """Return the run, and perhaps its checkpoint, that a person means by a model.

    None for a directory of weights and for owner/name. A run comes first, but a directory before a
    shipped run without a copy, and before RUN@CHECKPOINT.

    Raises: UserError: it is none of these.
    """
    named, place = find_run(runs_dir, text), directory_of(Path(text))
    is_copied = named is not None and (runs_dir / named.name).is_dir()
    if place.is_dir() and not (is_copied and "@" not in text or is_run_dir(place)):
        return None
    if named is None:
        name = plain_name(runs_dir, text)
        if HUB_NAME.fullmatch(name) and not is_run_dir(place):
            return None
        base, at, _ = text.partition("@")
        is_other = HUB_NAME.fullmatch(base) or (base and Path(base).is_dir())
        if at and is_other and not is_run_dir(Path(base)):
            raise UserError(
                f"{text}: {base} is no run, so it has no checkpoints; give {base} alone"
            )
        raise no_such_run(runs_dir, text)
    return named
