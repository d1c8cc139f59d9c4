"""A bound of a train step's memory from shapes alone: no step of the same operators can run in less.

A step with AdamW holds its arguments all the time: the stored parameters, of which a rank has its part where they are
split, and two averages of each. While an operator runs, its operands and its result are there too. The bound is the
arguments and the operator for which these are largest. `_log_softmax_backward_data`, for example, holds three tensors
of the size of the logits, and the product that makes a weight's gradient holds a whole gradient.

What the bound assumes of a step:

- It runs the operators of eager PyTorch, in float32, each on the whole batch of a rank. A compiler that fuses
  operators, and a loss in chunks, can run in less.
- Ranks share data, not operators: where parameters are split, an operator reads whole ones, which a gather has written
  beside this rank's part, and makes whole gradients. Collectives of gradients may work in place.
- Arguments stay where they are. Nothing is offloaded.

All else is free. Operators may run in any order and several times, so nothing has to be saved for the backward, and a
unit may be gathered one parameter at a time. Gradients may be reduced one by one, each followed by its own update, so
no two of them have to be there at once. Sums are left out: they can be made in place, and gradients of a tied
parameter can be summed after they were reduced.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from architectures import Configured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Are parameters split over ranks, and is the optimizer's state? Each system's backends and units are all the same here.
IS_SPLIT = {
    "plain": (False, False),
    "ddp": (False, False),
    "zero-redundancy": (False, True),
    "zero1": (True, True),
    "zero2": (True, True),
    "zero3": (True, True),
    "fsdp1": (True, True),
    "fsdp2": (True, True),
    "fsdp2-fine": (True, True),
}
SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class Bound(NamedTuple):
    """Bytes that a rank holds at least, and what they are."""

    parameters: int
    optimizer_state: int
    largest_operator: int
    operator: str

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.optimizer_state + self.largest_operator


class Operator(NamedTuple):
    """An operator of a step.

    Attributes:
        name: As torch names it.
        parameters: Bytes of the parameters that it reads.
        others: Bytes of its other operands and of its results.
    """

    name: str
    parameters: int
    others: int

    def transient_bytes(self, are_gathered: bool) -> int:
        """Bytes beyond the arguments while it runs; parameters that are not gathered are arguments."""
        return self.others + (self.parameters if are_gathered else 0)


def bounds_of(systems: Iterable[str], configuration: Configured, ranks: int) -> dict[str, Bound]:
    """Bound the bytes that a rank holds in a step of systems.

    Args:
        systems: Names of `rivals.SYSTEMS`. Those with fused operators, and unknown ones, are left out.
        configuration: What they train.
        ranks: The number of ranks among which they split what they split.

    Returns:
        The bounds by the names of systems.
    """
    with torch.device("meta"):
        module = configuration.module()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    operators = list_operators(configuration)
    bounds = {}
    for system in systems:
        kind = system.removeprefix("fshard-").removesuffix("-graph")
        if kind not in IS_SPLIT:
            continue
        parameters_are_split, state_is_split = IS_SPLIT[kind]
        are_gathered = parameters_are_split and ranks > 1
        sizes = [operator.transient_bytes(are_gathered) for operator in operators]
        largest = max(sizes)
        bounds[system] = Bound(
            even_part(module.parameters(), ranks if parameters_are_split else 1),
            2 * even_part(trained, ranks if state_is_split else 1),
            largest,
            operators[sizes.index(largest)].name,
        )
    return bounds


def even_part(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    """Bytes that one of the ranks holds at least, where they split parameters; a tied one counts once."""
    return -(-sum(parameter.nbytes for parameter in parameters) // ranks)


def list_operators(configuration: Configured) -> list[Operator]:
    """List the operators of one forward and backward of plain PyTorch, which computes shapes alone."""
    with FakeTensorMode():
        module, batch = configuration.module(), configuration.tokens(rank=0)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with _OperatorLog(list(module.parameters())) as log:
            torch.autograd.grad(module(*batch), trained, allow_unused=True)
    return log.operators


class _OperatorLog(TorchDispatchMode):
    """Notes each operator that runs, but for sums."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.parameters = {_storage_of(parameter) for parameter in parameters}
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in SUMS:
            return results
        sizes: dict[int, int] = {}
        for tensor in tree_leaves((args, kwargs, results)):
            if isinstance(tensor, torch.Tensor):
                sizes[_storage_of(tensor)] = tensor.untyped_storage().nbytes()
        parameters = sum(size for storage, size in sizes.items() if storage in self.parameters)
        self.operators.append(Operator(str(func), parameters, sum(sizes.values()) - parameters))
        return results


def _storage_of(tensor: torch.Tensor) -> int:
    """What tells memory from other memory; fake tensors have no addresses."""
    return tensor.untyped_storage()._cdata
