"""`identity.json`: which checkpoints are of what a run directory trains now.

An identity is a random name. It is drawn anew when a run starts over (--fresh) or goes on from an
earlier checkpoint; each checkpoint's `meta.json` has the one that it was saved under. So a
checkpoint that the run has left stays left, wherever it comes back from.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from basics.errors import BAD_INPUT, FAILED, TRANSIENT, UserError, cannot_be_written
from basics.files import read_regular_file, write_atomically

IDENTITY = "identity.json"
Name = Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")]


class Identity(BaseModel):
    """The identity of a run; of those that it goes on from, the last step that belongs to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name = Field(default_factory=lambda: uuid.uuid4().hex[:12])
    earlier: dict[Name, Annotated[int, Field(ge=0, lt=2**40)]] = {}

    def includes(self, name: str, global_step: int) -> bool:
        """Return whether a checkpoint belongs to the run, by the name that it was saved under."""
        return name == self.name or global_step <= self.earlier.get(name, -1)

    def after_step_back(self, name: str, global_step: int) -> Identity:
        """Return a new identity that goes on from a checkpoint."""
        is_known = name == self.name or name in self.earlier
        branch = min(global_step, self.earlier.get(name, global_step)) if is_known else 0
        before = {known: last for known, last in self.earlier.items()
                  if last < branch and known != name}
        return Identity(earlier=before | {name: global_step})


def read_identity(run_dir: Path) -> Identity | None:
    """Return the identity of a run; None if it has none yet.

    Raises:
        UserError: the file cannot be read.
    """
    path = run_dir / IDENTITY
    try:
        return Identity.model_validate_json(read_regular_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise UserError(f"{path}: cannot be read ({reason or 'damaged'}); restore it, or remove"
                        " it and name a checkpoint",
                        FAILED if number in TRANSIENT else BAD_INPUT) from None


def write_identity(run_dir: Path, identity: Identity) -> bool:
    """Write the identity of a run; return whether it had another one. Raises: UserError."""
    before = read_identity(run_dir)
    if identity != before:
        try:
            write_atomically(run_dir / IDENTITY, identity.model_dump_json() + "\n", durable=True)
        except OSError as error:
            raise cannot_be_written(run_dir, error) from None
    return before not in (None, identity)
