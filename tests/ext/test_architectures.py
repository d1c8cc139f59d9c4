"""Models of transformers are trained, jitted, drawn, loaded, saved, and generate, as by one process."""

import copy
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.tolerance import within
from tests.trees import assert_same_bits, one_axis

# Without an import of it, which takes a second in each process that looks for tests.
NEEDS_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), NEEDS_TRANSFORMERS]

RANKS, STEPS, SEQUENCES, LENGTH, SECONDS = 2, 3, 2, 9, 240.0
# Epsilon is as large as gradients are, because a smaller one would hide a gradient that is wrong by a factor.
ADAMW = dict(lr=1e-2, eps=1e-2, weight_decay=0.1)
TOKENS = dict(vocab_size=99, bos_token_id=1, eos_token_id=2, pad_token_id=0)
SIZES = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2)
DECODER = TOKENS | SIZES | dict(num_key_value_heads=2, max_position_embeddings=32)
T5 = dict(d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0)
DEEPSEEK = DECODER | dict(
    **dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=2),
    **dict(topk_group=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=12),
    first_k_dense_replace=1,
)
RESNET = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
IMAGE = 5


class Case(NamedTuple):
    """A class of models, the arguments of its configuration, and whether it computes in float64 all through."""

    model: str
    config: dict[str, Any]
    is_double: bool = False

    def build(self, dtype=torch.float32, device="cpu"):
        """The same random weights whoever asks, in train mode, without dropout."""
        import transformers

        cls, config = getattr(transformers, self.model), self.config
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            module = cls(cls.config_class(**copy.deepcopy(config))).to(dtype).train()
        for dropout in (part for part in module.modules() if isinstance(part, nn.Dropout)):
            dropout.p = 0.0
        if "num_experts_per_tok" in vars(module.config):
            # Grouped products take no float64, and no trace, as README and errors say.
            module.set_experts_implementation("batched_mm")
        return module

    def batches(self, sequences=SEQUENCES, length=LENGTH):
        """What each rank gets in each step: batches[step][rank]."""
        generator = torch.Generator().manual_seed(1)

        def batch():
            if self.model.startswith("ResNet"):
                pixels = torch.randn(sequences, 3, 32, 32, generator=generator).double()
                return {"pixel_values": pixels, "labels": torch.randint(3, (sequences,), generator=generator)}
            ids = torch.randint(6, 60, (sequences, length), generator=generator)
            mask = torch.ones_like(ids)
            # One of ones alone, transformers drops outside of traces.
            mask[0, -2:] = 0
            batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
            if self.model.startswith("Llava"):
                ids[:, 1:5] = IMAGE
                batch["pixel_values"] = torch.randn(sequences, 3, 8, 8, generator=generator).double()
            return batch

        return [[batch() for _ in range(RANKS)] for _ in range(STEPS)]


CASES = {
    "gptj": Case("GPTJForCausalLM", TOKENS | dict(n_embd=16, n_layer=2, n_head=2, rotary_dim=4, n_positions=32)),
    "llama, tied": Case("LlamaForCausalLM", DECODER | dict(tie_word_embeddings=True)),
    "mixtral": Case("MixtralForCausalLM", DECODER | dict(num_local_experts=5)),
    "deepseek": Case("DeepseekV3ForCausalLM", DEEPSEEK),
    "bert": Case("BertForMaskedLM", TOKENS | SIZES, True),
    "t5": Case("T5ForConditionalGeneration", TOKENS | T5),
    "resnet": Case("ResNetForImageClassification", RESNET, True),
    "llava": Case(
        "LlavaForConditionalGeneration",
        dict(
            image_token_index=IMAGE,
            text_config=DECODER | dict(model_type="llama"),
            vision_config=SIZES | dict(image_size=8, patch_size=4, model_type="clip_vision_model"),
        ),
    ),
}


