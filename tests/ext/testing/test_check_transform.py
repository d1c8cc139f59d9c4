"""check_transform: it passes what is right, and names each way in which a transform can be wrong."""

import re

import pytest
import torch

import fshard as fs
from fshard.testing import check_adjoint, check_transform
from tests.ranks import on_ranks
from tests.transforms.feedback import feedback
from tests.trees import CASTS, STRATEGIES, meshes, one_axis, two_axes


@pytest.mark.rows(1)
@on_ranks(1, 4)
def test_every_exact_strategy_passes():
    on = meshes()
    for name, make in STRATEGIES.items():
        if "dim" not in name:
            assert check_transform(make(on)).gather_error == 0.0


class Around(fs.Wrapped):
    """A user's transform that leaves the work to another one, and is the ground for mistakes."""


class Coarse(Around):
    """Gathers leaves of several elements in steps."""

    def gather(self, leaves, specs):
        return [leaf if leaf.numel() == 1 else (leaf * 64).round() / 64 for leaf in super().gather(leaves, specs)]


@on_ranks(3)
def test_dtypes_and_a_state():
    check_transform(fs.zero3(one_axis()), dtype=torch.float32)
    check_transform(feedback(one_axis()), dtype=torch.float32, error=1 / 200)


@on_ranks(4)
def test_lossy_ones_pass_within_their_error():
    """What rounds both ways, what rounds gradients and keeps the rest, and what rounds in gather."""
    mesh, rounded = two_axes(4), CASTS["cast zero2"](meshes())
    check_transform(rounded, error=1 / 200)
    check_transform(fs.compose(fs.replicate(mesh["replicate"]), feedback(mesh["shard"])), error=1 / 200)
    with pytest.raises(AssertionError, match="check_adjoint: scatter is not gather's transpose"):
        check_transform(rounded, error=1 / 20000)
    text = r"gather of \[2\] of shape \(24, 8\): relative error: expected .*, got 0\.00"
    with pytest.raises(AssertionError, match=text):
        check_transform(Coarse(fs.fully_shard(mesh["shard"])), [(1, 1), (1, 1), (24, 8)], error=1 / 400)


class Doubled(Around):
    def gather(self, leaves, specs):
        return [2 * leaf for leaf in super().gather(leaves, specs)]

    def scatter(self, grads, specs):
        return [2 * grad for grad in super().scatter(grads, specs)]


class AveragesVectors(Around):
    def scatter(self, grads, specs):
        by = [self.axes[0].size if len(spec.shape) == 1 else 1 for spec in specs]
        return [grad / size for grad, size in zip(super().scatter(grads, specs), by, strict=True)]


class WritesToLeaves(Around):
    def gather(self, leaves, specs):
        gathered = super().gather(leaves, specs)
        for leaf in leaves:
            leaf.mul_(1.5)
        return gathered


class WritesToGradients(Around):
    def scatter(self, grads, specs):
        scattered = super().scatter(grads, specs)
        for grad in grads:
            grad.zero_()
        return scattered


class ComparedByIdentity(Around):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class HashedByIdentity(Around):
    __hash__ = object.__hash__


class CountsDimsFromTheEnd(Around):
    def gather(self, leaves, specs):
        return [leaf.flip(-1).flip(-1) if leaf.dim() < 3 else leaf.flip(-1) for leaf in super().gather(leaves, specs)]


class ScattersBySpec(Around):
    """Leaves of one shape have equal specs."""

    def scatter(self, grads, specs):
        by_spec = dict(zip(specs, super().scatter(grads, specs), strict=True))
        return [by_spec[spec] for spec in specs]


class StatesBySpec(Around):
    def init(self, grad):
        return torch.zeros_like(grad)

    def scatter(self, grads, specs, states):
        by_spec = dict(zip(specs, grads, strict=True))
        return self.inner.scatter(grads, specs), [by_spec[spec].clone() for spec in specs]


class RoundsByTheFirst(Around):
    """Rounds all leaves by the scale of the first one; where that is doubled, they round as before."""

    def gather(self, leaves, specs):
        scale = leaves[0].abs().max()
        rounded = [scale * (leaf / scale).bfloat16().to(leaf.dtype) for leaf in leaves]
        return self.inner.gather(rounded, specs)


class StartsDoubled(Around):
    """Its two forms differ: the library calls both."""

    def gather(self, leaves, specs):
        return self.inner.gather(leaves, specs)

    def start_gather(self, leaves, specs):
        finish = self.inner.start_gather(leaves, specs)
        return lambda: [2 * full for full in finish()]

    def scatter(self, grads, specs):
        return self.inner.scatter(grads, specs)

    def start_scatter(self, grads, specs):
        finish = self.inner.start_scatter(grads, specs)
        return lambda: [2 * grad for grad in finish()]


class EndsDoubled(Around):
    def gather(self, leaves, specs):
        return [2 * full for full in self.inner.gather(leaves, specs)]

    def start_gather(self, leaves, specs):
        return self.inner.start_gather(leaves, specs)

    def scatter(self, grads, specs):
        return [2 * grad for grad in self.inner.scatter(grads, specs)]

    def start_scatter(self, grads, specs):
        return self.inner.start_scatter(grads, specs)


class FlattensStates(Around):
    def init(self, grad):
        return {"left": torch.zeros_like(grad)}

    def scatter(self, grads, specs, states):
        return self.inner.scatter(grads, specs), [{"left": grad.flatten()} for grad in grads]


class DropsStates(FlattensStates):
    def scatter(self, grads, specs, states):
        return self.inner.scatter(grads, specs), [None for _ in states]


