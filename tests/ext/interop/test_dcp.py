"""torch.distributed.checkpoint: FSDP2 runs go on in fshard and back, bit for bit, and what is refused."""

import pickle
import resource
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import fshard as fs
from fshard.checkpoint import CheckpointError, load_dcp, save_dcp
from fshard.extend import flatten
from tests.checkpoint.states import zeros_like
from tests.ext.interop.test_state_dict import refusal
from tests.ranks import on_ranks
from tests.trees import TREES, assert_same_bits, every_strategy, exotic_dtypes, one_axis
from tests.unit_models import Block, Language, filled, tie_head, tokens, zero3


def language():
    """A tied weight, buffers of both kinds, and sizes that two ranks do not divide."""
    module = filled(Language(tie_head, hidden=(13, 13)))
    module.blocks[0].register_buffer("shift", torch.tensor(2.0))
    module.blocks[0].register_buffer("cache", torch.ones(3), persistent=False)
    return module


def batch(step):
    (ids,) = tokens(2 * (step + 1))[2 * step + dist.get_rank()]
    return ids


class Fsdp2:
    """A run of FSDP2 as its users write one."""

    def __init__(self, mesh, make_optimizer, flat):
        self.module = language()
        for unit in (*self.module.blocks, self.module):
            fully_shard(unit, mesh=mesh)
        self.optimizer = make_optimizer(self.module.parameters())
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

    def load(self, directory):
        state = self.state()
        dcp.load(state, checkpoint_id=directory)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(self.module, self.optimizer, **states, options=self.options)


class Ours:
    """The same run by fshard."""

    def __init__(self, strategy, make_optimizer):
        self.module = language()
        self.model = fs.functionalize(self.module, units=Block)
        self.tx = fs.chain(fs.from_torch(make_optimizer.func, **make_optimizer.keywords, inject=["lr"]))
        self.state = fs.TrainState.create(self.model.init(strategy), self.tx, buffers=self.model.buffers)
        self.optimizer = make_optimizer(self.module.parameters())

    def train(self, steps):
        losses = []
        for step in steps:
            loss, grads = fs.value_and_grad(self.model.apply)(self.state.params, batch(step))
            self.state = fs.update(self.tx, self.state, grads)
            losses.append(float(loss))
        return losses


STRATEGIES = {"ddp": fs.ddp, "zero3": zero3(), "last dim": partial(fs.fully_shard, dim=-1)}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("2 processes")
def test_an_fsdp2_run_goes_on_in_fshard_and_back(tmp_path, strategy, flat, name):
    """Two steps in FSDP2, two in fshard and two in FSDP2 have the losses of six in FSDP2, bit for bit."""
    mesh = one_axis()
    expected, first, last = (Fsdp2(mesh, OPTIMIZERS[name], flat) for _ in range(3))
    losses = first.train(range(2))
    dcp.save(first.state(), checkpoint_id=tmp_path / "there")

    ours = Ours(STRATEGIES[strategy](mesh), OPTIMIZERS[name])
    # Torch's SGD does not count its steps.
    counted = {"updates": 2} if name == "sgd" else {}
    ours.state = load_dcp(tmp_path / "there", ours.state, module=ours.module, trusted=True, **counted)
    assert (int(ours.state.step), int(ours.state.opt_state[0].updates)) == (2, 2)
    losses += ours.train(range(2, 4))
    options = {"module": ours.module, "optimizer": ours.optimizer, "flatten_optimizer_state_dict": flat}
    save_dcp(tmp_path / "back", ours.state, **options)

    last.load(tmp_path / "back")
    losses += last.train(range(4, 6))
    assert losses == expected.train(range(6))
    assert len(set(losses)) == 6
    return losses


