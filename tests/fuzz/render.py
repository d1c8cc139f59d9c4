"""Render a plan as the source of a program that needs nothing but torch and fshard."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.kinds import KINDS
from tests.fuzz.plan import STATE, WHENS, Block, Plan, around, shared, takes_gradient

HEAD = '''"""{title}

Run it by `python program.py`: it compares plain torch with every strategy and asserts.
"""

import re
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.testing import spmd

D, WORLD, STEPS, MICRO = 6, {world}, {steps}, {micro}
REDUCE, COMMUNICATE, CLIP = "{reduce}", {communicate}, {clip}
JOB, SUMS = {job}, {sums}
STORED, COMPUTED, REDUCED, ROUNDED = {stored}, {computed}, {reduced}, {rounded}
DONATE, AGAIN, EVALUATE, LATE = {donate}, {again}, "{evaluate}", {late}
BREAKS, BREAKING = {breaks}, {breaking}
OPERATIONS, TIMEOUT, TORCH_DDP, SOME_UNUSED = {operations}, {timeout}, {torch_ddp}, {some_unused}
FROZEN = {frozen}
REFUSALS = {refusals}
MESHES = {{"hsdp": {{"replicate": 2, "shard": -1}}}}
JITTED = {jitted}
'''

DTYPES = {
    "float64": ("torch.float64", "torch.float64", "None"),
    "float32": ("torch.float32", "torch.float32", "None"),
    "bfloat16": ("torch.bfloat16", "torch.bfloat16", "None"),
    "policy": ("torch.float32", "torch.bfloat16", "None"),
    "policy, float32 sums": ("torch.float32", "torch.bfloat16", "torch.float32"),
}

# The class of torch.optim with its arguments, and fshard's own where it is not from_torch of that class.
OPTIMIZERS = {
    "SGD": ("SGD", "lr=0.1", ""),
    "momentum": ("SGD", "lr=0.1, momentum=0.9, weight_decay=0.1", ""),
    "nesterov": ("SGD", "lr=0.1, momentum=0.5, nesterov=True", ""),
    "AdamW": ("AdamW", "lr=0.01, eps=0.01, weight_decay=0.1", ""),
    "amsgrad": ("Adam", "lr=0.01, eps=0.01, amsgrad=True", ""),
    "RMSprop": ("RMSprop", "lr=0.01, eps=0.01, momentum=0.9", ""),
    "Adagrad": ("Adagrad", "lr=0.01, eps=0.01", ""),
    "fs.sgd": ("SGD", "lr=0.1, momentum=0.9, weight_decay=0.1", "fs.sgd(0.1, 0.9, weight_decay=0.1)"),
    "fs.adam": ("Adam", "lr=0.01, eps=0.01", "fs.adam(0.01, eps=0.01)"),
    "fs.adamw": ("AdamW", "lr=0.01, eps=0.01, weight_decay=0.1", "fs.adamw(0.01, eps=0.01, weight_decay=0.1)"),
}

STRATEGIES = {
    "ddp": "fs.ddp(mesh)",
    "zero1": "fs.zero1(mesh, min_shard_elements=0)",
    "zero2": "fs.zero2(mesh, min_shard_elements=0)",
    "zero3": "fs.zero3(mesh, min_shard_elements=0, merge_bytes=0{policy})",
    "zero3 kept": "fs.zero3(mesh, min_shard_elements=0, merge_bytes=0, regather=False{policy})",
    "zero3 some kept": 'fs.zero3(mesh, min_shard_elements=10, merge_bytes=0, regather="*1*", prefetch=2{policy})',
    "zero3 late": "fs.zero3(mesh, min_shard_elements=0, merge_bytes=0, prefetch=0{policy})",
    "zero3 merged": "fs.zero3(mesh, min_shard_elements=20{policy})",
    "zero3 last dim": "fs.zero3(mesh, layout=fs.fully_shard(mesh, dim=-1), merge_bytes=0{policy})",
    "zero3 beside zero2": (
        "fs.masked(fs.zero3(mesh, min_shard_elements=0, merge_bytes=0{policy}), '*0*', otherwise=fs.zero2(mesh))"
    ),
    "hsdp": "fs.hsdp(mesh, min_shard_elements=0, merge_bytes=0{policy})",
}

HOOKS = {
    "mask": "lambda g: g * (torch.arange(g.numel()).view(g.shape) % 2)",
    "clamp": "lambda g: g.clamp(-0.01, 0.01)",
    "scale": "lambda g: 0.5 * g",
    "watch": "lambda g: None",
}

# The refusals that are documented, by the features that together may meet them; any other error is a failure.
REFUSALS: dict[str, str] = {
    "reentrant": "got a use inside a reentrant checkpoint",
    # Weights that were gathered outside of it, or are frozen: torch's own error, with the same remedy.
    "reentrant & function": "you can either set use_reentrant=False",
    "reentrant & frozen": "you can either set use_reentrant=False",
    # A graph has its collectives, so that ranks must use the same units.
    **{
        f"jit & {when}": r"jit: ranks were told different things\n  (leaves|collectives): "
        for when in WHENS
        if "rank" in when
    },
    # Units inside a checkpoint that every rank computes again.
    **{f"around & {when}": "ranks differ in a collective\n" for when in WHENS if "rank" in when},
}

BREAK = """
class Boom(Exception):
    pass


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom("in the backward")
"""

CLOSE = """
if __name__ == "__main__":
    print(main())
