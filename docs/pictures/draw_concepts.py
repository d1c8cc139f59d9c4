"""Draw the pictures of the concepts, and the train step of the README: `python docs/pictures/draw_concepts.py`."""

from collections.abc import Callable
from html import escape
from pathlib import Path

INK = "#1f2933"
GRAY = "#e4e7eb"
GREEN = "#a8dcc4"
ORANGE = "#f8cf9c"
BLUE = "#c6daf3"

# Of rank 0 and of rank 1.
RANK_COLORS = (GREEN, ORANGE)


class Picture:
    """Shapes on a white ground with round corners."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Begin with the ground and the marker of arrows."""
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" '
            "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\" "
            f'font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12" fill="#ffffff" stroke="{GRAY}"/>',
        ]

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "middle", size: int = 14, bold: bool = False
    ) -> None:
        """Write a line whose middle is at the height `y`."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y + 0.35 * size:g}" text-anchor="{anchor}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "") -> None:
        """Draw a box with a line of text in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{INK}"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2, text)

    def outline(self, x: float, y: float, width: float, height: float) -> None:
        """Draw a dashed box without a ground."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="none" stroke="{INK}" '
            'stroke-dasharray="4 3"/>'
        )

    def line(self, points: str, *, arrow: bool = False, dashed: bool = False) -> None:
        """Draw a path, in the notation of SVG."""
        marker = ' marker-end="url(#head)"' if arrow else ""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<path d="{points}" fill="none" stroke="{INK}" stroke-width="1.4"{marker}{dashes}/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a straight arrow."""
        self.line(f"M{x:g} {y:g} L{to_x:g} {to_y:g}", arrow=True)

    def svg(self) -> str:
        """Return the file's text."""
        return "\n".join([*self._parts, "</svg>", ""])


def step() -> Picture:
    """A train step on two ranks: shard, gather, apply, scatter_grads, update."""
    picture = Picture(900, 300, "A train step on two ranks: shard, gather, apply, scatter_grads, update")
    for x, verb, caption in [
        (111, "shard", "a part each"),
        (230, "gather", "all-gather"),
        (400, "apply", "loss of own rows"),
        (590, "scatter_grads", "reduce-scatter"),
        (765, "update", "own part alone"),
    ]:
        picture.text(x, 28, verb, size=17, bold=True)
        picture.text(x, 51, caption)
    rows = (112, 206)
    for rank, y in enumerate(rows):
        color = RANK_COLORS[rank]
        picture.text(40, y, f"rank {rank}", bold=True)
        picture.box(82, y - 18, 58, 36, color, f"w{rank}")
        picture.box(275, y - 34, 50, 34, RANK_COLORS[0], "w0")
        picture.box(275, y, 50, 34, RANK_COLORS[1], "w1")
        picture.arrow(325, y, 351, y)
        picture.box(353, y - 24, 94, 48, BLUE)
        picture.text(400, y - 9, "forward,")
        picture.text(400, y + 10, "backward")
        picture.arrow(447, y, 473, y)
        picture.box(475, y - 34, 50, 34, BLUE, "g0")
        picture.box(475, y, 50, 34, BLUE, "g1")
        picture.box(655, y - 18, 58, 36, color, f"Σ g{rank}")
        picture.arrow(713, y, 802, y)
        picture.box(804, y - 18, 62, 36, color, f"w{rank}'")
    for rank, y in enumerate(rows):
        for other, other_y in enumerate(rows):
            part = 17 if rank else -17
            picture.arrow(140, y, 273, other_y + part)
            back = 17 if other else -17
            picture.arrow(525, y + back, 653, other_y + (-5 if rank == 0 else 5))
    picture.line("M835 224 L835 274 L111 274 L111 228", arrow=True)
    picture.text(473, 262, "the next step begins with the new parts")
    return picture


