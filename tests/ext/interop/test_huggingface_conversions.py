"""Models of transformers in files: both ways as its own from_pretrained and save_pretrained, of many architectures."""

import contextlib
import re
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard.checkpoint import CheckpointError, load_huggingface, save_huggingface
from fshard.ext.interop import huggingface
from fshard.ext.interop.transformers import Planned, from_files, planned, to_files
from fshard.extend import Entry, Exchange, piece_of
from fshard.testing import spmd
from tests.test_guide import REFERENCE, section
from tests.trees import assert_same_bits, one_axis

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

SINGLE = "model.safetensors"
RANKS = 2
TOKENS = dict(vocab_size=99, bos_token_id=1, eos_token_id=2, pad_token_id=0)
SIZES = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2)
DECODER = TOKENS | SIZES | dict(num_key_value_heads=2, max_position_embeddings=32)
VISION = SIZES | dict(image_size=8, patch_size=4)
T5 = TOKENS | dict(d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=2, decoder_start_token_id=0)
MOE = DECODER | dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, decoder_sparse_step=1)
DEEPSEEK = DECODER | dict(
    **dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=2),
    **dict(topk_group=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=12),
    first_k_dense_replace=1,
)
DETR = dict(
    **dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2),
    **dict(encoder_ffn_dim=20, decoder_ffn_dim=20, num_queries=3, num_labels=4, use_timm_backbone=False),
)
RESNET = dict(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
SEGFORMER = dict(
    **dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3]),
    **dict(strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=12, num_labels=4),
)
WHISPER = TOKENS | dict(
    **dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2),
    **dict(encoder_ffn_dim=20, decoder_ffn_dim=20, num_mel_bins=8, max_source_positions=12, max_target_positions=12),
    decoder_start_token_id=1,
)


class Case(NamedTuple):
    """A model: its class, the arguments of its configuration, and the configurations among these."""

    model: str
    config: dict[str, Any]
    parts: tuple[tuple[str, str, dict[str, Any]], ...] = ()

    def configuration(self):
        parts = {name: getattr(transformers, cls)(**arguments) for name, cls, arguments in self.parts}
        return getattr(transformers, self.model).config_class(**self.config, **parts)

    def on_meta(self):
        with torch.device("meta"):
            return getattr(transformers, self.model)(self.configuration()).eval()

    def build(self):
        """A model whose parameters and saved buffers all differ."""
        torch.manual_seed(0)
        module = getattr(transformers, self.model)(self.configuration()).eval()
        with torch.no_grad():
            for tensor in module.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
                    tensor.view(-1)[:1].normal_()
        return module

    def read(self, directory):
        """The oracle."""
        cls = getattr(transformers, self.model)
        module, info = cls.from_pretrained(directory, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        return module


LLAVA = (("text_config", "LlamaConfig", DECODER), ("vision_config", "CLIPVisionConfig", VISION))
CASES = {
    "Llama": Case("LlamaForCausalLM", DECODER),
    "Llama tied": Case("LlamaForCausalLM", DECODER | dict(tie_word_embeddings=True)),
    "GPT2": Case("GPT2LMHeadModel", TOKENS | dict(n_positions=16, n_embd=16, n_layer=2, n_head=2)),
    "GPTNeoX": Case("GPTNeoXForCausalLM", TOKENS | SIZES),
    "Mixtral": Case("MixtralForCausalLM", DECODER | dict(num_local_experts=5)),
    "Qwen2MoE": Case("Qwen2MoeForCausalLM", MOE | dict(shared_expert_intermediate_size=12)),
    "Qwen3MoE": Case("Qwen3MoeForCausalLM", MOE | dict(head_dim=8)),
    "DeepseekV3": Case("DeepseekV3ForCausalLM", DEEPSEEK),
    "Detr": Case("DetrForObjectDetection", DETR, (("backbone_config", "ResNetConfig", RESNET),)),
    "Segformer": Case("SegformerForSemanticSegmentation", SEGFORMER),
    "Llava": Case("LlavaForConditionalGeneration", dict(image_token_index=5), LLAVA),
    "CLIP": Case("CLIPModel", dict(projection_dim=8, text_config=DECODER, vision_config=VISION)),
    "T5": Case("T5ForConditionalGeneration", T5),
    "BERT": Case("BertForMaskedLM", TOKENS | SIZES),
    "BERT base": Case("BertModel", TOKENS | SIZES),
    "Whisper": Case("WhisperForConditionalGeneration", WHISPER),
    "ViT": Case("ViTForImageClassification", VISION),
}


def like_of(module, directory=None):
    """Parameters on the meta device, and buffers with values where the module does not save them."""
    saved = module.state_dict()
    params = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in module.named_parameters()}
    buffers = {name: torch.full(b.shape, 7, dtype=b.dtype) for name, b in module.named_buffers()}
    params = fs.shard(params, fs.zero3(one_axis(), min_shard_elements=0))
    to_meta = lambda tree: fs.tree_map(lambda tensor: tensor.to("meta"), tree)  # noqa: E731
    kept = {name: buffer for name, buffer in buffers.items() if name not in saved}
    return {**to_meta(params), **to_meta({n: b for n, b in buffers.items() if n not in kept}), **kept}, kept


