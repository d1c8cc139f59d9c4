"""Fine-tune a transformers model with LoRA: a frozen, sharded base, and two small factors for each linear weight.

    python examples/finetune_lora.py
    torchrun --standalone --nproc_per_node 2 examples/finetune_lora.py --rank 16
    torchrun --standalone --nproc_per_node 2 examples/finetune_lora.py --model path/to/a/llama

Needs transformers (pip install 'fshard[models,examples]'). LoRA is a function of two trees; no module is replaced or
wrapped. The rows of a weight and of its factor `a` are split in the same way, so each rank merges its own rows of
weight + a @ b, and the units of ZeRO-3 gather the merged weights. A step sends as many bytes as full fine-tuning does.
LoRA saves memory, because gradients and optimizer state are as small as the factors.

Without --model, a Llama with random weights learns the bytes of the Python standard library. With --model, each rank
reads only its own rows of a local directory. If the directory has a tokenizer, the program uses it for the text. No
rank holds the full base during the training. At the end, the program exports the merged model, loads it with
from_pretrained, and compares its weights and logits with the sharded model.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import batch, standard_library
from installed import MODELS, installed_by
from progress_bar import progress

import fshard as fs

with installed_by(MODELS):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    config = load_config(args.model)
    train_text, held_out = texts(args, config.vocab_size)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # Parameters that require no gradient are frozen leaves: they have neither gradients nor optimizer state.
    module.requires_grad_(False)
    model = fs.functionalize(fs.with_init_weights(module), units=args.units)
    # However small a leaf is, its rows are split: those of a weight and of its factor must lie on the same rank.
    strategy = fs.zero3(mesh, min_shard_elements=0)
    base = model.init(strategy, seed=args.seed)
    if args.model is not None:
        base = fs.checkpoint.load_huggingface(args.model, like=base, module=module, cast=True)
    factors = fs.shard(new_factors(module, args), strategy)
    tx = fs.from_torch(torch.optim.AdamW, lr=args.lr, weight_decay=0.0, fused=True)
    state = fs.TrainState.create(factors, tx)

    def loss_fn(both: tuple[Any, Any], xy: Batch) -> torch.Tensor:
        base, factors = both
        x, y = xy
        weights = merged(base, factors, args.alpha)
        logits = model.apply(weights, x, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def train_step(state: fs.TrainState, base: Any, xy: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        loss, (_, grads) = fs.value_and_grad(loss_fn)((base, state.params), xy)
        return fs.update(tx, state, grads), loss

    @torch.no_grad()
    def held_out_loss(factors: Any) -> float:
        xy = batch(held_out, 32, args.context, seed=mesh.get_rank())
        return fs.objective(loss_fn((base, factors), xy), like=base).item()

    before = held_out_loss(state.params)
    jitted_step = fs.jit(train_step, donate_argnums=0)
    for xy, bar in batches(args, train_text, mesh):
        state, loss = jitted_step(state, base, xy)
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    after = held_out_loss(state.params)

    whole = merged(base, state.params, args.alpha)
    x, _ = batch(held_out, 2, args.context, seed=0)
    with torch.no_grad():
        logits = model.apply(whole, x, use_cache=False).logits
    weights = fs.unshard(whole)
    is_first = mesh.get_rank() == 0
    export(args, config, whole, is_first)
    if is_first:
        report(base, state)
        print(f"held-out loss {before:.4f} before, {after:.4f} after {args.steps} steps")
        compare(args.export, weights, x, logits)


def merged(base: Any, factors: Any, alpha: float) -> Any:
    """The weights that the model runs with, sharded as the base is; the gradient of a product goes to its factors."""
    full = fs.gather({name: pair["b"] for name, pair in factors.items()})
    weights = dict(base)
    for name, pair in factors.items():
        weight = base[name]
        a = pair["a"].local
        rank = a.shape[1]
        change = alpha / rank * (a @ full[name])
        # A frozen leaf plus a trained value is no longer frozen.
        spec = replace(weight.spec, frozen=False)
        weights[name] = replace(weight, local=weight.local + change, spec=spec)
    return weights


def new_factors(module: torch.nn.Module, args: argparse.Namespace) -> dict[str, dict[str, torch.Tensor]]:
    """For each chosen matrix, of shape (m, n), `a` (m, rank) of zeros and a random `b` (rank, n): a @ b is zero."""
    generator = torch.Generator().manual_seed(args.seed)
    factors = {}
    for name, weight in module.named_parameters():
        if weight.dim() != 2 or not any(fnmatch(name, pattern) for pattern in args.targets):
            continue
        m, n = weight.shape
        a = torch.zeros(m, args.rank)
        b = torch.randn(args.rank, n, generator=generator) / n**0.5
        factors[name] = {"a": a, "b": b}
    if not factors:
        raise SystemExit(f"--targets {' '.join(args.targets)} matches no matrix of {type(module).__name__}")
    return factors


def load_config(path: Path | None) -> PretrainedConfig:
    if path is not None:
        return AutoConfig.from_pretrained(path)
    return LlamaConfig(
        vocab_size=256,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
    )


def texts(args: argparse.Namespace, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's sources, for training and held out: bytes, or tokens of a million bytes of each."""
    train, held_out = standard_library()
    if has_tokenizer(args.model):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        train = tokens_of(train, tokenizer)
        held_out = tokens_of(held_out, tokenizer)
    largest = int(train.max())
    if largest >= vocabulary:
        raise SystemExit(f"token {largest} is not in the model's vocabulary of {vocabulary}; add its tokenizer")
    return train, held_out


