"""Law 3 on models of transformers in train mode: two ranks have one process's numbers after three AdamW steps."""

import copy
import math
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from fshard.tree import flatten
from tests.test_init_memory import peak_bytes
from tests.trees import assert_same_bits, one_axis

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

RANKS, STEPS, SEQUENCES, LENGTH = 2, 3, 2, 7

# No size is a multiple of the number of ranks.
VOCABULARY, WIDTH, HIDDEN, HEADS, EXPERTS = 259, 33, 51, 3, 15

# Epsilon is as large as gradients are, because a smaller one would hide a gradient that is wrong by a factor.
ADAMW = dict(lr=1e-2, eps=1e-2, weight_decay=0.1)

# A gradient adds up at most this many terms below 1, in another order than one process does; AdamW hands on lr / eps =
# 1 times that, and the next gradient, of a loss with curvature about 1, what parameters differ by then.
TERMS = RANKS * SEQUENCES * LENGTH * (2**STEPS - 1)

# All models hold float64, but some norms, routers and losses of transformers compute in float32 whatever they get. From
# equal parameters they still give equal numbers; from parameters one rounding apart, numbers a float32 rounding apart.
FIRST_STEP = TERMS * torch.finfo(torch.float64).eps
LATER_STEPS = {True: TERMS * torch.finfo(torch.float32).eps, False: FIRST_STEP}


class Float32Linear(torch.nn.Linear):
    """What the routers of Switch convert to float32 in every forward; converting a module writes to its parameters."""

    def to(self, dtype):
        assert {parameter.dtype for parameter in self.parameters()} == {dtype}
        return self