def expected(module, like):
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensors[name].detach() for name in like}


@pytest.mark.parametrize("max_file_bytes", [20_000, 5_000_000_000])
@pytest.mark.parametrize("name", CASES)
def test_both_ways_as_transformers(tmp_path, name, max_file_bytes):
    case, theirs, ours = CASES[name], tmp_path / "theirs", tmp_path / "ours"
    case.build().save_pretrained(theirs, max_shard_size=max_file_bytes)
    oracle = case.read(theirs)
    oracle.config.save_pretrained(ours)
    meta = case.on_meta()

    def program():
        like, kept = like_of(meta)
        back = load_huggingface(theirs, like, module=meta)
        assert_same_bits(fs.unshard(back), expected(oracle, like) | kept)
        save_huggingface(ours, back, module=meta, max_file_bytes=max_file_bytes)

    spmd(program, RANKS)
    assert_same_bits(files_of(ours), files_of(theirs))
    assert_same_bits(dict(case.read(ours).state_dict()), dict(oracle.state_dict()))


@pytest.mark.parametrize("name", CASES)
def test_every_model_declares_units(name):
    module = CASES[name].on_meta()
    layers = fs.no_split(module)
    units = {unit.path for unit in fs.functionalize(module, units=layers)._units}
    assert sum(isinstance(module.get_submodule(path), layers) for path in units) >= 2


def files_of(directory):
    files = sorted(directory.glob("*.safetensors"))
    return dict(sorted((name, tensor) for file in files for name, tensor in load_file(file).items()))


def test_a_rank_reads_its_rows_of_stacked_experts(tmp_path, monkeypatch):
    case = CASES["Mixtral"]
    case.build().save_pretrained(tmp_path)
    meta, read = case.on_meta(), huggingface._tensors
    seen = {}

    def spied(exchange, path, stack, trusted):
        def entry(name, found):
            def count(box):
                out = found.read(box)
                seen.setdefault(torch.distributed.get_rank(), []).append((name, out.nbytes))
                return out

            return found._replace(read=count)

        return {name: entry(name, found) for name, found in read(exchange, path, stack, trusted).items()}

    monkeypatch.setattr(huggingface, "_tensors", spied)

    def program():
        like, _ = like_of(meta)
        back = load_huggingface(tmp_path, like, module=meta)
        return sum(piece_of(leaf).tensor.nbytes for name, leaf in back.items() if name in meta.state_dict())

    for rank, kept in enumerate(spmd(program, RANKS)):
        assert sum(nbytes for _, nbytes in seen[rank]) == kept
        experts = {int(re.search(r"experts\.(\d+)", name)[1]) for name, _ in seen[rank] if "experts." in name}
        assert experts == ({0, 1, 2}, {3, 4})[rank]


