"""Chooses where documents come from: the hub, files, or the standard library."""

import re
from dataclasses import replace
from pathlib import Path

from basics.errors import UserError
from basics.text import did_you_mean
from preparation.choosing import SourceOptions, kind_of
from preparation.ensure_dataset import STDLIB_DATASET
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
    if source != STDLIB_DATASET:
        if not Path(source).exists() and (advice := did_you_mean(source, [STDLIB_DATASET])):
            raise UserError(f"{source}: no such file or directory{advice}")
        return find_documents(options)
    if options.label() != source:
        raise UserError(f"{source}: has no --subset and no --split")
    if options.encoding or options.document_separator:
        raise UserError(f"{source}: has no --encoding and no --document-separator")
    return python_stdlib()
