"""Models of transformers whose initializer leaves values out are drawn as their constructors draw them."""

import pytest
import torch

import fshard as fs
from fshard.testing import spmd
from tests.test_init_memory import peak_bytes
from tests.trees import assert_same_bits, one_axis

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
AUDIO = SIZES | dict(conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(2, 2), num_conv_pos_embedding_groups=2)
GPT = dict(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2)
SEGMENTS = dict(text_config=SIZES, vision_config=SIZES | dict(image_size=8, patch_size=4), projection_dim=16)

# Weight norm; parameters that are drawn in a constructor; constants of a constructor; normal numbers that are cut off.
MODELS = {
    "weight norm": lambda: (transformers.Wav2Vec2Model, transformers.Wav2Vec2Config(**AUDIO)),
    "a copy to a device": lambda: (transformers.Wav2Vec2ConformerModel, transformers.Wav2Vec2ConformerConfig(**AUDIO)),
    "constructor": lambda: (transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTConfig(**GPT)),
    "constants": lambda: (transformers.CLIPSegModel, transformers.CLIPSegConfig(**SEGMENTS)),
    "cut off": lambda: (
        transformers.TimesformerModel,
        transformers.TimesformerConfig(**SIZES, image_size=8, patch_size=4, num_frames=2),
    ),
}


def on_meta(cls, config):
    with torch.device("meta"):
        return cls(config)


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_the_constructor(name):
    cls, config = MODELS[name]()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = cls(config)
    # Its constructor may draw on the processor.
    module = on_meta(cls, config)
    state = torch.get_rng_state()

    def program():
        model = fs.functionalize(module)
        params = model.init(fs.zero3(one_axis(), min_shard_elements=0), seed=3)
        assert_same_bits(fs.unshard(params), {name: p.detach() for name, p in expected.named_parameters()})
        assert_same_bits(dict(model.buffers), dict(expected.named_buffers()))

    for world_size in (1, 2):
        spmd(program, world_size)
    assert_same_bits(torch.get_rng_state(), state)


def test_a_model_that_was_changed_after_its_constructor_is_refused():
    """Its constructor draws other values than it has places for."""
    module = on_meta(*MODELS["constructor"]())
    module.transformer.h[0].mlp.c_fc = torch.nn.Linear(16, 64, device="meta")
    with pytest.raises(ValueError, match=r"values cannot be drawn from a seed\n.*c_attn.weight"):
        fs.functionalize(module).init(fs.ddp(one_axis()), seed=0)


def test_no_whole_model_is_held():
    cls, config = transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTConfig(**GPT | dict(n_embd=128, n_layer=6))
    model = fs.functionalize(on_meta(cls, config))
    model.init(fs.zero3(one_axis()), seed=0)
    peak, params = peak_bytes(lambda: model.init(fs.zero3(one_axis()), seed=0))
    sizes = [leaf.local.nbytes for leaf in params.values()]
    # What is drawn, and its copy for the shard, which is whole on one rank.
    print(f"peak {peak}, shards {sum(sizes)}, largest {max(sizes)}")
    assert peak <= sum(sizes) + 2 * max(sizes)
