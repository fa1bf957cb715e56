"""The state of a tuning that is not finished: saved after each epoch, removed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from basics.directory_lock import locked
from basics.errors import (
    as_os_error,
    cannot_be_written,
    first_line,
    visible,
)
from basics.failpoints import failpoint
from basics.files import check_tensor_header, fsync
from basics.tensor_files import header_of, read_tensors
from checkpointing import DAMAGE
from lab.instruct.tuning import Epoch, Tuner

STATE, PARTIAL = "state.safetensors", "state.partial"
RECORD = "tuning"  # a key of the file's metadata


class Record(BaseModel):
    """The finished epochs, and what must be the same for them to count."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    identity: dict[str, str]
    epochs: list[Epoch] = Field(min_length=1)


@dataclass(frozen=True)
class Progress:
    """A directory beside the tuned model, with the state after the last finished epoch.

    Attributes:
        identity: data, options and base model; the state of another one is not used.
    """

    directory: Path
    identity: dict[str, str]

    def restore(self, tuner: Tuner) -> None:
        """Let a tuner continue after the last finished epoch, if there is one."""
        path = self.directory / STATE
        if not path.exists():
            return
        try:
            check_tensor_header(path)
            with safe_open(path, framework="pt") as file:
                record = Record.model_validate_json((file.metadata() or {})[RECORD])
            if record.identity == self.identity:
                tuner.restore(record.epochs, read_tensors(path, header_of(tuner.state_shapes())))
        except DAMAGE as error:
            click.echo(visible(f"{path}: cannot be used ({first_line(error)}): starting anew"))
            return
        if record.identity != self.identity:
            click.echo(visible(f"{path}: is of a tuning with another {_differences(record, self)}:"
                               " starting anew"))
            return
        click.echo(f"continuing after epoch {record.epochs[-1].number}, which an earlier command"
                   " has finished")

    def save(self, tuner: Tuner) -> None:
        """Replace the state by that after a tuner's last epoch. Raises: UserError: disk is full."""
        record = Record(identity=self.identity, epochs=tuner.epochs)
        state = {name: tensor.detach().cpu().contiguous()
                 for name, tensor in tuner.state().items()}
        partial = self.directory / PARTIAL
        try:
            save_file(state, partial, {RECORD: record.model_dump_json()})
            failpoint("tune.rename")
            fsync(partial)
            partial.replace(self.directory / STATE)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise cannot_be_written(self.directory, as_os_error(error)) from None
        failpoint("tune.saved")

    def remove(self) -> None:
        """Remove the state: the tuning is finished."""
        for name in (STATE, PARTIAL):
            with suppress(OSError):
                (self.directory / name).unlink(missing_ok=True)


@contextmanager
def opened(directory: Path, identity: dict[str, str]) -> Iterator[Progress]:
    """Make a directory for the progress of one command; remove it again if it stays empty.

    Raises:
        UserError: another command uses it, or it cannot be made.
    """
    busy = (f"{directory}: another lab tune is at work here; wait for its end, or name another"
            " directory with --model-output")
    with locked(directory, busy=busy, is_temporary=True):
        yield Progress(directory, identity)


def _differences(record: Record, progress: Progress) -> str:
    found, wanted = record.identity, progress.identity
    return ", ".join(sorted(key.replace("_", " ") for key in found.keys() | wanted.keys()
                            if found.get(key) != wanted.get(key)))
