"""torch.distributed.checkpoint: FSDP2 runs go on in fshard and back, bit for bit, and what is refused."""

import io
import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fshard as fs
from fshard.checkpoint import CheckpointError, load_dcp, save_dcp
from fshard.testing import spmd
from tests.checkpoint.states import refused
from tests.checkpoint.test_state_dict import Net, every_leaf, refusal, sharded
from tests.ranks import on_ranks
from tests.trees import TREES, assert_same_bits, every_strategy, exotic_dtypes, normal, one_axis, two_axes

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Language(nn.Module):
    """A tied weight, buffers of both kinds, and sizes that two ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)
        draw = normal(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * draw(*parameter.shape))

    def forward(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (3, 5), generator=generator), torch.randint(11, (3, 5), generator=generator)


class Fsdp2:
    """A run of FSDP2 as its users write one."""

    def __init__(self, mesh, cls, hyper, flat):
        self.module = Language()
        for unit in (*self.module.blocks, self.module):
            fully_shard(unit, mesh=mesh)
        self.optimizer = cls(self.module.parameters(), **hyper)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def train(self, steps):
        losses = []
        for step in steps:
            loss = self.module(*batch(step))
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

    def save(self, directory):
        dcp.save(self.state(), checkpoint_id=directory)

    def load(self, directory):
        state = self.state()
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self.options,
        )


class Ours:
    """The same run by fshard."""

    def __init__(self, strategy, cls, hyper):
        self.module = Language()
        self.model = fs.functionalize(self.module, units=Block)
        self.tx = fs.chain(fs.from_torch(cls, **hyper, inject=["lr"]))
        self.state = fs.TrainState.create(self.model.init(strategy), self.tx, buffers=self.model.buffers)
        self.optimizer = cls(self.module.parameters(), **hyper)

    def train(self, steps):
        losses = []
        for step in steps:
            loss, grads = fs.value_and_grad(self.model.apply)(self.state.params, *batch(step))
            self.state = fs.update(self.tx, self.state, grads)
            losses.append(float(loss))
        return losses

    def save(self, directory, flat=False):
        save_dcp(directory, self.state, module=self.module, optimizer=self.optimizer, flatten_optimizer_state_dict=flat)

    def load(self, directory, **arguments):
        self.state = load_dcp(directory, self.state, module=self.module, trusted=True, **arguments)


STRATEGIES = {
    "ddp": fs.ddp,
    "zero2": fs.zero2,
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
    first.save(tmp_path / "there")
    ours.load(tmp_path / "there", **counted)
    assert (int(ours.state.step), int(ours.state.opt_state[0].updates)) == (2, 2)
    losses += ours.train(range(2, 4))
    ours.save(tmp_path / "back", flat)
    last.load(tmp_path / "back")
    losses += last.train(range(4, 6))
    assert losses == expected.train(range(6))
    assert len(set(losses)) == 6
    return losses


@on_ranks("2 processes")
def test_the_keys_are_those_of_fsdp2(tmp_path):
    mesh = one_axis()
    for flat in (False, True):
        run, ours = Fsdp2(mesh, torch.optim.AdamW, ADAMW, flat), Ours(every_leaf(mesh), torch.optim.AdamW, ADAMW)
        run.train(range(1))
        run.save(tmp_path / f"theirs {flat}")
        ours.save(tmp_path / f"ours {flat}", flat)
        theirs, ours = (
            dcp.FileSystemReader(tmp_path / f"{whose} {flat}").read_metadata() for whose in ("theirs", "ours")
        )
        assert theirs.state_dict_metadata.keys() == ours.state_dict_metadata.keys()
        assert {key: tuple(place) for key, place in theirs.planner_data.items()} == ours.planner_data
        for key, found in theirs.state_dict_metadata.items():
            assert getattr(found, "size", None) == getattr(ours.state_dict_metadata[key], "size", None)


@on_ranks("2 processes")
def test_learning_rates_that_were_injected_travel(tmp_path):
    mesh = one_axis()
    for flat in (False, True):
        theirs = Fsdp2(mesh, torch.optim.AdamW, {"lr": 0.125}, flat)
        theirs.save(tmp_path / f"there {flat}")
        ours = Ours(every_leaf(mesh), torch.optim.AdamW, ADAMW)
        ours.load(tmp_path / f"there {flat}")
        assert float(ours.state.opt_state[0].hyper["lr"]) == 0.125
        ours.save(tmp_path / f"back {flat}", flat)
        other = Fsdp2(mesh, torch.optim.AdamW, ADAMW, flat)
        other.load(tmp_path / f"back {flat}")
        assert other.optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.rows(1)
@pytest.mark.parametrize("tree", [*TREES.values(), exotic_dtypes], ids=lambda make: make.__name__)
@on_ranks(1, 2, 3, 4)
def test_trees_come_back_in_any_layout(tmp_path, tree):
    """Also in layouts that DTensor does not have."""
    previous = None
    for i, (_, strategy) in enumerate(every_strategy()):
        params = fs.shard(tree(), strategy)
        save_dcp(tmp_path / str(i), params)
        # From what the layout before wrote.
        back = load_dcp(tmp_path / (previous or "0"), fs.tree_map(torch.zeros_like, params), trusted=True)
        assert_same_bits(fs.unshard(back), fs.unshard(params))
        previous = str(i)


def test_another_number_of_ranks(tmp_path):
    full = {"w": normal()(7, 5), "v": normal(1)(3)}
    spmd(lambda: save_dcp(tmp_path, fs.shard(full, every_leaf(one_axis()))), 4)

    def program():
        like = fs.shard(fs.tree_map(torch.zeros_like, full), fs.hsdp(two_axes(2), min_shard_elements=0))
        assert_same_bits(fs.unshard(load_dcp(tmp_path, like, trusted=True)), full)

    spmd(program, 2)


def test_one_process_without_torch_distributed(tmp_path):
    full = {"w": normal()(7, 5)}
    save_dcp(tmp_path, full)
    assert not dist.is_initialized()
    assert_same_bits(load_dcp(tmp_path, {"w": torch.zeros(7, 5, dtype=torch.float64)}, trusted=True), full)


def test_other_keys(tmp_path):
    """An application nests its state deeper, or has the module's at the top."""
    full = {"w": normal()(7, 5)}
    like = {"w": torch.zeros(7, 5, dtype=torch.float64)}
    one_axis()
    dcp.save({"app": {"model": full, "optim": {"state": {}}}, "step": 3}, checkpoint_id=tmp_path / "deep")
    assert_same_bits(load_dcp(tmp_path / "deep", like, model_key="app.model", trusted=True), full)
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


