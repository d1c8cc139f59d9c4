"""Dataclasses as nodes of pytrees."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from fshard.errors import expect
from fshard.tree.nodes import register_node

Class = TypeVar("Class", bound=type)


def register_dataclass(cls: Class, *, meta_fields: Sequence[str] | None = None) -> Class:
    """Register a dataclass as a pytree: for fshard's functions, for optree, and for torch.func.

    Follows jax.tree_util.register_dataclass. Use it as a decorator, above `@dataclass`.

    Args:
        cls: The dataclass. Each of its fields holds a tensor or a tree.
        meta_fields: The names of fields that hold something else, such as a number of heads. They are a part of the
            structure: trees with other values differ, and `fs.jit` traces once for each. None takes the fields that are
            declared with `dataclasses.field(metadata={"static": True})`.

    Returns:
        The class.

    Raises:
        ValueError: if `cls` is not a dataclass, a name is not the name of a field, or the class is registered already.

    >>> import torch, fshard as fs
    >>> from dataclasses import dataclass, field
    >>> @fs.register_dataclass
    ... @dataclass
    ... class Head:
    ...     weight: torch.Tensor
    ...     name: str = field(metadata={"static": True})
    >>> fs.tree_map(lambda x: x + 1, Head(torch.zeros(2), "lm_head"))
    Head(weight=tensor([1., 1.]), name='lm_head')
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(
            f"register_dataclass: cls must be a dataclass, got {getattr(cls, '__name__', repr(cls))}. Write "
            "@fs.register_dataclass above @dataclass, not below it."
        )
    names = [field.name for field in dataclasses.fields(cls)]
    if meta_fields is None:
        meta_fields = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static")]
    expect(
        isinstance(meta_fields, list | tuple | set | frozenset),
        "register_dataclass",
        "meta_fields to be a list of names of fields",
        f"{meta_fields!r:.40}",
    )
    unknown = sorted(set(map(str, meta_fields)) - set(names))
    if unknown:
        raise ValueError(
            f"register_dataclass: meta_fields names {unknown[0]!r}, which is not a field of {cls.__name__}. Its fields "
            f"are {names}."
        )
    static_names = [name for name in names if name in meta_fields]
    data_names = [name for name in names if name not in meta_fields]

    def values_of(node: Any, field_names: Iterable[str]) -> tuple[Any, ...]:
        return tuple([getattr(node, name) for name in field_names])

    def unflatten(static: Any, children: Iterable[Any]) -> Any:
        # Maps put placeholders into trees, which a constructor might refuse.
        node = object.__new__(cls)
        for name, value in zip([*data_names, *static_names], [*children, *static], strict=True):
            object.__setattr__(node, name, value)
        return node

    register_node(
        cls,
        lambda node: (values_of(node, data_names), values_of(node, static_names), tuple(data_names)),
        unflatten,
    )
    return cls
