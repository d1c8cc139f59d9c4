"""What a library on top of fshard needs and a program does not: a second tier of names, without promises.

- `Problem`: a leaf that is wrong: its path, what is there and what was expected.
- `check_axis`: refuses what is no axis of a mesh of this process.
- `check_leaves`: refuses the leaves of a tree that are wrong, each by its path.
- `chained`: runs collectives of a graph in one order on every rank, also in its backward.
- `calling`: lets other ranks hear of an error that ends a call.
- `Chain`: the tokens of the collectives that run inside `chained`.
- `check_rates`: refuses hyperparameters out of the ranges that torch.optim has for them.
- `custom_call`: a differentiable function that communicates in its forward and its backward.
- `describe`: says what a value is, for an error.
- `expect`: refuses an argument unless it is as expected.
- `everyone`: shows every rank of some axes what each of them says.
- `flatten`, `unflatten`: the leaves of a tree with their paths and specs, and the tree of other leaves.
- `FullyShard`: the transform of `fully_shard`, for one that sends otherwise.
- `leaf_means`: means over a dim of whole leaves, however they are split.
- `leafwise`: new trees of old ones, by maths on the tensors of each leaf that has a gradient.
- `local_piece`: cuts this rank's shard out of a full tensor.
- `matches`: whether a mask chooses a name.
- `ranks_of`: all ranks of a mesh, or of this run, as one axis.
- `refuse`: refuses the leaves that are wrong, if there are any.
- `sum_dtype`: the dtype in which gradients of a leaf are added up.
- `walked`: lists the nodes of a graph, each once.
- `Watcher`, `watched`: what is told when collectives start and land, and the context in which it is.
"""

from fshard.collectives import Chain, chained, custom_call, walked
from fshard.comm import Watcher, calling, everyone, watched
from fshard.errors import Problem, expect, refuse
from fshard.mesh import ranks_of
from fshard.optim.leaves import leafwise
from fshard.optim.norms import leaf_means
from fshard.optim.rates import check_rates
from fshard.shard import local_piece
from fshard.transforms.axis import _FullyShard as FullyShard
from fshard.transforms.compose import sum_dtype
from fshard.tree import flatten, matches, unflatten
from fshard.tree.checks import check_axis, check_leaves, describe

__all__ = [
    "Chain",
    "FullyShard",
    "Problem",
    "Watcher",
    "calling",
    "chained",
    "check_axis",
    "check_leaves",
    "check_rates",
    "custom_call",
    "describe",
    "everyone",
    "expect",
    "flatten",
    "leaf_means",
    "leafwise",
    "local_piece",
    "matches",
    "ranks_of",
    "refuse",
    "sum_dtype",
    "unflatten",
    "walked",
    "watched",
]
