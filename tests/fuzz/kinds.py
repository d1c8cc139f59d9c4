"""Kinds of blocks: the parameters and the lines of one step from x of shape (rows, D) to x of that shape."""

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of block.

    Attributes:
        params: Shapes by name; `z` is complex, and `f` is float32 in every program.
        body: Lines that assign x; `{w}` stands for the parameter w.
        feature: Features that a program with it has; several by spaces.
        helper: A definition that the lines use.
        forms: "module", "function" or both.
    """

    params: dict[str, str]
    body: str
    feature: str = ""
    helper: str = ""
    forms: str = "module function"


SQUARE = {"w": "D, D"}
BOTH = {"w": "D, D", "b": "D"}
COMPLEX = {"z": "D, D"}

SAVES = """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w.mT)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, turned = ctx.saved_tensors
        return grad @ turned, x.mT @ grad
"""

SETUP = """
class Weigh(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x * w, (x * w).sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, w = ctx.saved_tensors
        return (grad * w if ctx.needs_input_grad[0] else None), (grad * x).sum(0)
"""

DIRTY = """
class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        ctx.mark_dirty(x)
        return x.mul_(1 + w)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + ctx.w), grad.sum(0)
"""

KINDS = {
    # Products and sums.
    "linear": Kind(BOTH, "x = torch.tanh(x @ {w} + {b})"),
    "F.linear": Kind(BOTH, "x = torch.tanh(F.linear(x, {w}, {b}))"),
    "einsum": Kind(SQUARE, "x = torch.tanh(torch.einsum('bi,ij->bj', x, {w}))"),
    "norm": Kind({"w": "D", "b": "D"}, "x = F.layer_norm(x, (D,), {w}, {b})"),
    "square": Kind(SQUARE, "x = torch.tanh(x @ ({w} @ {w}.t()))"),
    "softmax": Kind(SQUARE, "x = x @ F.softmax({w}, -1)"),
    "table": Kind({"w": "D + 1, D"}, "x = x + F.embedding((x[:, 0] > 0).long() + 2, {w})"),
    "scalar": Kind({"w": ""}, "x = x * torch.cos({w})"),
    "gate": Kind({"w": "D, 2 * D"}, "a, b = (x @ {w}).chunk(2, 1)\nx = a * torch.sigmoid(b)"),
    "loop": Kind(BOTH, "for i in range(3):\n    x = torch.tanh(x @ {w}) + {b}[i]"),
    "unequal": Kind({"w": "D, 17", "v": "17, D"}, "x = torch.tanh(x @ {w}) @ {v}"),
    # Views.
    "mT": Kind(SQUARE, "x = torch.tanh(x @ {w}.mT)", "view"),
    "flat": Kind({"w": "D * D"}, "x = torch.tanh(x @ {w}.view(D, D))", "view"),
    "slice": Kind({"w": "D + 2, D"}, "x = torch.tanh(x @ {w}[1:-1])", "view"),
    "stride": Kind({"w": "2 * D, D"}, "x = torch.tanh(x @ {w}[1::2])", "view"),
    "diagonal": Kind(SQUARE, "x = x * {w}.diagonal()", "view"),
    "expand": Kind({"w": "1, D"}, "x = x * {w}.expand(len(x), D)", "view"),
    "unbind": Kind({"w": "3, D"}, "a, b, c = {w}.unbind()\nx = x * a + torch.sigmoid(x * b) * c", "view"),
    "as_strided": Kind(SQUARE, "x = torch.tanh(x @ {w}.as_strided((D, D), (1, D)))", "view"),
    "squeeze": Kind({"w": "1, D, 1"}, "x = x * {w}.squeeze()", "view"),
    "permute": Kind({"w": "2, D, 3"}, "x = torch.tanh(x @ {w}.permute(1, 0, 2).reshape(D, D))", "view"),
    "unflatten": Kind({"w": "D * D"}, "x = torch.sin(x @ {w}.unflatten(0, (D, D)).movedim(0, 1))", "view"),
    "bits": Kind({"w": "2 * D"}, "x = x * torch.view_as_complex({w}.view(D, 2)).abs()", "view complex"),
    "neg view": Kind(SQUARE, "x = torch.tanh(x @ torch._neg_view({w}))", "view conjugate"),
    # Complex parameters.
    "complex": Kind(COMPLEX, "x = torch.tanh((x.to({z}.dtype) @ {z}).real)", "complex"),
    "conj": Kind(COMPLEX, "h = x.to({z}.dtype) @ {z}.conj()\nx = torch.tanh(h.real + h.imag)", "complex conjugate"),
    "mH": Kind(COMPLEX, "h = x.to({z}.dtype) @ {z}.mH\nx = torch.tanh(h.real - h.imag)", "complex conjugate"),
    "conj imag": Kind({"z": "D"}, "x = x * {z}.conj().imag", "complex conjugate"),
    "conj slice": Kind(
        {"z": "D + 1, D"},
        "h = x.to({z}.dtype) @ {z}[1:].conj()\nx = torch.tanh((h * h.conj()).real)",
        "complex conjugate",
    ),
    "view_as_real": Kind(
        {"z": "D"}, "x = x * torch.view_as_real({z})[:, 1] + torch.view_as_real({z})[:, 0]", "complex"
    ),
    "resolved": Kind(
        COMPLEX, "x = torch.tanh((x.to({z}.dtype) @ {z}.conj().resolve_conj()).imag)", "complex conjugate"
    ),
    "abs": Kind(COMPLEX, "x = torch.tanh(x @ {z}.abs())", "complex"),
    "single": Kind({"f": "D, D"}, "x = torch.tanh(x @ {f}.to(x.dtype))", "mixed-dtypes"),
    # Regions without gradients.
    "detach": Kind(SQUARE, "x = torch.tanh(x @ {w} + x @ {w}.detach())", "detach"),
    "detached": Kind(BOTH, "x = torch.tanh(x @ {w}.detach() + {b})", "detach unused"),
    "no_grad": Kind(
        SQUARE, "with torch.no_grad():\n    s = torch.cos({w}.sum())\nx = torch.tanh(x @ {w}) * s", "no_grad"
    ),
    "all no_grad": Kind(SQUARE, "with torch.no_grad():\n    s = torch.tanh(x @ {w})\nx = x + s", "no_grad unused"),
    "stop": Kind(BOTH, "x = x + {b} + torch.tanh(x @ {w}).detach()", "detach unused"),
    "straight": Kind(SQUARE, "h = x @ {w}\nx = h + (torch.tanh(h) - h).detach()", "detach"),
    "zero": Kind(SQUARE, "x = x + 0.0 * (x @ {w})", "zero-gradient"),
    "where": Kind(SQUARE, "x = torch.where(x > 1e9, x @ {w}, x)", "zero-gradient"),
    # Functions of the user's.
    "saves": Kind(SQUARE, "x = torch.tanh(Scale.apply(x, {w}))", "custom-Function", SAVES),
    "setup": Kind({"w": "D"}, "h, sign = Weigh.apply(x, {w})\nx = h + 0.1 * sign", "custom-Function", SETUP),
    "dirty": Kind({"w": "D"}, "x = Shift.apply(x.clone(), {w})", "custom-Function", DIRTY),
    # Activations written in place.
    "tanh_": Kind(BOTH, "h = x @ {w}\nh.tanh_()\nx = h + {b}", "in-place"),
    "relu_": Kind(BOTH, "x = F.relu(F.linear(x, {w}, {b}), inplace=True) + 0.1 * x", "in-place"),
    "column": Kind(BOTH, "h = x @ {w}\nh[:, 0] = h[:, 1].clone() * {b}[0]\nx = torch.tanh(h)", "in-place"),
    "mul_": Kind(BOTH, "h = x.clone()\nh.mul_({b})\nx = torch.tanh(h.addmm_(x, {w}))", "in-place"),
    "out of a view": Kind(SQUARE, "h = x @ {w}\nh[1:].mul_(0.5)\nx = torch.tanh(h)", "in-place view"),
    # Derivatives inside.
    "penalty": Kind(
        SQUARE,
        "if torch.is_grad_enabled():\n"
        "    v = x.detach().requires_grad_()\n"
        "    (g,) = torch.autograd.grad(torch.tanh(v @ {w}).sum(), v, create_graph=True)\n"
        "    x = x + 0.1 * g\n"
        "x = torch.tanh(x @ {w})",
        "derivative-inside",
    ),
    # State of a module.
    "cached": Kind(
        SQUARE,
        "if not hasattr(self, 'turned'):\n    self.turned = {w}.t()\nx = torch.tanh(x @ self.turned)",
        "module-state",
        forms="module",
    ),
    "counted": Kind(
        SQUARE,
        "self.calls = getattr(self, 'calls', 0) + 1\nx = torch.tanh(x @ {w} * self.calls)",
        "module-state",
        forms="module",
    ),
}