def test_each_leaf_is_gathered_once(tmp_path):
    """Also where many tensors of a file are made of one."""
    case = CASES["Mixtral"]
    module = case.build()
    saved = {name for name, _ in module.named_parameters()}

    def program():
        params = fs.shard(dict(module.named_parameters()), fs.zero3(one_axis(), min_shard_elements=0))
        with fs.comm.record() as record:
            save_huggingface(tmp_path, params, module=module)
        return [entry.label for entry in record].count("unshard")

    assert spmd(program, RANKS) == [len(saved)] * RANKS
    assert len(files_of(tmp_path)) > len(saved)


@pytest.mark.parametrize("wrote, reads", [("BERT", "BERT base"), ("BERT base", "BERT")])
def test_a_head_may_differ_where_files_need_not_match(tmp_path, wrote, reads):
    CASES[wrote].build().save_pretrained(tmp_path)
    cls = getattr(transformers, CASES[reads].model)
    module, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    fresh = CASES[reads].build()

    def program():
        like = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
        like = fs.tree_map(torch.Tensor.detach, like)
        like = fs.shard(like, fs.zero3(one_axis(), min_shard_elements=0))
        with pytest.raises(ValueError, match="leaves do not fit"):
            load_huggingface(tmp_path, like, module=fresh)
        back = fs.unshard(load_huggingface(tmp_path, like, module=fresh, strict=False))
        ours, theirs, before = back, expected(module, like), expected(fresh, like)
        found = {name for name in ours if name in module.state_dict() and name not in info["missing_keys"]}
        assert_same_bits(ours, {name: (theirs if name in found else before)[name] for name in ours})
        on_meta = fs.tree_map(lambda tensor: tensor.to("meta"), like)
        if info["missing_keys"]:
            with pytest.raises(ValueError, match=r"(?s)got nothing"):
                load_huggingface(tmp_path, on_meta, module=fresh, strict=False)

    spmd(program, RANKS)
    assert info["missing_keys"] if reads == "BERT" else info["unexpected_keys"]


