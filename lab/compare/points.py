"""Which rows of a comparison make one curve: of the loss over the batch, of the memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lab.compare.rows import Row, deciding_loss

PUBLISHED_COLOR, OTHER_COLOR = "tab:red", "tab:gray"
NEEDED_FOR_PARABOLA, NEEDED_FOR_LINE = 3, 2  # different x


@dataclass(frozen=True)
class Points:
    """What is put through one curve, or what is left over for none.

    Attributes:
        names: what stands beside the points; nothing beside published ones.
    """

    label: str
    color: str
    x: list[float]
    y: list[float]
    names: list[str]
    has_curve: bool


def loss_panels(rows: list[Row]) -> dict[str, list[Points]]:
    """Group the rows whose losses make one curve over the batch, by the loss that they show.

    Published rows have only a test loss: where the runs have another, they stand apart.
    """
    runs = [row for row in rows if not row.is_published]
    kind = deciding_loss(runs)
    panels = {kind: loss_points(runs, kind), "test_loss": loss_points(
        rows if kind == "test_loss" else [row for row in rows if row.is_published], "test_loss")}
    return {kind: points for kind, points in panels.items() if points}


def loss_points(rows: list[Row], kind: str) -> list[Points]:
    return _grouped(((row.first.loss_group, row, row.figures.global_batch_size, row.loss(kind))
                     for row in rows),
                    needed=NEEDED_FOR_PARABOLA, published="published: FineWeb, 3.26G tokens")


def memory_points(rows: list[Row]) -> list[Points]:
    """Group the runs whose memory makes one line over the microbatch: same model and precision.

    The published points are cards, each with the largest microbatch that it had room for.
    """
    return _grouped(((result.memory_group, row, result.figures.microbatch_size, result.memory_gib)
                     for row in rows for result in row.results),
                    needed=NEEDED_FOR_LINE, published="published: cards, and the most they hold")


def _grouped(found: Iterable[tuple[tuple[str, ...], Row, float | None, float | None]], *,
             needed: int, published: str) -> list[Points]:
    """Sort points into groups of `needed` different x or more, and one of what is left.

    Args:
        published: label of the published ones.
    """
    groups: dict[tuple[str, ...], dict[tuple[float, float], Row]] = {}
    for group, row, x, y in found:
        if group and x and y is not None:
            groups.setdefault(group, {}).setdefault((x, y), row)  # the same again counts once
    made, rest = [], {}
    for points in groups.values():
        first = next(iter(points.values()))
        if len({x for x, _ in points}) < needed:
            rest |= points
        elif first.is_published:
            made.append(_points(points, published, PUBLISHED_COLOR))
        else:
            color = f"C{sum(other.color != PUBLISHED_COLOR for other in made) % 3}"
            made.append(_points(points, f"runs like {first.short_name}", color))
    label = f"too few alike for a curve ({needed} needed)"
    return made + ([_points(rest, label, OTHER_COLOR)] if rest else [])


def _points(points: dict[tuple[float, float], Row], label: str, color: str) -> Points:
    return Points(label, color, x=[x for x, _ in points], y=[y for _, y in points],
                  names=["" if row.is_published else row.short_name for row in points.values()],
                  has_curve=color != OTHER_COLOR)
