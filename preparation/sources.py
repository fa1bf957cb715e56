"""Find the documents that SOURCE names: files, a dataset on the hub, or python-stdlib."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from basics.errors import UserError
from preparation.documents import Source, find_documents, kind_of, python_stdlib
from preparation.journal import Request

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class SourceOptions:
    """The part of a command line that names documents."""

    source: str
    subset: str = ""
    text_column: str = "text"
    keep_raw: Path | None = None


def find_source(options: SourceOptions, *, raw_dir: Path,
                unfinished: Request | None = None) -> Source:
    """Find the documents that SOURCE names. Raises: UserError.

    Args:
        raw_dir: for downloads that are not kept.
        unfinished: of an earlier launch, which continues with the same commit of a hub dataset.
    """
    source, subset, keep_raw = options.source, options.subset.strip("/"), options.keep_raw
    if HUB_NAME.fullmatch(source) and not kind_of(source) and not Path(source).exists():
        from preparation.hub import RawFiles, hub_source

        is_same = unfinished is not None and unfinished.source == f"{source} {subset}".strip()
        try:
            return hub_source(
                source, subset, text_column=options.text_column,
                raw_files=RawFiles(keep_raw or raw_dir, keep_raw is not None),
                revision=unfinished.revision if is_same else None,
            )
        except UserError as error:
            raise UserError(f"{error} (and there is no file {source} here)") from None
    if subset or keep_raw:
        raise UserError(f"{source}: --subset and --keep-raw need a dataset on the hub, given as"
                        " owner/name")
    if source == "python-stdlib":
        return python_stdlib()
    return find_documents(source, text_column=options.text_column)
