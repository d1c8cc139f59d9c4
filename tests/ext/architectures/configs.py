"""Which architectures there are in transformers, drawn by a seed, and small configurations of them."""

import random
import re
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS, POSITIONS = 128, 32, 64, 4, 2, 64
# Larger than this, a model has a size that no rule of `shrunk` knows.
MAX_PARAMETERS = 5_000_000

# The mappings that architectures are drawn from, in the order in which one that several have is assigned to one.
TASKS = {
    "CAUSAL_LM": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens to tokens",
    "MASKED_LM": "tokens",
    "IMAGE_TEXT_TO_TEXT": "image and tokens",
    "IMAGE_CLASSIFICATION": "image",
    "OBJECT_DETECTION": "boxes",
    "SEMANTIC_SEGMENTATION": "pixels",
    "UNIVERSAL_SEGMENTATION": "image alone",
    "DEPTH_ESTIMATION": "image alone",
    "AUDIO_CLASSIFICATION": "audio",
    "CTC": "audio to tokens",
    "SPEECH_SEQ_2_SEQ": "audio to tokens",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "image and text",
    "VIDEO_CLASSIFICATION": "video",
}


class Architecture(NamedTuple):
    """One architecture of transformers.

    Attributes:
        name: Its model_type.
        model: Name of the class of its model.
        task: Which mapping it is drawn from.
    """

    name: str
    model: str
    task: str


def architectures(seed: int) -> list[Architecture]:
    """All architectures of the mappings in an order drawn by a seed, the mappings taking turns."""
    generator, seen = random.Random(seed), set[str]()
    queues = []
    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        found = []
        for name, model in names.items():
            model = model[0] if isinstance(model, (list, tuple)) else model
            if name not in seen and model not in seen:
                seen.update((name, model))
                found.append(Architecture(name, model, task))
        generator.shuffle(found)
        queues.append(found)
    # Two of causal models, which are most, for one of each other mapping.
    out: list[Architecture] = []
    while any(queues):
        for task, queue in zip(TASKS, queues, strict=True):
            for _ in range(3 if task == "CAUSAL_LM" else 1):
                if queue:
                    out.append(queue.pop())
    return out


def class_of(architecture: Architecture) -> type[torch.nn.Module]:
    return getattr(transformers, architecture.model)


# Ways to make a configuration small: whether names of stages, which are derived from layers, are left to the class, and
# whether lists of widths and depths become small too.
WAYS = ((True, True), (False, True), (True, False), (False, False))


def tiny(architecture: Architecture, way: int = 0) -> Any:
    """A small configuration of an architecture."""
    cls = class_of(architecture)
    full = cls.config_class().to_dict()
    return cls.config_class.from_dict(shrunk(full, *WAYS[way]))


