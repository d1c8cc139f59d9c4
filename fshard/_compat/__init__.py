"""Every private torch API that fshard uses, each with the versions it was checked on."""

# Checked on 2.13. torch.distributed's own functional collectives are built on it.
from torch._C._distributed_c10d import _register_work as register_work

# Checked on 2.13. It keeps the address of a storage that is gone from being given to another.
from torch.multiprocessing.reductions import StorageWeakRef

# Checked on 2.13. The relative and absolute tolerance of torch.testing.assert_close for a dtype.
from torch.testing._comparison import default_tolerances

# Checked on 2.13.
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from fshard._compat.autograd import (
    any_dual,
    below_autograd,
    checkpoints,
    copied_as_it_is,
    divide_in_place,
    hook_of,
    in_reentrant_checkpoint,
    is_batched,
    is_differentiated,
    is_held_elsewhere,
    is_transformed,
    next_sequence_number,
    outside_selective_checkpoint,
    outside_transforms,
    random_state,
    refuses_saved_tensor_hooks,
    register_torch_pytree,
    running_sequence_number,
    share_memory,
    shared_dual_level,
    shares_memory,
    storage_key,
    transforms_active,
    version,
    versions,
    without_saved_tensor_hooks,
)
from fshard._compat.collectives import (
    CUT,
    Pair,
    cut,
    default_store,
    fake_process_groups,
    group_devices,
    group_of_all,
    group_of_row,
    group_rank,
    group_ranks,
    group_size,
    make_pair,
    release_groups_at_exit,
    resolve_process_group,
    start_by_backend,
    start_swap,
    texts_in_store,
    timeout_of,
    wait_tensor,
)
from fshard._compat.fake import fake_maker, is_fake, seen_trunc_normal
from fshard._compat.inductor import compile_by_inductor
from fshard._compat.modules import (
    forget_flat_weights,
    init_optimizer_state,
    is_compiled,
    parameters_of,
    set_flat_weights,
)
from fshard._compat.threads import (
    ThreadedCollective,
    keeping_thread_object,
    thread_object,
    threaded_process_groups,
)
from fshard._compat.tracing import (
    RESHAPES,
    WAIT_TENSOR,
    Argument,
    arguments_of,
    asks_for_values,
    changes_geometry,
    guards_of,
    is_effect,
    is_entrywise,
    is_linearizing,
    is_tracing,
    make_graph_of,
    outside_modes,
    python_function,
    sees_programs,
    trace_notes,
    written,
)
