"""Real architectures: models of transformers with 200 million parameters, under the interface of the GPT."""

from typing import Any, NamedTuple

import torch
from torch import nn
from trained_gpt import SEED, Configuration

import fshard as fs

# As Llama 3.2 1B: a wide MLP, four query heads for each head of keys, one table for embeddings and logits.
LLAMA = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=11, num_attention_heads=16)
LLAMA |= dict(num_key_value_heads=4, tie_word_embeddings=True)
# As Mixtral 8x7B: eight experts in each layer, of which a token takes two, and a head of its own.
MIXTRAL = dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=7, num_attention_heads=8)
MIXTRAL |= dict(num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2)
MIXTRAL |= dict(experts_implementation="sorted")
SIZES = {"llama": ("LlamaForCausalLM", LLAMA), "mixtral": ("MixtralForCausalLM", MIXTRAL)}


def sorted_experts(
    experts: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:  # (tokens, width), (tokens, chosen) twice, to (tokens, width)
    """Apply experts as transformers does by default, but by its operator that can be traced in float32."""
    expert, order = index.flatten().sort()
    ends = torch.searchsorted(expert, torch.arange(experts.num_experts, device=x.device), right=True)
    token, product = order // index.shape[-1], torch.ops.transformers.grouped_mm_fallback
    gate, up = product(x[token], experts.gate_up_proj.mT, ends).chunk(2, dim=-1)
    rows = product(experts.act_fn(gate) * up, experts.down_proj.mT, ends)  # (tokens * chosen, width)
    return torch.zeros_like(x).index_add(0, token, rows * weights.flatten()[order, None])


class CausalModel(nn.Module):
    """A model of transformers that takes and returns what the GPT does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # (batch, time) twice, to a scalar
        return self.model(x, labels=y, shift_labels=y, use_cache=False).loss


class Architecture(NamedTuple):
    """A class of models, the sizes of its configuration, and a batch, in the place of a trained_gpt.Configuration."""

    name: str
    model: type[nn.Module]
    block: type[nn.Module]
    sizes: dict[str, Any]
    batch: int = 1
    time: int = 256
    vocabulary: int = 32000

    tokens = Configuration.tokens

    def module(self) -> CausalModel:
        """The model with the same values on every rank, or without values on the meta device."""
        module = CausalModel(self.model(self.model.config_class(vocab_size=self.vocabulary, **self.sizes)))
        # Constructors have drawn too: draw again, in a copy of the same tensors, what fshard draws.
        torch.manual_seed(SEED)
        drawn = fs.with_init_weights(module)
        drawn.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
        return module


Configured = Configuration | Architecture


def parse(name: str) -> Configured:
    """The architecture of a name, or the GPT whose sizes the name spells."""
    if name not in SIZES:
        return Configuration.parse(name)
    # Benchmarks of other models run without transformers.
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)
    cls, sizes = SIZES[name]
    model = getattr(transformers, cls)
    with torch.device("meta"):
        (block,) = fs.no_split(model(model.config_class(**sizes)))
    return Architecture(name, model, block, sizes)
