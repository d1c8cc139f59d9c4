"""tensor_parallel: modules split by plans of names against themselves in one process, and the bytes that they send."""

import copy
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fshard as fs
from fshard.extend import fake_axes
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.test_processes import ROOT
from tests.tolerance import within
from tests.trees import assert_same_bits, normal

sys.path.append(str(ROOT / "examples"))
from gpt import GPT, Block

WIDTH, HEADS, LAYERS, ROWS, TIME, VOCABULARY, PADDING = 48, 24, 2, 4, 24, 48, 5


class Attention(nn.Module):
    """As LlamaAttention: the number of heads is taken from shapes, and those from the input."""

    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        # Without the large number, a head of two small elements would hand a difference on many times larger.
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1.0)

    def forward(self, hidden_states, scale):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(self.q_norm(q) * scale, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(attended.reshape(*shape[:2], -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp, self.norm1, self.norm2 = Attention(), MLP(), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, h):
        h = h + self.self_attn(hidden_states=self.norm1(h), scale=2.0)
        return h + self.mlp(self.norm2(h))


class Llama(nn.Module):
    """As LlamaForCausalLM of transformers, by the names of its submodules."""

    def __init__(self, tied):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.layers = nn.Sequential(*(DecoderLayer() for _ in range(LAYERS)))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(self.norm(self.layers(self.embed_tokens(ids))))


SHARED = {"*norm*": "sequence"}
GPT_PLAN = {"tokens": "vocabulary", "blocks.0": "split", "*.qkv": ("column", 3), "*.up": "column"}
GPT_PLAN |= SHARED | dict.fromkeys(("*.proj", "*.down"), "row")
LLAMA_PLAN = {"*embed_tokens": "vocabulary", "*layers.0": "split", "*.self_attn": "gather", "*.mlp": "gather"}
LLAMA_PLAN |= SHARED | dict.fromkeys(("*.[qkv]_proj", "*.gate_proj", "*.up_proj"), "column")
LLAMA_PLAN |= dict.fromkeys(("*.o_proj", "*.down_proj"), "row")


class Case(NamedTuple):
    """A module and its plan; `head` is the style of its head."""

    make: Callable[[], nn.Module]
    layer: type[nn.Module]
    plan: dict[str, Any]
    head: str
    divide: Any = None


CASES = {
    "GPT": Case(lambda: GPT(WIDTH, LAYERS, HEADS, TIME), Block, GPT_PLAN | {"head": "column"}, "column", "*.heads"),
    "GPT, checkpointed": Case(
        lambda: GPT(WIDTH, LAYERS, HEADS, TIME, remat=True),
        Block,
        GPT_PLAN | {"head": "vocabulary"},
        "vocabulary",
        ["*.heads"],
    ),
    "Llama": Case(lambda: Llama(False), DecoderLayer, LLAMA_PLAN | {"*lm_head": "column"}, "column"),
    "Llama, tied": Case(lambda: Llama(True), DecoderLayer, LLAMA_PLAN | {"*lm_head": "vocabulary"}, "vocabulary"),
}


@cache
def module_of(name):
    """The same values on every rank."""
    module, draw = CASES[name].make().double(), normal(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(*parameter.shape) / (WIDTH**0.5 if parameter.dim() > 1 else 1) + (parameter.dim() < 2))
    return module


def data():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(VOCABULARY, (ROWS, TIME), generator=generator) for _ in range(2))


@cache
def one_process(name):
    module, (x, y) = copy.deepcopy(module_of(name)), data()
    loss = F.cross_entropy(module(x).flatten(0, 1), y.flatten())
    loss.backward()
    return {key: parameter.grad for key, parameter in module.named_parameters()}, loss.detach()


def setting(name, sizes, sequence_dim, **changes):
    """A case on a mesh: its parameters, this rank's tokens and its loss."""
    case, mesh = CASES[name], fs.init_mesh(dict(zip(("shard", "tp"), sizes, strict=True)), device="cpu")
    shard, tp = (fs.axis_of(mesh, axis) for axis in ("shard", "tp"))
    options = {"plan": case.plan, "sequence_dim": sequence_dim, "divide": case.divide} | changes
    parallel, split = fs.tensor_parallel(module_of(name), tp, **options)
    model = fs.functionalize(parallel, units=case.layer)
    params = model.init(fs.compose(fs.zero3(mesh, min_shard_elements=0, bucket_bytes=0), split))

    def loss_fn(params, x, y):
        logits = model.apply(params, x)
        if case.head == "column":
            return fs.vocab_parallel_cross_entropy(logits, None, y, tp)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return params, tuple(ids.chunk(shard.size)[fs.axis_index(shard)] for ids in data()), loss_fn


@on_ranks(3, 4, pytest.param(8, marks=pytest.mark.slow), pytest.param("2 processes", marks=pytest.mark.slow))
def test_it_is_the_module_of_one_process(world_size):
    """The plain GPT is in the table of laws of extensions; 3 does not divide its 256 bytes."""
    for name in ("Llama",) if world_size == 3 else ("GPT, checkpointed", "Llama", "Llama, tied"):
        for sequence_dim in (None, 1):
            params, batch, loss_fn = setting(name, (world_size // 4 or 1, min(world_size, 4)), sequence_dim)
            loss, grads = fs.value_and_grad(loss_fn)(params, *batch)
            expected = one_process(name)
            # Sums over all tokens, which layers hand on, forward and backward.
            near = within(expected, terms=ROWS * TIME, steps=2 * LAYERS)
            assert_trees_close((fs.unshard(grads), loss), expected, **near)


@on_ranks(2)
def test_checkpoint_wrappers_change_no_name_of_a_plan():
    tp = fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    for name in ("GPT", "Llama"):
        case, module = CASES[name], module_of(name)
        wrapped = copy.deepcopy(module)
        layers = wrapped.blocks if name == "GPT" else wrapped.layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
        results = []
        for given in (module, wrapped):
            parallel, split = fs.tensor_parallel(given, tp, case.plan, sequence_dim=1, divide=case.divide)
            model = fs.functionalize(parallel, units=case.layer)
            loss_fn = lambda p, x, y: fs.vocab_parallel_cross_entropy(model.apply(p, x), None, y, tp)  # noqa: B023, E731
            results.append(fs.unshard(fs.value_and_grad(loss_fn)(model.init(split), *data())))
        assert_same_bits(*results)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, scale, x):
        return self.down(self.up(scale * x))


class Model(nn.Sequential):
    def forward(self, *inputs):
        return self[0](*inputs)


@on_ranks(2)
def test_the_first_input_may_be_a_number_where_no_dim_is_split():
    module, tp = Model(Scaled()).double(), fs.axis_of(fs.init_mesh({"tp": -1}, device="cpu"))
    inputs = torch.tensor(0.5, dtype=torch.float64), normal(1)(ROWS, WIDTH)
    parallel, split = fs.tensor_parallel(module, tp, {"0": "gather", "*up": "column", "*down": "row"})
    model = fs.functionalize(parallel)
    params = model.init(split, seed=0)
    with torch.no_grad():
        expected = torch.func.functional_call(module, fs.unshard(params), inputs)
        assert_trees_close(model.apply(params, *inputs), expected, **within(expected, WIDTH, steps=2))
    text = "the first input of a module of style 'gather' or 'split' to be a tensor of {} or more dims, got"
    pieces, _ = fs.tensor_parallel(module, tp, {"0": "split"}, sequence_dim=1)
    for made, first, dims in ((parallel, None, 0), (pieces, inputs[0], 2)):
        with pytest.raises(ValueError, match=text.format(dims)):
            made(first, inputs[1])


def sent_by_label(world_size, sequence_dim, rows=ROWS):
    """Bytes that a rank sends over "tp" for the GPT."""
    tokens, part = rows * TIME * 8, (world_size - 1) / world_size
    # Between layers; and of each token a largest logit, the exponentials and the target.
    values, sums = tokens * WIDTH, 2 * part * 2 * tokens
    # Of its three pieces of queries, keys and values a rank sends so many to others.
    exchanged = {2: 1, 4: 2}[world_size] * values / world_size
    both = {"ragged_all_to_all": 2 * LAYERS * exchanged, "pmax": (world_size - 1) * tokens}
    if sequence_dim is None:
        passed = 2 * part * (2 * LAYERS + 1) * values
        return both | {"psum_invariant": passed + sums, "pcast": passed}
    between = (6 * LAYERS + 2) * WIDTH * 8
    moved = part * (4 * LAYERS + 1) * values
    sent = {"psum_invariant": 2 * part * values + sums, "pcast": 2 * part * (values + between)}
    return both | sent | {"all_gather": moved, "reduce_scatter": moved}


def test_the_module_is_not_changed():
    module = module_of("GPT")
    with fake_axes("test", {"tp": 2}, {"tp": 0}, "gloo") as axes:
        made, _ = fs.tensor_parallel(module, axes["tp"], CASES["GPT"].plan, divide="*.heads")
    assert [block.heads for block in module.blocks] == [HEADS] * LAYERS
    assert [block.heads for block in made.blocks] == [HEADS // 2] * LAYERS
    assert not any("forward" in vars(submodule) for submodule in module.modules())
    for (name, parameter), (other, same) in zip(module.named_parameters(), made.named_parameters(), strict=True):
        assert name == other
        assert parameter is same


def fits(changes, divide="*.heads"):
    plan = {**CASES["GPT"].plan, **changes}
    return {"plan": {pattern: style for pattern, style in plan.items() if style}, "divide": divide}


BAD = [
    ({"plan": {}}, "expected plan to be a dict of styles by patterns of submodules' names, got {}"),
    (fits({"*.up": "columns"}), "expected plan['*.up'] to be one of ('column', 'row', 'vocabulary', 'gather'"),
    (fits({"*.q_proj": "column"}), "expected plan['*.q_proj'] to match a submodule, got no match; name some of"),
    (
        fits({"norm": "row", "*norm*": None}),
        "does not fit the module\n  norm: expected an nn.Linear for style 'row', got",
    ),
    (
        fits({"blocks.1": "sequence"}),
        "blocks.1: has submodules with parameters, which style 'sequence' would leave out",
    ),
    ({"axis": 5}, "tokens: expected a multiple of 5 rows, got 256"),
    ({"axis": 16}, "blocks.1.heads: expected a multiple of 16, got 24"),
    ({"divide": None}, "expected divide to say whether to divide blocks.0.heads, blocks.1.heads, got None; pass"),
    ({**fits({"blocks.0": None}), "sequence_dim": 1}, "a module of style 'split' with sequence_dim, got none; name"),
    (
        {"module": Llama(True), "plan": {"embed_tokens": "vocabulary"}, "divide": None},
        "lm_head.weight: is whole, but tied to embed_tokens.weight, which is split by dim 0",
    ),
]


def test_bad_arguments_are_refused():
    for change, text in BAD:
        given = {"module": module_of("GPT"), "axis": 2, **fits({}), **change}
        axes = fake_axes("test", {"tp": given["axis"]}, {"tp": 0}, "gloo")
        with axes as made, pytest.raises(ValueError, match=re.escape(text)):
            fs.tensor_parallel(**given | {"axis": made["tp"]})
