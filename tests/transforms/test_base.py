"""Classes of transforms: what is refused when they are made, Wrapped, and what is read off their structure."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.testing import check_transform
from fshard.transforms.compose import masks
from fshard.transforms.structure import layout_axes, reduction
from tests.ranks import my_rank, on_ranks
from tests.transforms.feedback import feedback
from tests.trees import assert_same_bits, normal, one_axis, two_axes


def test_a_class_that_would_not_do_what_it_says_is_refused():
    remedy = (
        "Define it as gather's transpose, with the sum over axes, or let it return the gradients if they pass through."
    )
    for name in ("gather", "start_gather", "axes", "init"):
        with pytest.raises(TypeError) as caught:
            type("Own", (fs.ShardTransform,), {name: lambda self, *args: None})
        assert str(caught.value) == f"Own: scatter is missing beside {name}. {remedy}"


# One form of each half, and the other one.
FORMS = (
    ("gather", "start_gather"),
    ("start_gather", "gather"),
    ("scatter", "start_scatter"),
    ("start_scatter", "scatter"),
)


def pass_on(transform, tensors, specs):
    return tensors


@pytest.mark.rows(8)
@pytest.mark.parametrize("inherited, other", FORMS)
@pytest.mark.parametrize("root", (fs.ShardTransform, fs.Wrapped))
def test_a_class_defines_the_form_that_its_base_class_has(root, inherited, other):
    """The other one would still do as the base class does."""
    scatter = {"scatter": pass_on} if inherited.endswith("gather") else {}
    base = type("Base", (root,), {inherited: pass_on, **scatter})
    with pytest.raises(TypeError) as caught:
        type("Own", (base,), {other: pass_on})
    assert str(caught.value) == (
        f"Own: {inherited} is missing beside {other}, because that of Base would still run. Define {inherited} too."
    )
    assert issubclass(type("Own", (base,), {inherited: pass_on}), base)
    assert issubclass(type("Own", (base,), {inherited: pass_on, other: pass_on}), base)


@pytest.mark.rows(8)
@pytest.mark.parametrize("defined, other", FORMS)
@pytest.mark.parametrize("root", (fs.ShardTransform, fs.Wrapped))
def test_each_half_of_a_pair_follows_from_the_other(root, defined, other):
    """Of a class, or of one that a class has beside the base class; both may call the same form of their base."""
    calls = []

    def note(transform, tensors, specs):
        calls.append(defined)
        return getattr(root, defined)(transform, tensors, specs)

    members = {"scatter": pass_on, defined: note} if defined.endswith("gather") else {defined: note}
    by_itself = type("Own", (root,), members)
    by_another_class = type("Own", (type("Mixed", (), members), root), {})
    for made in (by_itself, by_another_class):
        transform = made(fs.compose()) if root is fs.Wrapped else made()
        for form in (defined, other):
            result = getattr(transform, form)([1], None)
            assert (result() if form.startswith("start") else result) == [1]
    assert calls == [defined] * 4


@dataclass(frozen=True)
class Own(fs.ShardTransform):
    """Fields may have any name, and so may helpers with an underscore; a member may be a field with a default."""

    gathers: bool
    axis: fs.Axis | None
    axes: tuple[fs.Axis, ...] = ()
    inner: fs.ShardTransform | None = None

    def scatter(self, grads, specs):
        return grads


@on_ranks(2)
def test_what_is_read_off_the_structure():
    """Of a user's own transform around others too."""
    mesh = one_axis()
    axis, wide = fs.axis_of(mesh), fs.cast(scatter=torch.float64)
    masked = fs.masked(fs.compose(fs.fully_shard(mesh), wide), "a*", fs.replicate(mesh))
    around = fs.Wrapped(masked)
    for transform in (around, Own(True, axis), Own(True, None, inner=around)):
        assert layout_axes(transform) == (axis,)
    for transform in (around, fs.compose(fs.offload("cpu"), around)):
        assert masks(transform) == ("a*",)
    params = fs.shard({"a1": torch.ones(3), "b": torch.ones(3)}, around)
    assert [params[name].spec.transform.inner.axes for name in params] == [(axis,)] * 2
    assert params["b"].spec.transform.inner == fs.replicate(mesh)
    # The dtype that gradients are reduced in, whether there is a state, and whether reductions may write to them.
    reductions = {
        fs.fully_shard(mesh): (None, False, True),
        fs.zero3(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32): (torch.float32, False, True),
        fs.compose(wide, fs.ddp(mesh), fs.cast(scatter=torch.float16)): (torch.float16, False, True),
        fs.Wrapped(fs.compose(fs.fully_shard(mesh), wide)): (torch.float64, False, False),
        fs.compose(fs.offload("cpu"), feedback(mesh)): (None, True, False),
        fs.split_dim(mesh, dim=0): (None, False, False),
        fs.zero3(fs.init_mesh({"shard": 1, "rest": -1}, device="cpu")): (None, False, False),
    }
    for transform, expected in reductions.items():
        assert reduction(transform)[:3] == expected, transform


