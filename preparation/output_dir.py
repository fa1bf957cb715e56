"""The directory that a dataset or a tokenizer is written to: made beside it, renamed at the end."""

import os
from collections.abc import Set as AbstractSet
from pathlib import Path

from basics.errors import UserError
from basics.files import fsync, replace_directory


def check_output_dir(output_dir: Path, made: AbstractSet[str], *, replace: bool) -> Path:
    """Return the output directory with links resolved.

    Args:
        made: names of the files that the command writes there, which `replace` may replace.

    Raises: UserError: it has other files, or these without `replace`, or cannot be renamed.
    """
    output_dir = Path(os.path.realpath(output_dir))  # Path.resolve() raises on loops of links
    if output_dir.is_mount() or output_dir == Path.cwd():
        raise UserError(
            f"{output_dir}: is a mount point or the current directory; name a directory in it"
        )
    if not output_dir.exists():
        return output_dir
    found = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else None
    if found is None or found - made:
        other = f" ({min(found - made)})" if found else ""
        raise UserError(
            f"{output_dir}: is not empty{other}; name another output, or delete it yourself"
        )
    if found and not replace:
        raise UserError(
            f"{output_dir}: is not empty; name another output, or replace what is there with"
            " --replace"
        )
    return output_dir


def put_in_place(new_dir: Path, output_dir: Path, *, replace: bool) -> None:
    """Rename a finished directory to its final name, with `replace` also over files."""
    if replace:
        replace_directory(new_dir, output_dir, aside=new_dir.with_name("replaced"))
        return
    new_dir.rename(output_dir)  # replaces an empty directory, never files
    fsync(output_dir.parent)