def tokens_of(text: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    characters = text[:1_000_000].numpy().tobytes().decode(errors="replace")
    return torch.tensor(tokenizer(characters, verbose=False).input_ids)


def batches(args: argparse.Namespace, text: torch.Tensor, mesh: Any) -> Iterator[tuple[Batch, Any]]:
    """This rank's batches, behind a progress bar."""
    rank = mesh.get_rank()
    bar = progress(range(args.steps), "training", shown=rank == 0)
    for step in bar:
        yield batch(text, args.batch, args.context, seed=step * mesh.size() + rank), bar


def export(args: argparse.Namespace, config: PretrainedConfig, weights: Any, is_first: bool) -> None:
    """Write a directory for from_pretrained; weights that an earlier run has written there are replaced."""
    if is_first:
        for name in ("checksums.json", "model.safetensors", "model.safetensors.index.json"):
            (args.export / name).unlink(missing_ok=True)
        config.save_pretrained(args.export)
        if has_tokenizer(args.model):
            AutoTokenizer.from_pretrained(args.model).save_pretrained(args.export)
    fs.checkpoint.save_huggingface(args.export, weights)


def compare(directory: Path, weights: dict[str, torch.Tensor], x: torch.Tensor, logits: torch.Tensor) -> None:
    """Load what was exported, in one process."""
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for name, weight in weights.items():
        assert torch.equal(loaded.get_parameter(name), weight), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(x, use_cache=False).logits, logits)
    print(f"{directory}: from_pretrained reads the merged weights, and gives the merged logits")


def has_tokenizer(path: Path | None) -> bool:
    return path is not None and (path / "tokenizer_config.json").exists()


def report(base: Any, state: fs.TrainState) -> None:
    pairs = state.params.values()
    frozen = sum(math.prod(leaf.spec.shape) for leaf in base.values())
    trained = sum(math.prod(leaf.spec.shape) for pair in pairs for leaf in pair.values())
    print(f"{frozen:,} parameters are frozen, {trained:,} in {len(pairs)} pairs of factors are trained")
    of_base = megabytes_of(base)
    of_factors = megabytes_of(state.params)
    of_adamw = megabytes_of(state.opt_state)
    print(f"each rank keeps {of_base:.2f} MB of the base, {of_factors:.2f} of factors, ", end="")
    print(f"{of_adamw:.2f} of AdamW's state; for all weights AdamW's would be {2 * of_base:.2f}")


def megabytes_of(tree: Any) -> float:
    return sum(leaf.nbytes for leaf in fs.tree_leaves(tree)) / 1e6


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
    parser.add_argument("--export", type=Path, default=Path("runs/lora"), help="directory for the merged model")
    parser.add_argument(
        "--targets",
        nargs="+",
        default=["*_proj.weight", "lm_head.weight"],
        help="patterns of matrices",
    )
    parser.add_argument("--units", default="model.layers.*", help="pattern of the model's layers, gathered one by one")
    parser.add_argument("--rank", type=int, default=8, help="rank of the factors")
    parser.add_argument("--alpha", type=float, default=16.0, help="products of factors are scaled by alpha / rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank in a step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