def leaves() -> Picture:
    """A tensor of five rows cut over two ranks, and a small leaf that is kept whole."""
    picture = Picture(900, 330, "A tensor of five rows cut over two ranks, and a small leaf that both keep whole")
    picture.text(130, 28, "the full tensors", size=16, bold=True)
    for rank, x in enumerate((440, 730)):
        picture.text(x, 28, f"rank {rank} stores", size=16, bold=True)
    size = 30
    top = 80
    picture.text(130, 62, "w: float32[5, 2]")
    for row in range(5):
        color = RANK_COLORS[row >= 3]
        for column in range(2):
            picture.box(100 + column * size, top + row * size, size, size, color, str(2 * row + column))
    for rank, x in enumerate((440, 730)):
        picture.text(x, 62, "P('shard'), local [3, 2]")
        for row in range(3):
            number = 3 * rank + row
            for column in range(2):
                is_padding = number > 4
                color = GRAY if is_padding else RANK_COLORS[rank]
                text = "0" if is_padding else str(2 * number + column)
                picture.box(x - size + column * size, top + row * size, size, size, color, text)
        picture.text(x, 277, "P(), local [3]")
        for column in range(3):
            picture.box(x - 45 + column * size, 290, size, 26, BLUE, "1")
    picture.text(130, 277, "b: float32[3]")
    for column in range(3):
        picture.box(85 + column * size, 290, size, 26, BLUE, "1")
    picture.arrow(175, 125, 395, 125)
    picture.line("M175 200 L640 200 L640 140 L685 140", arrow=True)
    picture.arrow(190, 303, 380, 303)
    picture.line("M500 303 L672 303", arrow=True)
    picture.text(800, 155, "padding", anchor="start")
    picture.line("M796 155 L768 155", arrow=True)
    picture.text(280, 110, "rows 0 to 2")
    picture.text(400, 186, "rows 3 and 4")
    picture.text(285, 289, "small: kept whole")
    return picture


def units() -> Picture:
    """Four units along the time of a step: when each is gathered, held, dropped and reduced."""
    picture = Picture(900, 310, "When four units are gathered, held, computed with and reduced during a step")
    left, width, height, top = 76, 81, 44, 78
    picture.text(left + 2.5 * width, 28, "forward", size=16, bold=True)
    picture.text(left + 7.2 * width, 28, "backward", size=16, bold=True)
    picture.line(f"M{left + 5 * width} 16 L{left + 5 * width} 262", dashed=True)
    cells = {
        0: {0: "gather", 1: "compute", 8: "gather", 9: "compute", 10: "reduce"},
        1: {1: "gather", 2: "compute", 7: "gather", 8: "compute", 9: "reduce"},
        2: {2: "gather", 3: "compute", 4: "keep", 6: "keep", 7: "compute", 8: "reduce"},
        3: {3: "gather", 4: "compute", 6: "compute", 7: "reduce"},
    }
    colors = {"gather": ORANGE, "compute": GREEN, "keep": BLUE, "reduce": GRAY}
    for unit, moments in cells.items():
        y = top + unit * (height + 4)
        picture.text(40, y + height / 2, f"unit {unit}", bold=True)
        for moment, name in moments.items():
            # The end of the forward and the beginning of the backward are next to each other.
            column = moment - 1 if moment > 5 else moment
            picture.box(left + column * width, y, width - 2, height, colors[name], name)
    picture.arrow(left, 56, left + 9.4 * width, 56)
    picture.text(left + 9.4 * width + 6, 56, "time", anchor="start")
    picture.text(450, 288, "An empty place means that the rank holds only its shard of the unit.")
    return picture


def strategies() -> Picture:
    """What one of four ranks holds under each strategy, stored and during a step."""
    picture = Picture(900, 360, "What one of four ranks holds under each strategy: stored, and added during a step")
    for x, name in [(230, "parameters P"), (470, "gradients G"), (710, "optimizer state O")]:
        picture.text(x + 75, 28, name, size=16, bold=True)
    full = 180
    rows = [
        ("ddp", (1, 0), (0, 1), (1, 0), ""),
        ("zero1", (0.25, 0.75), (0, 1), (0.25, 0), ""),
        ("zero2", (0.25, 0.75), (0, 0.25), (0.25, 0), ""),
        ("zero3", (0.25, 0.1), (0, 0.25), (0.25, 0), "two units"),
        ("hsdp, 2 x 2", (0.5, 0.1), (0, 0.5), (0.5, 0), "two units"),
    ]
    for row, (name, *groups, note) in enumerate(rows):
        y = 50 + row * 50
        picture.text(20, y + 17, name, anchor="start", bold=True)
        for x, (stored, added) in zip((215, 455, 695), groups, strict=True):
            picture.outline(x, y, full, 34)
            if stored:
                picture.box(x, y, stored * full, 34, GREEN)
            if added:
                picture.box(x + stored * full, y, added * full, 34, ORANGE)
        if note:
            picture.text(215 + (groups[0][0] + groups[0][1]) * full + 5, y + 17, note, anchor="start")
    for x, color, text in [(215, GREEN, "stored between steps"), (455, ORANGE, "added during a step")]:
        picture.box(x, 318, 22, 22, color)
        picture.text(x + 32, 329, text, anchor="start")
    picture.outline(695, 318, 22, 22)
    picture.text(727, 329, "all of it", anchor="start")
    return picture


