"""The example of LoRA runs as a user runs it: it learns, and from_pretrained loads what it exports, merged."""

import re
import sys

import pytest
import torch

from tests.test_processes import ROOT, TORCHRUN, run

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples/finetune_lora.py"
LAUNCHERS = pytest.mark.parametrize("launcher", [(sys.executable,), (*TORCHRUN, 2)], ids=["alone", "torchrun"])


def finetune(launcher, directory, *options):
    """Held-out losses before and after, and what else was printed."""
    out = run(*launcher, EXAMPLE, "--export", directory, *options)
    assert f"{directory}: from_pretrained reads the merged weights, and gives the merged logits" in out
    before, after = re.search(r"held-out loss (\S+) before, (\S+) after", out).groups()
    return before, after, out


@LAUNCHERS
def test_learns_exports_and_goes_on(tmp_path, launcher):
    before, after, out = finetune(launcher, tmp_path / "first", "--steps", 40)
    assert float(after) < float(before) - 1.5
    assert "918,656 parameters are frozen, 84,992 in 29 pairs of factors are trained" in out
    # The same batches, on a base that is what was merged; factors are new, and change nothing yet.
    (tmp_path / "second").mkdir()
    (tmp_path / "second/model.safetensors").write_bytes(b"of a run before")
    options = ("--model", tmp_path / "first", "--steps", 4, "--targets", "*.3.*_proj.weight")
    assert finetune(launcher, tmp_path / "second", *options)[0] == after
    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("first", "second")
    )
    changed = {name for name, weight in first.items() if not torch.equal(weight, second[name])}
    assert changed == {name for name in first if ".3." in name and name.endswith("_proj.weight")}


@LAUNCHERS
def test_model_with_tokenizer_tied_weights_and_bfloat16(tmp_path, launcher):
    model, exported = tmp_path / "model", tmp_path / "exported"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([EXAMPLE.read_text()], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    # Sizes that ranks do not divide.
    sizes = dict(hidden_size=33, intermediate_size=51, num_hidden_layers=2, num_attention_heads=3, head_dim=12)
    tokens = dict(vocab_size=290, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True)
    config = transformers.LlamaConfig(**sizes, **tokens, num_key_value_heads=1)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)

    before, after, _ = finetune(launcher, exported, "--model", model, "--steps", 5, "--rank", 3)
    assert float(after) < float(before)
    loaded = transformers.AutoTokenizer.from_pretrained(exported)
    assert loaded.decode(loaded("def main() -> None:").input_ids) == "def main() -> None:"


def test_layers_and_matrices_by_other_names(tmp_path):
    """GPT-2 keeps its matrices the other way round."""
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=None, eos_token_id=None)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes)).save_pretrained(tmp_path / "model")
    (tmp_path / "second").mkdir()
    (tmp_path / "second/model.safetensors").write_bytes(b"of a run before")
    options = ("--model", tmp_path / "model", "--units", "transformer.h.*", "--targets", "*.c_*.weight", "--steps", 5)
    before, after, _ = finetune((*TORCHRUN, 2), tmp_path / "exported", *options)
    assert float(after) < float(before)


PEFT = ROOT / "examples/finetune_peft.py"


@pytest.mark.parametrize("bits", (8, 4))
@LAUNCHERS
def test_adapters_of_peft_on_a_base_of_bytes(tmp_path, launcher, bits):
    pytest.importorskip("peft")
    out = run(*launcher, PEFT, "--export", tmp_path / "adapter", "--steps", 60, "--bits", bits)
    before, after = re.search(r"held-out loss (\S+) before, (\S+) after", out).groups()
    assert float(after) < float(before) - 0.5
    assert f"{tmp_path / 'adapter'}: PeftModel.from_pretrained reads the adapter" in out
    ranks = 1 if launcher == (sys.executable,) else 2
    kept, numbers = (float(figure) for figure in re.search(r"keeps (\S+) MB .* bits, (\S+) in float32", out).groups())
    # Of each number a byte or half a byte, and of each 64 a scale; vectors stay in float32.
    assert kept / numbers == pytest.approx((bits / 8 + 4 / 64) / 4, rel=0.02)
    assert numbers * ranks == pytest.approx(918_656 * 4 / 1e6, rel=0.01)
