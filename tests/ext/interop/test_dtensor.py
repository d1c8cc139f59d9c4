"""To and from DTensor, against FSDP2's own parameters."""

import re

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import fshard as fs
from tests.checkpoint.states import refused
from tests.ext.interop.test_state_dict import every_leaf
from tests.ranks import on_ranks
from tests.transforms.test_own_dim import STRATEGIES as OWNING
from tests.transforms.test_own_dim import grid, initial, whole
from tests.trees import assert_alike, assert_same_bits, normal, one_axis
from tests.unit_models import filled

# Its first dims are 12, 12, 5 and 5: the ones are even for 2 and 3 ranks, the others for neither.
EVEN = ("0.weight", "0.bias")


def sharded_by_both():
    """A module that FSDP2 shards, its full values, and what fshard makes of them on the same mesh."""
    mesh, module = one_axis(), filled(nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 5)))
    full = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    fully_shard(module, mesh=mesh)
    return mesh, module, full, fs.shard(full, every_leaf(mesh))


@on_ranks("2 processes")
def test_parameters_of_fsdp2_are_taken_over():
    mesh, module, _, ours = sharded_by_both()
    theirs = dict(module.named_parameters())
    params = fs.from_dtensor(theirs, every_leaf(mesh))
    # The layout is the one that `shard` itself gives, so that everything else goes on from here.
    assert repr(params) == repr(ours)
    assert_same_bits(fs.tree_leaves(params), fs.tree_leaves(ours))
    assert all(params[name].local.data_ptr() == theirs[name].to_local().data_ptr() for name in EVEN)
    assert not any(leaf.requires_grad for leaf in fs.tree_leaves(params))


@on_ranks("2 processes")
def test_parameters_that_a_module_freezes_are_frozen():
    """Tensors of a state dict are no parameters, and take no gradient either way."""
    mesh, module, _, _ = sharded_by_both()
    module[0].requires_grad_(False)
    for tensors, frozen in ((dict(module.named_parameters()), ["0.weight", "0.bias"]), (module.state_dict(), [])):
        params = fs.from_dtensor(tensors, every_leaf(mesh))
        assert [name for name, leaf in params.items() if leaf.spec.frozen] == frozen


@on_ranks("2 processes")
def test_a_mesh_without_names_has_the_axes_of_the_same_ranks():
    """FSDP2 makes one where it is given none."""
    one_axis()
    module = fully_shard(filled(nn.Linear(5, 3)))
    theirs = dict(module.named_parameters())
    params = fs.from_dtensor(theirs, every_leaf(one_axis()))
    full = {name: parameter.full_tensor().detach() for name, parameter in theirs.items()}
    assert_same_bits(fs.unshard(params), full)
    module.load_state_dict(fs.to_dtensor(fs.tree_map(lambda t: 2 * t, params), module.weight.device_mesh))
    assert_same_bits({name: p.full_tensor() for name, p in theirs.items()}, {name: 2 * t for name, t in full.items()})
    rows = fs.init_mesh({"outer": 2, "shard": 1}, device="cpu")
    text = refused(lambda: fs.from_dtensor(theirs, every_leaf(rows["shard"])))
    assert "['weight']: lives on no named axes, and the strategy on shard=1 in group " in text


@on_ranks("2 processes")
def test_shards_become_the_dtensors_of_fsdp2():
    mesh, module, full, params = sharded_by_both()
    ours = fs.to_dtensor(params, mesh)
    for name, theirs in module.named_parameters():
        assert (ours[name].shape, ours[name].stride()) == (theirs.shape, theirs.stride())
        assert ours[name].placements == theirs.placements
        assert ours[name].full_tensor().equal(full[name])
    assert all(ours[name].to_local().data_ptr() == params[name].local.data_ptr() for name in EVEN)
    # So an FSDP2 model loads them.
    module.load_state_dict(fs.to_dtensor(fs.tree_map(lambda t: 2 * t, params), mesh))
    loaded = fs.unshard(fs.from_dtensor(dict(module.named_parameters()), every_leaf(mesh)))
    assert_same_bits(loaded, {name: 2 * tensor for name, tensor in full.items()})


