"""Fine-tune a transformers model with peft's LoRA, on a sharded base that is kept in 8 or 4 bits.

    python examples/finetune_peft.py --bits 8
    torchrun --standalone --nproc_per_node 2 examples/finetune_peft.py --bits 4

Needs transformers and peft (pip install 'fshard[models,examples]'). The base is frozen, and its matrices are stored as
blocks of bytes (quantized.py). Each rank keeps its rows of the bytes, and ranks send bytes to each other. The weights
of a layer are floating-point numbers only while the layer runs. The adapter's factors are trained. peft makes the
module, and initialises and saves the adapter. At the end, PeftModel.from_pretrained loads it, and the program compares
its logits with those of the sharded model.

Without --model, a Llama with random weights learns the bytes of the Python standard library. With --model, each rank
reads only its own rows of a local directory. A rank holds one whole matrix at a time, while it quantizes this matrix.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from finetune_lora import batches, load_config, texts
from gpt import batch
from installed import MODELS, installed_by
from quantized import Dequantize, dequantized, fits, quantized
from torch import nn

import fshard as fs

with installed_by(MODELS):
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

# What peft puts before the names of the model that it wraps.
ADAPTER = "base_model.model."


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    config = load_config(args.model)
    train_text, held_out = texts(args, config.vocab_size)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain = fs.functionalize(fs.with_init_weights(module))
    strategy = fs.zero3(mesh)
    base = plain.init(strategy, seed=args.seed)
    if args.model is not None:
        base = fs.checkpoint.load_huggingface(args.model, like=base, module=module, cast=True)
    bytes_of_floats = sum(leaf.local.nbytes for leaf in base.values())
    stored = store_in_bytes(base, strategy, args.bits)
    del base

    # peft gives other names to the same parameters.
    names = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
    lora = LoraConfig(r=args.rank, lora_alpha=args.alpha, target_modules=args.targets)
    wrapped = get_peft_model(module, lora)
    frozen = {}
    for name, parameter in wrapped.named_parameters():
        if id(parameter) in names:
            name_before = names[id(parameter)]
            frozen[name] = stored[name_before]
    adapter = fs.shard(new_adapter(wrapped, args.seed), strategy)
    model = fs.functionalize(wrapped, units=f"{ADAPTER}model.layers.*")
    buffers = {}
    for name, buffer in plain.buffers.items():
        buffers[ADAPTER + name] = buffer
    tx = fs.from_torch(torch.optim.AdamW, lr=args.lr, weight_decay=0.0, fused=True)
    state = fs.TrainState.create(adapter, tx)

    def logits_of(frozen: Any, adapter: Any, x: torch.Tensor) -> torch.Tensor:
        params = {**frozen, **adapter}
        out, _ = model.apply(params, input_ids=x, use_cache=False, buffers=buffers)
        return out.logits

    def loss_fn(both: tuple[Any, Any], xy: Any) -> torch.Tensor:
        frozen, adapter = both
        x, y = xy
        logits = logits_of(frozen, adapter, x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def train_step(state: fs.TrainState, frozen: Any, xy: Any) -> tuple[fs.TrainState, torch.Tensor]:
        value_and_grad = fs.value_and_grad(loss_fn)
        loss, (_, grads) = value_and_grad((frozen, state.params), xy)
        return fs.update(tx, state, grads), loss

    @torch.no_grad()
    def held_out_loss(adapter: Any) -> float:
        xy = batch(held_out, 32, args.context, seed=mesh.get_rank())
        loss = loss_fn((frozen, adapter), xy)
        return fs.objective(loss, like=frozen).item()

    before = held_out_loss(state.params)
    jitted_step = fs.jit(train_step, donate_argnums=0)
    for xy, bar in batches(args, train_text, mesh):
        state, loss = jitted_step(state, frozen, xy)
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    after = held_out_loss(state.params)

    x, _ = batch(held_out, 2, args.context, seed=0)
    with torch.no_grad():
        logits = logits_of(frozen, state.params, x)
    trained = fs.unshard(state.params)
    whole = fs.unshard(stored)
    if mesh.get_rank() == 0:
        kept = sum(leaf.local.nbytes for leaf in stored.values()) / 1e6
        print(f"each rank keeps {kept:.2f} MB of the base in {args.bits} bits, {bytes_of_floats / 1e6:.2f} in float32")
        print(f"held-out loss {before:.4f} before, {after:.4f} after {args.steps} steps")
        export(args.export, wrapped, trained)
        compare(args, config, whole, x, logits)


def store_in_bytes(base: dict[str, Any], strategy: fs.ShardTransform, bits: int) -> dict[str, Any]:
    """Quantize the matrices of a base, one after another, and freeze all of it."""
    stored = fs.reshard(base, strategy, frozen="*")
    in_bytes = fs.compose(strategy, Dequantize(torch.float32, bits))
    for name, leaf in stored.items():
        if not fits(leaf.spec.shape):
            continue
        full = fs.unshard({name: leaf})
        codes = quantized(full[name], bits)
        stored |= fs.shard({name: codes}, in_bytes, frozen="*")
    return stored


def new_adapter(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """The adapter's parameters, as peft initialises them: the first factors random, the second zero."""
    torch.manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            for factors in (layer.lora_A, layer.lora_B):
                factors.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    adapter = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            adapter[name] = parameter.detach()
    return adapter


def export(directory: Path, module: nn.Module, adapter: dict[str, torch.Tensor]) -> None:
    """Let peft save the adapter."""
    state_dict = get_peft_model_state_dict(module, state_dict=adapter)
    module.save_pretrained(directory, state_dict=state_dict)


def compare(
    args: argparse.Namespace,
    config: Any,
    stored: Any,
    x: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Load the adapter by peft, on the base as it computes, in one process."""
    weights = {}
    for name, leaf in stored.items():
        weights[name] = leaf
        if leaf.dtype == torch.uint8:
            weights[name] = dequantized(leaf, args.bits)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    base.load_state_dict(weights, strict=False)
    loaded = PeftModel.from_pretrained(base, args.export).eval()
    with torch.no_grad():
        out = loaded(input_ids=x, use_cache=False)
    torch.testing.assert_close(out.logits, logits)
    print(f"{args.export}: PeftModel.from_pretrained reads the adapter, and gives the sharded model's logits")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="directory of a causal language model; by default a Llama of random weights",
    )
    parser.add_argument("--export", type=Path, default=Path("runs/peft"), help="directory for the adapter")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8, help="bits of a stored number")
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], help="peft's target_modules")
    parser.add_argument("--rank", type=int, default=8, help="rank of the factors")
    parser.add_argument("--alpha", type=int, default=16, help="products of factors are scaled by alpha / rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank in a step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
