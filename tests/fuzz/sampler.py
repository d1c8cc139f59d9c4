"""Random programs: a model of random blocks, trained by plain torch in one process and by fshard on ranks."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.rounding import tolerance
from fshard.testing import check_pure, spmd
from tests.tolerance import largest
from tests.trees import assert_same_bits, copied

# The columns, and how many rows a microbatch has at most.
D, MOST_ROWS = 6, 4

# Kinds of blocks: shapes of parameters, and the maths of one.
KINDS = {
    "linear": ({"w": (D, D), "b": (D,)}, lambda p, x: x @ p.w + p.b),
    "uneven": ({"up": (D, 7), "down": (7, D)}, lambda p, x: x + F.gelu(x @ p.up) @ p.down),
    "norm": ({"scale": (D,), "shift": (D,)}, lambda p, x: F.layer_norm(x, (D,), p.scale, p.shift)),
    "number": ({"scale": ()}, lambda p, x: x * p.scale),
    "transposed view": ({"w": (D, D)}, lambda p, x: x + x @ p.w.mT.contiguous().view(D, D)),
    "pieces": ({"w": (2, D, D)}, lambda p, x: sum(x @ part for part in p.w.unbind())),
    "in place": ({"w": (D, D)}, lambda p, x: (x @ p.w).tanh_()),
    "used twice": ({"w": (D, D)}, lambda p, x: torch.tanh(x @ p.w) @ p.w),
    "unused": ({"w": (D, D), "rest": (3,)}, lambda p, x: x @ p.w),
    "empty": ({"w": (D, D), "none": (0, 3)}, lambda p, x: x @ p.w + p.none.sum()),
    "indexed": ({"table": (9, D)}, lambda p, x: x + p.table[torch.arange(len(x)) % 9]),
    "saved": ({"w": (D, D)}, lambda p, x: torch.exp(-(x @ p.w).square()) + x),
}
WRAPS = ("none", "checkpoint", "twice", "no_grad")
WHENS = ("always", "one rank", "other ranks", "late", "never")
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, None),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, None),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "weight_decay": 0.1}, None),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 0.01}, None),
    "fs.sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, fs.sgd(0.1, momentum=0.9)),
    "fs.adam": (torch.optim.Adam, {"lr": 0.01, "eps": 0.01}, fs.adam(0.01, eps=0.01)),
}
STRATEGIES = {
    "ddp": fs.ddp,
    "zero1": partial(fs.zero1, min_shard_elements=0),
    "zero2": partial(fs.zero2, min_shard_elements=0),
    "zero3": partial(fs.zero3, min_shard_elements=0, bucket_bytes=0),
    "zero3 kept": partial(fs.zero3, min_shard_elements=0, bucket_bytes=0, regather=False),
    "zero3 some kept": partial(fs.zero3, min_shard_elements=10, bucket_bytes=0, regather="*1*", prefetch=2),
    "zero3 late": partial(fs.zero3, min_shard_elements=0, bucket_bytes=0, prefetch=0),
    "zero3 merged": partial(fs.zero3, min_shard_elements=20),
    "zero3 last dim": lambda mesh: fs.zero3(mesh, layout=fs.fully_shard(mesh, dim=-1), bucket_bytes=0),
}


class Part(NamedTuple):
    """One block of a program."""

    kind: str = "linear"
    wrap: str = "none"
    when: str = "always"
    frozen: bool = False
    tied: bool = False  # its w is the first block's


@dataclass(frozen=True)
class Plan:
    """One program; `jitted` is a strategy that is jitted too."""

    seed: int = 0
    world: int = 2
    parts: tuple[Part, ...] = (Part(),)
    dtype: torch.dtype = torch.float64
    micro: int = 1
    communicate: str | None = None
    tree: bool = False
    reduce: str = "mean"
    ragged: bool = False
    optimizer: str = "SGD"
    clip: bool = False
    donate: bool = False
    jitted: str = ""
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    steps: int = 2


def draw(seed: int) -> Plan:
    """The plan of a seed. Its first block is trained in each step of each rank, so that there is a loss to follow."""
    pick = random.Random(seed)
    world = pick.choice((1, 2, 2, 3, 4))
    parts = [Part(pick.choice(("linear", "in place", "unused")))]
    for _ in range(pick.randrange(4)):
        kind, wrap = pick.choice([*KINDS]), pick.choices(WRAPS, (6, 2, 1, 1))[0]
        when = pick.choices(WHENS, (6, 1, 1, 1, 1))[0]
        # A unit that only some ranks enter twice is refused.
        when = "always" if "rank" in when and (world == 1 or wrap == "twice") else when
        tied = KINDS[kind][0].get("w") == (D, D) and wrap != "no_grad" and pick.random() < 0.3
        parts.append(Part(kind, wrap, when, pick.random() < 0.1 and not tied, tied))
    micro = pick.choice((1, 1, 2, 3))
    # A graph has its collectives, so that ranks must use the same units.
    jits = seed % 4 == 3 and not any("rank" in part.when for part in parts)
    return Plan(
        seed=seed,
        world=world,
        parts=tuple(parts),
        dtype=pick.choice((torch.float64, torch.float64, torch.float32)),
        micro=micro,
        communicate=pick.choice((None, "each", "once")),
        tree=micro == 2 and world != 3 and pick.random() < 0.5,
        reduce=pick.choice(("mean", "sum", "weighted")),
        ragged=pick.random() < 0.3,
        optimizer=pick.choice([*OPTIMIZERS]),
        clip=pick.random() < 0.3,
        donate=pick.random() < 0.3,
        jitted=pick.choice(("ddp", "zero1", "zero2", "zero3")) if jits else "",
        strategies=("ddp", "zero1", "zero2", "zero3", pick.choice([*STRATEGIES][4:])),
    )


class Block(nn.Module):
    """A block that may be wrapped, and used by some ranks or steps alone."""

    def __init__(self, part, draw, dtype):
        super().__init__()
        self.part = part
        for name, shape in KINDS[part.kind][0].items():
            value = 0.5 * torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
            setattr(self, name, nn.Parameter(value, requires_grad=not part.frozen))

    def forward(self, x, rank, step):
        wrap = self.part.wrap
        is_used = {"always": True, "never": False, "one rank": rank == 0, "other ranks": rank > 0, "late": step > 0}
        if not is_used[self.part.when]:
            return x
        run = partial(KINDS[self.part.kind][1], self)
        if wrap == "checkpoint":
            return checkpoint(run, x, use_reentrant=False)
        if wrap == "no_grad":
            with torch.no_grad():
                added = run(x.detach())
            return x + added
        return run(run(x)) if wrap == "twice" else run(x)


class Model(nn.Sequential):
    def forward(self, x, rank, step):
        for block in self:
            x = block(x, rank, step)
        return x


def build(plan):
    generator = torch.Generator().manual_seed(plan.seed)
    model = Model(*(Block(part, generator, plan.dtype) for part in plan.parts))
    for block in model:
        if block.part.tied:
            block.w = model[0].w
    return model


def batches(plan, rank, step):
    made = []
    for i in range(plan.micro):
        generator = torch.Generator().manual_seed(1000 * rank + 10 * step + i)
        rows = 1 + (rank + 2 * step + i) % MOST_ROWS if plan.ragged else 3
        made.append(torch.randn(2, rows, D, generator=generator, dtype=torch.float64).to(plan.dtype).unbind())
    return made


def local(plan: Plan, run: Any, data: Any, rank: int, step: int) -> Any:
    """This rank's loss of a microbatch: the mean or the sum of rows, and their number."""
    x, y = data
    rows = (run(x, rank, step) - y).square().sum(-1)
    return (rows.mean() if plan.reduce == "mean" else rows.sum()), torch.tensor(len(x))