"""


def render(plan: Plan) -> str:
    """The program's source."""
    n, features = len(plan.blocks), plan.features()
    stored, computed, reduced = DTYPES[plan.dtype]
    policy = ""
    if computed != stored:
        policy = f", param_dtype={computed}" + (f", reduce_dtype={reduced}" if reduced != "None" else "")
    head = HEAD.format(
        title=f"Program {plan.seed}: {', '.join(sorted(features))}.",
        world=plan.world,
        steps=plan.steps,
        micro=plan.micro,
        reduce=plan.reduce,
        communicate=plan.communicate,
        job=plan.job,
        sums={"sums": "tree"} if plan.tree else {},
        clip=0.5 if plan.clip else 0,
        stored=stored,
        computed=computed,
        reduced=reduced,
        rounded="torch.float32" if "mixed-dtypes" in features else computed,
        donate=plan.donate,
        again=plan.again,
        evaluate=plan.evaluate,
        late=any(depends_on_step(block) for block in plan.blocks),
        breaks=plan.breaks[0] % plan.steps if plan.breaks else None,
        breaking=plan.rank,
        # Terms of the sums in a row of D products, a batch, ranks and microbatches, through blocks and their backwards.
        operations=4 * n * (6 + 5 * plan.world * plan.micro),
        timeout=60,
        torch_ddp=runs_on_torch_ddp(plan),
        some_unused=bool(features & {"unused", "no_grad", *WHENS}),
        frozen={f"block{i}.{name}" for i, name in owned(plan) if plan.blocks[i].frozen} or "set()",
        refusals=[pattern for names, pattern in REFUSALS.items() if features.issuperset(names.split(" & "))],
        jitted=set(plan.jitted) or "set()",
    )
    wrapped = {"policy": policy, "computed": computed}
    lines = []
    for name, text in STRATEGIES.items():
        if (name == "hsdp" and plan.world % 2) or (name.startswith("zero3 ") and name != plan.variant):
            continue
        text = text.format(**wrapped)
        if policy and "{policy}" not in STRATEGIES[name]:
            casts = f"fs.cast(gather={computed}), {text}" + (
                f", fs.cast(scatter={reduced})" if reduced != "None" else ""
            )
            text = f"fs.compose({casts})"
        lines.append(f'    "{name}": lambda mesh: {text},')
    strategies = "\n".join(["STRATEGIES = {", *lines, "}"])
    helpers = dict.fromkeys(KINDS[block.kind].helper for block in plan.blocks if KINDS[block.kind].helper)
    if plan.breaks:
        helpers[BREAK] = None
    middle = module_form(plan) if plan.form == "module" else function_form(plan)
    parts = [head, strategies + "\n", *helpers, *middle, batches(plan), optimizers(plan), harness(), CLOSE]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def harness() -> str:
    """The text below the line of dashes."""
    text = (Path(__file__).parent / "harness.py").read_text()
    return text[text.index("# -----") :].split("\n", 1)[1]


