"""Abstract states: leaves with specs and dtypes and without values, which a checkpoint fills and a trace takes."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.comm import setting
from fshard.init import SKIP_DRAWING
from fshard.testing import spmd
from fshard.tree import flatten
from tests.ranks import my_rank, on_ranks
from tests.trees import every_bit, one_axis

OF_TORCH = torch.optim
OPTIMIZERS = {
    "adam": lambda: fs.adam(0.1),
    "clipped average": lambda: fs.chain(fs.clip_by_global_norm(1.0), fs.ema(fs.adamw(0.1), 0.9)),
    "fused": lambda: fs.from_torch(OF_TORCH.AdamW, lr=0.1, fused=True),
    "numbers that depend on numbers": lambda: fs.from_torch(OF_TORCH.ASGD, lr=0.1),
    "injected": lambda: fs.from_torch(OF_TORCH.SGD, lr=0.1, momentum=0.9, inject=["lr"]),
    "skipped": lambda: fs.skip_nonfinite(fs.sgd(0.1, momentum=0.9)),
    "scaled": lambda: fs.dynamic_loss_scale(fs.from_torch(OF_TORCH.AdamW, lr=0.1)),
    "masked": lambda: fs.chain(fs.masked(fs.add_decayed_weights(0.1), "0.*"), fs.lamb(0.1)),
    "partitioned": lambda: fs.partition({"0.*": fs.adafactor(0.1), "1.*": fs.from_torch(OF_TORCH.NAdam, lr=0.1)}),
    "whole": lambda: fs.whole(fs.from_torch(OF_TORCH.Muon, lr=0.1)),
}


def make_model(**options):
    return fs.functionalize(nn.Sequential(nn.Linear(4, 6, bias=False, **options), nn.Linear(6, 4, bias=False)))


def make_strategy():
    return fs.zero3(one_axis(), min_shard_elements=0)


def make_state(tx, **options):
    model = make_model()
    return fs.TrainState.create(model.init(make_strategy(), **options), tx, buffers=model.buffers, key=3)


def train(state, tx):
    model = make_model()

    def loss(params, x):
        return model.apply(params, x).square().mean()

    def step(state, x):
        value, grads = fs.value_and_grad(loss)(state.params, x)
        return fs.update(tx, state, grads), value

    return step, torch.ones(3, 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_abstract_state_is_filled_with_the_bits_that_were_saved(name, tmp_path):
    tx = OPTIMIZERS[name]()

    def program():
        step, batch = train(None, tx)
        state, _ = step(make_state(tx, seed=1), batch)
        fs.checkpoint.save(tmp_path, state).wait()
        abstract = make_state(tx, abstract=True)
        for path, leaf, other in zip(*leaves_of(abstract), flatten(state).leaves, strict=True):
            assert isinstance(leaf, fs.Sharded) == isinstance(other, fs.Sharded), path
            if isinstance(leaf, fs.Sharded):
                assert leaf.local.is_meta, path
                assert leaf.spec == other.spec, path
                assert leaf.local.stride() == other.local.stride(), path
        restored = fs.checkpoint.restore(tmp_path, like=abstract)
        assert every_bit(restored) == every_bit(state)
        assert every_bit(step(restored, batch)) == every_bit(step(state, batch))

    spmd(program, 2)


def leaves_of(tree):
    flat = flatten(tree)
    return flat.paths, flat.leaves


def test_a_class_that_keeps_state_of_another_shape_is_refused_by_name():
    params = {"w": torch.empty(3, 5, device="meta")}
    with pytest.raises(ValueError, match="from_torch: Adafactor keeps row_var in another shape than the parameter's"):
        fs.from_torch(OF_TORCH.Adafactor, lr=0.1).init(params)


@on_ranks(2)
def test_a_stateful_transform_has_an_abstract_state():
    strategy = fs.quantize(one_axis(), scatter=True)
    drawn = make_model().init(strategy, seed=0)
    abstract = make_model().init(strategy, abstract=True)
    for leaf, other in zip(*map(fs.tree_leaves, map(fs.transform_state, (abstract, drawn))), strict=True):
        assert leaf.is_meta
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)


@on_ranks(2)
def test_plans_and_graphs_of_abstract_states_are_those_of_states_with_values():
    tx = OPTIMIZERS["fused"]()
    step, batch = train(None, tx)
    step = fs.jit(step, donate_argnums=0)
    drawn, abstract = make_state(tx, seed=0), make_state(tx, abstract=True)
    graph, other = (fs.make_graph(step)(state, batch) for state in (abstract, drawn))
    assert graph.collectives() == other.collectives()
    assert [moment.operator for moment in graph.moments] == [moment.operator for moment in other.moments]
    assert graph.peak_bytes() == other.peak_bytes() > 0
    plans = (fs.plan(step, state, batch, mesh={"shard": 8}) for state in (abstract, drawn))
    assert len({str(plan) for plan in plans}) == 1
    assert step.traces == []


USES = {
    "gather": ("gather", lambda state, path: fs.gather(state.params)),
    "unshard": ("unshard", lambda state, path: fs.unshard(state.params)),
    "reshard": ("reshard", lambda state, path: fs.reshard(state, fs.ddp(one_axis()))),
    "apply": ("apply", lambda state, path: make_model().apply(state.params, torch.ones(2, 4))),
    "value_and_grad": ("value_and_grad", lambda state, path: train(state, fs.adam(0.1))[0](state, torch.ones(2, 4))),
    "update": ("update", lambda state, path: fs.update(fs.adam(0.1), state, state.params)),
    "jit": ("jit", lambda state, path: fs.jit(lambda state: state)(state)),
    "save": ("checkpoint.save", lambda state, path: fs.checkpoint.save(path, state)),
    "save_dcp": ("checkpoint.save_dcp", lambda state, path: fs.checkpoint.save_dcp(path, state.params)),
    "to_state_dict": ("checkpoint.to_state_dict", lambda state, path: fs.checkpoint.to_state_dict(state.params)),
    "global_norm": ("global_norm", lambda state, path: fs.global_norm(state.params)),
}


@pytest.mark.parametrize("use", USES)
def test_abstract_leaves_are_refused_by_name_where_values_are_needed(use, tmp_path):
    verb, call = USES[use]

    def program():
        state = make_state(fs.adam(0.1), abstract=True)
        with pytest.raises(ValueError, match="abstract") as refusal:
            call(state, tmp_path)
        return str(refusal.value)

    texts = spmd(program, 2)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"{verb}: leaves are abstract")
    assert "['0.weight']: has a shape, but no values" in texts[0]
    assert "fs.checkpoint.restore(directory, like=state)" in texts[0]


def test_a_state_that_was_filled_in_part_is_refused(tmp_path):
    tx = fs.adam(0.1)
    fs.checkpoint.save(tmp_path, make_state(tx, seed=0)).wait()
    state = fs.checkpoint.restore(tmp_path, like=make_state(tx, abstract=True), only="params.*")
    grads = fs.tree_map(torch.ones_like, state.params)
    with pytest.raises(ValueError, match=r"update: leaves are abstract\n  \.opt_state"):
        fs.update(tx, state, grads)


@on_ranks(2)
def test_ranks_that_differ_in_abstract_are_named():
    with pytest.raises(ValueError, match="ranks hold different trees"):
        make_model().init(make_strategy(), seed=0, abstract=my_rank() == 1)


@pytest.mark.parametrize("options", ({"seed": 0}, {}))
def test_nothing_is_drawn_where_values_are_about_to_be_read(options):
    with setting(SKIP_DRAWING, True):
        assert make_model().init(make_strategy(), **options)["0.weight"].local.is_meta
        # A tree of the user's own keeps its values.
        assert not fs.shard({"w": torch.ones(2)}, make_strategy())["w"].local.is_meta
    assert not make_model().init(make_strategy(), **options)["0.weight"].local.is_meta


def test_a_module_whose_buffers_wait_for_init_is_drawn():
    class Cached(nn.Linear):
        def __init__(self):
            super().__init__(2, 2, device="meta")
            self.register_buffer("cache", torch.empty(2, device="meta"), persistent=False)

        def reset_parameters(self):
            super().reset_parameters()
            if hasattr(self, "cache"):
                self.cache.fill_(3.0)

    model = fs.functionalize(Cached())
    assert model.init(make_strategy(), seed=0, abstract=True)["weight"].local.is_meta
    assert model.buffers["cache"].is_meta
    with setting(SKIP_DRAWING, True):
        assert not model.init(make_strategy(), seed=0)["weight"].local.is_meta
    assert model.buffers["cache"].tolist() == [3.0, 3.0]


def test_abstract_must_be_a_flag():
    with pytest.raises(ValueError, match=r"model\.init: abstract must be True or False, got 1"):
        make_model().init(make_strategy(), abstract=1)