@dataclass
class LargerThan:
    """A mask that compares by value, and so cannot be hashed."""

    elements: int

    def __call__(self, name, leaf):
        return leaf.numel() > self.elements


@on_ranks(2)
def test_a_mask_need_not_be_hashed():
    mesh = one_axis()
    masked = fs.masked(fs.fully_shard(mesh, min_shard_elements=0), LargerThan(3), fs.replicate(mesh))
    for transform in (masked, fs.compose(fs.cast(gather=torch.bfloat16), masked), fs.Wrapped(masked)):
        params = fs.shard({"a": torch.ones(3), "b": torch.ones(4)}, transform)
        assert [params[name].local.numel() for name in params] == [3, 2]


@dataclass(frozen=True)
class Doubled(fs.Wrapped):
    """Doubles gradients, in the form of a scatter that starts."""

    def start_scatter(self, grads, specs):
        return self.inner.start_scatter([2 * grad for grad in grads], specs)


@on_ranks(4)
def test_a_scatter_around_two_sums_is_run_whichever_form_it_has():
    params = fs.shard({"w": torch.ones(8)}, Doubled(fs.hsdp(two_axes(4), min_shard_elements=0)))
    _, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
    assert fs.unshard(grads)["w"].tolist() == [2.0] * 8


KEPT: Any = {}


@dataclass(frozen=True)
class Keeps(fs.ShardTransform):
    """Keeps what it returns, between storage and what sums, and returns its state."""

    def init(self, grad):
        return torch.zeros_like(grad)

    def scatter(self, grads, specs, states):
        KEPT[my_rank()] = list(grads), [grad.clone() for grad in grads]
        return grads, list(grads)


@on_ranks(2)
def test_nothing_that_a_transform_keeps_is_written_to():
    """Neither to divide by the number of ranks nor to add up microbatches, and its state is not."""
    full = {"w": torch.ones(6, 4), "b": torch.ones(3)}
    params = fs.shard(full, fs.compose(Keeps(), fs.fully_shard(one_axis())))

    def loss(params, x):
        return sum((x * leaf).sum() for leaf in fs.gather(params).values())

    run = fs.accumulate(loss, communicate="each", transform_state=fs.transform_state(params))
    _, grads, after = run(params, [torch.tensor(1.0), torch.tensor(3.0)])
    assert_same_bits(*KEPT[my_rank()])
    assert_same_bits(fs.unshard(grads), fs.tree_map(lambda x: 2 * x, full))
    # The sum over two ranks in the last microbatch, padding aside.
    assert [row[row != 0].unique().tolist() for row in fs.tree_leaves(after)] == [[6.0]] * 2