def depends_on_step(block: Block) -> bool:
    return block.when in ("late", "early", "gap", "late on one rank")


def owned(plan: Plan) -> Iterator[tuple[int, str]]:
    """Block and name of every parameter that no earlier block owns."""
    for i, block in enumerate(plan.blocks):
        tied = shared(block, plan.blocks[block.tie]) if block.tie is not None else None
        for name in KINDS[block.kind].params:
            if name != tied:
                yield i, name


def runs_on_torch_ddp(plan: Plan) -> bool:
    """Whether DDP can be asked: it averages, knows no policies, and what it finds unused must hold in one backward."""
    features = plan.features()
    other = {"accumulate", "raises", "reentrant", "complex", "derivative-inside", "save_on_cpu"}
    other.add(STATE)  # its module keeps what a forward sets
    plain = plan.form == "module" and plan.reduce == "mean" and not plan.dtype.startswith("policy")
    # DDP needs a loss that takes a gradient on every rank.
    return plain and plan.world == 2 and takes_gradient(plan) and not features & other


def body(plan: Plan, i: int, place: str) -> str:
    block = plan.blocks[i]
    kind = KINDS[block.kind]
    return kind.body.format(**{name: place.format(name) for name in kind.params})


def condition(plan: Plan, block: Block) -> str:
    """When the block runs, as a Python expression; empty where always."""
    r = plan.rank
    return {
        "always": "",
        "one rank": f"r == {r}",
        "other ranks": f"r != {r}",
        "late": "t >= 1",
        "early": "t < 1",
        "gap": "t != 1",
        "late on one rank": f"t >= 1 and r == {r}",
        "never": "False",
    }[block.when]


def call(plan: Plan, i: int) -> list[str]:
    """The lines that run a block on x."""
    block = plan.blocks[i]
    if plan.form == "module":
        run, weights, unit = f"self.block{i}", "", f"self.block{i}"
    else:
        run, weights, unit = f"block{i}", f"fs.gather({part(plan, i)}), ", part(plan, i)
    before, test = [], condition(plan, block)
    if plan.form == "function" and "rank" in block.when:
        before, weights = [f"p{i} = {weights.removesuffix(', ')}"], f"p{i}, "
    inner = f"lambda x, r, t: checkpoint({run}, {weights}x, r, t, use_reentrant=False)"
    lines = {
        "none": [f"x = {run}({weights}x, r, t)"],
        "checkpoint": [f"x = checkpoint({run}, {weights}x, r, t, use_reentrant=False)"],
        "nested": [f"x = checkpoint({inner}, x, r, t, use_reentrant=False)"],
        "reentrant": [f"x = checkpoint({run}, {weights}x, r, t, use_reentrant=True)"],
        "remat": [
            f"x = fs.remat({run})(x, r, t)"
            if plan.form == "module"
            else f"x = fs.remat(lambda q, x: {run}(fs.gather(q), x, r, t))({unit}, x)"
        ],
        "save_on_cpu": ["with torch.autograd.graph.save_on_cpu():", f"    x = {run}({weights}x, r, t)"],
        "no_grad": ["with torch.no_grad():", f"    x = {run}({weights}x, r, t)"],
        "twice": ["for _ in range(2):", f"    x = {run}({weights}x, r, t)"],
    }[block.wrap]
    if test:
        lines = [f"if {test}:", *("    " + line for line in lines)]
    if block.keeps:
        name = next(iter(KINDS[block.kind].params))
        place = f"self.block{i}.{name}" if plan.form == "module" else f'p{i}["{name}"]'
        if plan.form == "function" and not before:
            before = [f"p{i} = {weights.removesuffix(', ')}"]
            lines = [line.replace(weights, f"p{i}, ") for line in lines]
        before.append(f"kept.append({place}.reshape(-1)[:3])" if plan.form == "function" else "")
        after = f"kept.append({place}.reshape(-1)[:3])" if plan.form == "module" else ""
        lines = [*lines, after]
    return [line for line in (*before, *lines) if line]


