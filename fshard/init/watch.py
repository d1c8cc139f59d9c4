"""Watch: shows which operators read and write a module's parameters while its values are drawn."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from fshard import _compat

TRUNC_NORMAL = "trunc_normal_"

# Their results do not depend on earlier values of the tensor.
_OVERWRITING = frozenset(
    [
        *("zero_", "fill_", "copy_", "uniform_", "normal_", TRUNC_NORMAL),
        *("random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    ]
)
# Shape, strides and offset of a view.
Place = tuple[tuple[int, ...], tuple[int, ...], int]


class Touch(NamedTuple):
    """One operator's use of one parameter.

    Attributes:
        name: The parameter's.
        written: The view of it that is written to; None where it is only read.
        overwrites: Whether all of it is written and nothing of it read.
    """

    name: str
    written: torch.Tensor | None
    overwrites: bool


class Watch(_compat.DispatchMode):
    """Hands operators on parameters to `operate`, which subclasses define; trunc_normal_ counts as one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Watch tensors by name, with all their views."""
        super().__init__()
        self.tensors = dict(tensors)
        self._names = {_compat.storage_key(tensor): name for name, tensor in self.tensors.items()}
        self._inside = False
        self.generator: torch.Generator | None = None

    def seed(self, seed: int) -> None:
        """Seed the generator that operators draw from."""
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    @abstractmethod
    def operate(self, op: str, touches: Sequence[Touch], given: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """Handle an operator: its name, its uses of parameters, its arguments by name, and a function that runs it."""

    def see(self, call: Callable[[], Any]) -> None:
        """Run a call and see its operators."""
        with ExitStack() as stack:
            stack.enter_context(_compat.seen_trunc_normal(self._trunc_normal))
            stack.enter_context(self)
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return self._run(func, args, kwargs)
        op = func.__name__.partition(".")[0]
        arguments = _compat.arguments_of(func) or []
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written: dict[str, torch.Tensor] = {}
        read: dict[str, None] = {}
        for argument in arguments:
            value = given.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                name = self._name_of(tensor)
                if name is not None and argument.written:
                    written[name] = tensor
                elif name is not None and op != "detach":
                    # Other views look at how much memory there is.
                    read[name] = None
        touches = [self._touch(op, name, written.get(name), name in read) for name in {**written, **read}]
        return self.operate(op, touches, given, lambda: self._run(func, args, kwargs))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator; random ones draw from the generator of this watch.

        It gives the numbers of torch's own one, which other threads, such as simulated ranks, may draw from. A call
        that has seeded that one means it.
        """
        own, shared = self.generator, torch.default_generator
        is_random = own is not None and torch.Tag.nondeterministic_seeded in func.tags
        if own is None or not is_random or shared.initial_seed() != own.initial_seed():
            return func(*args, **kwargs)
        tensors = [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
        elsewhere = any(tensor.device.type != "cpu" or _compat.is_fake(tensor) for tensor in tensors)
        if elsewhere or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        names = [argument.name for argument in _compat.arguments_of(func) or []]
        if "generator" in names[len(args) :]:
            return func(*args, **(kwargs | {"generator": own}))
        shared.set_state(own.get_state())
        out = func(*args, **kwargs)
        own.set_state(shared.get_state())
        return out

    def _trunc_normal(
        self, own: Callable[..., Any], tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any
    ) -> torch.Tensor:
        def run() -> torch.Tensor:
            self._inside = True
            try:
                return own(tensor, mean, std, a, b, generator)
            finally:
                self._inside = False

        name = self._name_of(tensor)
        touches = [] if name is None else [self._touch(TRUNC_NORMAL, name, tensor, False)]
        given = {"self": tensor, "mean": mean, "std": std, "a": a, "b": b, "generator": generator}
        return self.operate(TRUNC_NORMAL, touches, given, run)

    def _name_of(self, tensor: Any) -> str | None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None
        return self._names.get(_compat.storage_key(tensor))

    def _touch(self, op: str, name: str, written: torch.Tensor | None, is_read: bool) -> Touch:
        own = self.tensors[name]
        whole = written is not None and not is_read and place_of(written) == place_of(own)
        return Touch(name, written, whole and op in _OVERWRITING)


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a tensor lies in its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
