"""Plans: what a seed draws, and the features that a plan has."""

import random
from dataclasses import dataclass, field, replace

from tests.fuzz.kinds import KINDS

# How a block's call is wrapped, and when it runs.
WRAPS = ("none", "checkpoint", "nested", "reentrant", "remat", "save_on_cpu", "no_grad", "twice")
WHENS = ("always", "one rank", "other ranks", "late", "early", "gap", "late on one rank", "never")
HOOKS = ("", "mask", "clamp", "scale", "watch")
UNITS = ("Block", "None", "nn.Module", "'block*'", "1", "lambda path, module: path.endswith(('0', '2'))")
OPTIMIZERS = ("SGD", "momentum", "nesterov", "AdamW", "amsgrad", "RMSprop", "Adagrad", "fs.sgd", "fs.adam", "fs.adamw")
DTYPES = ("float64", "float32", "bfloat16", "policy", "policy, float32 sums")
VARIANTS = (
    *("zero3 kept", "zero3 some kept", "zero3 late", "zero3 merged"),
    *("zero3 last dim", "zero3 beside zero2"),
)
STATE = "module-state"


@dataclass(frozen=True)
class Block:
    """One block of a program; see the constants above."""

    kind: str = "linear"
    wrap: str = "none"
    when: str = "always"
    hook: str = ""
    frozen: bool = False
    tie: int | None = None
    keeps: bool = False  # hands a view of its first parameter on to the end of the forward


@dataclass(frozen=True)
class Plan:
    """One program.

    Attributes:
        world: Ranks.
        form: A "module", or a "function" that gathers parts of a tree.
        around: Blocks from and to which one checkpoint is made, and its kind.
        rank: The rank that differs, where one does.
        breaks: The step in which it raises first, and in which half.
        jitted: Strategies that are jitted too.
        variant: The strategy that runs besides those of every program.
        tree: Whether microbatches are added up in one tree.
    """

    seed: int = 0
    world: int = 2
    form: str = "module"
    blocks: tuple[Block, ...] = field(default=(Block(),))
    units: str = "Block"
    around: tuple[int, int, str] | None = None
    dtype: str = "float64"
    steps: int = 3
    micro: int = 1
    communicate: str = "None"
    reduce: str = "mean"
    ragged: str = ""  # "", "ragged" or "empty"
    optimizer: str = "SGD"
    clip: bool = False
    donate: bool = False
    again: bool = False
    evaluate: str = ""
    rank: int = 0
    breaks: tuple[int, str] | None = None
    jitted: tuple[str, ...] = ()
    variant: str = "zero3 kept"
    tree: bool = False

    @property
    def job(self) -> int:
        """Microbatches of all ranks together."""
        return self.world * self.micro

    def features(self) -> frozenset[str]:
        """What refusals, bounds and statistics go by."""
        found = {self.form, self.dtype, self.reduce, self.optimizer, f"world {self.world}"}
        for block in self.blocks:
            found |= set(filter(None, KINDS[block.kind].feature.split(" ")))
            found |= {block.wrap, block.when} - {"none", "always"}
            found |= {f"hook {block.hook}"} if block.hook else set()
            found |= {name for name in ("frozen", "keeps") if getattr(block, name)}
            found |= {"tie"} if block.tie is not None else set()
        if self.around:
            found |= {"around", self.around[2]}
        if self.micro > 1:
            found |= {"accumulate", f"communicate {self.communicate}"}
            found |= {"tree"} if self.tree else set()
        for name in ("ragged", "evaluate"):
            found |= {getattr(self, name)} - {""}
        found |= {name for name in ("clip", "donate", "again") if getattr(self, name)}
        found |= {"raises", f"raises in the {self.breaks[1]}"} if self.breaks else set()
        found |= {"jit"} if self.jitted else set()
        return frozenset(found)


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    pick = random.Random(seed)
    form = "function" if pick.random() < 0.3 else "module"
    world = pick.choice((1, 2, 2, 2, 3, 3, 4))
    dtype = pick.choices(DTYPES, (70, 10, 5, 8, 7))[0]
    kinds = [name for name, kind in KINDS.items() if form in kind.forms.split()]
    blocks: list[Block] = []
    for i in range(pick.choice((1, 2, 3, 3, 4))):
        blocks.append(
            Block(
                pick.choice(kinds),
                pick.choices(WRAPS, (50, 15, 5, 3, 10, 5, 3, 9))[0],
                pick.choices(WHENS, (60, 8, 8, 6, 5, 5, 4, 4))[0],
                pick.choice(HOOKS[1:]) if pick.random() < 0.15 else "",
                pick.random() < 0.07,
                pick.randrange(i) if i and pick.random() < 0.2 else None,
                pick.random() < 0.1,
            )
        )
    first = pick.randrange(len(blocks))
    around = (first, pick.randint(first + 1, len(blocks)), pick.choice(("checkpoint", "checkpoint", "remat")))
    plan = Plan(
        seed,
        world,
        form,
        tuple(blocks),
        pick.choices(UNITS, (5, 2, 2, 1, 1, 1))[0],
        around if pick.random() < 0.2 else None,
        dtype,
        pick.choice((2, 2, 2, 3)),
        pick.choice((1, 1, 1, 1, 2, 3)),
        pick.choice(("None", "'each'", "'once'")),
        pick.choice(("mean", "mean", "sum", "weighted")),
        pick.choice(("", "", "ragged", "empty")),
        pick.choice(OPTIMIZERS),
        pick.random() < 0.25,
        pick.random() < 0.3,
        pick.random() < 0.3,
        pick.choice(("", "", "", "no_grad", "inference_mode")),
        pick.randrange(world),
        (pick.randrange(2), pick.choice(("forward", "backward"))) if pick.random() < 0.12 else None,
        tuple(pick.sample(("ddp", "zero1", "zero2", "zero3", "hsdp"), 1)) if seed % 4 == 3 else (),
        pick.choice(VARIANTS),
    )
    plan = replace(plan, tree=pick.random() < 0.5)
    return valid(plan)


