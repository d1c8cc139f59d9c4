"""Replay: draw the values that constructing a module draws; parameters are held only while values are needed."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard import _compat
from fshard.init.calls import blank_copy, calls_of, fill_blank, new_parameter
from fshard.init.watch import TRUNC_NORMAL, Touch, Watch

Keep = Callable[[str, torch.Tensor], None]
NewBuffer = Callable[[torch.Tensor], torch.Tensor]


class _Event(NamedTuple):
    """A use of a parameter: by which call, and whether it overwrites all values; None where this is unknown."""

    call: int
    overwrites: bool | None


class _DeviationError(Exception):
    """The calls used parameters in another way than when they ran without values."""


def replay(module: nn.Module, new_buffer: NewBuffer, seed: int, keep: Keep) -> tuple[nn.Module, list[str]]:
    """Draw all values of a module, in the order and with the random numbers of drawing it as a whole.

    The calls run twice: first without values, to learn when each parameter is used. Then a parameter is made when it is
    first written to, handed over after its last use, and dropped in between where its values are overwritten.

    Args:
        module: The module, which is not changed.
        new_buffer: Makes the copy's buffer of a buffer.
        seed: The seed of torch's generator, whose state the caller puts back.
        keep: Takes each parameter, by name, with its values; they are gone when it returns. It may be called again,
            with the values that count.

    Returns:
        The copy of the module that the calls ran on, for its buffers, and the names of parameters that nothing drew.
    """
    events = _record(module, new_buffer, seed)
    with suppress(_DeviationError):
        return _run(module, new_buffer, seed, keep, events)
    # The calls depend on values, or on whether there are some: any call may use any parameter.
    calls = range(len(calls_of(module)))
    return _run(module, new_buffer, seed, keep, {name: [_Event(n, None) for n in calls] for name in events})


class _Record(Watch):
    """Records how one call uses parameters."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.seen: list[tuple[str, bool]] = []

    def operate(self, op: str, touches: Sequence[Touch], given: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        self.seen += [(touch.name, touch.overwrites) for touch in touches]
        if op == TRUNC_NORMAL and _compat.is_fake(given["self"]):
            return given["self"]
        return run()


def _record(module: nn.Module, new_buffer: NewBuffer, seed: int) -> dict[str, list[_Event]]:
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
