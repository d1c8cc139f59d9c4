"""Modules with torch's checkpoint_wrapper or torch.compile inside: the names of exports are those of a state dict."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrapped
from torch.distributed.checkpoint.state_dict import get_state_dict

import fshard as fs
from fshard.checkpoint import (
    from_optimizer_state_dict,
    from_state_dict,
    load_dcp,
    load_huggingface,
    save_dcp,
    save_huggingface,
    to_optimizer_state_dict,
    to_state_dict,
)
from tests.ext.interop.test_state_dict import refusal
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, normal, one_axis
from tests.unit_models import zero3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """A tied weight, and blocks with buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


def made(seed=0):
    module, draw = Net().double().eval(), normal(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(draw(*tensor.shape).abs() if tensor.is_floating_point() else tensor + 3)
    return module


def of_blocks(wrap):
    def make(seed=0):
        module = made(seed)
        for i, block in enumerate(module.blocks):
            module.blocks[i] = wrap(block)
        return module

    return make


def of_layers_and_blocks(seed=0):
    module = of_blocks(wrapped)(seed)
    apply_activation_checkpointing(module, check_fn=lambda submodule: isinstance(submodule, nn.Linear))
    return module


WRAPPINGS = {
    "plain": made,
    "each block": of_blocks(wrapped),
    "each block and layer, twice": lambda seed=0: wrapped(of_layers_and_blocks(seed)),
    "the whole": lambda seed=0: wrapped(made(seed)),
}
STRATEGIES = {
    "zero2": lambda mesh: fs.zero2(mesh, min_shard_elements=0),
    "zero3": zero3(),
    "ddp": fs.ddp,
}
IDS = torch.tensor([[1, 4, 10, 0, 3], [2, 2, 5, 9, 7]])
EVERY = pytest.mark.parametrize("wrapping", WRAPPINGS)
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


def parts(module, strategy):
    """Its model, its parameters, and all that its state dict has."""
    model = fs.functionalize(module, Block)
    params = model.init(STRATEGIES[strategy](one_axis()))
    return model, params, params | {name: model.buffers[name] for name in model.buffers if "cache" not in name}


def plain_state():
    return {name: tensor.detach() for name, tensor in made().state_dict().items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@EVERY_STRATEGY
@EVERY
@on_ranks(1, 2)
def test_every_export_has_the_names_of_the_plain_module_and_is_read_again(wrapping, strategy, tmp_path):
    module, expected = WRAPPINGS[wrapping](), plain_state()
    _, params, state = parts(module, strategy)
    assert list(params) == [name for name, _ in made().named_parameters()]
    like = fs.tree_map(torch.zeros_like, state)

    exported = to_state_dict(state, module=module)
    assert list(exported) == list(dict.fromkeys([*exported, *expected]))
    assert_same_bits(dict(sorted(exported.items())), dict(sorted(expected.items())))
    loaded = [from_state_dict(exported, like, module=module), from_state_dict(expected, like, module=module)]

    save_huggingface(tmp_path / "hf", state, module=module)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    once = {name: tensor for name, tensor in expected.items() if name != "head.weight"}
    assert_same_bits(dict(sorted(written.items())), dict(sorted(once.items())))
    loaded += [load_huggingface(tmp_path / "hf", like, module=module)]
    loaded += [load_huggingface(tmp_path / "hf", like, module=made())]

    save_dcp(tmp_path / "dcp", state, module=module)
    read = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same_bits(read["model"], expected)
    loaded += [load_dcp(tmp_path / "dcp", like, module=module, trusted=True)]
    loaded += [load_dcp(tmp_path / "dcp", like, module=made(), trusted=True)]
    for tree in loaded:
        assert_same_bits(fs.unshard(tree), fs.unshard(state))


@EVERY_STRATEGY
@EVERY
@on_ranks(1, 2)
def test_training_and_the_state_of_optimizers_are_those_of_the_plain_module(wrapping, strategy, tmp_path):
    tx = fs.from_torch(torch.optim.Adam, lr=0.1)

    def trained(make):
        module = make()
        model, params, _ = parts(module, strategy)
        state = fs.TrainState.create(params, tx, buffers=model.buffers)
        for ids in IDS:
            loss, grads = fs.value_and_grad(lambda p, ids=ids: model.apply(p, ids).square().mean())(state.params)
            state = fs.update(tx, state, grads)
        return module, state, loss

    module, state, loss = trained(WRAPPINGS[wrapping])
    plain, plain_trained, plain_loss = trained(made)
    assert_same_bits((fs.unshard(state), loss), (fs.unshard(plain_trained), plain_loss))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (module, plain)]
    exported = to_optimizer_state_dict(state.opt_state, module, optimizers[0])
    expected = to_optimizer_state_dict(plain_trained.opt_state, plain, optimizers[1])
    assert_same_bits(exported["state"], expected["state"])
    back = from_optimizer_state_dict(exported, tx.init(state.params), module, optimizers[0])
    assert_same_bits(fs.unshard(back), fs.unshard(state.opt_state))
    save_dcp(tmp_path, state, module=module, optimizer=optimizers[0])
    like = fs.TrainState.create(fs.tree_map(torch.zeros_like, state.params), tx, buffers=state.buffers)
    for of, optimizer in ((module, optimizers[0]), (plain, optimizers[1])):
        again = load_dcp(tmp_path, like, module=of, trusted=True)
        assert_same_bits(fs.unshard(again.params), fs.unshard(state.params))
        assert_same_bits(fs.unshard(again.opt_state), fs.unshard(state.opt_state))
        assert optimizer.state == {}


def test_names_of_compiled_modules_are_those_that_torch_gives_each_export(tmp_path):
    """state_dict() of a module keeps what torch.compile adds to names, and get_state_dict leaves it out."""
    tx = fs.from_torch(torch.optim.Adam, lr=0.1)
    for make in (of_blocks(lambda block: torch.compile(block, backend="eager")), of_compiled_and_wrapped):
        module, place = make(), tmp_path / make.__name__
        _, params, state = parts(module, "zero2")
        assert to_state_dict(state, module=module).keys() == module.state_dict().keys()
        save_huggingface(place / "hf", state, module=module)
        assert load_file(place / "hf" / "model.safetensors").keys() == module.state_dict().keys() - {"head.weight"}
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        whole = fs.update(tx, fs.TrainState.create(params, tx), fs.tree_map(torch.ones_like, params))
        save_dcp(place / "dcp", whole, module=module, optimizer=optimizer)
        by_torch, of_optimizer = get_state_dict(module, optimizer)
        names = {f"model.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
        names = {name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "") for name in names}
        listed = dcp.FileSystemReader(place / "dcp").read_metadata().state_dict_metadata
        assert {name for name in listed if name.startswith("model.")} == names
        assert names <= {f"model.{name}" for name in by_torch}
        owners = set(of_optimizer["param_groups"][0]["params"])
        assert {
            name.split(".", 2)[2].rpartition(".")[0] for name in listed if name.startswith("optim.state.")
        } == owners
        like = fs.TrainState.create(fs.tree_map(torch.zeros_like, params), tx)
        again = load_dcp(place / "dcp", like, module=module, trusted=True)
        assert_same_bits(fs.unshard((again.params, again.opt_state)), fs.unshard((whole.params, whole.opt_state)))


def of_compiled_and_wrapped(seed=0):
    return of_blocks(lambda block: torch.compile(wrapped(block), backend="eager"))(seed)


class Dropping(Net):
    """A state dict without some of the parameters, as of models that save an adapter alone."""

    def __init__(self):
        super().__init__()
        self.double().register_state_dict_post_hook(drop)


def drop(module, state_dict, prefix, metadata):
    for name in [name for name in state_dict if "up" in name]:
        del state_dict[name]


def test_leaves_without_a_place_in_the_state_dict_are_refused_by_path_on_every_rank(tmp_path):
    module = Dropping()
    exports = {
        "to_state_dict": lambda state: to_state_dict(state, module=module),
        "save_dcp": lambda state: save_dcp(tmp_path / "dcp", state, module=module),
        "save_huggingface": lambda state: save_huggingface(tmp_path / "hf", state, module=module),
        "from_state_dict": lambda state: from_state_dict(plain_state(), state, module=module),
    }
    for name, run in exports.items():
        text = refusal(lambda mesh, run=run: run(parts(module, "zero2")[2]))
        assert text.startswith(f"checkpoint.{name}: leaves do not fit\n")
        assert "  blocks.0.up.weight: expected one that module.state_dict() has under a name of module." in text
        assert "blocks.1.up.bias: expected" in text
        assert "blocks.0.down.weight" not in text
    # Under the names that the wrapped module itself gives them.
    other = WRAPPINGS["each block"]()

    def export(mesh):
        params = {name: tensor.detach() for name, tensor in other.named_parameters()}
        to_state_dict(params, module=other)

    text = refusal(export)
    assert "blocks.0._checkpoint_wrapped_module.up.weight: expected blocks.0.up.weight, got a leaf" in text


def test_a_load_leaves_no_leaf_without_a_value(tmp_path):
    module, given = WRAPPINGS["each block"](), plain_state()
    del given["blocks.1.down.bias"]
    save_huggingface(tmp_path / "hf", given)
    save_dcp(tmp_path / "dcp", given)
    loads = {
        "from_state_dict": lambda like: from_state_dict(given, like, module=module),
        "load_dcp": lambda like: load_dcp(tmp_path / "dcp", like, module=module, trusted=True),
        "load_huggingface": lambda like: load_huggingface(tmp_path / "hf", like, module=module),
    }
    for run in loads.values():
        text = refusal(lambda mesh, run=run: run(parts(module, "zero2")[2]))
        assert "  blocks.1.down.bias: expected float64[5], got nothing\n" in text
    _, _, state = parts(module, "zero2")
    like = fs.tree_map(lambda leaf: leaf * 0 + 2, state)
    kept = load_huggingface(tmp_path / "hf", like, module=module, strict=False)
    assert_same_bits(kept["blocks.1.down.bias"].local, like["blocks.1.down.bias"].local)
    assert_same_bits(kept["blocks.0.down.bias"].local, state["blocks.0.down.bias"].local)
    # A buffer that nobody saves has the value of `like`, if that has any.
    without = {"blocks.0.cache": torch.empty(2, device="meta", dtype=torch.float64)}
    text = refusal(lambda mesh: from_state_dict(plain_state(), parts(module, "zero2")[2] | without, module=module))
    assert "  blocks.0.cache: expected float64[2], got nothing\n" in text
