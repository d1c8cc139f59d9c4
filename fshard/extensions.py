"""Public names of extensions: the modules that hold them are imported when a name is first asked for."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

# By the module that shows a name and the name; a module is shown itself where its last part is the name.
MODULES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("fshard", "adafactor"): "fshard.ext.optim.adafactor",
        ("fshard", "from_dtensor"): "fshard.ext.interop.dtensor",
        ("fshard", "lamb"): "fshard.ext.optim.trust",
        ("fshard", "lars"): "fshard.ext.optim.trust",
        ("fshard", "moe"): "fshard.ext.parallel.moe",
        ("fshard", "pipeline"): "fshard.ext.parallel.pipeline",
        ("fshard", "plan"): "fshard.ext.plan.plan",
        ("fshard", "quantize"): "fshard.ext.quantize",
        ("fshard", "ring_attention"): "fshard.ext.parallel.attention",
        ("fshard", "ring_positions"): "fshard.ext.parallel.attention",
        ("fshard", "scale_by_factored_rms"): "fshard.ext.optim.adafactor",
        ("fshard", "scale_by_trust_ratio"): "fshard.ext.optim.trust",
        ("fshard", "tensor_parallel"): "fshard.ext.parallel.tensor",
        ("fshard", "to_dtensor"): "fshard.ext.interop.dtensor",
        ("fshard", "trace"): "fshard.ext.trace.trace",
        ("fshard", "ulysses"): "fshard.ext.parallel.attention",
        ("fshard", "vocab_parallel_cross_entropy"): "fshard.ext.parallel.vocabulary",
        ("fshard", "vocab_parallel_embedding"): "fshard.ext.parallel.vocabulary",
        ("fshard", "whole"): "fshard.ext.optim.whole",
        ("fshard", "with_init_weights"): "fshard.ext.interop.init_weights",
        ("fshard.checkpoint", "from_optimizer_state_dict"): "fshard.ext.interop.optimizer_state",
        ("fshard.checkpoint", "load_dcp"): "fshard.ext.interop.dcp",
        ("fshard.checkpoint", "load_huggingface"): "fshard.ext.interop.huggingface",
        ("fshard.checkpoint", "save_dcp"): "fshard.ext.interop.dcp",
        ("fshard.checkpoint", "save_huggingface"): "fshard.ext.interop.huggingface",
        ("fshard.checkpoint", "to_optimizer_state_dict"): "fshard.ext.interop.optimizer_state",
        ("fshard.testing", "assert_budget"): "fshard.ext.plan.plan",
        ("fshard.testing", "assert_same_bits"): "fshard.ext.same_bits",
    }
)


def resolver(shown_by: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that shows names of extensions.

    Args:
        shown_by: The module's name.

    Returns:
        The function, which keeps what it has found in the module.
    """

    def resolve(name: str) -> Any:
        if (shown_by, name) not in MODULES:
            raise AttributeError(f"module {shown_by!r} has no attribute {name!r}")
        module = import_module(MODULES[shown_by, name])
        found = getattr(module, name, module)
        setattr(sys.modules[shown_by], name, found)
        return found

    return resolve
