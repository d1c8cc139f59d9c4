"""torch.distributed.checkpoint: FSDP2 runs go on in fshard and back, bit for bit, and what is refused."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fshard as fs
from fshard.checkpoint import load_dcp, save_dcp
from tests.ext.interop.test_state_dict import refusal
from tests.ranks import on_ranks
from tests.trees import TREES, assert_same_bits, every_strategy, exotic_dtypes, normal, one_axis
from tests.unit_models import Block, Language, filled, tie_head, tokens

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9}


def language():
    """A tied weight, buffers of both kinds, and sizes that two ranks do not divide."""
    module = filled(Language(tie_head, hidden=(13, 13)))
    module.register_buffer("scale", torch.tensor(2.0))
    module.register_buffer("cache", torch.ones(3), persistent=False)
    return module


def batch(step):
    (ids,) = tokens(2 * (step + 1))[2 * step + dist.get_rank()]
    return ids


class Fsdp2:
    """A run of FSDP2 as its users write one."""

    def __init__(self, mesh, cls, hyper, flat):
        self.module = language()
        for unit in (*self.module.blocks, self.module):
            fully_shard(unit, mesh=mesh)
        self.optimizer = cls(self.module.parameters(), **hyper)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def train(self, steps):
        losses = []
        for step in steps:
            loss = self.module(batch(step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean / dist.get_world_size()))
        return losses

    def state(self):
        model, optimizer = get_state_dict(self.module, self.optimizer, options=self.options)
        return {"model": model, "optim": optimizer}


class Ours:
    """The same run by fshard."""

    def __init__(self, strategy, cls, hyper):
        self.module = language()
        self.model = fs.functionalize(self.module, units=Block)
        self.tx = fs.chain(fs.from_torch(cls, **hyper, inject=["lr"]))
        self.state = fs.TrainState.create(self.model.init(strategy), self.tx, buffers=self.model.buffers)
        self.optimizer = cls(self.module.parameters(), **hyper)

    def train(self, steps):
        losses = []
        for step in steps:
            loss, grads = fs.value_and_grad(self.model.apply)(self.state.params, batch(step))
            self.state = fs.update(self.tx, self.state, grads)
            losses.append(float(loss))
        return losses


STRATEGIES = {
    "ddp": fs.ddp,
    "zero3": lambda mesh: fs.zero3(mesh, min_shard_elements=0),
    "last dim": lambda mesh: fs.fully_shard(mesh, dim=-1),
}
# Torch's SGD does not count its steps.
OPTIMIZERS = {"adamw": (torch.optim.AdamW, ADAMW, {}), "sgd": (torch.optim.SGD, SGD, {"updates": 2})}


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("2 processes")
def test_an_fsdp2_run_goes_on_in_fshard_and_back(tmp_path, strategy, flat, name):
    """Two steps in FSDP2, two in fshard and two in FSDP2 have the losses of six in FSDP2, bit for bit."""
    cls, hyper, counted = OPTIMIZERS[name]
    mesh = one_axis()
    expected, first, last = (Fsdp2(mesh, cls, hyper, flat) for _ in range(3))
    ours = Ours(STRATEGIES[strategy](mesh), cls, hyper)
    losses = first.train(range(2))
    dcp.save(first.state(), checkpoint_id=tmp_path / "there")
    ours.state = load_dcp(tmp_path / "there", ours.state, module=ours.module, trusted=True, **counted)
    assert (int(ours.state.step), int(ours.state.opt_state[0].updates)) == (2, 2)
    losses += ours.train(range(2, 4))
    options = {"module": ours.module, "optimizer": ours.optimizer, "flatten_optimizer_state_dict": flat}
    save_dcp(tmp_path / "back", ours.state, **options)
    state = last.state()
    dcp.load(state, checkpoint_id=tmp_path / "back")
    both = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
    set_state_dict(last.module, last.optimizer, **both, options=last.options)
    losses += last.train(range(4, 6))
    assert losses == expected.train(range(6))
    assert len(set(losses)) == 6
    return losses


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_trees_come_back_in_any_layout(tmp_path):
    """Also in layouts that DTensor does not have; from what the layout before wrote."""
    for make in (*TREES.values(), exotic_dtypes):
        directory = tmp_path / make.__name__
        for i, (_, strategy) in enumerate(every_strategy()):
            params = fs.shard(make(), strategy)
            save_dcp(directory / f"{i}", params)
            back = load_dcp(directory / f"{max(0, i - 1)}", fs.tree_map(torch.zeros_like, params), trusted=True)
            assert_same_bits(fs.unshard(back), fs.unshard(params))


def test_other_keys(tmp_path):
    """An application nests its state deeper, or has the module's at the top."""
    full = {"w": normal()(7, 5)}
    like = {"w": torch.zeros(7, 5, dtype=torch.float64)}
    one_axis()
    dcp.save({**full, "step": 3}, checkpoint_id=tmp_path / "flat")
    assert_same_bits(load_dcp(tmp_path / "flat", like, model_key="", trusted=True), full)
    save_dcp(tmp_path / "ours", full, model_key="app.model")
    theirs = {"app": {"model": fs.tree_map(torch.clone, like)}}
    dcp.load(theirs, checkpoint_id=tmp_path / "ours")
    assert_same_bits(theirs["app"]["model"], full)


def test_other_keys_of_an_optimizer(tmp_path):
    module, keys = One(), {"model_key": "app.model", "optimizer_key": "app.adam"}
    state = fs.tree_map(lambda leaf: leaf + 1, trained())
    save_dcp(tmp_path, state, module=module, optimizer=torch.optim.AdamW(module.parameters()), **keys)
    assert_same_bits(load_dcp(tmp_path, trained(), trusted=True, **keys), state)
    assert "w.step: expected float32[], got nothing" in refusal(
        lambda mesh: load_dcp(tmp_path, trained(), trusted=True, model_key="app.model")
    )


def test_a_state_is_saved_with_its_module_and_optimizer(tmp_path):
    text = "checkpoint.save_dcp: a TrainState needs module= and optimizer=, as get_state_dict takes them"
    assert refusal(lambda mesh: save_dcp(tmp_path, trained(), module=One())) == text


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))


def trained(cls=torch.optim.AdamW, **hyper):
    params = {"w": torch.ones(3)}
    return fs.TrainState.create(params, fs.from_torch(cls, **hyper))


def test_nothing_is_read_untrusted(tmp_path):
    save_dcp(tmp_path, {"w": torch.ones(3)})
    for trusted in (False, "no", 1, torch.tensor(True)):
        message = refusal(lambda mesh: load_dcp(tmp_path, {"w": torch.ones(3)}, trusted=trusted))  # noqa: B023
        assert message == (
            f"checkpoint.load_dcp: {tmp_path / '.metadata'} is pickled, and reading it can run code of its author; "
            "pass trusted=True if you trust whoever wrote it, or have it written as safetensors"
        )


def test_contents_that_are_damaged_or_do_not_fit(tmp_path):
    save_dcp(tmp_path, {"w": torch.ones(3), "extra": torch.ones(1)})
    load = lambda mesh: load_dcp(tmp_path, {"w": torch.ones(4)}, trusted=True)  # noqa: E731
    assert "w: expected float32[4], got float32[3]\n  extra: expected nothing, got float32[1]\n" in refusal(load)
    for damage, message in ((b"nonsense", "UnpicklingError"), (pickle.dumps({"w": 1}), "AttributeError: 'dict'")):
        (tmp_path / ".metadata").write_bytes(damage)
        assert message in refusal(load)
