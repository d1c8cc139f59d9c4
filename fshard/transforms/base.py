"""ShardTransform, the one extension point, Wrapped, which changes a part of another, and the walk through parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from fshard.errors import expect
from fshard.tree import Axis, Spec, Tree
from fshard.tree.checks import describe

Tensors = Sequence[torch.Tensor]
Specs = Sequence[Spec]
States = Sequence[Tree]
Finish = Callable[[], Tensors]

# The forms of each half of a transform, one that finishes at once and one that starts, with the other of the two.
OTHER_FORM = MappingProxyType(
    {
        "gather": "start_gather",
        "start_gather": "gather",
        "scatter": "start_scatter",
        "start_scatter": "scatter",
    }
)


class LayoutError(ValueError):
    """A leaf's shape does not fit a transform: what was expected and what it is.

    >>> import torch, fshard as fs
    >>> class Pairs(fs.Wrapped):
    ...     def layout(self, spec):
    ...         if spec.shape[0] % 2:
    ...             raise fs.LayoutError(got=f"{spec.shape[0]} rows", expected="an even number of rows")
    ...         return self.inner.layout(spec)
    >>> fs.shard({"w": torch.ones(3)}, Pairs(fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu"))))
    Traceback (most recent call last):
    ValueError: shard: leaves cannot be sharded
      ['w']: expected an even number of rows, got 3 rows
    To fix: pass full tensors whose shapes fit the strategy.
    """

    def __init__(self, got: str, expected: str) -> None:
        """Keep both parts, so that `shard` can add the leaf's path."""
        super().__init__(f"expected {expected}, got {got}")
        self.got = got
        self.expected = expected

    def __reduce__(self) -> Any:
        """Pickle both parts: an error by itself keeps the text alone."""
        return type(self), (self.got, self.expected)


class Storage(NamedTuple):
    """The two devices of a leaf.

    Attributes:
        device: The device that keeps shards.
        compute_device: The device that computes with them; gathers from another one start on a stream of their own.

    >>> import torch, fshard as fs
    >>> class Offloaded(fs.Wrapped):
    ...     @property
    ...     def storage(self):
    ...         return fs.Storage(device=torch.device("cpu"), compute_device=torch.device("cuda"))
    >>> Offloaded(fs.compose()).storage.compute_device
    device(type='cuda')
    """

    device: torch.device
    compute_device: torch.device


def is_default(cls: "type[ShardTransform]", name: str) -> bool:
    """Whether a class has a member as ShardTransform defines it."""
    return getattr(cls, name) is getattr(ShardTransform, name)


def _derive(transform: "ShardTransform", form: str, *args: Any, **kwargs: Any) -> Any:
    """Run a form of a half that a class leaves to its base: by the other form, if the class defines that one alone."""
    cls = type(transform)
    other = OTHER_FORM[form]
    if is_default(cls, form) and not is_default(cls, other):
        result = getattr(transform, other)(*args, **kwargs)
        return (lambda: result) if form.startswith("start") else result()
    if isinstance(transform, Wrapped):
        return getattr(transform.inner, form)(*args, **kwargs)
    tensors = args[0] if args else kwargs["grads"]
    return (lambda: tensors) if form.startswith("start") else tensors


def _check_has_scatter(cls: "type[ShardTransform]") -> None:
    """Refuse a class that changes leaves, or sums over axes, without saying how gradients come back."""
    defined = [vars(base) for base in cls.__mro__ if base is not ShardTransform]
    if any("scatter" in members or "start_scatter" in members for members in defined):
        return
    for name in ("gather", "start_gather", "axes", "init"):
        if not is_default(cls, name):
            raise TypeError(
                f"{cls.__name__}: scatter is missing beside {name}. Define it as gather's transpose, with the sum over "
                "axes, or let it return the gradients if they pass through."
            )


def _check_forms(cls: "type[ShardTransform]") -> None:
    """Refuse a class that defines one form of a half, where the other form would still do as a base class does."""
    for form, other in OTHER_FORM.items():
        if form in vars(cls) and other not in vars(cls) and not is_default(cls, other):
            base = next(base.__name__ for base in cls.__mro__ if other in vars(base))
            raise TypeError(
                f"{cls.__name__}: {other} is missing beside {form}, because that of {base} would still run. Define "
                f"{other} too."
            )


@dataclass(frozen=True)
class ShardTransform:
    """A pure pair: gather turns stored tensors into the ones computed with, scatter is its transpose for gradients.

    Subclass as a frozen dataclass: transforms live in specs, are compared by value and must be hashable. Both methods
    take all leaves that travel together and return as many, output i from input i alone; they must not modify their
    inputs, and leave trailing dims they do not know of alone (vmap puts its batch there).

    A transform that remembers something from step to step, such as what a lossy scatter left out, defines `init`, and
    its scatter takes and returns states. Gather has no state: it runs as often as a strategy wants.

    The members are `axes`, `storage`, `layout`, `gather`, `scatter`, `start_gather`, `start_scatter` and `init`. Fields
    and helpers are a subclass's own.

    Each half has two forms: `start_gather` and `start_scatter` return a function that finishes, so that communication
    overlaps what runs in between, and `gather` and `scatter` finish at once. Define one form of each half, or both:

    | you define     | `gather()` runs             | `start_gather()` runs      |
    |----------------|-----------------------------|----------------------------|
    | `gather`       | yours                       | yours, all at the start    |
    | `start_gather` | yours, and finishes at once | yours                      |
    | both           | your `gather`               | your `start_gather`        |
    | neither        | passes leaves on            | passes leaves on           |

    Scatter has the same table. Call no other form of `super()` than the one you are in: it would run that one again.

    A class is refused by a TypeError when it is made if it changes leaves without a scatter, or defines one form of a
    half whose other form it inherits from a class of yours.

    >>> import torch, fshard as fs
    >>> class Rounded(fs.ShardTransform):
    ...     def gather(self, leaves, specs):
    ...         return [leaf.round() for leaf in leaves]
    ...     def scatter(self, grads, specs):  # straight through the rounding
    ...         return list(grads)
    >>> strategy = fs.compose(fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")), Rounded())
    >>> params = fs.shard({"w": torch.tensor([0.8, 2.1])}, strategy)
    >>> fs.gather(params), fs.unshard(params)
    ({'w': tensor([1., 2.])}, {'w': tensor([0.8000, 2.1000])})
    """

    # The facts that `structure.reduction` has read off an instance.
    _reduction: ClassVar[Any] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class whose methods do not belong together."""
        super().__init_subclass__(**kwargs)
        _check_has_scatter(cls)
        _check_forms(cls)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that batches are split over: a gradient is the sum of those of their ranks.

        Scatter sums over all of them but those that `layout` splits with `owned=True`: there the program brings each
        piece its whole gradient. `Spec.roles` says what each axis is to a leaf.
        """
        return ()

    @property
    def storage(self) -> Storage | None:
        """The devices that keep shards and compute with them; None where one device does both."""
        return None

    def layout(self, spec: Spec) -> Spec:
        """Say how this transform stores a leaf.

        Args:
            spec: The leaf as the transform to the right leaves it.

        Returns:
            The spec with what this transform adds: axes, and dims split over them.

        Raises:
            LayoutError: if the leaf's shape does not fit.
        """
        return spec

    def gather(self, leaves: Tensors, specs: Specs) -> Tensors:
        """Turn stored tensors into the ones to the right of this transform, and wait for them.

        Args:
            leaves: One tensor per leaf.
            specs: The leaves' storage specs.

        Returns:
            One tensor per leaf. A class that defines no gather passes leaves on as they are.
        """
        return _derive(self, "gather", leaves, specs)

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        """Turn gradients of gather's outputs into gradients of its inputs, summed over this transform's axes.

        A subclass defines scatter(self, grads, specs), or scatter(self, grads, specs, states) if it defines `init`.
        Gradients are sums so far, not yet divided for a mean, and so are residuals of them. Values that are not finite
        should not enter a state, because they would stay there.

        Args:
            *args: grads, one tensor per leaf, shaped as gather's outputs; specs, the leaves' storage specs; states,
                what `init` or the last call returned for each leaf, not to be written to.
            **kwargs: The same by name.

        Returns:
            One tensor per leaf, shaped as gather's inputs; with states, the pair of these and the new states.
        """
        return _derive(self, "scatter", *args, **kwargs)

    def start_gather(self, leaves: Tensors, specs: Specs) -> Finish:
        """Start a gather whose communication may overlap what runs until it is finished.

        Args:
            leaves: As for `gather`.
            specs: As for `gather`.

        Returns:
            A function that finishes and returns gather's result. It must not start communication itself: when it is
            called may depend on a rank's data. If the class defines gather alone, all of it is done at the start.
        """
        return _derive(self, "start_gather", leaves, specs)

    def start_scatter(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Start a scatter whose communication may overlap what runs until it is finished.

        Args:
            *args: As for `scatter`.
            **kwargs: As for `scatter`.

        Returns:
            A function that finishes and returns scatter's result. If the class defines scatter alone, all of it is
            done at the start.
        """
        return _derive(self, "start_scatter", *args, **kwargs)

    @cached_property
    def _foreign_names(self) -> Sequence[str]:
        foreign = [type(part).__name__ for part in walk_parts(self) if not isinstance(part, BuiltIn)]
        return tuple(dict.fromkeys(foreign))

    def init(self, grad: torch.Tensor) -> Tree:
        """Make the state of one leaf.

        Args:
            grad: Zeros in the shape, on the device and in the stored dtype of gradients that scatter is given.

        Returns:
            A tree of tensors, this rank's own; None where the leaf needs none.
        """
        return None


@dataclass(frozen=True)
class Wrapped(ShardTransform):
    """Does all that another transform does; subclass it to do a part otherwise, such as how gradients are summed.

    If a subclass defines gather without start_gather, or scatter without start_scatter, that half does not overlap what
    runs beside it.

    Attributes:
        inner: The other transform.

    >>> import torch, fshard as fs
    >>> class Coarse(fs.Wrapped):  # leaves travel as bfloat16
    ...     def gather(self, leaves, specs):
    ...         return [full.float() for full in self.inner.gather([leaf.bfloat16() for leaf in leaves], specs)]
    >>> strategy = Coarse(fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> params = fs.shard({"w": torch.tensor([1.0, 1 / 3])}, strategy)
    >>> fs.gather(params), fs.unshard(params)
    ({'w': tensor([1.0000, 0.3340])}, {'w': tensor([1.0000, 0.3333])})
    """

    inner: ShardTransform

    # Both halves are those of the other transform, so a subclass need not say how gradients come back.
    scatter = ShardTransform.scatter

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes that the other transform communicates over."""
        return self.inner.axes

    @property
    def storage(self) -> Storage | None:
        """The devices that the other transform keeps shards on and computes with."""
        return self.inner.storage

    def layout(self, spec: Spec) -> Spec:
        """Store a leaf as the other transform does."""
        return self.inner.layout(spec)

    def init(self, grad: torch.Tensor) -> Tree:
        """Make the other transform's state."""
        return self.inner.init(grad)


class BuiltIn(ShardTransform):
    """A transform of this package, which keeps none of the tensors that it is given or returns."""


class Container(BuiltIn):
    """A transform of this package that is made of others, and whose state is that of its parts.

    Attributes:
        stages: The others, storage first.
    """

    stages: tuple[ShardTransform, ...]


def expect_transform(api_name: str, argument: str, value: Any) -> None:
    """Refuse an argument that is no transform, such as a class of them."""
    is_transform = isinstance(value, ShardTransform)
    expect(is_transform, api_name, f"{argument} to be a ShardTransform such as fs.zero2(mesh)", describe(value))


def lay_out(transform: ShardTransform, spec: Spec) -> Spec:
    """Lay out a leaf by a transform, and refuse what is no spec of the leaf's shape."""
    laid_out = transform.layout(spec)
    shape = getattr(laid_out, "shape", None)
    if shape != spec.shape:
        name = type(transform).__name__
        raise LayoutError(got=f"one of shape {shape}", expected=f"{name}.layout to return a Spec of shape {spec.shape}")
    return laid_out


def field_values(transform: ShardTransform) -> Iterator[Any]:
    """List the values in a transform's fields, and in tuples there."""
    for field in fields(transform):
        value = getattr(transform, field.name)
        if type(value) is tuple:
            yield from value
        else:
            yield value


def walk_parts(transform: ShardTransform) -> Iterator[ShardTransform]:
    """List all transforms in a transform, the one next to storage first, and the transform itself last."""
    for value in field_values(transform):
        if isinstance(value, ShardTransform):
            yield from walk_parts(value)
    yield transform


def foreign_names(transform: Any) -> Sequence[str]:
    """List the classes of a transform's parts that are not of this package, read off its structure once.

    Args:
        transform: The transform of a spec; None has no parts.

    Returns:
        The names of the classes, each once.
    """
    if transform is None:
        return ()
    return transform._foreign_names