def forward(plan: Plan) -> list[str]:
    """The lines of the whole forward."""
    lines = ["kept = []"] if any(block.keeps for block in plan.blocks) else []
    for i in range(len(plan.blocks)):
        if not around(plan, i):
            lines += call(plan, i)
        elif plan.around and i == plan.around[0]:
            inside = [line for j in range(*plan.around[:2]) for line in call(plan, j)]
            lines += ["def middle(x):", *("    " + line for line in inside), "    return x", ""]
            kind = plan.around[2]
            lines += [
                "x = fs.remat(middle)(x)" if kind == "remat" else "x = checkpoint(middle, x, use_reentrant=False)"
            ]
    if plan.breaks:
        test = f"t >= 100 and r == {plan.rank}"
        lines += [
            f"if {test}:",
            '    raise Boom("in the forward")' if plan.breaks[1] == "forward" else "    x = Break.apply(x)",
        ]
    if any(block.keeps for block in plan.blocks):
        lines += ["for view in kept:", "    x = x + 0.1 * (view * view.conj()).real.sum().to(x.dtype)"]
    return [*lines, "return x"]


def indented(lines: str | list[str], by: int) -> str:
    return textwrap.indent(lines if isinstance(lines, str) else "\n".join(lines), " " * by)


DRAWN = """
def drawn():
    draw = torch.Generator().manual_seed({seed})
    return {{
{lines}
    }}
"""


def values(plan: Plan) -> str:
    """The function that draws the values of all parameters that are stored, by name."""
    lines = []
    for i, name in owned(plan):
        shape = KINDS[plan.blocks[i].kind].params[name]
        dtype = {"z": "STORED.to_complex()", "f": "torch.float32"}.get(name, "STORED")
        wide = "torch.complex128" if name == "z" else "torch.float64"
        size = f"({shape}{',' if shape and ',' not in shape else ''})"
        lines.append(
            f'        "block{i}.{name}": (0.5 * torch.randn({size}, generator=draw, dtype={wide})).to({dtype}),'
        )
    return DRAWN.format(seed=plan.seed, lines="\n".join(lines))


MODULE = """
def build():
    module = Model()
    with torch.no_grad():
        for name, value in drawn().items():
            module.get_parameter(name).copy_(value)
{extra}
    return module


def initial():
    return {{name: leaf.detach().clone() for name, leaf in build().named_parameters()}}


def fresh(values):
    module = build()
    if COMPUTED != STORED:
        module.to(COMPUTED)
    leaves = dict(module.named_parameters())
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(values[name])
    return module, leaves


def sharded(strategy):
    model = fs.functionalize(build(), units={units})
    return model.apply, model.init(strategy)
"""


def module_form(plan: Plan) -> list[str]:
    """Classes, and the functions that the harness calls."""
    parts = ["class Block(nn.Module):\n    pass"]
    made, ties = [], []
    for i, block in enumerate(plan.blocks):
        lines = []
        for name, shape in KINDS[block.kind].params.items():
            dtype = {"z": "STORED.to_complex()", "f": "torch.float32"}.get(name, "STORED")
            size = f"({shape}{',' if shape and ',' not in shape else ''})"
            lines.append(f"        self.{name} = nn.Parameter(torch.empty({size}, dtype={dtype}))")
        made.append(f"self.block{i} = Block{i}()")
        if block.tie is not None:
            name = shared(block, plan.blocks[block.tie])
            ties.append(f"self.block{i}.{name} = self.block{block.tie}.{name}")
        parts.append(
            f"class Block{i}(Block):\n    def __init__(self):\n        super().__init__()\n"
            + "\n".join(lines)
            + "\n\n    def forward(self, x, r, t):\n"
            + indented(body(plan, i, "self.{}"), 8)
            + "\n        return x"
        )
    parts.append(
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + indented([*made, *ties], 8)
        + "\n\n    def forward(self, x, r, t):\n"
        + indented(forward(plan), 8)
    )
    extra = []
    for i, block in enumerate(plan.blocks):
        for name in KINDS[block.kind].params:
            if block.frozen and (i, name) in set(owned(plan)):
                extra.append(f"module.block{i}.{name}.requires_grad_(False)")
    text = MODULE.format(units=plan.units, extra=indented(extra, 4))
    return ["\n\n\n".join(parts), values(plan), text.replace("\n\n    return module", "\n    return module")]


