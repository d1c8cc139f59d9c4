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
from tests.checkpoint.states import zeros_like
from tests.ext.interop.test_dcp import language
from tests.ext.interop.test_state_dict import every_leaf, refusal
from tests.ranks import on_ranks
from tests.trees import assert_same_bits, one_axis
from tests.unit_models import Block, tokens, zero3


def with_blocks(wrap):
    module = language()
    for i, block in enumerate(module.blocks):
        module.blocks[i] = wrap(block)
    return module


def with_layers_and_blocks():
    module = with_blocks(wrapped)
    apply_activation_checkpointing(module, check_fn=lambda submodule: isinstance(submodule, nn.Linear))
    return module


WRAPPINGS = {
    "plain": language,
    "each block": lambda: with_blocks(wrapped),
    "each block and layer, twice": lambda: wrapped(with_layers_and_blocks()),
    "the whole": lambda: wrapped(language()),
}
STRATEGIES = {"zero2": every_leaf, "zero3": zero3()}
STEPS = 2
TX = fs.from_torch(torch.optim.Adam, lr=0.1)


def every_wrapping(test):
    table = pytest.mark.rows(2)(pytest.mark.parametrize("wrapping", WRAPPINGS)(on_ranks(1, 2)(test)))
    return pytest.mark.parametrize("strategy", STRATEGIES)(table)


def parts(module, strategy="zero2"):
    """Its model, its parameters, and all that its state dict has."""
    model = fs.functionalize(module, Block)
    params = model.init(STRATEGIES[strategy](one_axis()))
    return model, params, params | {name: model.buffers[name] for name in model.buffers if "cache" not in name}


def state_of(module):
    return parts(module)[2]


def plain_state():
    return {name: tensor.detach() for name, tensor in language().state_dict().items()}


