"""The licence and the languages of a dataset, for the cards of models that were trained on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard

from basics.files import read_regular_file
from run_config import DATASET_NAME

# FineWeb's, in tokens or as it is: these have no card on this machine.
FINEWEB = re.compile(r"(gpjt|HuggingFaceFW)/fineweb(-edu)?(-gpt2-tokens)?")
LICENCE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{1,8})*")
MAX_LANGUAGES = 200
UNKNOWN = "unknown"  # the licence in a card that nobody has filled in


@dataclass(frozen=True)
class Declared:
    """What a dataset's card declares; None for what it does not."""

    licence: str | None = None
    languages: tuple[str, ...] | None = None


def declared_of(dataset: str, datasets_dir: Path) -> Declared:
    """Return what is known of a dataset: FineWeb, or one with a card in its directory."""
    if FINEWEB.fullmatch(dataset):
        return Declared("odc-by", ("en",))
    if not re.fullmatch(DATASET_NAME, dataset):
        return Declared()
    try:
        values = DatasetCard(read_regular_file(datasets_dir / dataset / "README.md")).data.to_dict()
    except Exception:  # there is none, or it is damaged; the YAML library has errors of its own
        return Declared()
    licence = values.get("license")
    if not (isinstance(licence, str) and LICENCE_NAME.fullmatch(licence)) or licence == UNKNOWN:
        return Declared()
    return Declared(licence, _languages(values.get("language")))


def _languages(found: Any) -> tuple[str, ...] | None:
    codes = [found] if isinstance(found, str) else found
    if not isinstance(codes, list) or not 0 < len(codes) <= MAX_LANGUAGES:
        return None
    are_codes = all(isinstance(code, str) and LANGUAGE_CODE.fullmatch(code) for code in codes)
    return tuple(codes) if are_codes else None
