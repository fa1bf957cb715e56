"""Which models `lab evaluate` measures: targets, and checkpoints of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from basics.checkpoint_files import BEST, directory_of, named_as_checkpoints
from basics.errors import UserError, one_line, print_error
from checkpointing import find_checkpoint, open_checkpoint
from run_config import Run, load_run
from trainer.models import check_name, is_run

ALL = "all"


@dataclass(frozen=True)
class Chosen:
    """A target by its name, and of a run one of its checkpoints.

    Attributes:
        checkpoint: its name, found when the command began.
        asked_for: `latest`, `best` or the name: what replaces a checkpoint that a training run has
            removed meanwhile.
        is_optional: it is one of all, so that it may be missing or damaged.
    """

    name: str
    checkpoint: str = BEST
    asked_for: str = BEST
    is_optional: bool = False


def choose_models(names: tuple[str, ...], checkpoints: str, runs_dir: Path) -> list[Chosen]:
    """Return all models that are asked for, each once; warn about damaged checkpoints of all.

    Args:
        names: targets; RUN@CHECKPOINT chooses this run's own checkpoints.
        checkpoints: of runs: `all`, or names separated by commas.

    Raises:
        UserError: one does not exist, or is damaged.
    """
    found: list[Chosen] = []
    for text in names:
        name, own = _split(text, runs_dir)
        check_name(name, runs_dir)
        if is_run(name, runs_dir):
            run = load_run(runs_dir, name)
            found += _checkpoints(run, own or checkpoints)
        elif own:
            raise UserError(f"{text}: {name} is no run, so it has no checkpoints; give"
                            f" {name} alone")
        else:
            found.append(Chosen(name))
    return list({(one.name, one.checkpoint): one for one in reversed(found)}.values())[::-1]


def _split(text: str, runs_dir: Path) -> tuple[str, str]:
    """Split RUN@CHECKPOINT; a directory may have an @ in its name."""
    name, _, checkpoints = text.partition("@")
    is_whole = is_run(text, runs_dir) or directory_of(Path(text)).is_dir()
    return (text, "") if is_whole or not checkpoints else (name, checkpoints)


def _checkpoints(run: Run, wanted: str) -> list[Chosen]:
    """Open the checkpoints of a run; those of `all` only quickly. Raises: UserError."""
    if wanted == ALL:
        names = _sound_ones(run.checkpoints_dir)
        return [Chosen(run.name, name, name, is_optional=True) for name in names]
    found = [(find_checkpoint(run.checkpoints_dir, name), name) for name in wanted.split(",")]
    if None in (checkpoint for checkpoint, _ in found):
        raise _no_checkpoint(run.checkpoints_dir)
    return [Chosen(run.name, checkpoint.name, name) for checkpoint, name in found]


def _sound_ones(directory: Path) -> list[str]:
    """Return the names of the checkpoints; warn about damaged ones. Raises: UserError: none."""
    names = []
    for path in named_as_checkpoints(directory):
        try:
            names.append(open_checkpoint(path).name)
        except UserError as error:
            warn_of_skipped(error)
    if not names:
        raise _no_checkpoint(directory)
    return names


def warn_of_skipped(error: UserError) -> None:
    """Warn about a checkpoint that is left out."""
    print_error(f"warning: left out: {one_line(str(error))}")


def _no_checkpoint(directory: Path) -> UserError:
    return UserError(f"{directory}: no checkpoint yet; train the run first")