def test_files_of_another_model_are_refused_also_where_they_need_not_match(tmp_path):
    save_file({"other": torch.ones(2)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="expected names of leaves among those in the files, got none of them"):
        load_huggingface(tmp_path, {"w": torch.ones(2)}, strict=False)


def test_experts_that_do_not_stack_are_refused_on_every_rank(tmp_path):
    case = CASES["Mixtral"]
    case.build().save_pretrained(tmp_path)
    content = load_file(tmp_path / SINGLE)
    wrong = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    shape = content[wrong].shape
    meta = case.on_meta()

    def program(match, error):
        like, _ = like_of(meta)
        with pytest.raises(error, match=match):
            load_huggingface(tmp_path, like, module=meta)

    content[wrong] = torch.ones(shape[0] + 1, shape[1])
    save_file(content, tmp_path / SINGLE)
    failed = "transformers cannot convert the weights for"
    spmd(lambda: program(f"{failed} model.layers.1.mlp.experts", CheckpointError), RANKS)
    del content[wrong]
    save_file(content, tmp_path / SINGLE)
    spmd(lambda: program(f"{failed}|leaves do not fit", ValueError), RANKS)


def test_parameters_without_buffers_that_the_module_saves_are_refused(tmp_path):
    module = CASES["Detr"].build()

    def program():
        params = fs.shard(dict(module.named_parameters()), fs.zero3(one_axis()))
        with pytest.raises(
            ValueError, match=r"(?s)running_mean: expected .* that the module saves, got nothing.*buffers"
        ):
            save_huggingface(tmp_path / "new", params, module=module)

    spmd(program, RANKS)


def conversions():
    """A conversion on real tensors, and those tensors; each has slices that a box of its result needs."""
    loading = import_module("transformers.core_model_loading")
    four = {"a": [torch.randn(6, 4, 2) for _ in range(4)], "b": [torch.randn(6, 4, 2) for _ in range(4)]}
    one = {"a": [torch.randn(8, 6, 4)]}
    config = transformers.LlamaConfig(num_attention_heads=2)
    for op, inputs, sources, targets in (
        *((loading.MergeModulelist(dim), {"a": four["a"]}, ["a"], ["t"]) for dim in (0, 1, -1)),
        *((loading.Concatenate(dim), four, ["a", "b"], ["t"]) for dim in (0, 1, 2)),
        *((loading.Chunk(dim), one, ["a"], ["s", "t"]) for dim in (0, 1, 2)),
        *((loading.SplitModulelist(dim), one, ["a"], ["t.*"]) for dim in (0, 1, 2)),
        *((loading.Transpose(*dims), one, ["a"], ["t"]) for dims in ((0, 1), (1, 2), (-1, 0))),
        *((loading.Interleave(dim), one, ["a"], ["t"]) for dim in (0, 1)),
        (loading.PermuteForRope(), {"a": [torch.randn(8, 3)]}, ["a"], ["t"]),
        (loading.ErnieFuseAndSplitTextVisionExperts(), four, ["a", "b"], ["s", "t"]),
        (loading.LinearToConv3d(3, (2, 2, 2)), {"a": [torch.randn(5, 24)]}, ["a"], ["t"]),
    ):
        yield op, inputs, dict(source_patterns=sources, target_patterns=targets, config=config)


def test_planned_conversions_have_the_values_of_real_ones():
    generator = torch.Generator().manual_seed(0)
    kinds = set()
    for op, inputs, arguments in conversions():
        plans = {name: [planned(Entry.of(each), name) for each in tensors] for name, tensors in inputs.items()}
        real = op.convert({name: list(tensors) for name, tensors in inputs.items()}, **arguments)
        made = op.convert(plans, **arguments)
        assert list(made) == list(real)
        for name, tensor in real.items():
            assert type(made[name]) is Planned
            assert (made[name].shape, made[name].dtype) == (tensor.shape, tensor.dtype)
            assert made[name].sources <= set(inputs)
            assert_same_bits(made[name].value(), tensor)
            for _ in range(20):
                ends = [torch.randint(n + 1, (2,), generator=generator).tolist() for n in tensor.shape]
                box = tuple(slice(min(pair), max(pair)) for pair in ends)
                if all(part.start < part.stop for part in box):
                    assert_same_bits(made[name].read(box), tensor[box])
        kinds.add(type(op))
    assert len(kinds) == 9


def test_functions_that_write_cannot_be_planned():
    plan = planned(Entry.of(torch.ones(2)), "a")
    with pytest.raises(NotImplementedError, match="writes to a weight"):
        plan.add_(1)
    with pytest.raises(NotImplementedError, match="writes to a weight"):
        plan[0] = 1
    assert_same_bits((plan + 1).value(), torch.full((2,), 2.0))


def architectures():
    """The classes of transformers whose names or weights in files are not those of the model."""
    registered = import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping
    auto = import_module("transformers.models.auto.modeling_auto")
    kinds = ("", "FOR_CAUSAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_", "FOR_OBJECT_DETECTION_", "FOR_SEMANTIC_SEGMENTATION_")
    for kind in kinds:
        for model_type, classes in getattr(auto, f"MODEL_{kind}MAPPING_NAMES").items():
            for name in [classes] if isinstance(classes, str) else classes:
                if registered(model_type) or registered(name):
                    yield name


def of_default_size(name):
    """A model on the meta device, of few layers and experts; None where it needs a package or arguments."""
    with contextlib.suppress(Exception), torch.device("meta"):
        cls = getattr(transformers, name)
        config = cls.config_class()
        for part in (config, *(getattr(config, f"{kind}_config", None) for kind in ("text", "vision", "audio"))):
            if isinstance(getattr(part, "num_hidden_layers", None), int) and not getattr(part, "layer_types", None):
                part.num_hidden_layers = min(part.num_hidden_layers, 2)
            for key in ("num_experts", "num_local_experts", "n_routed_experts"):
                if isinstance(getattr(part, key, None), int):
                    setattr(part, key, min(getattr(part, key), 16))
        return cls(config)
    return None


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_reads_the_names_and_shapes_that_it_writes():
    """Without values: there is no memory for them."""
    made, wrong = [], {}
    for name in dict.fromkeys(architectures()):
        module = of_default_size(name)
        if module is None:
            continue
        made.append(name)
        exchange = Exchange("test", module)
        tensors = (*module.named_parameters(), *module.named_buffers())
        leaves = {key: tensor for key, tensor in tensors if exchange.saved_as(key)}
        files = to_files(exchange, leaves, module, {})
        entries = {key: Entry(each.dtype, tuple(each.shape), each.read) for key, each in files.items()}
        back, optional = from_files(entries, module)
        found = {exchange.first.get(key, key): (each.dtype, each.shape) for key, each in back.items()}
        needed = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in leaves.items()}
        if found != {key: each for key, each in needed.items() if key in found or key not in optional}:
            wrong[name] = sorted(found.items() ^ needed.items())[:4]
        assert frozenset().union(*(each.sources for each in files.values())) == leaves.keys(), name
    assert wrong == {}
    assert len(made) > 230


