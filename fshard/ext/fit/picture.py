"""The picture of a step's memory: the bytes that are held over the step, before and after a budget, as an SVG."""

from collections.abc import Mapping, Sequence

# The area in which the curves are.
_LEFT, _WIDTH, _BOTTOM, _HEIGHT = 24, 852, 350, 264
_FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328"'
_HEAD = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 400" width="900" height="400" role="img" {_FONT}>\n'
_TITLE = """<title>Memory of a rank over one step</title><rect width="900" height="400" rx="10" fill="#ffffff"/>
<text x="24" y="36" font-size="18" font-weight="bold">Memory of a rank over one step</text>
"""
_FLOOR = f"""<text x="450" y="380" text-anchor="middle">operators, from the first to the last</text>
<path d="M{_LEFT} {_BOTTOM}h{_WIDTH}" stroke="#d0d7de"/>
"""
# The colors of curves, in their order.
_COLORS = ("#6b7078", "#1f2328", "#0b6e4f", "#c4432b")


def draw_curves(curves: Mapping[str, Sequence[int]]) -> str:
    """Draw the bytes that are held while each operator of a step runs.

    Args:
        curves: By their names the bytes at each operator; one number is a level, which has a broken line.

    Returns:
        The text of an SVG file.
    """
    highest = max(map(max, curves.values()))
    picture = _HEAD + _TITLE + _FLOOR
    x = _LEFT
    for color, (name, held) in zip(_COLORS, curves.items(), strict=False):
        dashes = "8 4" if len(held) == 1 else "none"
        picture += f'<text x="{x}" y="66" fill="{color}">{name}, {max(held) / 1e6:.1f} MB</text>\n'
        steps = []
        for place, nbytes in enumerate(held, start=1):
            steps.append(f"{_BOTTOM - _HEIGHT * nbytes / highest:.1f}H{_LEFT + _WIDTH * place / len(held):.1f}")
        path = f"M{_LEFT} {'V'.join(steps)}"
        picture += f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>\n'
        x += _WIDTH // 4
    return picture + "</svg>\n"