@on_ranks("2 processes")
def test_a_parameter_that_never_had_a_gradient_has_no_state(tmp_path):
    """Neither in the files of FSDP2, nor in another part of a partition."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    parts = {name: fs.from_torch(torch.optim.AdamW, lr=0.1) for name in ("*.weight", "*.bias")}
    like = fs.TrainState.create(fs.functionalize(module).init(fs.zero3(one_axis()), seed=0), fs.partition(parts))
    trained = nn.Sequential(fully_shard(nn.Linear(3, 3)), fully_shard(nn.Linear(3, 3)))
    optimizer = torch.optim.AdamW([{"params": trained.parameters(), "weight_decay": 0.5}], lr=0.1)
    trained[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optim = get_state_dict(trained, optimizer, options=options)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / str(flat))
        state = load_dcp(tmp_path / str(flat), like, module=module, trusted=True)
        for part, kind in zip(state.opt_state, ("weight", "bias"), strict=True):
            steps = {name: float(step) for name, step in part.slots["step"].items() if step is not None}
            assert steps == {f"0.{kind}": 1.0, f"1.{kind}": 0.0}


@on_ranks(2)
def test_a_parameter_without_updates_begins_anew_after_a_checkpoint(tmp_path):
    """With dampening, the first step of SGD is not that from a momentum of zeros."""
    module = nn.Linear(3, 2)
    rates = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    tx = fs.from_torch(torch.optim.SGD, **rates)
    model = fs.functionalize(module)
    first = fs.TrainState.create(model.init(fs.zero3(one_axis()), seed=0), tx)
    abstract = fs.TrainState.create(model.init(fs.zero3(one_axis()), abstract=True), tx)
    grads = fs.tree_map(torch.ones_like, first.params)
    second = fs.update(tx, first, grads | {"bias": None})
    for state, like in ((first, first), (first, abstract), (second, second)):
        directory = tmp_path / f"{state.step} {like is state}"
        save_dcp(directory, state, module=module, optimizer=torch.optim.SGD(module.parameters(), **rates))
        loaded = load_dcp(directory, like, module=module, trusted=True, updates=int(state.step))
        after, expected = (fs.update(tx, each, grads) for each in (loaded, state))
        assert_same_bits(fs.unshard(after), fs.unshard(expected))
    with pytest.raises(ValueError, match=r"momentum_buffer.bias: expected float32\[2\], got nothing"):
        load_dcp(directory, abstract, module=module, trusted=True, updates=1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@on_ranks(2)
def test_a_state_before_its_first_update_is_written_as_torch_writes_it(tmp_path):
    """With a momentum of zeros, also where the first step would not read it."""
    module = nn.Linear(3, 2)
    rates = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    state = fs.TrainState.create(
        fs.functionalize(module).init(fs.zero3(one_axis()), seed=0), fs.from_torch(SGD, **rates)
    )
    save_dcp(tmp_path, state, module=module, optimizer=SGD(module.parameters(), **rates))
    _, expected = get_state_dict(module, SGD(module.parameters(), **rates))
    read = fs.tree_map(lambda value: value + 1 if isinstance(value, torch.Tensor) else value, expected)
    dcp.load({"optim": read}, checkpoint_id=tmp_path, no_dist=True)
    assert_same_bits(read["state"], expected["state"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("flat", [False, True])
def test_torch_makes_the_dicts_of_its_own_checkpoint_of_the_files(tmp_path, flat):
    """Torch's converter reads from the list of contents which dict each key is in."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    params = fs.functionalize(module).init(fs.zero3(one_axis()), seed=0)
    state = fs.TrainState.create(params, fs.from_torch(torch.optim.AdamW))
    save_dcp(tmp_path / "ours", state, module=module, optimizer=optimizer, flatten_optimizer_state_dict=flat)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(module, optimizer, options=options)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "torch")
    files = [tmp_path / f"{name}.pt" for name in ("ours", "torch")]
    for file in files:
        dcp_to_torch_save(file.with_suffix(""), file)
    ours, expected = (sorted(flatten(torch.load(file)["optim"]).paths) for file in files)
    assert ours == expected


@on_ranks(2)
def test_a_state_of_another_class_than_the_optimizer_is_refused(tmp_path):
    module = nn.Linear(3, 2)
    state = fs.TrainState.create(
        fs.functionalize(module).init(fs.zero3(one_axis()), seed=0), fs.from_torch(torch.optim.AdamW)
    )
    kept = r"\['exp_avg', 'exp_avg_sq', 'step'\]"
    for optimizer, expected in (
        (SGD(module.parameters()), r"\[\], which this SGD keeps"),
        (
            torch.optim.AdamW(module.parameters(), amsgrad=True),
            r"\[.*'max_exp_avg_sq', 'step'\], which this AdamW keeps",
        ),
    ):
        with pytest.raises(ValueError, match=f"^checkpoint.save_dcp: expected a state with {expected}, got {kept}"):
            save_dcp(tmp_path / "out", state, module=module, optimizer=optimizer)
    assert not (tmp_path / "out").exists()