def functionalize(module):
    """With the layers that the library says are not to be split as units."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    units = {type(part) for part in module.modules() if type(part).__name__ in names and list(part.parameters())}
    return fs.functionalize(module, units=tuple(units) or None)


def strategy():
    """ZeRO-3; units as small as these are else gathered together."""
    return fs.zero3(one_axis(), bucket_bytes=0, min_shard_elements=0)


def dense(module, batches):
    """Train one process on the joint batches, whose loss is the mean of the losses of their parts."""
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    # Each rank has buffers of its own.
    kept = [{name: buffer.clone() for name, buffer in module.named_buffers()} for _ in range(RANKS)]
    for parts in batches:
        optimizer.zero_grad()
        losses = []
        for rank, part in enumerate(parts):
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    buffer.copy_(kept[rank][name])
            loss = module(**part).loss / RANKS
            loss.backward()
            losses.append(loss.detach())
            kept[rank] = {name: buffer.clone() for name, buffer in module.named_buffers()}
        optimizer.step()
        named = dict(module.named_parameters())
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}
        yield {"loss": sum(losses), "grads": grads, "params": {name: p.detach().clone() for name, p in named.items()}}


def begun(module, transform=None):
    """A state, and the train step that users write for a model with buffers."""
    model, tx = functionalize(module), fs.from_torch(torch.optim.AdamW, **ADAMW)

    def train_step(state, batch):
        def loss_fn(params):
            out, buffers = model.apply(params, buffers=state.buffers, **batch)
            return out.loss, buffers

        (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
        return fs.update(tx, state._replace(buffers=buffers), grads), loss, grads

    return fs.TrainState.create(model.init(transform or strategy()), tx, buffers=model.buffers), train_step


@pytest.mark.parametrize("checkpointed", (False, True), ids=("kept", "checkpointed"))
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process(name, checkpointed):
    """Gradients add up a term for each token; AdamW hands on lr / eps = 1 times their difference, doubled each step."""
    case = CASES[name]
    module, batches = case.build(torch.float64), case.batches()
    if checkpointed and not module.supports_gradient_checkpointing:
        pytest.skip("transformers has no checkpoints of activations for it")
    if checkpointed:
        module.activation_checkpointing_enable()
    steps = list(dense(copy.deepcopy(module), batches))
    dtype = torch.float64 if case.is_double else torch.float32

    def program():
        state, train_step = begun(module)
        for parts, expected in zip(batches, steps, strict=True):
            state, loss, grads = train_step(state, parts[fs.comm.rank(fs.axis_of(one_axis()))])
            near = within(expected, RANKS * SEQUENCES * LENGTH, 2**STEPS - 1, dtype)
            found = {"loss": loss.detach(), "grads": fs.unshard(grads), "params": fs.unshard(state.params)}
            assert_trees_close(found, expected, **near)

    spmd(program, RANKS, timeout=SECONDS)


@pytest.mark.parametrize("name", CASES)
def test_jit_has_the_same_bits(name):
    module, batches = CASES[name].build(torch.float64), CASES[name].batches()

    def program():
        state, train_step = begun(module)
        fast, rank = fs.jit(train_step), fs.comm.rank(fs.axis_of(one_axis()))
        one = two = state
        for parts in batches:
            one, *expected = train_step(one, parts[rank])
            two, *found = fast(two, parts[rank])
            assert_trees_close((found, two.params), (expected, one.params), exact=True)
            assert_same_bits(dict(two.buffers), dict(one.buffers))
        assert len(fast.traces) == 1

    spmd(program, RANKS, timeout=SECONDS)


@pytest.mark.parametrize("name", CASES)
def test_values_are_drawn_by_the_models_own_initializer(name):
    module = CASES[name].build(device="meta")

    def program():
        model = functionalize(fs.with_init_weights(module))
        return fs.unshard(model.init(strategy(), seed=0)), model.buffers

    params, buffers = spmd(program, RANKS, timeout=SECONDS)[0]
    own = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng():
        for tensor in (*own.parameters(), *own.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        for part in own.modules():
            part.__dict__.pop("_is_hf_initialized", None)
        torch.manual_seed(0)
        own.init_weights()
    assert_same_bits(params, {name: p.detach() for name, p in own.named_parameters()})
    assert_same_bits(dict(buffers), dict(CASES[name].build().named_buffers()))


@pytest.mark.parametrize("max_file_bytes", (20_000, 5_000_000_000))
@pytest.mark.parametrize("name", CASES)
def test_files_are_those_of_transformers_both_ways(name, max_file_bytes, tmp_path):
    module, other = CASES[name].build(), CASES[name].build()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.normal_() if tensor.is_floating_point() else None
    module.save_pretrained(tmp_path / "theirs", max_shard_size=max_file_bytes)
    module.config.save_pretrained(tmp_path / "ours")

    def program():
        model, kept = functionalize(other), set(other.state_dict())
        like = {**model.init(strategy()), **{n: buffer for n, buffer in model.buffers.items() if n in kept}}
        params = fs.checkpoint.load_huggingface(tmp_path / "theirs", like, module=other)
        fs.checkpoint.save_huggingface(tmp_path / "ours", params, module=other, max_file_bytes=max_file_bytes)
        return fs.unshard(params)

    read = type(module).from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    named = {**dict(read.named_parameters()), **dict(read.named_buffers())}
    found = spmd(program, RANKS, timeout=SECONDS)[0]
    assert_same_bits(found, {name: named[name].detach() for name in found})
    again = type(module).from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_same_bits(dict(again.state_dict()), dict(read.state_dict()))


@pytest.mark.parametrize("name", ("gptj", "t5", "llava"))
def test_generate(name):
    module = CASES[name].build().eval()
    given = {key: value for key, value in CASES[name].batches()[0][0].items() if key != "labels"}
    given = {key: value.float() if value.is_floating_point() else value for key, value in given.items()}
    wanted = given | dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)

    class Generate(nn.Module):
        """A module whose forward is transformers' generate."""

        def __init__(self):
            super().__init__()
            self.model = module

        def forward(self, **given):
            return self.model.generate(**given)

    with torch.no_grad():
        expected = module.generate(**wanted)

    def program():
        model = functionalize(Generate())
        params = model.init(strategy())
        with torch.no_grad():
            return model.apply(fs.gather(params), **wanted), model.apply(params, **wanted)

    for out in spmd(program, RANKS, timeout=SECONDS)[0]:
        assert torch.equal(out, expected)