def by_name(tensors):
    return dict(sorted(tensors.items()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@every_wrapping
def test_every_export_has_the_names_of_the_plain_module_and_is_read_again(wrapping, strategy, tmp_path):
    module, expected = WRAPPINGS[wrapping](), plain_state()
    _, params, state = parts(module, strategy)
    assert list(params) == [name for name, _ in language().named_parameters()]

    exported = to_state_dict(state, module=module)
    assert list(exported) == list(dict.fromkeys([*exported, *expected]))
    assert_same_bits(by_name(exported), by_name(expected))

    save_huggingface(tmp_path / "hf", state, module=module)
    once = {name: tensor for name, tensor in expected.items() if name != "head.weight"}
    assert_same_bits(by_name(load_file(tmp_path / "hf" / "model.safetensors")), by_name(once))

    save_dcp(tmp_path / "dcp", state, module=module)
    read = {"model": zeros_like(expected)}
    dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same_bits(read["model"], expected)

    like = zeros_like(state)
    for loaded in (
        from_state_dict(exported, like, module=module),
        *(load_huggingface(tmp_path / "hf", like, module=reader) for reader in (module, language())),
        *(load_dcp(tmp_path / "dcp", like, module=reader, trusted=True) for reader in (module, language())),
    ):
        assert_same_bits(fs.unshard(loaded), fs.unshard(state))


def train(module, strategy):
    """The state and the last loss after some steps, and the optimizer that torch would have."""
    model, params, _ = parts(module, strategy)
    state = fs.TrainState.create(params, TX, buffers=model.buffers)
    for batch in tokens(STEPS):
        loss, grads = fs.value_and_grad(model.apply)(state.params, *batch)
        state = fs.update(TX, state, grads)
    return state, loss, torch.optim.Adam(module.parameters(), lr=0.1)


@every_wrapping
def test_training_and_the_state_of_optimizers_are_those_of_the_plain_module(wrapping, strategy, tmp_path):
    module, plain = WRAPPINGS[wrapping](), language()
    state, loss, optimizer = train(module, strategy)
    expected, expected_loss, plain_optimizer = train(plain, strategy)
    assert_same_bits((fs.unshard(state), loss), (fs.unshard(expected), expected_loss))
    exported = to_optimizer_state_dict(state.opt_state, module, optimizer)
    of_plain = to_optimizer_state_dict(expected.opt_state, plain, plain_optimizer)
    assert_same_bits(exported["state"], of_plain["state"])
    back = from_optimizer_state_dict(exported, TX.init(state.params), module, optimizer)
    assert_same_bits(fs.unshard(back), fs.unshard(state.opt_state))
    save_dcp(tmp_path, state, module=module, optimizer=optimizer)
    like = fs.TrainState.create(zeros_like(state.params), TX, buffers=state.buffers)
    for reader in (module, plain):
        loaded = load_dcp(tmp_path, like, module=reader, trusted=True)
        assert_same_bits(fs.unshard(loaded.params), fs.unshard(state.params))
        assert_same_bits(fs.unshard(loaded.opt_state), fs.unshard(state.opt_state))
    assert optimizer.state == plain_optimizer.state == {}


def names_in(directory, kind):
    """The names of a kind of entries in a checkpoint of torch's."""
    listed = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    return {name.removeprefix(kind) for name in listed if name.startswith(kind)}


@pytest.mark.parametrize("wrap", (lambda block: block, wrapped), ids=("compiled", "compiled and wrapped"))
def test_names_of_compiled_modules_are_those_that_torch_gives_each_export(wrap, tmp_path):
    """state_dict() of a module keeps what torch.compile adds to names, and get_state_dict leaves it out."""
    module = with_blocks(lambda block: torch.compile(wrap(block), backend="eager"))
    _, params, state = parts(module)
    assert to_state_dict(state, module=module).keys() == module.state_dict().keys()
    save_huggingface(tmp_path / "hf", state, module=module)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == module.state_dict().keys() - {"head.weight"}

    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    trained = fs.update(TX, fs.TrainState.create(params, TX), fs.tree_map(torch.ones_like, params))
    save_dcp(tmp_path / "dcp", trained, module=module, optimizer=optimizer)
    _, of_optimizer = get_state_dict(module, optimizer)
    assert names_in(tmp_path / "dcp", "model.") == {
        name for name, _ in language().named_parameters(remove_duplicate=False)
    }
    owners = {name.rpartition(".")[0] for name in names_in(tmp_path / "dcp", "optim.state.")}
    assert owners == set(of_optimizer["param_groups"][0]["params"])
    like = fs.TrainState.create(zeros_like(params), TX)
    loaded = load_dcp(tmp_path / "dcp", like, module=module, trusted=True)
    assert_same_bits(fs.unshard((loaded.params, loaded.opt_state)), fs.unshard((trained.params, trained.opt_state)))


def drop(module, state_dict, prefix, metadata):
    for name in [name for name in state_dict if "inner" in name]:
        del state_dict[name]


def test_leaves_without_a_place_in_the_state_dict_are_refused_by_path_on_every_rank(tmp_path):
    """As of models that save an adapter alone."""
    module = language()
    module.register_state_dict_post_hook(drop)
    exports = {
        "to_state_dict": lambda state: to_state_dict(state, module=module),
        "save_dcp": lambda state: save_dcp(tmp_path / "dcp", state, module=module),
        "save_huggingface": lambda state: save_huggingface(tmp_path / "hf", state, module=module),
        "from_state_dict": lambda state: from_state_dict(plain_state(), state, module=module),
    }
    for name, export in exports.items():
        text = refusal(lambda mesh, export=export: export(state_of(module)))
        assert text.startswith(f"checkpoint.{name}: leaves do not fit\n")
        assert "  blocks.0.perceptron.inner.weight: expected one that module.state_dict() has under a name" in text
        assert "blocks.1.perceptron.inner.bias: expected" in text
        assert "blocks.0.perceptron.outer.weight" not in text
    # Under the names that the wrapped module itself gives them.
    other = WRAPPINGS["each block"]()
    params = {name: tensor.detach() for name, tensor in other.named_parameters()}
    text = refusal(lambda mesh: to_state_dict(params, module=other))
    assert "blocks.0._checkpoint_wrapped_module.norm.weight: expected blocks.0.norm.weight, got a leaf" in text


def test_a_load_leaves_no_leaf_without_a_value(tmp_path):
    module, incomplete = WRAPPINGS["each block"](), plain_state()
    del incomplete["blocks.1.norm.bias"]
    text = refusal(lambda mesh: from_state_dict(incomplete, state_of(module), module=module))
    assert "  blocks.1.norm.bias: expected float64[8], got nothing\n" in text
    save_huggingface(tmp_path, incomplete)
    state = state_of(module)
    like = fs.tree_map(lambda leaf: leaf * 0 + 2, state)
    kept = load_huggingface(tmp_path, like, module=module, strict=False)
    assert_same_bits(kept["blocks.1.norm.bias"].local, like["blocks.1.norm.bias"].local)
    assert_same_bits(kept["blocks.0.norm.bias"].local, state["blocks.0.norm.bias"].local)
    # A buffer that nobody saves has the value of `like`, if that has any.
    without = {"blocks.0.cache": torch.empty(3, device="meta")}
    text = refusal(lambda mesh: from_state_dict(plain_state(), state_of(module) | without, module=module))
    assert "  blocks.0.cache: expected float32[3], got nothing\n" in text