@on_ranks("2 processes")
def test_a_module_that_fsdp2_has_sharded_is_refused():
    _, module, _, _ = sharded_by_both()
    assert refused(lambda: fs.functionalize(module)) == (
        "functionalize: '0.weight' is a DTensor, as fully_shard makes it. Pass the module as it was before. "
        "fs.from_dtensor(module.state_dict(), strategy) takes the values over."
    )


@on_ranks("2 processes")
def test_there_and_back_is_the_same():
    """Also whole and empty leaves, numbers that stay whole, other dims, and leaves that are no tensors of ours."""
    mesh, draw, plain = one_axis(), normal(), torch.ones(2)
    full = {"w": draw(5, 4), "matrix": draw(12, 7), "row": draw(1, 4), "empty": draw(0, 3), "none": None}
    with_number = full | {"number": draw()}
    for tree, strategy in (
        (full, every_leaf(mesh)),
        (with_number, fs.zero2(mesh, min_shard_elements=30)),
        (with_number, fs.ddp(mesh)),
        (full, fs.fully_shard(mesh, dim=-1)),
    ):
        params = fs.shard(tree, strategy)
        dtensors = fs.to_dtensor({"params": params, "plain": plain}, mesh)
        assert dtensors["plain"] is plain
        assert isinstance(dtensors["params"]["w"], DTensor)
        assert_alike(fs.from_dtensor(dtensors, strategy)["params"], params)


@on_ranks(4)
def test_layouts_that_dtensor_pads_otherwise_are_refused():
    """DTensor cuts five rows over two times two ranks into 2, 1, 1 and 1, not 2, 2, 1 and 0; a number it cannot cut."""
    mesh = fs.init_mesh({"major": 2, "minor": 2}, device="cpu")
    strategy = fs.compose(fs.fully_shard(mesh["minor"]), fs.fully_shard(mesh["major"]))
    over = r"major=2 in group '[^']+' on cpu, minor=2 in group '[^']+' on cpu"
    ours = r"P\(\('major', 'minor'\)\)"
    theirs = rf"DTensor splits dims evenly, in the order of {over}, and no numbers"
    rows = rf"  \['w'\]: is {ours} of shape \(5, 3\) over {over}, but {theirs}\n"
    text = refused(lambda: fs.to_dtensor(fs.shard({"w": torch.ones(5, 3), "n": torch.ones(())}, strategy), mesh))
    assert re.fullmatch(
        "to_dtensor: DTensor has no such layout on this mesh\n"
        rf"  \['n'\]: is {ours} of shape \(\) over {over}, but {theirs}\n"
        f"{rows}To fix: pass the mesh they were sharded with, or reshard these leaves; min_shard_elements keeps small "
        "ones whole.",
        text,
    )
    dtensors = {"w": distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)] * 2)}
    text = refused(lambda: fs.from_dtensor(dtensors, strategy))
    remedy = "To fix: use the strategy's mesh and Shard or Replicate."
    assert re.fullmatch(rf"from_dtensor: leaves cannot be taken over\n{rows}{remedy}", text)


@on_ranks("2 processes")
def test_dtensors_that_cannot_be_taken_over_are_all_named():
    mesh, other = one_axis(), fs.init_mesh({"other": -1}, device="cpu")
    tree = {
        "partial": DTensor.from_local(torch.ones(4), mesh, [Partial()]),
        "elsewhere": distribute_tensor(torch.ones(4), other, [Shard(0)]),
    }
    text = refused(lambda: fs.from_dtensor(tree, every_leaf(mesh)))
    assert re.search(r"\n  \['elsewhere'\]: lives on other=2 in group .*, and the strategy on shard=2 in group ", text)
    assert "\n  ['partial']: has the placement P(sum), which is neither Shard nor Replicate\n" in text


@on_ranks(2)
def test_leaves_that_ranks_own_keep_their_roles():
    mesh = grid(1, 2)
    strategy = OWNING["of ddp"](mesh)
    params = fs.shard(initial(), strategy)
    there = fs.to_dtensor(params, mesh)
    back = fs.from_dtensor(there, strategy)
    # The specs too, whose axes stand in the strategy's order and not in that of the mesh.
    assert_alike(back, params)
    there["experts"]["up"] = fs.to_dtensor(fs.shard({"up": initial()["experts"]["up"]}, whole(mesh)), mesh)["up"]
    text = "['experts']['up']: is replicated over ['expert'], where the strategy has each rank own its piece\n"
    assert text in refused(lambda: fs.from_dtensor(there, strategy))