def varying() -> Picture:
    """Values that vary and a value that agrees, and the functions that lead from one to the other."""
    picture = Picture(900, 320, "Values that vary between ranks, values that agree, and the functions between them")
    picture.text(235, 28, "varies: each rank its own", size=16, bold=True)
    picture.text(705, 28, "agrees: one value for all ranks", size=16, bold=True)
    for rank, y in enumerate((62, 142)):
        picture.box(165, y, 140, 60, RANK_COLORS[rank])
        picture.text(235, y + 21, f"rank {rank}")
        picture.text(235, y + 41, f"x = {rank + 1}")
    picture.box(635, 62, 140, 140, BLUE)
    picture.text(705, 122, "both ranks")
    picture.text(705, 142, "y = 3")
    picture.outline(150, 50, 170, 164)
    picture.arrow(320, 95, 633, 95)
    picture.text(477, 79, "psum_invariant")
    picture.arrow(635, 170, 322, 170)
    picture.text(477, 186, "pcast")
    picture.line("M150 90 C 95 90, 95 174, 148 174", arrow=True)
    picture.text(72, 122, "psum,")
    picture.text(72, 142, "pmean")
    lines = [
        "The backward goes the other way: the transpose of psum_invariant is pcast, that of pcast",
        "is psum_invariant, and that of psum is psum. A gather of leaves leads from what is stored",
        "to values that vary, and its transpose sums the gradients of all ranks.",
    ]
    for number, line in enumerate(lines):
        picture.text(450, 242 + 22 * number, line)
    return picture


def one_program() -> Picture:
    """Two ranks run one program; one of them fails, and the other hears of it."""
    picture = Picture(900, 310, "Two ranks run one program; rank 1 fails, and rank 0 raises an error that names it")
    for x, name in [(170, "at the start"), (440, "under way"), (745, "at the end")]:
        picture.text(x, 28, name, size=16, bold=True)
    for rank, y in enumerate((92, 192)):
        picture.text(40, y, f"rank {rank}", bold=True)
        picture.box(95, y - 22, 150, 44, BLUE, "the same call?")
        picture.arrow(245, y, 283, y)
        picture.box(285, y - 22, 110, 44, RANK_COLORS[rank], "gather 0")
        picture.arrow(395, y, 433, y)
    picture.box(435, 70, 150, 44, RANK_COLORS[0], "gather 1: waits")
    picture.box(435, 170, 150, 44, RANK_COLORS[1], "loss raises")
    for x in (170, 340):
        picture.line(f"M{x} 114 L{x} 170", dashed=True)
    picture.text(182, 142, "a digest", anchor="start")
    picture.text(352, 142, "order, shape", anchor="start")
    picture.arrow(585, 92, 623, 92)
    picture.arrow(585, 192, 623, 192)
    picture.arrow(510, 170, 510, 116)
    picture.text(522, 142, "tells why", anchor="start")
    for y, first, second in [
        (92, "CollectiveError: rank 1 failed", "in value_and_grad: ValueError"),
        (192, "ValueError:", "bad sample 17"),
    ]:
        picture.box(625, y - 28, 240, 56, GRAY)
        picture.text(745, y - 10, first)
        picture.text(745, y + 11, second)
    picture.text(450, 256, "Every rank ends with an error that names the rank and the cause.")
    picture.text(450, 280, "No rank goes on with wrong values.")
    return picture


PICTURES: tuple[Callable[[], Picture], ...] = (step, leaves, units, strategies, varying, one_program)


if __name__ == "__main__":
    for draw in PICTURES:
        Path(__file__).with_name(f"{draw.__name__}.svg").write_text(draw().svg())
