"""The example of LoRA runs as a user runs it: it learns, and from_pretrained loads what it exports, merged."""

import re

import pytest
import torch

from tests.test_examples import launched
from tests.test_processes import ROOT, run

transformers = pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples/finetune_lora.py"


def finetune(launcher, directory, *options):
    """Held-out losses before and after, and what else was printed."""
    out = run(*launcher, EXAMPLE, "--export", directory, *options)
    assert f"{directory}: from_pretrained reads the merged weights, and gives the merged logits" in out
    before, after = re.search(r"held-out loss (\S+) before, (\S+) after", out).groups()
    return before, after, out


@launched
def test_learns_exports_and_goes_on(tmp_path, launcher, ranks):
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


PEFT = ROOT / "examples/finetune_peft.py"
# The share of a base's numbers that are in vectors, and the share that padding adds to shards.
VECTORS, PADDED = 0.02, 0.01


@pytest.mark.parametrize("bits", (8, 4))
@launched
def test_adapters_of_peft_on_a_base_of_bytes(tmp_path, launcher, ranks, bits):
    pytest.importorskip("peft")
    out = run(*launcher, PEFT, "--export", tmp_path / "adapter", "--steps", 60, "--bits", bits)
    before, after = re.search(r"held-out loss (\S+) before, (\S+) after", out).groups()
    assert float(after) < float(before) - 0.5
    assert f"{tmp_path / 'adapter'}: PeftModel.from_pretrained reads the adapter" in out
    kept, numbers = (float(figure) for figure in re.search(r"keeps (\S+) MB .* bits, (\S+) in float32", out).groups())
    # Of each number a byte or half a byte, and of each 64 a scale; vectors stay in float32.
    assert kept / numbers == pytest.approx((bits / 8 + 4 / 64) / 4, rel=VECTORS)
    assert numbers * ranks == pytest.approx(918_656 * 4 / 1e6, rel=PADDED)