@dataclass(frozen=True)
class Elsewhere(fs.ShardTransform):
    """A user's own offload, to another device for shards than for computation."""

    @property
    def storage(self):
        return fs.Storage(torch.device("meta"), torch.device("cpu"))


@on_ranks(1)
def test_shards_are_kept_on_the_device_of_their_storage():
    ddp = fs.ddp(one_axis())
    for transform in (Elsewhere(), fs.Wrapped(Elsewhere()), fs.compose(Elsewhere(), ddp), fs.compose(ddp, Elsewhere())):
        assert fs.shard({"w": torch.ones(3)}, transform)["w"].local.device.type == "meta"


def one_step(transform, full):
    """Parameters after a step, and its collectives."""

    def loss(params):
        return sum((leaf**2).sum() for leaf in fs.gather(params).values())

    state = fs.TrainState.create(fs.shard(full, transform), fs.sgd(0.1))
    with fs.comm.record() as record:
        _, grads, after = fs.value_and_grad(loss, transform_state=state.transform_state)(state.params)
    state = fs.update(fs.sgd(0.1), state, grads, transform_state=after)
    return fs.unshard((state.params, state.transform_state)), [tuple(entry) for entry in record]


@dataclass(frozen=True)
class Stateless(fs.Wrapped):
    def scatter(self, grads, specs):
        return self.inner.scatter(grads, specs)


@on_ranks(4)
def test_it_is_what_it_wraps():
    mesh, full = two_axes(4), {"w": normal(1)(6, 5), "b": normal(2)(7)}
    by_name = fs.masked(fs.fully_shard(mesh["shard"]), "w", fs.replicate(mesh["shard"]))
    for inner in (fs.hsdp(mesh, min_shard_elements=0), by_name, feedback(mesh["shard"])):
        values, record = one_step(fs.Wrapped(inner), full)
        expected, expected_record = one_step(inner, full)
        assert_same_bits(values, expected)
        assert record == expected_record
    check_transform(fs.Wrapped(fs.zero3(one_axis(), min_shard_elements=0)))
    params = fs.shard({"w": torch.ones(4)}, Stateless(feedback(mesh["shard"])))
    with pytest.raises(TypeError, match=r"Stateless\.scatter\(\) takes 3 positional arguments but 4 were given"):
        fs.scatter_grads({"w": torch.ones(4)}, params, transform_state=fs.transform_state(params))


def test_gradients_may_be_passed_by_name():
    grads = [torch.ones(2)]
    for transform in (fs.ShardTransform(), fs.cast(), fs.compose(), fs.compose(fs.cast(scatter=torch.float32))):
        assert_same_bits(transform.scatter(grads=grads, specs=[None]), grads)
        assert_same_bits(transform.start_scatter(grads=grads, specs=[None])(), grads)
        wrapped = fs.Wrapped(transform)
        assert_same_bits(wrapped.scatter(grads=grads, specs=[None]), grads)


@on_ranks(2)
def test_a_cast_leaves_other_leaves_than_floating_ones_as_they_are():
    """Indices would be rounded, and imaginary parts lost."""
    others = {"index": torch.arange(300, 307), "mask": torch.arange(5) % 2 == 0}
    others["phase"] = torch.complex(torch.ones(3), torch.arange(3.0))
    full = {"w": torch.linspace(0, 1, 5), **others}
    params = fs.shard(full, fs.zero3(one_axis(), param_dtype=torch.bfloat16, min_shard_elements=0))
    gathered = fs.gather(params)
    assert gathered.pop("w").dtype == torch.bfloat16
    assert_same_bits(gathered, others)
    precise = torch.full((5,), 1 + 2**-10)
    assert_same_bits(fs.unshard(fs.scatter_grads({"w": precise}, like={"w": params["w"]}))["w"], precise)


def test_an_error_of_a_layout_survives_a_pickle():
    error = fs.LayoutError(got="3 rows", expected="an even number of rows")
    for other in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (other.got, other.expected, str(other)) == (error.got, error.expected, str(error))
