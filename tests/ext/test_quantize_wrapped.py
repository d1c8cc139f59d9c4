"""What quantize's structure says of it, and Wrapped around it."""

import fshard as fs
from fshard.transforms.compose import reduction
from tests.ranks import on_ranks
from tests.transforms import test_base as core
from tests.trees import one_axis, two_axes


@on_ranks(2)
def test_what_is_read_off_the_structure():
    mesh = one_axis()
    offloaded = fs.compose(fs.offload("cpu"), fs.quantize(mesh, scatter=True))
    assert reduction(offloaded)[:3] == (None, True, True)
    assert reduction(fs.Wrapped(fs.quantize(mesh, scatter=True)))[:3] == (None, True, False)


@on_ranks(1)
def test_a_scatter_without_states_around_it_is_refused():
    core.check_a_scatter_without_states_around_one_with_states_is_refused(fs.quantize(one_axis(), scatter=True))


@on_ranks(4)
def test_it_is_what_it_wraps():
    core.check_it_is_what_it_wraps(fs.quantize(two_axes(4)["shard"], scatter=True))
