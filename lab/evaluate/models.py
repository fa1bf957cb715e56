"""Which models `lab evaluate` measures: targets, and checkpoints of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from basics.checkpoint_names import BEST, LATEST, directory_of, named_as_checkpoints
from basics.errors import UserError
from checkpointing import find_checkpoint, list_checkpoints
from run_config import Run, load_run
from trainer.targets import check_name, is_run

ALL = "all"


@dataclass(frozen=True)
class Chosen:
    """A target by its name; of a run, one of its checkpoints (`latest`, `best` or a name)."""

    name: str
    checkpoint: str = BEST


def choose_models(names: tuple[str, ...], checkpoints: str, runs_dir: Path) -> list[Chosen]:
    """Return all models that are asked for, each once.

    Args:
        names: targets; RUN@CHECKPOINT chooses this run's own checkpoints.
        checkpoints: of runs: `all`, or names separated by commas.

    Raises:
        UserError: one does not exist.
    """
    found: list[Chosen] = []
    for text in names:
        name, own = _split(text, runs_dir)
        check_name(name, runs_dir)
        if is_run(name, runs_dir):
            run = load_run(runs_dir, name)
            found += [Chosen(name, one) for one in _checkpoints(run, own or checkpoints)]
        elif own:
            raise UserError(f"{text}: {name} is no run, so it has no checkpoints; give"
                            f" {name} alone")
        else:
            found.append(Chosen(name))
    return list(dict.fromkeys(found))


def _split(text: str, runs_dir: Path) -> tuple[str, str]:
    """Split RUN@CHECKPOINT; a directory may have an @ in its name."""
    name, _, checkpoints = text.partition("@")
    is_whole = is_run(text, runs_dir) or directory_of(Path(text)).is_dir()
    return (text, "") if is_whole or not checkpoints else (name, checkpoints)


def _checkpoints(run: Run, wanted: str) -> list[str]:
    directory = run.checkpoints_dir
    if wanted == ALL:
        names = [checkpoint.name for checkpoint in list_checkpoints(directory)]
        if not names:
            raise UserError(f"{directory}: no checkpoint yet; train the run first")
        return names
    present = {path.name for path in named_as_checkpoints(directory)}
    for name in (names := wanted.split(",")):
        if name not in {*present, LATEST, BEST}:
            find_checkpoint(directory, name)  # its error lists the checkpoints
    return names
