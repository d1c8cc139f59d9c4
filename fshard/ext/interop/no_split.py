"""no_split: the units that a model of transformers declares."""

from torch import nn

__all__ = ["no_split"]


def no_split(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """List the units that a model of transformers declares: its layers, by the `_no_split_modules` of its classes.

    Args:
        model: The model, or a module with such models among its submodules, with values or on the meta device.

    Returns:
        The classes of submodules, for `functionalize(model, units=fs.no_split(model))`.

    Raises:
        ValueError: if no submodule is of a class that is declared.

    >>> class Block(nn.Linear): ...
    >>> class Model(nn.Sequential):
    ...     _no_split_modules = ["Block"]
    >>> [cls.__name__ for cls in no_split(Model(Block(2, 2), nn.ReLU(), Block(2, 2)))]
    ['Block']
    """
    # transformers declares classes by their names.
    declared: set[str] = set()
    for part in model.modules():
        declared.update(getattr(part, "_no_split_modules", None) or ())
    units: dict[type[nn.Module], None] = {}
    for part in model.modules():
        if part is not model and type(part).__name__ in declared:
            units[type(part)] = None
    if not units:
        text = f"{type(model).__name__} has no submodule of the classes that it declares in _no_split_modules"
        raise ValueError(f"no_split: {text}, {sorted(declared)}; pass units= another rule")
    return tuple(units)
