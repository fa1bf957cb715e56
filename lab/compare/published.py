"""The published results of the original system, as rows for `lab compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from basics.errors import UserError
from lab.compare.results import PUBLISHED, Figures, Result, slice_of

PUBLISHED_PATH = Path(__file__).parents[2] / "runs" / "published.json"


def read_published(path: Path = PUBLISHED_PATH) -> list[Result]:
    """Read the published results. Raises: UserError if the file cannot be read."""
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
        return [_result(row, slice_of(published["test_slice"])) for row in published["rows"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); it is part of the"
                        " project: download it again") from None


def _result(row: dict[str, Any], test_slice: str) -> Result:
    """Convert one published row; compute dollars from its seconds and the machine's price."""
    known = {name: row[name] for name in Figures.__dataclass_fields__ if name in row}
    num_gpus, _, device = row.get("machine", "").partition("x ")
    if device:
        known["num_gpus"] = int(num_gpus)
    for key, seconds in (("usd", "seconds"), ("validation_usd", "validation_seconds")):
        if seconds in row and "usd_per_hour" in row:
            known[key] = row[seconds] / 3600 * row["usd_per_hour"]
    # The original's fit has one point per run: of two checkpoints the best.
    is_in_fit = row.get("dataset") == "FineWeb" and row.get("checkpoint") != "latest"
    return Result(
        name=row["name"], status=PUBLISHED, figures=Figures(**known), notes=row.get("notes", ""),
        size=row["model"],
        tests={test_slice: {"loss": row["test_loss"]}} if "test_loss" in row else {},
        device=device or None, memory_gib=row.get("gib_per_gpu"),
        loss_group=(PUBLISHED, row["dataset"], str(row.get("tokens"))) if is_in_fit else (),
        memory_group=(PUBLISHED,),
    )
