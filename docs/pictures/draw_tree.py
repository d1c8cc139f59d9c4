"""Draw tree.svg: one tree of additions over eight microbatches, on one, two and four ranks."""

from pathlib import Path

MICROBATCHES = 8
LEVELS = 3
# Fills of ranks, for dark text.
RANKS = ("#cfe3f7", "#fbdcb2", "#d3ecd0", "#e6d5f2")
INK = "#333333"

PANEL, GAP, LEFT, TOP, STEP = 300, 30, 40, 70, 62
BOX = 28


def place(panel: int, level: int, number: int) -> tuple[float, float]:
    """The middle of a node: leaves are level 0."""
    width = 2**level
    spacing = (PANEL - BOX) / (MICROBATCHES - 1)
    x = LEFT + panel * (PANEL + GAP) + BOX / 2 + spacing * (number * width + (width - 1) / 2)
    return x, TOP + (LEVELS - level) * STEP


def draw_panel(panel: int, ranks: int) -> list[str]:
    """One tree; solid lines are additions between ranks, dashed ones are made by a rank alone."""
    title = "1 rank" if ranks == 1 else f"{ranks} ranks"
    middle = LEFT + panel * (PANEL + GAP) + PANEL / 2
    parts = [f'<text x="{middle}" y="42" text-anchor="middle" font-weight="bold">{title}</text>']
    for level in range(1, LEVELS + 1):
        dashes = "" if 2**level <= ranks else ' stroke-dasharray="4 4"'
        for number in range(MICROBATCHES // 2**level):
            x, y = place(panel, level, number)
            for child in (2 * number, 2 * number + 1):
                child_x, child_y = place(panel, level - 1, child)
                parts.append(
                    f'<line x1="{x:.1f}" y1="{y}" x2="{child_x:.1f}" y2="{child_y}" stroke="{INK}" '
                    f'stroke-width="2"{dashes}/>'
                )
    for level in range(1, LEVELS + 1):
        for number in range(MICROBATCHES // 2**level):
            x, y = place(panel, level, number)
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="12" fill="#ffffff" stroke="{INK}" stroke-width="2"/>')
            parts.append(f'<text x="{x:.1f}" y="{y + 5}" text-anchor="middle">+</text>')
    for number in range(MICROBATCHES):
        x, y = place(panel, 0, number)
        fill = RANKS[number % ranks]
        parts.append(
            f'<rect x="{x - BOX / 2:.1f}" y="{y - BOX / 2}" width="{BOX}" height="{BOX}" rx="4" fill="{fill}" '
            f'stroke="{INK}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{y + 5}" text-anchor="middle">{number}</text>')
    return parts


def draw() -> str:
    """The whole picture."""
    width, height = 2 * LEFT + 3 * PANEL + 2 * GAP, 380
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{INK}">',
        f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
    ]
    for panel, ranks in enumerate((1, 2, 4)):
        parts += draw_panel(panel, ranks)
    y = 320
    x = LEFT
    for rank, fill in enumerate(RANKS):
        parts.append(f'<rect x="{x}" y="{y - 14}" width="18" height="18" rx="4" fill="{fill}" stroke="{INK}"/>')
        parts.append(f'<text x="{x + 26}" y="{y}">a microbatch of rank {rank}</text>')
        x += 240
    y += 36
    parts.append(f'<line x1="{LEFT}" y1="{y - 5}" x2="{LEFT + 40}" y2="{y - 5}" stroke="{INK}" stroke-width="2"/>')
    parts.append(f'<text x="{LEFT + 50}" y="{y}">added between ranks</text>')
    x = LEFT + 240
    parts.append(
        f'<line x1="{x}" y1="{y - 5}" x2="{x + 40}" y2="{y - 5}" stroke="{INK}" stroke-width="2" '
        'stroke-dasharray="4 4"/>'
    )
    parts.append(f'<text x="{x + 50}" y="{y}">added by each rank, for its shard</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("tree.svg").write_text(draw())
