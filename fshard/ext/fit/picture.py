"""The picture of a step's memory: the bytes that are held over the step, before and after a budget, as an SVG."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

TITLE = "Memory of a rank over one step"
# The edges of the area in which the curves are.
LEFT, TOP, RIGHT, BOTTOM = 64, 96, 876, 350
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328"'
SIZE = 'viewBox="0 0 900 400" width="900" height="400"'
HEAD = "".join(
    [
        f'<svg xmlns="http://www.w3.org/2000/svg" {SIZE} role="img" {FONT}>',
        f'<title>{TITLE}</title><rect width="900" height="400" rx="10" fill="#ffffff"/>',
        f'<text x="24" y="36" font-size="18" font-weight="bold">{TITLE}</text>',
        '<text x="24" y="88">MB</text>',
        f'<text x="{(LEFT + RIGHT) / 2}" y="380" text-anchor="middle">',
        "operators, from the first to the last; the backward begins at the mark</text>",
    ]
)


class Curve(NamedTuple):
    """A curve of the picture, from its left edge to its right one.

    Attributes:
        label: What the legend says.
        held: Bytes at each operator; one number is a level.
        style: Attributes of its path.
        backward: The number of the first operator of the backward; 0 if there is none.
    """

    label: str
    held: Sequence[int]
    style: str
    backward: int = 0


def draw_memory(before: Any, after: Any, budget: int | None) -> str:
    """Draw the bytes that are held while each operator of a step runs.

    Args:
        before: The `GraphMemory` without a budget.
        after: That with it; not drawn if there is no budget.
        budget: The bytes that are allowed; None if there is no budget.

    Returns:
        The text of an SVG file.
    """
    curves = [Curve("arguments", [after.arguments], 'stroke="#1f2328" stroke-dasharray="2 3"')]
    if budget is not None:
        curves.append(Curve("budget", [budget], 'stroke="#c4432b" stroke-dasharray="8 4"'))
        curves.append(Curve("with a budget", after.held, 'stroke="#0b6e4f"', after.backward))
    curves.append(Curve("no budget", before.held, 'stroke="#8a8f98"', before.backward))
    highest = max(max(curve.held) for curve in curves) / 1e6
    shapes = [HEAD]
    tick = 10.0 ** math.floor(math.log10(highest))
    while highest < 4 * tick:
        tick /= 2
    for number in range(math.floor(highest / tick) + 1):
        y = BOTTOM - (BOTTOM - TOP) * tick * number / highest
        shapes.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#d0d7de"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{tick * number:g}</text>')
    for number, curve in enumerate(reversed(curves)):
        x = LEFT + number * (RIGHT - LEFT) / len(curves)
        shapes.append(f'<path d="M{x:.1f} 61h22" {curve.style} stroke-width="3"/>')
        shapes.append(f'<text x="{x + 28:.1f}" y="66">{curve.label}, {max(curve.held) / 1e6:.1f} MB</text>')
        shapes.append(_draw_curve(curve, highest))
    return "\n".join([*shapes, "</svg>\n"])


def _draw_curve(curve: Curve, highest: float) -> str:
    """Draw a curve as steps of the same width, and a mark where its backward begins."""
    steps = []
    for number, nbytes in enumerate(curve.held, start=1):
        x = LEFT + number * (RIGHT - LEFT) / len(curve.held)
        y = BOTTOM - (BOTTOM - TOP) * nbytes / 1e6 / highest
        steps.append(f"V{y:.1f}H{x:.1f}")
    line = "".join(steps).removeprefix("V")
    shape = f'<path d="M{LEFT} {line}" fill="none" {curve.style} stroke-width="1.5"/>'
    if not curve.backward:
        return shape
    x = LEFT + curve.backward * (RIGHT - LEFT) / len(curve.held)
    return f'{shape}<path class="backward" d="M{x:.1f} {BOTTOM}v-14" {curve.style} stroke-width="4"/>'