def test_torchs_offline_tools_read_it(tmp_path):
    module = Language()
    tx = fs.from_torch(torch.optim.AdamW, **ADAMW)

    def program():
        model = fs.functionalize(module)
        state = fs.TrainState.create(model.init(every_leaf(one_axis())), tx, buffers=model.buffers)
        save_dcp(tmp_path / "dcp", state, module=module, optimizer=torch.optim.AdamW(module.parameters(), **ADAMW))

    spmd(program, 2)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt")
    content = torch.load(tmp_path / "file.pt", weights_only=True)
    assert_same_bits(dict(content["model"]), dict(module.state_dict()))
    assert content["optim"]["param_groups"][0]["lr"] == 1e-2
    assert set(content["optim"]["state"]["norm.bias"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_nothing_is_read_untrusted(tmp_path):
    save_dcp(tmp_path, {"w": torch.ones(3)})
    message = refusal(lambda mesh: load_dcp(tmp_path, {"w": torch.ones(3)}))
    assert message == (
        f"checkpoint.load_dcp: {tmp_path / '.metadata'} is pickled, and reading it can run code of its author; "
        "pass trusted=True if you trust whoever wrote it, or have it written as safetensors"
    )


def test_leaves_that_do_not_fit_are_all_named(tmp_path):
    save_dcp(tmp_path, {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4).double(), "extra": torch.ones(1)})

    def load(mesh):
        like = {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.zeros(4), "missing": torch.zeros(2)}
        load_dcp(tmp_path, fs.shard(like, every_leaf(mesh)), trusted=True)

    assert refusal(load) == (
        "checkpoint.load_dcp: leaves do not fit\n"
        "  b: expected float32[5], got float32[4]\n"
        "  c: expected float32[4], got float64[4]\n"
        "  missing: expected float32[2], got nothing\n"
        "  extra: expected nothing, got float32[1]\n"
        "To fix: pass a tree of the same names; module= knows which are tied or not saved, cast=True changes dtypes."
    )


def trained(cls=torch.optim.AdamW, **hyper):
    params = {"w": torch.ones(3)}
    return fs.TrainState.create(params, fs.from_torch(cls, **hyper))


@pytest.mark.parametrize("flat", [False, True])
def test_a_class_that_keeps_nothing(tmp_path, flat):
    """Its state does not say whose it is, but has numbers that were injected."""
    module = One()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    state = trained(torch.optim.SGD, lr=0.25, inject=["lr"])
    save_dcp(tmp_path, state, module=module, optimizer=optimizer, flatten_optimizer_state_dict=flat)
    like = trained(torch.optim.SGD, lr=1.0, inject=["lr"])
    back = load_dcp(tmp_path, like, updates=7, trusted=True)
    assert (float(back.opt_state.hyper["lr"]), int(back.opt_state.updates), int(back.step)) == (0.25, 7, 7)


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))