# By the name of a number, the first that matches: what it becomes, from what it was.
RULES = [
    (
        r"dropout|drop_path|layerdrop|drop_rate|_pdrop|jitter|drop_prob|mask_time_prob|mask_feature_prob",
        lambda v: type(v)(0),
    ),
    (r"vocab_size|vocabulary_size|codebook_size|n_vocab", lambda v: VOCABULARY if v > 2 else v),
    (r"^num_(key_value|kv)_heads$|num_(key_value|kv)_heads$|n_head_kv|multi_query_group_num", lambda v: min(v, 2)),
    (r"heads?$|^n_heads?$|attention_head_num", lambda v: min(v, HEADS)),
    (r"qk_head_dim", lambda v: 2 * 8),
    (r"^rotary_dim$|head_dim$|^d_kv$|head_size$|attention_key_value_channels|kv_channels", lambda v: 8),
    (r"lora_rank|_rank$|lora_dim", lambda v: min(v, 8)),
    (r"experts_per_tok|top_?k|topk_group|n_group|num_selected_experts|moe_k$", lambda v: min(v, 2)),
    (r"num_shared_experts|n_shared_experts", lambda v: min(v, 1)),
    (r"experts|expert_num|num_local_experts", lambda v: min(v, 4)),
    (
        r"num_hidden_layers|^n_layers?$|num_layers|_layers$|^depth$|_depth$|num_blocks|layers_num|n_layer",
        lambda v: min(v, LAYERS),
    ),
    (r"intermediate|ffn|d_ff|inner_dim|mlp_dim|feed_forward|ff_dim|n_inner|d_inner", lambda v: min(v, HIDDEN)),
    (
        r"max_position|n_positions|max_source|max_target|max_seq|n_ctx|seq_len|max_len|max_.*length",
        lambda v: min(v, POSITIONS),
    ),
    (r"^image_size$|^input_size$|^img_size$|crop_size$", lambda v: min(v, 32)),
    (r"^num_image_tokens$|image_seq", lambda v: min(v, 16)),
    (r"num_queries", lambda v: min(v, 10)),
    (r"sliding_window|^window$|attention_window|local_attention|chunk_size|window_size", lambda v: min(v, 8)),
    (r"patch_size|patch_stride", lambda v: min(v, 8)),
    (r"num_mel_bins|feature_size|num_mels", lambda v: min(v, 16)),
    (r"state_size|ssm_state|mamba_d_state", lambda v: min(v, 8)),
    (
        r"hidden|d_model|n_embd|embd|embed|_dim$|^dim$|width|channels$|projection|_size$|units|pooler_num",
        lambda v: min(v, WIDTH),
    ),
]
KEPT = re.compile(
    r"^(num_channels|in_channels|hop|stride|kernel|conv_kernel|conv_stride|num_labels|spatial_merge|temporal|"
    r"pixel_shuffle|num_feat_extract_layers|downsampl|scale|.*kernel_size|tubelet_size|num_frames|type_vocab_size|.*_stride|d_conv|.*conv_dim)"
)
WIDTHS = re.compile(
    r"hidden_sizes|embed_dims?|widths|channels|dims|conv_dim|neck_hidden|hidden_channels|decoder_hid|_sizes$|_dim$"
)


def shrunk(config: dict[str, Any], rederive: bool = True, lists: bool = True) -> dict[str, Any]:
    """The same configuration with small sizes, and those inside it."""
    layers = next((config[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if type(config.get(k)) is int), 0)
    chosen = list(range(min(layers, LAYERS)))
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        first = [types.index(t) for t in dict.fromkeys(types)]
        chosen = sorted(dict.fromkeys([*first, *range(len(types))]))[: max(LAYERS, len(first))]
        chosen = sorted([*first, *(i for i in range(len(types)) if i not in first)][: max(LAYERS, len(first))])
    derived = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
    config = {key: value for key, value in config.items() if not (rederive and key in derived)}
    out = {}
    used: dict[int, int] = {}
    for key, value in config.items():
        if isinstance(value, dict) and not key.endswith(("id2label", "label2id")):
            out[key] = shrunk(value, rederive, lists)
        elif isinstance(value, list) and len(value) == layers and layers > LAYERS:
            out[key] = [value[i] for i in chosen]
        elif isinstance(value, list):
            out[key] = _list(key, value) if lists else value
        elif isinstance(value, bool) or not isinstance(value, int | float):
            out[key] = value
        elif key.endswith(("_token_id", "_token_index", "_id")) and isinstance(value, int):
            if value >= VOCABULARY:
                value = used.setdefault(value, VOCABULARY - 1 - value % 61)
            out[key] = value
        elif KEPT.match(key):
            out[key] = value
        else:
            rule = next((rule for pattern, rule in RULES if re.search(pattern, key)), None)
            out[key] = rule(value) if rule and (isinstance(value, int) or rule is RULES[0][1]) else value
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if key in out and types:
            out[key] = len(chosen)
    if out.get("pad_token_id") is None and "pad_token_id" in out:
        out["pad_token_id"] = 0
    return out


def _list(key: str, value: list[Any]) -> list[Any]:
    if not value or not all(type(v) is int for v in value):
        return [shrunk(v) if isinstance(v, dict) else _list(key, v) if isinstance(v, list) else v for v in value]
    if re.search(r"depths|num_.*(blocks|layers)|layers", key):
        return [min(v, 1) for v in value]
    if "mrope_section" in key or "axes" in key:
        return value
    if re.search(r"heads", key):
        return [max(1, v // value[0]) for v in value]
    if WIDTHS.search(key) and max(value) > WIDTH:
        small = max(1, min(value) // 8)
        return [max(8, v // small) for v in value] if min(value) >= 8 else [min(v, WIDTH) for v in value]
    if re.search(r"image_size|input_size", key):
        return [min(v, 32) for v in value]
    return value