NUMBER = "-?[0-9.e+-]+"
PRODUCTS = rf"got <gather\(x\), y> = {NUMBER} and <x, scatter\(y\)> = {NUMBER}, apart by {NUMBER}"
WRONG = {
    Doubled: r"gather of \[0\] of shape \(5, 3\): relative error: expected at most 0, got 1",
    AveragesVectors: rf"check_adjoint: scatter is not gather's transpose\n  \[1\]: expected .*, {PRODUCTS}\n",
    WritesToLeaves: r"gather's inputs: leaves it wrote to: expected",
    WritesToGradients: r"scatter's inputs: leaves it wrote to: expected at most 0, got [45]",
    ComparedByIdentity: r"equality of a pickled copy \(use a frozen dataclass\): differences: expected at most 0",
    HashedByIdentity: r"equality of a pickled copy \(use a frozen dataclass\): differences: expected at most 0",
    CountsDimsFromTheEnd: r"gather with a batch of vmap behind the dims: leaves that differ from single calls",
    ScattersBySpec: r"scatter of all leaves twice: leaves that differ from single calls: expected",
    StatesBySpec: r"scatter of all leaves twice: leaves that differ from single calls: expected",
    StartsDoubled: r"gather of \[0\] of shape \(5, 3\): relative error: expected at most 0, got 1",
    EndsDoubled: "gather and start_gather, or two calls: differing leaves: .*\n"
    "  scatter and start_scatter, or two calls: differing leaves: ",
    FlattensStates: r"scatter's new states: leaves whose state has other shapes or dtypes .*, got [45]",
    DropsStates: r"scatter's new states: leaves whose state has other shapes or dtypes .*, got 6",
}


@on_ranks(2)
def test_what_depends_on_the_first_leaf_is_named():
    text = "gather of all leaves twice: leaves that differ from single calls: expected at most 0, got"
    with pytest.raises(AssertionError, match=f"^check_transform: claims do not hold\n  {text}"):
        check_transform(RoundsByTheFirst(fs.fully_shard(one_axis())), [(5, 3), (7,)], error=2**-7)


@on_ranks(2)
def test_each_mistake_is_named():
    plain = fs.fully_shard(one_axis())
    check_transform(Around(plain))
    for wrong, text in WRONG.items():
        with pytest.raises(AssertionError, match=text):
            check_transform(wrong(plain))


class ReturnsNothing(Around):
    def gather(self, leaves, specs):
        super().gather(leaves, specs)


class ReturnsPairs(Around):
    def gather(self, leaves, specs):
        return [(full, full) for full in super().gather(leaves, specs)]


class LosesRows(Around):
    def gather(self, leaves, specs):
        return [full[:-1] if full.dim() else full for full in super().gather(leaves, specs)]


class KeepsGradientsWhole(Around):
    def scatter(self, grads, specs):
        super().scatter(grads, specs)
        return list(grads)


@on_ranks(2)
def test_results_that_no_step_would_take_are_named():
    plain = fs.fully_shard(one_axis(), min_shard_elements=0)
    for wrong, text in (
        (ReturnsNothing, "ReturnsNothing.gather: expected 6 results, got None"),
        (ReturnsPairs, r"ReturnsPairs.gather: results do not fit\n  \[0\]: expected a tensor, got a tuple"),
        (LosesRows, r"LosesRows.gather: results do not fit\n  \[0\]: expected .*\(5, 3\), got .*\(4, 3\)"),
        (KeepsGradientsWhole, r"KeepsGradientsWhole.scatter: .*\n  \[0\]: expected .* \(3, 3\), got .*\(5, 3\)"),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            check_transform(wrong(plain))


@on_ranks(2)
def test_what_would_compare_nothing_is_refused():
    transform = fs.fully_shard(one_axis())
    shapes = "shapes of leaves with elements, such as [(5, 3)], got "
    dtype, error = "dtype to be a floating torch.dtype such as ", "error to be a number, 0 or more and below 1, got "
    for argument, options, text in (
        ([], {}, f"{shapes}[]"),
        ([(0, 3), (0,)], {}, f"{shapes}[(0, 3), (0,)]"),
        # Its shapes would be used up by the first of several checks.
        (iter([(2, 3)]), {}, f"{shapes}<list_iterator"),
        ([3, 4], {}, f"{shapes}[3, 4]"),
        ([(1.5,)], {}, f"{shapes}[(1.5,)]"),
        (None, {}, f"{shapes}None"),
        # Of complex numbers only the real parts would be compared.
        ([(2, 3)], {"dtype": torch.complex64}, dtype),
        ([(2, 3)], {"dtype": "float32"}, dtype),
        # By an error of 1, zeros are as good as any values.
        ([(2, 3)], {"error": 1.0}, f"{error}1.0"),
        ([(2, 3)], {"error": torch.inf}, f"{error}inf"),
        ([(2, 3)], {"error": True}, f"{error}True"),
    ):
        for check in (check_adjoint, check_transform):
            with pytest.raises(ValueError, match=f"^check_adjoint: expected {re.escape(text)}"):
                check(transform, argument, **options)


@on_ranks(4)
def test_leaves_that_stay_split_are_refused():
    mesh = two_axes(4)
    transform = fs.compose(fs.fully_shard(mesh["shard"]), fs.split_dim(mesh["replicate"], dim=0))
    text = r"^check_transform: expected leaves that gather makes whole, got some split over \['replicate'\]; check "
    with pytest.raises(ValueError, match=text):
        check_transform(transform, [(4, 4)])