def dense(plan: Plan) -> list[dict[str, Any]]:
    """Every step by plain torch: each rank's microbatches one by one, with gradients summed and divided."""
    model, history = build(plan), []
    cls, hyper, _ = OPTIMIZERS[plan.optimizer]
    trained = [leaf for leaf in model.parameters() if leaf.requires_grad]
    optimizer = cls(trained, **hyper)
    for step in range(plan.steps):
        total, counts = 0, 0
        optimizer.zero_grad()
        for rank in range(plan.world):
            for data in batches(plan, rank, step):
                value, count = local(plan, model, data, rank, step)
                value.backward()
                total, counts = total + value.detach(), counts + count
        divisor = {"mean": plan.world * plan.micro, "sum": 1, "weighted": counts}[plan.reduce]
        for leaf in trained:
            leaf.grad = None if leaf.grad is None else leaf.grad / divisor
        grads = {name: leaf.grad for name, leaf in model.named_parameters()}
        history.append({"loss": total / divisor, "grads": copied(grads)})
        if plan.clip:
            nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        history[-1]["params"] = copied(dict(model.named_parameters()))
    return history


def sharded(plan: Plan, strategy: str, jitted: bool) -> list[dict[str, Any]]:
    """Every step by fshard, on this rank."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu")
    model, rank, history = fs.functionalize(build(plan), units=Block), dist.get_rank(), []
    cls, hyper, counterpart = OPTIMIZERS[plan.optimizer]
    tx = counterpart or fs.from_torch(cls, **hyper)
    tx = fs.chain(fs.clip_by_global_norm(0.5), tx) if plan.clip else tx
    state = fs.TrainState.create(model.init(STRATEGIES[strategy](mesh)), tx)

    def loss_fn(params: Any, data: Any, step: int) -> Any:
        value, count = local(plan, partial(model.apply, params), data, rank, step)
        return (value, count) if plan.reduce == "weighted" else value

    def train_step(state: Any, data: Any, step: int) -> Any:
        if plan.micro > 1:
            sums = {"reduction_order": "tree"} if plan.tree else {"communicate": plan.communicate}
            gradient = fs.accumulate(loss_fn, reduce=plan.reduce, **sums)
        else:
            gradient, (data,) = fs.value_and_grad(loss_fn, reduce=plan.reduce), data
        loss, grads = gradient(state.params, data, step)
        return fs.update(tx, state, grads, donate=plan.donate and not jitted), loss, grads

    run = fs.jit(train_step, donate_argnums=0 if plan.donate else (), static_argnums=2) if jitted else train_step
    for step in range(plan.steps):
        data = batches(plan, rank, step)
        if not plan.donate:
            again = check_pure(run, state, data, step)
        state, loss, grads = run(state, data, step)
        if not plan.donate:
            assert_same_bits(fs.tree_leaves(again), fs.tree_leaves((state, loss, grads)))
        full_grads, full_params = copied(fs.unshard(grads)), copied(fs.unshard(state.params))
        history.append({"loss": loss.detach().clone(), "grads": full_grads, "params": full_params})
    return history


def differences(plan: Plan, actual: list[Any], expected: list[Any]) -> list[str]:
    """Lines that name what differs by more than rounding."""
    # Sums over the rows of all microbatches and over columns, through all blocks and back; and so in each step.
    terms = plan.world * plan.micro * MOST_ROWS + D
    lines = []
    for step, (results, expected_results) in enumerate(zip(actual, expected, strict=True)):
        scale = max(1.0, largest(expected_results))
        bound = tolerance(plan.dtype, terms, scale, 2 * len(plan.parts) * (step + 1))
        leaves = _by_name(results)
        for name, expected_leaf in _by_name(expected_results).items():
            leaf = leaves[name]
            if leaf is None or expected_leaf is None:
                lines += [] if leaf is expected_leaf else [f"step {step}: {name} is None on one side"]
            elif leaf.shape != expected_leaf.shape or not bool(((leaf - expected_leaf).abs() <= bound).all()):
                lines.append(f"step {step}: {name} differs: {leaf}, expected {expected_leaf}")
    return lines


def _by_name(results: dict[str, Any]) -> dict[str, Any]:
    leaves = {"loss": results["loss"]}
    for part in ("grads", "params"):
        leaves |= {f"{part} {name}": leaf for name, leaf in results[part].items()}
    return leaves


def check(plan: Plan) -> None:
    """Compare every strategy of a plan with plain torch."""
    expected = dense(plan)
    for strategy in plan.strategies:
        runs = []
        for jitted in (False, True) if strategy == plan.jitted else (False,):
            ranks = spmd(partial(sharded, plan, strategy, jitted), plan.world)
            assert all(differences(plan, each, ranks[0]) == [] for each in ranks)
            lines = differences(plan, ranks[0], expected)
            assert not lines, "\n  ".join([f"{strategy}: wrong numbers without an error", *lines[:6]])
            runs.append(ranks[0])
        assert_same_bits(fs.tree_leaves(runs[0]), fs.tree_leaves(runs[-1]))