def test_optimizer_states_that_do_not_fit(tmp_path):
    module = One()
    save_dcp(tmp_path, trained(amsgrad=True), module=module, optimizer=torch.optim.AdamW(module.parameters()))
    message = refusal(lambda mesh: load_dcp(tmp_path, trained(), trusted=True))
    assert "w.max_exp_avg_sq: expected nothing, got float32[3]" in message
    message = refusal(lambda mesh: load_dcp(tmp_path, trained(torch.optim.Adagrad), trusted=True))
    assert "w.sum: expected float32[3], got nothing" in message
    # The parameters alone are there for whoever wants no more.
    assert_same_bits(load_dcp(tmp_path, {"w": torch.zeros(3)}, trusted=True), {"w": torch.ones(3)})
    with pytest.raises(
        ValueError, match="expected module= and optimizer= too, as get_state_dict takes them, got a TrainState"
    ):
        save_dcp(tmp_path / "other", trained())
    other = trained()._replace(opt_state=fs.sgd(0.1, momentum=0.9).init({"w": torch.ones(3)}))
    with pytest.raises(ValueError, match="torch's optimizers have no such state"):
        save_dcp(tmp_path / "other", other, module=module, optimizer=torch.optim.SGD(module.parameters()))


@pytest.mark.parametrize("with_module", [False, True])
def test_buffers_that_are_not_saved_stay(tmp_path, with_module):
    module = Net()
    spmd(lambda: save_dcp(tmp_path, sharded(module, every_leaf(one_axis())), module=module), 2)

    def load(mesh):
        like = sharded(Net(1), every_leaf(mesh))
        like["cache"] = torch.full((3,), 5.0)
        back = load_dcp(tmp_path, like, module=module if with_module else None, trusted=True)
        expected = dict(module.state_dict()) | {"cache": torch.full((3,), 5.0)}
        assert_same_bits(fs.unshard(back), {name: expected[name].detach() for name in like})

    if with_module:
        spmd(lambda: load(one_axis()), 3)
    else:
        message = refusal(load)
        assert "cache: expected float32[3], got nothing" in message
        assert "head.weight: expected nothing, got float32[11, 7]" in message


