"""Replay: draw the values that constructing a module draws; parameters are held only while values are needed."""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.init.calls import Call, blank_copy, fill_blank, new_parameter

TRUNC_NORMAL = "trunc_normal_"

# Their results do not depend on earlier values of the tensor.
OVERWRITING = frozenset(
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
            if _compat.is_fake(tensor):
                return tensor
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
        return Touch(name, written, whole and op in OVERWRITING)


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a tensor lies in its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


Keep = Callable[[str, torch.Tensor], None]
NewBuffer = Callable[[torch.Tensor], torch.Tensor]
Calls = Callable[[nn.Module], list[Call]]


class _Event(NamedTuple):
    """A use of a parameter: by which call, and whether it overwrites all values; None where this is unknown."""

    call: int
    overwrites: bool | None


class _DeviationError(Exception):
    """The calls used parameters in another way than when they ran without values."""


def replay(
    module: nn.Module, new_buffer: NewBuffer, seed: int, keep: Keep, calls_of: Calls
) -> tuple[nn.Module, list[str]]:
    """Draw all values of a module, in the order and with the random numbers of drawing it as a whole.

    The calls run twice: first without values, to learn when each parameter is used. Then a parameter is made when it is
    first written to, handed over after its last use, and dropped in between where its values are overwritten.

    Args:
        module: The module, which is not changed.
        new_buffer: Makes the copy's buffer of a buffer.
        seed: The seed of torch's generator, whose state the caller puts back.
        keep: Takes each parameter, by name, with its values; they are gone when it returns. It may be called again,
            with the values that count.
        calls_of: Lists the calls that draw the values of a copy of the module.

    Returns:
        The copy of the module that the calls ran on, for its buffers, and the names of parameters that nothing drew.
    """
    events = _record(module, new_buffer, seed, calls_of)
    with suppress(_DeviationError):
        return _run(module, new_buffer, seed, keep, calls_of, events)
    # The calls depend on values, or on whether there are some: any call may use any parameter.
    calls = range(len(calls_of(module)))
    return _run(module, new_buffer, seed, keep, calls_of, {name: [_Event(n, None) for n in calls] for name in events})


class _Record(Watch):
    """Records how one call uses parameters."""

    seen: list[tuple[str, bool]]

    def operate(self, op: str, touches: Sequence[Touch], given: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        self.seen += [(touch.name, touch.overwrites) for touch in touches]
        return run()


def _record(module: nn.Module, new_buffer: NewBuffer, seed: int, calls_of: Calls) -> dict[str, list[_Event]]:
    """Run the calls without values and list the uses of each parameter."""
    made = blank_copy(module, _compat.fake_maker(), new_buffer)
    watch = _Record(made.parameters)
    events: dict[str, list[_Event]] = {name: [] for name in watch.tensors}
    names = {parameter: name for name, parameter in watch.tensors.items()}
    watch.seed(seed)
    for number, call in enumerate(calls_of(made.module)):
        watch.seen = []
        try:
            watch.see(call.run)
        except Exception:
            # It asked for values: it may use the parameters of its submodule in any way.
            for parameter in call.module.parameters():
                if parameter in names:
                    events[names[parameter]].append(_Event(number, None))
        else:
            for name, overwrites in watch.seen:
                events[name].append(_Event(number, overwrites))
    return events


class _Replay(Watch):
    """Makes parameters when they are used, and lets go of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], keep: Keep, events: Mapping[str, Sequence[_Event]]) -> None:
        super().__init__(tensors)
        self._keep = keep
        self._events = {name: deque(found) for name, found in events.items()}
        self._call = 0
        self._unknown: set[str] = set()
        self._live: set[str] = set()
        self.done: set[str] = set()

    def run(self, number: int, call: Callable[[], Any]) -> None:
        """Run a call, with memory for the parameters that it may use in any way."""
        self._call = number
        self._unknown = {name for name, events in self._events.items() if events and events[0] == (number, None)}
        for name in self._unknown - self._live:
            self._make(name, fill=True)
        self.see(call)
        for name in sorted(self._unknown):
            self._advance(name)
        if any(events and events[0].call == number for events in self._events.values()):
            raise _DeviationError

    def restore(self) -> None:
        """Give every parameter memory again, whatever is in it."""
        for name in self.tensors.keys() - self._live:
            self._make(name, fill=False)

    def operate(self, op: str, touches: Sequence[Touch], given: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        known = [touch for touch in touches if touch.name not in self._unknown]
        for touch in known:
            events = self._events[touch.name]
            if not events or events[0] != (self._call, touch.overwrites):
                raise _DeviationError
            if touch.name not in self._live:
                self._make(touch.name, fill=not touch.overwrites)
        out = run()
        for touch in known:
            self._advance(touch.name)
        return out

    def _advance(self, name: str) -> None:
        """Go on to a parameter's next use: hand it over behind the last, and drop values that are overwritten."""
        events = self._events[name]
        events.popleft()
        if not events:
            self._keep(name, self.tensors[name].detach())
            self.done.add(name)
        if not events or events[0].overwrites:
            storage = self.tensors[name].untyped_storage()
            # An array of numpy's may share it.
            if storage.resizable():
                storage.resize_(0)
            self._live.discard(name)

    def _make(self, name: str, fill: bool) -> None:
        tensor = self.tensors[name]
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self._live.add(name)
        if fill:
            fill_blank(tensor)


def _run(
    module: nn.Module,
    new_buffer: NewBuffer,
    seed: int,
    keep: Keep,
    calls_of: Calls,
    events: Mapping[str, Sequence[_Event]],
) -> tuple[nn.Module, list[str]]:
    made = blank_copy(module, _hollow, new_buffer)
    watch = _Replay(made.parameters, lambda name, full: keep(name, full) if name in made.places else None, events)
    own = {name: _compat.storage_key(tensor) for name, tensor in watch.tensors.items()}
    watch.seed(seed)
    try:
        for number, call in enumerate(calls_of(made.module)):
            watch.run(number, call.run)
    except _DeviationError:
        raise
    except BaseException:
        # A reader of the traceback must find memory behind each tensor.
        watch.restore()
        raise
    left = []
    found = dict(made.module.named_parameters(remove_duplicate=False))
    for name, place in made.places.items():
        tensor = found.get(place)
        # A call may put another tensor in its place, or another memory into it.
        if tensor is not None and not tensor.is_meta and _compat.storage_key(tensor) != own[name]:
            keep(name, tensor.detach())
        elif name not in watch.done:
            left.append(name)
    return made.module, left


def _hollow(parameter: torch.Tensor) -> torch.Tensor:
    """Make the same without memory."""
    made = new_parameter(parameter)
    made.untyped_storage().resize_(0)
    return made
