"""Models of transformers in files: both ways as its own from_pretrained and save_pretrained, of many architectures."""

import re
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard.checkpoint import load_huggingface, save_huggingface
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
DEEPSEEK = DECODER | dict(
    **dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=2),
    **dict(topk_group=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=12),
    first_k_dense_replace=1,
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
    "Llama tied": Case("LlamaForCausalLM", DECODER | dict(tie_word_embeddings=True)),
    "GPT2": Case("GPT2LMHeadModel", TOKENS | dict(n_positions=16, n_embd=16, n_layer=2, n_head=2)),
    "Mixtral": Case("MixtralForCausalLM", DECODER | dict(num_local_experts=5)),
    "DeepseekV3": Case("DeepseekV3ForCausalLM", DEEPSEEK),
    "Llava": Case("LlavaForConditionalGeneration", dict(image_token_index=5), LLAVA),
    "T5": Case("T5ForConditionalGeneration", T5),
    "BERT": Case("BertForMaskedLM", TOKENS | SIZES),
    "BERT base": Case("BertModel", TOKENS | SIZES),
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


def files_of(directory):
    files = sorted(directory.glob("*.safetensors"))
    return dict(sorted((name, tensor) for file in files for name, tensor in load_file(file).items()))


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
