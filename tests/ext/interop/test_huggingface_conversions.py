"""Models of transformers in files: heads that differ, and the program of the guide."""

import re

import pytest
import torch

import fshard as fs
from fshard.checkpoint import load_huggingface
from fshard.testing import spmd
from tests.ext import test_architectures as architectures
from tests.test_guide import FINE_TUNE
from tests.trees import assert_same_bits, one_axis

pytestmark = [pytest.mark.slow, architectures.NEEDS_TRANSFORMERS]

RANKS = 2
CASES = {
    "Mixtral": architectures.CASES["mixtral"],
    "BERT": architectures.CASES["bert"],
    "BERT base": architectures.CASES["bert"]._replace(model="BertModel"),
}


def build(name):
    """A model whose parameters and saved buffers all differ."""
    module = CASES[name].build().eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return module


def expected(module, like):
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensors[name].detach() for name in like}


@pytest.mark.parametrize("wrote, reads", [("BERT", "BERT base"), ("BERT base", "BERT")])
def test_a_head_may_differ_where_files_need_not_match(tmp_path, wrote, reads):
    build(wrote).save_pretrained(tmp_path)
    fresh = build(reads)
    module, info = type(fresh).from_pretrained(tmp_path, output_loading_info=True)

    def program():
        like = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
        like = fs.tree_map(torch.Tensor.detach, like)
        like = fs.shard(like, fs.zero3(one_axis(), min_shard_elements=0))
        with pytest.raises(ValueError, match="leaves do not fit"):
            load_huggingface(tmp_path, like, module=fresh)
        back = fs.unshard(load_huggingface(tmp_path, like, module=fresh, strict=False))
        ours, theirs, before = back, expected(module, like), expected(fresh, like)
        in_files = {name for name in ours if name in module.state_dict() and name not in info["missing_keys"]}
        assert_same_bits(ours, {name: (theirs if name in in_files else before)[name] for name in ours})
        on_meta = fs.tree_map(lambda tensor: tensor.to("meta"), like)
        if info["missing_keys"]:
            with pytest.raises(ValueError, match=r"(?s)got nothing"):
                load_huggingface(tmp_path, on_meta, module=fresh, strict=False)

    spmd(program, RANKS)
    assert info["missing_keys"] if reads == "BERT" else info["unexpected_keys"]
    with pytest.raises(ValueError, match="none of the leaves is in the files; names= gives leaves"):
        load_huggingface(tmp_path, {"w": torch.ones(2)}, strict=False)


def test_the_guide(tmp_path):
    """Its first program, from files to files."""
    import transformers

    block, *_ = re.findall(r"```py\n(.*?)```", FINE_TUNE.read_text(), re.DOTALL)
    files, out = tmp_path / "files", tmp_path / "out"
    build("Mixtral").save_pretrained(files)

    def program():
        mesh = one_axis()
        batch = torch.arange(6)[None] + mesh.get_rank()
        scope = {"directory": files, "out": out, "mesh": mesh, "batches": [batch] * 2, "torch": torch, "fs": fs}
        with torch.random.fork_rng():
            exec(block, scope)
        return {name: fs.unshard(leaf) for name, leaf in scope["state"].params.items()}

    first, second = spmd(program, RANKS)
    assert_same_bits(first, second)
    loaded = transformers.MixtralForCausalLM.from_pretrained(out)
    assert_same_bits(expected(loaded, first), first)
    assert not torch.equal(first["lm_head.weight"], build("Mixtral").lm_head.weight)
