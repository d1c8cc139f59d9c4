"""Private APIs of Inductor, each with the versions it was checked on; imported late, because that takes seconds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def compile_by_inductor(module: Any, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph of operators to kernels, in an order that Inductor chooses. Checked on 2.13.

    Args:
        module: A torch.fx.GraphModule that writes to no input; its results keep their strides.
        examples: Its inputs as fake tensors, or none.

    Returns:
        A function of the inputs that returns a sequence of the results.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    (output,) = module.graph.find_nodes(op="output")
    with output.args[0][0].meta["val"].fake_mode:
        lowered = make_fx(module, decomposition_table=select_decomp_table(), tracing_mode="real")(*examples)
    lowered.graph.eliminate_dead_code()
    (output,) = lowered.graph.find_nodes(op="output")
    number_of_results = len(output.args[0])
    output.meta["user_visible_output_idxs"] = list(range(number_of_results))
    run = compile_fx_inner(lowered, list(examples))

    def compiled(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return run(list(tensors))

    return compiled