def valid(plan: Plan) -> Plan:
    """Drop what makes no sense together, or what torch itself does not define."""
    exact = plan.dtype == "float64"
    blocks = []
    for i, block in enumerate(plan.blocks):
        kind = KINDS[block.kind]
        if "complex" in kind.feature and not exact and plan.dtype != "float32":
            block = replace(block, kind="linear")
        if "mixed" in kind.feature and not exact:
            block = replace(block, kind="linear")
        if plan.form == "function" and STATE in kind.feature:
            block = replace(block, kind="linear")
        kind = KINDS[block.kind]
        # A module that counts its calls counts those of a checkpoint's recompute too, in torch as here.
        if STATE in kind.feature:
            block = replace(block, wrap="none")
        if plan.world == 1 and block.when in ("one rank", "other ranks", "late on one rank"):
            block = replace(block, when="always")
        # A unit that only some ranks enter twice is refused.
        if block.wrap == "twice" and "rank" in block.when:
            block = replace(block, wrap="none")
        # A derivative inside a checkpoint runs that again in the forward, and enters its units twice.
        if "derivative" in kind.feature and "rank" in block.when and (block.wrap == "checkpoint" or around(plan, i)):
            block = replace(block, when="always")
        # What only some ranks gather is refused in a loop over gather: there all gather, and some do not use it.
        if plan.form == "function" and block.wrap == "remat" and "rank" in block.when:
            block = replace(block, wrap="checkpoint")
        tied = plan.blocks[block.tie] if block.tie is not None and block.tie < i else None
        if tied is None or shared(block, tied) is None or block.wrap == "no_grad":
            block = replace(block, tie=None)
        # Hooks are registered on what a function gathers, and again by what runs again.
        runs_again = block.wrap != "none" or block.tie is not None or around(plan, i)
        ties = any(other.tie == i for other in plan.blocks)
        if block.hook and (plan.form == "module" or runs_again or ties or block.frozen):
            block = replace(block, hook="")
        if block.hook and ("unused" in kind.feature or block.wrap in ("no_grad", "reentrant")):
            block = replace(block, hook="")
        if block.hook == "clamp" and (plan.micro > 1 or not exact or "complex" in kind.feature):
            block = replace(block, hook="mask")
        if block.keeps and (block.wrap not in ("none", "twice") or around(plan, i) or block.when != "always"):
            block = replace(block, keeps=False)
        blocks.append(block)
    plan = replace(plan, blocks=tuple(blocks))
    stateful = any(STATE in KINDS[block.kind].feature for block in blocks)
    if stateful and plan.around:
        plan = replace(plan, around=None)
    if stateful and plan.micro > 1:
        plan = replace(plan, micro=1)
    if plan.around and plan.around[1] > len(blocks):
        plan = replace(plan, around=None)
    if plan.micro != 2 or plan.world == 3:
        plan = replace(plan, tree=False)
    # A policy of casts is an argument of one of the two strategies.
    if plan.dtype.startswith("policy") and plan.variant == "zero3 beside zero2":
        plan = replace(plan, variant="zero3 kept")
    # The mean of no rows is no number, of a rank or of all of them.
    if plan.ragged == "empty" and (plan.reduce == "mean" or plan.world == 1):
        plan = replace(plan, ragged="ragged")
    if plan.optimizer.startswith("fs.adam") and "complex" in plan.features():
        plan = replace(plan, optimizer="AdamW")
    if not any(has_own(plan.blocks, i) and not block.frozen for i, block in enumerate(plan.blocks)):
        plan = replace(plan, blocks=tuple(replace(block, frozen=False) for block in plan.blocks))
    if plan.jitted:
        plan = replace(plan, breaks=None)
    if plan.breaks and not takes_gradient(plan):
        plan = replace(plan, breaks=(plan.breaks[0], "forward"))
    if plan.rank >= plan.world:
        plan = replace(plan, rank=0)
    if plan.world % 2 and "hsdp" in plan.jitted:
        plan = replace(plan, jitted=tuple({"hsdp": "zero3"}.get(name, name) for name in plan.jitted))
    return plan


def takes_gradient(plan: Plan) -> bool:
    """Whether the loss takes a gradient on every rank and in every step."""
    used = [b for b in plan.blocks if b.when == "always" and not b.frozen and "unused" not in KINDS[b.kind].feature]
    return bool(used) and all(block.wrap not in ("no_grad", "reentrant") for block in plan.blocks)


def around(plan: Plan, i: int) -> bool:
    """Whether a block is in the checkpoint around several."""
    return plan.around is not None and plan.around[0] <= i < plan.around[1]


def shared(block: Block, tied: Block) -> str | None:
    """The parameter that two blocks can share, if any."""
    mine, theirs = KINDS[block.kind].params, KINDS[tied.kind].params
    return next((name for name in mine if theirs.get(name) == mine[name]), None)


def has_own(blocks: tuple[Block, ...], i: int) -> bool:
    """Whether a block has a parameter that is not tied to an earlier one's."""
    tie = blocks[i].tie
    return tie is None or len(KINDS[blocks[i].kind].params) > 1