@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_trees_come_back_in_any_layout(tmp_path):
    """Also in layouts that DTensor does not have; from what the layout before wrote."""
    for make in (*TREES.values(), exotic_dtypes):
        directory = tmp_path / make.__name__
        for i, (_, strategy) in enumerate(list(every_strategy())[::2]):
            params = fs.shard(make(), strategy)
            save_dcp(directory / f"{i}", params)
            back = load_dcp(directory / f"{max(0, i - 1)}", zeros_like(params), trusted=True)
            assert_same_bits(fs.unshard(back), fs.unshard(params))


W = {"w": torch.ones(3)}


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(W["w"])


def adam_state():
    return fs.TrainState.create(W, fs.from_torch(torch.optim.AdamW))


def load_refusal(directory, like, trusted=True, **options):
    return refusal(lambda mesh: load_dcp(directory, like, trusted=trusted, **options))


def test_other_keys(tmp_path):
    """An application nests its state deeper, or has the module's at the top."""
    one_axis()
    dcp.save({**W, "step": 3}, checkpoint_id=tmp_path / "flat")
    assert_same_bits(load_dcp(tmp_path / "flat", zeros_like(W), model_key="", trusted=True), W)
    save_dcp(tmp_path / "ours", W, model_key="app.model")
    theirs = {"app": {"model": zeros_like(W)}}
    dcp.load(theirs, checkpoint_id=tmp_path / "ours")
    assert_same_bits(theirs["app"]["model"], W)
    module, keys = One(), {"model_key": "app.model", "optimizer_key": "app.adam"}
    state = fs.tree_map(lambda leaf: leaf + 1, adam_state())
    save_dcp(tmp_path / "state", state, module=module, optimizer=torch.optim.AdamW(module.parameters()), **keys)
    assert_same_bits(load_dcp(tmp_path / "state", adam_state(), trusted=True, **keys), state)
    assert load_refusal(tmp_path / "state", W) == (
        "checkpoint.load_dcp: expected model.w in the checkpoint, got app.model.w; pass its key as model_key=, "
        'which is "" for the top'
    )
    assert load_refusal(tmp_path / "state", adam_state(), model_key="app.model") == (
        "checkpoint.load_dcp: expected optim.state.w.exp_avg in the checkpoint, got app.adam.state.w.exp_avg; pass its "
        'key as optimizer_key=, which is "" for the top'
    )
    text = load_refusal(tmp_path / "flat", W)
    assert text.startswith("checkpoint.load_dcp: expected model.w in the checkpoint, got w; pass")
    text = load_refusal(tmp_path / "flat", {"v": torch.ones(3)})
    assert text.startswith("checkpoint.load_dcp: expected model.v in the checkpoint, got nothing; pass")


def test_a_state_is_saved_with_its_module_and_optimizer(tmp_path):
    text = "checkpoint.save_dcp: a TrainState needs module= and optimizer=, as get_state_dict takes them"
    assert refusal(lambda mesh: save_dcp(tmp_path, adam_state(), module=One())) == text


def test_nothing_is_read_untrusted(tmp_path):
    save_dcp(tmp_path, W)
    for trusted in (False, "no", 1, torch.tensor(True)):
        assert load_refusal(tmp_path, W, trusted) == (
            f"checkpoint.load_dcp: {tmp_path / '.metadata'} is pickled, and reading it can run code of its author; "
            "pass trusted=True if you trust whoever wrote it, or have it written as safetensors"
        )


def test_contents_that_are_damaged_or_do_not_fit(tmp_path):
    save_dcp(tmp_path, W | {"extra": torch.ones(1)})
    text = "w: expected float32[4], got float32[3]\n  extra: expected nothing, got float32[1]\n"
    assert text in load_refusal(tmp_path, {"w": torch.ones(4)})
    for damage, text in ((b"nonsense", "UnpicklingError"), (pickle.dumps({"w": 1}), "AttributeError: 'dict'")):
        (tmp_path / ".metadata").write_bytes(damage)
        assert text in load_refusal(tmp_path, W)


def test_a_write_that_fails_names_the_directory_and_the_rank(tmp_path):
    """Such as on a full disk, where torch's own error speaks of positions in a file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            save_dcp(tmp_path, {"w": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(caught.value).startswith(
        f"checkpoint.save_dcp: {tmp_path}: rank 0 could not write its file, perhaps because the disk is full: RuntimeE"
    )
    assert not any(tmp_path.iterdir())
