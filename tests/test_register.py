"""Dataclasses as trees: parameters of every verb, static fields, and what is refused."""

from dataclasses import dataclass, field

import optree
import torch
from torch.utils import _pytree as pytree

import fshard as fs
from tests.bad_input import text_of
from tests.ranks import on_ranks


@fs.register_dataclass
@dataclass(frozen=True, slots=True)
class Attention:
    weight: torch.Tensor
    heads: int = field(metadata={"static": True})

    def __post_init__(self):
        # A map over a tree must not call this with other values than tensors.
        assert isinstance(self.weight, torch.Tensor)


@dataclass
class Scaled:
    factor: torch.Tensor
    inner: Attention
    name: str


fs.register_dataclass(Scaled, meta_fields=["name"])


def make_tree(heads=2):
    return Scaled(torch.ones(2), Attention(torch.arange(6.0).reshape(3, 2), heads), "a")


def test_maps_of_every_library_keep_static_fields():
    for map_tensors in (fs.tree_map, optree.tree_map, pytree.tree_map):
        mapped = map_tensors(lambda x: x + 1, make_tree())
        assert (mapped.name, mapped.inner.heads) == ("a", 2)
        assert mapped.inner.weight.equal(torch.arange(1.0, 7.0).reshape(3, 2))
    lists = optree.tree_map(torch.Tensor.tolist, make_tree())
    assert lists.factor == [1.0, 1.0]
    assert optree.tree_paths(make_tree()) == [("factor",), ("inner", "weight")]


@on_ranks(2)
def test_a_tree_of_dataclasses_is_sharded_differentiated_and_jitted():
    params = fs.shard(make_tree(), fs.zero3(fs.init_mesh({"shard": -1}, device="cpu"), min_shard_elements=0))

    def loss(p):
        full = fs.gather(p)
        return full.factor.sum() * full.inner.weight.sum() * full.inner.heads

    value, grads = fs.value_and_grad(loss)(params)
    assert (value.item(), grads.inner.heads) == (60.0, 2)
    assert fs.unshard(grads).factor.tolist() == [30.0, 30.0]
    of_func = torch.func.grad(lambda p: fs.objective(loss(p), like=p))(params)
    assert of_func.inner.weight.local.equal(grads.inner.weight.local)
    step = fs.jit(lambda p: fs.value_and_grad(loss)(p)[0])
    assert [step(params).item(), step(params).item()] == [60.0, 60.0]
    other = fs.shard(make_tree(heads=3), fs.zero3(fs.init_mesh({"shard": -1}, device="cpu"), min_shard_elements=0))
    assert step(other).item() == 90.0


def test_static_fields_are_part_of_the_structure():
    text = text_of(lambda: fs.tree_map(torch.add, make_tree(2), make_tree(3)))
    assert text.startswith("tree_map: rest: trees differ in structure\n")


class Plain:
    pass


@dataclass
class WithoutFields:
    w: torch.Tensor


def test_refusals():
    assert text_of(lambda: fs.register_dataclass(Plain)) == (
        "register_dataclass: cls must be a dataclass, got Plain. Write @fs.register_dataclass above @dataclass, not "
        "below it."
    )
    assert text_of(lambda: fs.register_dataclass(WithoutFields, meta_fields=["v"])) == (
        "register_dataclass: meta_fields names 'v', which is not a field of WithoutFields. Its fields are ['w']."
    )
    assert "already registered" in text_of(lambda: fs.register_dataclass(Attention))


def test_a_class_that_a_library_registered_with_torch_is_in_no_registry_afterwards():
    """transformers registers its outputs so; optree alone would make instances without their constructor."""

    @dataclass
    class Output(dict):
        logits: torch.Tensor

    pytree.register_pytree_node(Output, lambda node: ([node.logits], None), lambda children, _: Output(*children))
    assert "already registered" in text_of(lambda: fs.register_dataclass(Output))
    output = Output(torch.ones(2))
    assert optree.tree_leaves(output) == [output]
    assert text_of(lambda: fs.jit(lambda x: Output(x))(torch.ones(2))) == (
        "jit: the result of the function: leaves are no tensors\n"
        "  (root): expected a Sharded leaf or a tensor, got an Output\n"
        "To fix: write @fs.register_dataclass above the declaration of Output, or put its tensors in a dict or a "
        "NamedTuple."
    )
