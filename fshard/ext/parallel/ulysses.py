"""Attention by exchanges of heads for time, after Jacobs et al. 2023 (https://arxiv.org/abs/2309.14509)."""

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard.ext.parallel.attention import check_four_dims
from fshard.extend import check_axis, describe, expect


def ulysses(attention: Callable[..., torch.Tensor], axis: fs.Axis) -> Callable[..., torch.Tensor]:
    """Make attention over a sequence whose pieces ranks hold of one over whole sequences: each gets some of the heads.

    Two exchanges of all ranks bring the whole time of these heads and take the result back, which costs less traffic
    than a ring, but no more ranks than heads. Pieces lie in rank order.

    Args:
        attention: Called as attention(q, k, v, **keywords) on tensors of shape (batch, heads, time, head dim), as
            torch's scaled_dot_product_attention; returns the result for q.
        axis: The mesh axis that splits the sequence.

    Returns:
        A function of the same arguments, for tensors of this rank's time and of all heads.

    Raises:
        ValueError: by the function returned, if the ranks do not divide the heads of a tensor.

    >>> import torch, fshard as fs
    >>> attention = torch.nn.functional.scaled_dot_product_attention
    >>> q, k, v = torch.arange(48.0).sin().reshape(3, 1, 2, 4, 2)  # batch 1, two heads, time 4, head dim 2
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"cp": -1}, device="cpu"))
    ...     return fs.ulysses(attention, axis)(*(x.chunk(2, dim=2)[fs.axis_index(axis)] for x in (q, k, v)))
    >>> pieces = fs.testing.spmd(program, world=2)
    >>> pieces[0].shape, torch.allclose(torch.cat(pieces, dim=2), attention(q, k, v))
    (torch.Size([1, 2, 2, 2]), True)
    """
    expect(callable(attention), "ulysses", "attention to be a function", describe(attention))
    check_axis("ulysses", axis)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> torch.Tensor:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_four_dims("ulysses", name, tensor)
            needed = f"heads of {name}, its dim 1, to be a multiple of {axis.size}, the ranks of {axis.name!r}"
            remedy = "repeat or pad heads, or use fs.ring_attention"
            expect(tensor.shape[1] % axis.size == 0, "ulysses", needed, str(tensor.shape[1]), remedy)
        whole = attention(*fs.all_to_all((q, k, v), axis, 1, 2), **keywords)
        check_four_dims("ulysses", "the result of attention", whole)
        return fs.all_to_all(whole, axis, 2, 1)

    return run
