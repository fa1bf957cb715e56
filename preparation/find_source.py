"""Chooses where documents come from: the hub, files, or the standard library."""

import re
from dataclasses import replace
from pathlib import Path

from basics.errors import UserError
from preparation.choosing import SourceOptions, kind_of
from preparation.sources import Source, find_documents, python_stdlib

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_source(options: SourceOptions, *, raw_dir: Path) -> Source:
    """Find the documents that SOURCE names; downloads that are not kept go to `raw_dir`.

    Raises: UserError: there are none, or the hub cannot be reached.
    """
    options = replace(options, subset=options.subset.strip("/"))
    source = options.source
    if HUB_NAME.fullmatch(source) and not kind_of(source) and not Path(source).exists():
        from preparation.hub import hub_source  # slow to import

        return hub_source(options, raw_dir=raw_dir)
    if options.keep_raw or options.revision:
        raise UserError(
            f"{source}: --keep-raw and --revision need a dataset on the hub, given as owner/name"
        )
    if source != "python-stdlib":
        return find_documents(options)
    if options.label() != source:
        raise UserError(f"{source}: has no --subset and no --split")
    if options.encoding or options.document_separator:
        raise UserError(f"{source}: has no --encoding and no --document-separator")
    return python_stdlib()
