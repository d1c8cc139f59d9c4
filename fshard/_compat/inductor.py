"""Private APIs of Inductor, each with the versions it was checked on; imported late, because that takes seconds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def compile_by_inductor(module: Any, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph of operators to kernels, in the order that it has. Checked on 2.13.

    Args:
        module: A torch.fx.GraphModule that writes to no input.
        examples: Its inputs as fake tensors.
    """
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = examples[0].fake_mode if examples else None  # type: ignore[attr-defined]
    # Reordering for peak memory would put every gather next to its wait.
    with torch._inductor.config.patch(reorder_for_peak_memory=False):
        if mode is not None:
            with mode:
                module = make_fx(module, decomposition_table=select_decomp_table(), tracing_mode="real")(*examples)
        module.graph.eliminate_dead_code()
        compiled = compile_fx_inner(module, list(examples))
    return lambda *tensors: compiled(list(tensors))
