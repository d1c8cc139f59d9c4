"""Public names of extensions, such as `fs.pipeline`: their modules are imported when a name is first asked for."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

# By the module that shows names and that of fshard.ext which holds them; the last part of one may be a name itself.
TABLE: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("fshard", "check.check"): "check",
        ("fshard", "chunked_loss"): "chunked_loss",
        ("fshard", "fit.fit"): "fit",
        ("fshard", "interop.dtensor"): "from_dtensor to_dtensor",
        ("fshard", "interop.init_weights"): "with_init_weights",
        ("fshard", "interop.no_split"): "no_split",
        ("fshard", "jit.graph"): "make_graph",
        ("fshard", "optim.adafactor"): "adafactor scale_by_factored_rms",
        ("fshard", "optim.native"): (
            "adam adamw add_decayed_weights clip_by_global_norm clip_by_norm clip_by_value scale_by_adam sgd"
        ),
        ("fshard", "optim.norms"): "global_norm leaf_norms",
        ("fshard", "optim.schedules"): "from_torch_scheduler schedules",
        ("fshard", "optim.trust"): "lamb lars scale_by_trust_ratio",
        ("fshard", "optim.whole"): "whole",
        ("fshard", "optim.wrappers"): "dynamic_loss_scale ema freeze masked partition skip_nonfinite",
        ("fshard", "parallel.attention"): "ring_attention ring_positions ulysses",
        ("fshard", "parallel.moe"): "moe",
        ("fshard", "parallel.pipeline"): "pipeline",
        ("fshard", "parallel.tensor"): "tensor_parallel",
        ("fshard", "parallel.vocabulary"): "vocab_parallel_cross_entropy vocab_parallel_embedding",
        ("fshard", "plan.plan"): "plan",
        ("fshard", "publish"): "publish receive",
        ("fshard", "quantize"): "quantize",
        ("fshard", "replay.diff"): "diff",
        ("fshard", "replay.verify"): "verify",
        ("fshard", "saved_graph"): "load_graph save_graph",
        ("fshard", "saved_graph.cache"): "graph_cache",
        ("fshard", "replay.replay"): "replay",
        ("fshard", "sample_ids"): "sample_ids",
        ("fshard", "trace.trace"): "trace",
        ("fshard.checkpoint", "interop.dcp"): "load_dcp save_dcp",
        ("fshard.checkpoint", "interop.huggingface"): "load_huggingface save_huggingface",
        ("fshard.checkpoint", "interop.optimizer_state"): "from_optimizer_state_dict to_optimizer_state_dict",
        ("fshard.checkpoint", "interop.state_dict"): "from_state_dict to_state_dict",
        ("fshard.checkpoint.manager", "memory.generations"): "open_memory",
        ("fshard.extend", "jit.graph"): "StepGraph find_lifetimes",
        ("fshard.extend", "optim.block_sums"): "sum_digits sum_powers",
        ("fshard.extend", "parallel.custom_call"): "custom_call differentiate",
        ("fshard.extend", "plan.plan"): "fake_axes lay_out_call",
        ("fshard.extend", "plan.report"): "Rates check_rates",
        ("fshard.extend", "plan.timeline"): "estimate_operator",
        ("fshard.init", "counter"): "draw_by_counter",
        ("fshard.jit", "fit.memory"): "MemoryReport",
        ("fshard.jit", "jit.inductor"): "compile_pieces",
        ("fshard.testing", "testing.assert_step"): "assert_step",
        ("fshard.testing", "testing.check_optimizer"): "check_optimizer",
        ("fshard.testing", "testing.compare"): "assert_matches_ddp assert_trees_close check_pure",
        ("fshard.testing", "testing.laws"): "TransformReport check_adjoint check_transform",
        ("fshard.testing", "testing.same_bits"): "assert_same_bits",
    }
)


def make_getattr(shown_by: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that shows names of extensions.

    Args:
        shown_by: The module's name.

    Returns:
        The function. It sets a name that it has looked up as an attribute of the module, so that it is called once.
    """
    modules: dict[str, str] = {}
    for (module_name, extension), names in TABLE.items():
        if module_name == shown_by:
            modules |= dict.fromkeys(names.split(), extension)

    def lookup(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {shown_by!r} has no attribute {name!r}")
        extension = import_module(f"fshard.ext.{modules[name]}")
        value = getattr(extension, name, extension)
        setattr(sys.modules[shown_by], name, value)
        return value

    return lookup
