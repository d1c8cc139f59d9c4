"""Private APIs of torch and transformers that extensions use, each with the versions it was checked on."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# A copy to another dtype or device.
TO_COPY = torch.ops.aten._to_copy.default
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fuses_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these. Checked on 2.13."""
    return q.is_cpu and q.dtype in _DTYPES and q.shape[-1] == v.shape[-1]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and each query's log-sum-exp of scores, which is wide where the tensors are narrow. Checked on 2.13."""
    q, k, v = map(_dense, (q, k, v))
    out, logs = _FORWARD(q, k, v, 0.0, causal, scale=scale)
    return out, logs


def fused_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of q, k and v; `out` and `logs` may be those of all keys, of which these are some.

    Checked on 2.13.
    """
    grad, q, k, v = map(_dense, (grad, q, k, v))
    dq, dk, dv = _BACKWARD(grad, q, k, v, out, logs, 0.0, causal, scale=scale)
    return dq, dk, dv


def _dense(tensor: Tensor) -> Tensor:
    """The kernel reads a head's numbers one after another."""
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def is_transformed(tensor: Tensor) -> bool:
    """Whether a torch.func transform holds a tensor, whose values then are not to be had. Checked on 2.13."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def weight_conversions(module: Any) -> tuple[list[Any], list[Any]]:
    """The renamings and the converters of a model of transformers, from files to the model.

    Checked on transformers 5.23.
    """
    loading = import_module("transformers.core_model_loading")
    transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    return renamings, converters


def weight_order(name: str) -> Any:
    """The key by which transformers sorts the names of weights. Checked on transformers 5.23."""
    return import_module("transformers.core_model_loading").dot_natural_key(name)


def rename_weight(
    name: str,
    module: Any,
    expected: Mapping[str, Any],
    renamings: Sequence[Any],
    converters: Sequence[Any],
) -> tuple[str, str | None]:
    """The name that a model has for a weight of files, and the pattern of the converter that takes it, or None.

    Checked on transformers 5.23.
    """
    loading = import_module("transformers.core_model_loading")
    new_name, pattern = loading.rename_source_key(name, renamings, converters, module.base_model_prefix, expected)
    return new_name, pattern


def drop_ignored_names(module: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Leave out the names that a model of transformers lets files lack, and those that it lets them have besides.

    Checked on transformers 5.23.
    """
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    module._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def list_unsaved_names(module: Any) -> frozenset[str]:
    """The names that a model of transformers does not save. Checked on transformers 5.23."""
    return frozenset(module._keys_to_ignore_on_save or ())


def drop_tied_weights(state: dict[str, Tensor], module: Any) -> dict[str, Tensor]:
    """Leave one name of each tied weight, the one that a model of transformers writes to files.

    Checked on transformers 5.23.
    """
    modeling = import_module("transformers.modeling_utils")
    return dict(modeling.remove_tied_weights_from_state_dict(state, module))


def revert_conversions(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict of a model of transformers to the weights that it writes to files.

    Checked on transformers 5.23.
    """
    return dict(import_module("transformers.core_model_loading").revert_weight_conversion(module, state))


def schema_of(function: Any) -> Any:
    """The schema of an operator of torch's: its `arguments`, and its results as `returns`. Checked on 2.13.

    None of what TorchScript alone has, such as `aten.add.int` on two numbers: no trace has it.
    """
    if not torch._C._dispatch_has_kernel(function.name()):
        return None
    return function._schema


def lazy_module(graph: Graph) -> GraphModule:
    """A module of a graph, whose code is generated only if it is run. Checked on 2.13."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(torch.nn.Module(), graph)


def compile_by_inductor(module: Any, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile a graph of operators to kernels, in an order that Inductor chooses. Checked on 2.13.

    Inductor is imported here, because that takes seconds.

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
    first_result = output.args[0][0]
    fake_mode = first_result.meta["val"].fake_mode
    table = select_decomp_table()
    trace = make_fx(module, decomposition_table=table, tracing_mode="real")
    with fake_mode:
        lowered = trace(*examples)
    lowered.graph.eliminate_dead_code()
    (output,) = lowered.graph.find_nodes(op="output")
    number_of_results = len(output.args[0])
    output.meta["user_visible_output_idxs"] = list(range(number_of_results))
    run = compile_fx_inner(lowered, list(examples))

    def compiled(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return run(list(tensors))

    return compiled
