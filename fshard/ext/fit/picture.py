"""The picture of a step's memory: the bytes that are held over the step, before and after a budget, as an SVG."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

# The area in which the curves are.
_LEFT, _WIDTH, _BOTTOM, _HEIGHT = 64, 812, 350, 254
_FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328"'
_HEAD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 400" width="900" height="400" role="img" {_FONT}>',
    '<title>Memory of a rank over one step</title><rect width="900" height="400" rx="10" fill="#ffffff"/>',
    '<text x="24" y="36" font-size="18" font-weight="bold">Memory of a rank over one step</text>',
    '<text x="24" y="88">MB</text>',
    '<text x="470" y="380" text-anchor="middle">operators, from the first to the last</text>',
)
# For each curve the attributes of its path.
_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "no budget": 'stroke="#8a8f98"',
        "with a budget": 'stroke="#0b6e4f"',
        "budget": 'stroke="#c4432b" stroke-dasharray="8 4"',
        "arguments": 'stroke="#1f2328" stroke-dasharray="2 3"',
    }
)


def draw_curves(curves: Mapping[str, Sequence[int]]) -> str:
    """Draw the bytes that are held while each operator of a step runs.

    Args:
        curves: For names in `_STYLES` the bytes at each operator; one number is a level.

    Returns:
        The text of an SVG file.
    """
    highest = max(map(max, curves.values()))
    shapes = [*_HEAD]
    for quarter in range(5):
        y = _BOTTOM - _HEIGHT * quarter / 4
        shapes.append(f'<path d="M{_LEFT} {y}h{_WIDTH}" stroke="#d0d7de"/>')
        shapes.append(f'<text x="{_LEFT - 8}" y="{y + 5}" text-anchor="end">{highest * quarter / 4e6:.1f}</text>')
    for number, (name, held) in enumerate(curves.items()):
        style = f'fill="none" stroke-width="2" {_STYLES[name]}'
        x = _LEFT + _WIDTH * number / 4
        shapes.append(f'<path d="M{x} 61h22" {style}/>')
        shapes.append(f'<text x="{x + 28}" y="66">{name}, {max(held) / 1e6:.1f} MB</text>')
        steps = []
        for place, nbytes in enumerate(held, start=1):
            y = _BOTTOM - _HEIGHT * nbytes / highest
            steps.append(f"{y:.1f}H{_LEFT + _WIDTH * place / len(held):.1f}")
        shapes.append(f'<path d="M{_LEFT} {"V".join(steps)}" {style}/>')
    return "\n".join([*shapes, "</svg>\n"])
