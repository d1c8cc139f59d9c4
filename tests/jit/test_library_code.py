"""Functions that read values in the code of an installed library: errors name the line, and checks pass."""

import re

import pytest
import torch

import fshard as fs
from tests.trees import assert_same_bits, one_axis

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

TOKENS = dict(vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
DECODER = TOKENS | dict(num_key_value_heads=1, head_dim=8, max_position_embeddings=32)
VISION = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8)


def mixtral():
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def llava():
    vision = transformers.CLIPVisionConfig(**VISION, patch_size=4)
    text = transformers.LlamaConfig(**DECODER)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=60, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def stepped(module, batch, **options):
    """A loss with its gradients, eager, and the function that gave them, to be jitted."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model = fs.functionalize(module.train())

    def step(params, batch):
        def loss_fn(params):
            return model.apply(params, **{"use_cache": False, **options}, **batch).loss

        return fs.value_and_grad(loss_fn)(params)

    params = model.init(fs.zero3(one_axis()))
    return step, (params, batch), step(params, batch)


def tokens(length=7):
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def padded(batch):
    """With a mask that hides the end of a sequence: of ones alone, transformers drops it outside of traces."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -2:] = 0
    return batch | {"attention_mask": mask}


def test_a_loop_over_experts_is_refused_with_its_line():
    module = mixtral()
    module.set_experts_implementation("eager")
    step, given, _ = stepped(module, tokens())
    line = '"for expert_idx in expert_hit:"'
    with pytest.raises(ValueError, match=f"(?s)modeling_mixtral.*{re.escape(line)}; use torch.where"):
        fs.jit(step)(*given)


@pytest.mark.parametrize("implementation", ("batched_mm", "grouped_mm"))
def test_forms_without_values_have_the_eager_bits(implementation):
    module = mixtral()
    module.set_experts_implementation(implementation)
    step, given, (loss, grads) = stepped(module, padded(tokens()))
    jitted_loss, jitted = fs.jit(step)(*given)
    assert_same_bits({"loss": jitted_loss, "grads": fs.unshard(jitted)}, {"loss": loss, "grads": fs.unshard(grads)})


@pytest.mark.parametrize("options", (dict(use_cache=True), dict(attn="eager")), ids=("cache", "attention"))
def test_without_a_mask_the_remedies_have_the_eager_bits(options):
    """Transformers keeps a mask in a trace that it drops elsewhere, once it has looked at it: the README says so."""
    module = mixtral()
    module.set_attn_implementation(options.get("attn", "sdpa"))
    step, given, (loss, grads) = stepped(module, tokens(), use_cache="use_cache" in options)
    jitted_loss, jitted = fs.jit(step)(*given)
    assert_same_bits({"loss": jitted_loss, "grads": fs.unshard(jitted)}, {"loss": loss, "grads": fs.unshard(grads)})


def test_messages_of_a_models_checks_may_show_tensors():
    """Llava formats the number of image tokens for a message before it knows whether to raise."""
    ids = tokens(9)["input_ids"]
    ids[:, 1:5] = 60
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    batch = padded({"input_ids": ids, "labels": ids}) | {"pixel_values": pixels}
    step, given, (loss, grads) = stepped(llava(), batch)
    jitted_loss, jitted = fs.jit(step)(*given)
    assert_same_bits({"loss": jitted_loss, "grads": fs.unshard(jitted)}, {"loss": loss, "grads": fs.unshard(grads)})