class Case(NamedTuple):
    """One model.

    Attributes:
        model: Name of its class.
        layer: Name of the class of its layers, which are its units.
        config: Arguments of the configuration.
        has_float32: Whether some of it computes in float32 whatever it gets.
    """

    model: str
    layer: str
    config: dict[str, Any]
    has_float32: bool

    def build(self, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
        """The same random weights on every rank."""
        cls = getattr(transformers, self.model)
        config = cls.config_class(**self.config)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = cls(config).to(dtype).train()
        for name, submodule in module.named_modules():
            if name.endswith("router.classifier"):
                submodule.float().__class__ = Float32Linear
        return module

    def functionalize(self, module: torch.nn.Module) -> fs.Model:
        """With a unit for each layer."""
        layers = {type(layer) for layer in module.modules() if type(layer).__name__ == self.layer}
        return fs.functionalize(fs.with_init_weights(module), units=tuple(layers))


TOKENS = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False)
LAYERS = dict(hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=3, num_attention_heads=HEADS)
DECODER = TOKENS | LAYERS | dict(num_key_value_heads=1, head_dim=12, max_position_embeddings=16)
ENCODER = LAYERS | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
VIT = ENCODER | dict(image_size=12, patch_size=4, num_labels=7)
GPT2 = TOKENS | dict(
    n_positions=16, n_embd=WIDTH, n_layer=3, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
T5 = TOKENS | dict(decoder_start_token_id=0)
T5 |= dict(d_model=WIDTH, d_ff=HIDDEN, d_kv=11, num_layers=2, num_decoder_layers=2, num_heads=HEADS, dropout_rate=0.0)
# The implementation of experts that takes float64; the loss has a part that balances their load.
MIXTRAL = dict(num_local_experts=EXPERTS, experts_implementation="eager", output_router_logits=True)
SWITCH = dict(num_experts=EXPERTS, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.0)

CASES = {
    "GPT2": Case("GPT2LMHeadModel", "GPT2Block", GPT2, True),
    "Llama": Case("LlamaForCausalLM", "LlamaDecoderLayer", DECODER | dict(tie_word_embeddings=False), True),
    "Llama tied": Case("LlamaForCausalLM", "LlamaDecoderLayer", DECODER | dict(tie_word_embeddings=True), True),
    "BERT": Case("BertForMaskedLM", "BertLayer", TOKENS | ENCODER, False),
    "T5": Case("T5ForConditionalGeneration", "T5Block", T5, True),
    "ViT": Case("ViTForImageClassification", "ViTLayer", VIT, False),
    # Experts are slices of one leaf.
    "Mixtral": Case("MixtralForCausalLM", "MixtralDecoderLayer", DECODER | MIXTRAL, True),
    # Experts are modules of their own, of which a rank calls some.
    "Switch": Case("SwitchTransformersForConditionalGeneration", "SwitchTransformersBlock", T5 | SWITCH, True),
}

# By the name of a router's class: which experts each token goes to, a mask of shape (tokens, experts), from its output.
CHOSEN = {
    "MixtralTopKRouter": lambda out: torch.nn.functional.one_hot(out[2], EXPERTS).sum(1),
    "SwitchTransformersTop1Router": lambda out: out[0].flatten(0, 1),
}

STRATEGIES = {
    "ddp": lambda mesh: fs.ddp(mesh),
    "zero2": lambda mesh: fs.zero2(mesh),
    # Units as small as these are else gathered together.
    "zero3": lambda mesh: fs.zero3(mesh, merge_bytes=0),
    "zero3 that keeps": lambda mesh: fs.zero3(mesh, regather=False, merge_bytes=0),
}


def on_meta(case):
    """The model without values."""
    cls = getattr(transformers, case.model)
    with torch.device("meta"):
        return cls(cls.config_class(**case.config)).eval()


def initialized(case, seed):
    """The oracle: memory for the whole model, and its own initializer."""
    module = on_meta(case).to_empty(device="cpu")
    with torch.random.fork_rng(), torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        torch.manual_seed(seed)
        module.init_weights()
    return module


def batches(case):
    """The batch of every step and rank."""
    generator = torch.Generator().manual_seed(1)

    def tokens():
        return torch.randint(3, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)

    def batch():
        if "ViT" in case.model:
            pixels = torch.randn(SEQUENCES, 3, 12, 12, generator=generator, dtype=torch.float64)
            return {"pixel_values": pixels, "labels": torch.randint(7, (SEQUENCES,), generator=generator)}
        if "Bert" in case.model:
            targets, mask = tokens(), torch.ones(SEQUENCES, LENGTH, dtype=torch.int64)
            mask[0, -2:] = 0
            return {"input_ids": tokens(), "attention_mask": mask, "labels": targets.where(targets % 3 == 0, -100)}
        inputs = tokens()
        return {"input_ids": inputs, "labels": tokens() if "decoder_start_token_id" in case.config else inputs}

    return [[batch() for _ in range(RANKS)] for _ in range(STEPS)]


class Step(NamedTuple):
    """What one step of one process leaves, and the experts that each rank's batch went to, a mask for each router."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    experts: list[list[torch.Tensor]]


def one_process(case, module):
    """Train a module on the joint batches, whose loss is the mean of the losses of their parts."""
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    used: list[torch.Tensor] = []
    for router in module.modules():
        if chosen := CHOSEN.get(type(router).__name__):
            router.register_forward_hook(
                lambda _module, _args, out, chosen=chosen: used.append(chosen(out).bool().any(0))
            )
    for parts in batches(case):
        # An expert that no token goes to has no gradient, and stays as it is.
        optimizer.zero_grad()
        losses, experts = [], []
        for part in parts:
            loss = module(**part).loss / RANKS
            loss.backward()
            losses.append(loss.detach())
            experts.append(list(used))
            used.clear()
        optimizer.step()
        named = dict(module.named_parameters())
        yield Step(
            sum(losses),
            {name: parameter.grad for name, parameter in named.items()},
            {name: parameter.detach().clone() for name, parameter in named.items()},
            experts,
        )


def assert_accounts(record, params, module, layer, strategy):
    """Law 8 for the gradients of one step, in its parts; full leaves count with their padding."""
    moved = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for entry in record:
        moved[entry.op] += 0 if entry.scalar else entry.bytes
    if strategy == "ddp":
        # What is summed in pieces is filled up to a multiple of the ranks.
        whole, full = sum(leaf.local.nbytes for leaf in params.values()), record.bytes_sent() * RANKS / (RANKS - 1)
        assert 2 * whole <= full <= 2 * (whole + (RANKS - 1) * torch.float64.itemsize * len(record))
        return
    split = {name: RANKS * leaf.local.nbytes for name, leaf in params.items() if leaf.spec.partition_axes()}
    whole = sum(leaf.local.nbytes for name, leaf in params.items() if name not in split)
    assert moved["reduce_scatter"] == sum(split.values())
    assert moved["all_reduce"] == whole
    if strategy != "zero3":
        assert moved["all_gather"] == sum(split.values())
        return
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    uses = Counter(names[id(tensor)] for _, tensor in module.named_parameters(remove_duplicate=False))
    layers = [path for path, submodule in module.named_modules() if type(submodule).__name__ == layer]
    inside = {name for name in split if any(name.startswith(f"{path}.") for path in layers)}
    # Layers are gathered again, tied leaves for each module that has them. Others may be needed again, unless they come
    # last or are embeddings; where another module looks at them before, that is a use more, gathered twice too.
    least = sum((uses[name] + (name in inside)) * nbytes for name, nbytes in split.items())
    assert least <= moved["all_gather"] <= least + 3 * sum(split[name] for name in split if name not in inside)


def largest_difference(actual, expected):
    pairs = zip(flatten(actual).leaves, flatten(expected).leaves, strict=True)
    return max(float((a.detach() - b).abs().max()) for a, b in pairs if b is not None)


def trained(case, strategy, is_checkpointed=False):
    """Train on this rank next to one process; return the largest error of each step and the experts used in it."""
    module = case.build()
    steps = one_process(case, copy.deepcopy(module))
    if is_checkpointed:
        module.activation_checkpointing_enable()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    mesh = one_axis()
    model = case.functionalize(module)
    tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
    state = fs.TrainState.create(model.init(STRATEGIES[strategy](mesh)), tx)
    bound, errors, experts = FIRST_STEP, [], []
    for parts, expected in zip(batches(case), steps, strict=True):
        part = parts[fs.comm.rank(fs.axis_of(mesh))]
        with fs.comm.record() as record:
            loss, grads = fs.value_and_grad(lambda params, part=part: model.apply(params, **part).loss)(state.params)
        assert_accounts(record, state.params, module, case.layer, strategy)
        state = fs.update(tx, state, grads)
        actual = {"loss": loss.detach(), "grads": fs.unshard(grads), "params": fs.unshard(state.params)}
        needed = {"loss": expected.loss, "grads": expected.grads, "params": expected.params}
        assert_trees_close(actual, needed, rtol=0, atol=bound)
        bound = LATER_STEPS[case.has_float32]
        errors.append(largest_difference(actual, needed))
        experts.append(expected.experts)
    assert_trees_close(dict(module.named_parameters()), before, exact=True)
    return errors, experts


def report(title, errors):
    print(f"{title}: largest error {errors[0]:.1e} in the first step, {max(errors[1:]):.1e} in later ones")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_three_steps_equal_one_process(workers, name, strategy):
    (errors, experts), (others, _) = spmd(lambda: trained(CASES[name], strategy), workers(RANKS))
    assert errors == others
    report(f"{name}, {strategy}", errors)
    if "zero3" not in strategy:
        # Sums have the same order.
        assert max(errors) == 0
    if name in ("Mixtral", "Switch"):
        first, second = (torch.stack([torch.stack(ranks[i]) for ranks in experts]) for i in range(RANKS))
        assert (first & ~second).any()
        assert (second & ~first).any()


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_layers_that_are_checkpointed_and_units(workers, name):
    """The recompute calls a layer's forward itself, after the model has returned."""
    errors, others = spmd(lambda: trained(CASES[name], "zero3", is_checkpointed=True)[0], workers(RANKS))
    assert errors == others
    report(f"{name}, zero3, checkpointed", errors)


@pytest.mark.parametrize("mode", ("replay", "counter"))
@pytest.mark.parametrize("name", CASES)
def test_init_from_the_meta_device(name, mode):
    """By replay, bitwise the model's own initialization; by counter, the same values at every world size."""
    case = CASES[name]
    module, expected = on_meta(case), initialized(case, 3)
    # Values that a model has do not matter.
    drawn = case.functionalize(case.build(torch.float32)).init(fs.ddp(one_axis()), seed=3, mode=mode)

    def program():
        model = case.functionalize(module)
        params = model.init(fs.zero3(one_axis(), min_shard_elements=0), seed=3, mode=mode)
        return fs.unshard(params), model.buffers

    ranks = [[(fs.unshard(drawn), dict(expected.named_buffers()))], *(spmd(program, ranks) for ranks in (1, 3))]
    for params, buffers in (found for ends in ranks for found in ends):
        assert_same_bits(buffers, dict(expected.named_buffers()))
        if mode == "replay":
            assert_same_bits(params, {name: p.detach() for name, p in expected.named_parameters()})
        else:
            assert_same_bits(params, ranks[0][0][0])
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    # A matrix of n normal numbers has their deviation within a part of 1 / sqrt(2 n).
    for name, parameter in expected.named_parameters():
        deviations = parameter.detach().double().std(), params[name].double().std()
        if parameter.numel() > 1:
            assert abs(deviations[0] - deviations[1]) <= deviations[0] * 5 / math.sqrt(parameter.numel())


def test_init_holds_no_whole_model():
    """The outermost submodule that draws is held whole: of GPT-2 an MLP, whose second projection is drawn twice."""
    case = CASES["GPT2"]._replace(config=GPT2 | dict(n_embd=258, n_layer=8, vocab_size=1031))
    model = case.functionalize(on_meta(case))
    strategy = fs.zero3(one_axis())
    model.init(strategy, seed=0)
    peak, params = peak_bytes(lambda: model.init(strategy, seed=0))
    sizes = [leaf.local.nbytes for leaf in params.values()]
    drawn = sum(leaf.local.nbytes for name, leaf in params.items() if ".h.0.mlp." in name)
    # One rank's shards are whole; the caller's generator is put back.
    assert sum(sizes) <= peak <= sum(sizes) + drawn + torch.get_rng_state().nbytes
    assert drawn < sum(sizes) / 10


def test_bfloat16_llama_trains(workers):
    """It learns two batches by heart in bfloat16, and keeps its parameters in float32."""

    def program():
        case = CASES["Llama"]
        module = case.build(torch.float32)
        mesh = one_axis()
        model = case.functionalize(module)
        tx = fs.from_torch(torch.optim.AdamW, lr=1e-2)
        state = fs.TrainState.create(model.init(fs.zero3(mesh, param_dtype=torch.bfloat16, merge_bytes=0)), tx)
        part = batches(case)[0][fs.comm.rank(fs.axis_of(mesh))]

        def loss_fn(params):
            out = model.apply(params, **part)
            assert out.logits.dtype == torch.bfloat16
            return out.loss

        losses = []
        for _ in range(20):
            loss, grads = fs.value_and_grad(loss_fn)(state.params)
            state = fs.update(tx, state, grads)
            losses.append(float(loss))
        assert {leaf.local.dtype for leaf in flatten(state.params).leaves} == {torch.float32}
        return losses

    losses, others = spmd(program, workers(RANKS))
    assert losses == others
    print(f"Llama, zero3 in bfloat16: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    # It starts from a uniform guess; NaN is not less than anything.
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.5
    assert losses[-1] < 1
