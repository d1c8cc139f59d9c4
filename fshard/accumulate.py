"""accumulate: the loss and gradients of several microbatches, as if they were one batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fshard.checks import check_function, check_reduce, kind
from fshard.engine import code_of
from fshard.transforms.state import ABSENT, Absent
from fshard.tree import ReshardPolicy, Tree, flatten, is_sharded
from fshard.value_and_grad import Schedule, differentiate


def accumulate(
    f: Callable[..., Any],
    *,
    reduce: str = "mean",
    has_aux: bool = False,
    communicate: str | None = None,
    schedule: Schedule | None = None,
    transform_state: Tree | Absent = ABSENT,
) -> Callable[..., Any]:
    """Turn a local loss of one microbatch into a function of many: `value_and_grad` of their common objective.

    Activations of one microbatch are held at a time. The objective is the mean over microbatches and ranks, or with
    "weighted" the true mean over all items, however unequally they are spread. Gradients are added up in the dtype that
    they are reduced in, where that is wider than the one they are computed in, or stored in.

    Args:
        f: Called as f(params, microbatch, *args, **kwargs); returns this rank's scalar loss, or (sum, count) for
            "weighted".
        reduce: As for `value_and_grad`; "mean" and "sum" are over microbatches too.
        has_aux: Whether f returns (loss, aux) instead.
        communicate: "each" reduces gradients in every microbatch and sums shards of them, which needs least memory;
            "once" sums full gradients and reduces them in the last one, which sends least. None leaves it to the
            strategy: once for ZeRO-1, else each.
        schedule: As for `value_and_grad`.
        transform_state: As for `value_and_grad`; it goes from microbatch to microbatch where each is reduced.

    Returns:
        A function of (params, microbatches, *args, **kwargs), where microbatches is a sequence, as long on every rank.
        It returns (objective, grads), or ((objective, auxes), grads) with a list of every microbatch's aux; with
        `transform_state` the new state comes third. A leaf that was used in any microbatch has a gradient.

    Raises:
        ValueError: if `reduce` or `communicate` is unknown; by the function returned, if there are no microbatches, and
            as for `value_and_grad`.
    """
    check_function("accumulate", f)
    check_reduce(reduce, "accumulate")
    if communicate not in (None, "each", "once"):
        raise ValueError(f'accumulate: expected communicate to be "each", "once" or None, got {communicate!r}')

    def run(params: Tree, microbatches: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if not isinstance(microbatches, Sequence) or not microbatches:
            found = "none" if isinstance(microbatches, Sequence) else kind(microbatches)
            raise ValueError(f"accumulate: expected the microbatches to be a sequence of one or more, got {found}")
        functions = [partial(_on, f, microbatch, args, kwargs) for microbatch in microbatches]
        once = communicate == "once" or (communicate is None and not _reduces_early(params))
        value, auxes, *rest = differentiate(
            "accumulate",
            functions,
            params,
            reduce,
            has_aux,
            code=code_of(f),
            schedule=schedule,
            once=once,
            transform_state=transform_state,
        )
        return (value, auxes) if has_aux else value, *rest

    return run


def _on(f: Callable[..., Any], microbatch: Any, args: Any, kwargs: Any, params: Tree) -> Any:
    return f(params, microbatch, *args, **kwargs)


def _reduces_early(params: Tree) -> bool:
    policies = [leaf.spec.reshard or ReshardPolicy() for leaf in flatten(params).leaves if is_sharded(leaf)]
    return all(policy.early for policy in policies)