def test_files_of_older_versions(tmp_path):
    """Other names of weights, a base without its prefix, and buffers that are no longer saved."""
    case = CASES["BERT"]
    case.build().save_pretrained(tmp_path)
    content = load_file(tmp_path / SINGLE)
    old = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in content.items()
    }
    assert not any(name.startswith("bert.") or "LayerNorm.weight" in name for name in old)
    save_file({**old, "embeddings.position_ids": torch.arange(512)[None]}, tmp_path / SINGLE, metadata={"format": "pt"})
    oracle, meta = case.read(tmp_path), case.on_meta()

    def program():
        like, kept = like_of(meta)
        back = fs.unshard(load_huggingface(tmp_path, like, module=meta))
        assert_same_bits(back, expected(oracle, like) | kept)

    spmd(program, RANKS)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float64])
def test_stacked_experts_of_another_dtype_are_cast(tmp_path, stored):
    case = CASES["Mixtral"]
    case.build().to(stored).save_pretrained(tmp_path)
    oracle = getattr(transformers, case.model).from_pretrained(tmp_path, dtype=torch.float32)
    meta = case.on_meta()

    def program():
        like, kept = like_of(meta)
        with pytest.raises(ValueError, match="cast=True changes dtypes"):
            load_huggingface(tmp_path, like, module=meta)
        back = fs.unshard(load_huggingface(tmp_path, like, module=meta, cast=True))
        assert_same_bits(back, expected(oracle, like) | kept)

    spmd(program, RANKS)


def test_the_guide(tmp_path):
    """Its program, from files to files."""
    (block,) = re.findall(r"```python\n(.*?)```", section(REFERENCE, "Models of transformers"), re.DOTALL)
    files, out = tmp_path / "files", tmp_path / "out"
    CASES["Mixtral"].build().save_pretrained(files)

    def program():
        mesh = one_axis()
        batch = torch.arange(6)[None] + mesh.get_rank()
        scope = {"directory": files, "out": out, "mesh": mesh, "batches": [batch] * 2, "torch": torch, "fs": fs}
        with torch.random.fork_rng():
            exec(block, scope)
        return {name: fs.unshard(leaf) for name, leaf in scope["state"].params.items()}

    first, second = spmd(program, RANKS)
    assert_same_bits(first, second)
    loaded = CASES["Mixtral"].read(out)
    assert_same_bits(expected(loaded, first), first)
    assert not torch.equal(first["lm_head.weight"], CASES["Mixtral"].build().lm_head.weight)