@pytest.mark.parametrize(
    "damage, message",
    [
        (b"nonsense", "UnpicklingError|KeyError|EOFError|ValueError"),
        (pickle.dumps({"w": 1}), "AttributeError: 'dict' object has no attribute"),
        (None, "No such file"),
    ],
    ids=["nonsense", "something else", "nothing"],
)
def test_contents_that_are_damaged(tmp_path, damage, message):
    save_dcp(tmp_path, {"w": torch.ones(3)})
    os.remove(tmp_path / ".metadata")
    if damage:
        (tmp_path / ".metadata").write_bytes(damage)
    with pytest.raises(CheckpointError, match=message):
        load_dcp(tmp_path, {"w": torch.ones(3)}, trusted=True)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_file_that_is_missing(tmp_path, missing):
    spmd(lambda: save_dcp(tmp_path, fs.shard({"w": torch.ones(4)}, every_leaf(one_axis()))), 2)
    os.remove(tmp_path / f"__{missing}_0.distcp")
    message = refusal(
        lambda mesh: load_dcp(tmp_path, fs.shard({"w": torch.zeros(4)}, every_leaf(mesh)), trusted=True), 2
    )
    assert f"__{missing}_0.distcp" in message


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("torch.distributed.checkpoint.filesystem.os.fsync", full_disk)
        message = refusal(lambda mesh: save_dcp(tmp_path, fs.shard({"w": torch.ones(4)}, every_leaf(mesh))))
    assert "No space left on device" in message
    assert os.listdir(tmp_path) == []


def test_a_tie_that_is_none_there(tmp_path):
    """As of a run whose module lost its ties when it was materialised."""
    module = Net()
    apart = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    apart["head.weight"][0, 0] += 1
    save_dcp(tmp_path, apart)

    def load(mesh):
        like = sharded(Net(1), every_leaf(mesh))
        load_dcp(tmp_path, like, module=module, trusted=True)

    assert ("expected embedding.weight to have the same values under all its names, got others; untie") in refusal(
        load, 3
    )


LEAF = "Sharded(float64[4, 2], P('shard'), local [2, 2])"


def leaves():
    return fs.shard({"w": normal()(4, 2)}, every_leaf(one_axis()))


# torch.distributed.checkpoint itself does not know Sharded leaves: it is told so before it writes anything.
# States of several structures, and the name of the leaf that each is refused for.
STATES = {
    "a tree": (lambda: {"m": leaves()}, "m.w"),
    "a leaf": (leaves, "w"),
    "beside a tensor in a list": (lambda: {"m": [torch.ones(2), leaves()["w"]]}, "m.1"),
    "a train state": (lambda: {"s": fs.TrainState.create(leaves(), fs.sgd(0.1))}, "s.params['w']"),
}


@pytest.mark.parametrize("save", [dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result()], ids=["now", "later"])
@pytest.mark.parametrize("name", STATES)
@on_ranks("2 processes")
def test_leaves_are_refused_before_anything_is_written(tmp_path, name, save):
    make, path = STATES[name]
    text = refused(lambda: save(make(), checkpoint_id=tmp_path / "there"), dcp.api.CheckpointException)
    needed = (
        "ValueError: torch.distributed.checkpoint.save: shards of all ranks but one would be lost\n"
        f"  {path}: expected tensors or DTensors, got {LEAF}\n"
        "To fix: pass fs.to_dtensor(params, mesh), or use fs.checkpoint.save or fs.checkpoint.save_dcp.\n"
    )
    assert text.count(needed) == 2
    assert os.listdir(tmp_path) == []


def test_a_train_state_without_shards_is_saved(tmp_path):
    one_axis()
    state = fs.TrainState.create({"w": torch.ones(3)}, fs.sgd(0.1))
    dcp.save({"s": state, "n": 3}, checkpoint_id=tmp_path)
    assert set(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"s", "n"}


@on_ranks("2 processes")
def test_leaves_are_not_loaded_into(tmp_path):
    """By torch's own error, which names the leaf on every rank; it has no hook for another."""
    params = leaves()
    dcp.save({"m": fs.to_dtensor(params, one_axis())}, checkpoint_id=tmp_path)
    text = refused(lambda: dcp.load({"m": dict(params)}, checkpoint_id=tmp_path), dcp.api.CheckpointException)
    assert len(re.findall("ValueError: Invalid checkpoint metadata for m.w,", text)) == 2


def test_leaves_are_pickled_as_ever():
    leaf = leaves()["w"]
    file = io.BytesIO()
    torch.save(leaf, file)
    file.seek(0)
    for back in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(leaf))):
        assert (type(back), back.spec) == (fs.Sharded, leaf.spec)
        assert_same_bits(back.local, leaf.local)