FUNCTION = """
def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        part, name = path.split(".")
        tree.setdefault(part, {})[name] = leaf
    return tree


def initial():
    return drawn()


def fresh(values):
    leaves = {}
    for name, value in values.items():
        value = value.detach().clone() if COMPUTED == STORED else value.detach().to(COMPUTED)
        leaves[name] = nn.Parameter(value, name not in FROZEN)
    return partial(forward, nested(leaves)), leaves


def sharded(strategy):
    leaves = {name: nn.Parameter(value, name not in FROZEN) for name, value in initial().items()}
    return forward, fs.shard(nested(leaves), strategy)
"""


def part(plan: Plan, i: int) -> str:
    """The part of the tree that a block gathers."""
    block = plan.blocks[i]
    if block.tie is None:
        return f'params["block{i}"]'
    name, own = shared(block, plan.blocks[block.tie]), owner(plan, i)
    rest = f'**params["block{i}"], ' if len(KINDS[block.kind].params) > 1 else ""
    return f'{{{rest}"{name}": params["block{own}"]["{name}"]}}'


def owner(plan: Plan, i: int) -> int:
    """The block that owns what a block's tie leads to."""
    block = plan.blocks[i]
    while block.tie is not None:
        i, block = block.tie, plan.blocks[block.tie]
    return i


def function_form(plan: Plan) -> list[str]:
    """Functions of parts of a tree, and those that the harness calls."""
    parts = []
    for i, block in enumerate(plan.blocks):
        hooks = []
        if block.hook:
            for name in KINDS[block.kind].params:
                hooks += [f'if p["{name}"].requires_grad:', f'    p["{name}"].register_hook({HOOKS[block.hook]})']
        text = [*hooks, *body(plan, i, 'p["{}"]').split("\n"), "return x"]
        parts.append(f"def block{i}(p, x, r, t):\n" + indented(text, 4))
    parts.append("def forward(params, x, r, t):\n" + indented(forward(plan), 4))
    return ["\n\n\n".join(parts), values(plan), FUNCTION]


BATCHES = """
def batches(r, t):
    made = []
    for i in range((r + 1) * JOB // WORLD - r * JOB // WORLD):
        draw = torch.Generator().manual_seed(1000 * r + 10 * t + i)
        x, y = torch.randn(2, {rows}, D, generator=draw, dtype=torch.float64).to(COMPUTED)
        made.append((x, y))
    return made
"""


def batches(plan: Plan) -> str:
    rows = {"": "3", "ragged": "1 + (r + 2 * t + i) % 4", "empty": "(r + t + i) % 4"}[plan.ragged]
    return BATCHES.format(rows=rows)


def optimizers(plan: Plan) -> str:
    cls, hyper, own = OPTIMIZERS[plan.optimizer]
    pure = own or f"fs.from_torch(torch.optim.{cls}, {hyper})"
    clip = f"fs.chain(fs.clip_by_global_norm(CLIP), {pure})" if plan.clip else pure
    return (
        f"def dense_optimizer(leaves):\n    return torch.optim.{cls}(leaves, {hyper})\n\n\n"
        f"def optimizer():\n    return {clip}\n"
    )
