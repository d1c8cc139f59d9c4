"""Every private torch API that fshard uses, each with the versions it was checked on."""

# Checked on 2.13. torch.distributed's own functional collectives are built on it.
from torch._C._distributed_c10d import _register_work as register_work

# Checked on 2.13. It keeps the address of a storage that is gone from being given to another.
from torch.multiprocessing.reductions import StorageWeakRef

# Checked on 2.13.
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

# Checked on 2.13. Runs without dispatch modes, which a trace would write down.
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

# Checked on 2.13. Makes a class a node of torch's own pytrees, which torch.func maps over.
from torch.utils._pytree import register_pytree_node as register_torch_pytree

from fshard._compat.autograd import *
from fshard._compat.collectives import *
from fshard._compat.fake import *
from fshard._compat.launcher import *
from fshard._compat.layouts import *
from fshard._compat.modules import *
from fshard._compat.threads import *
from fshard._compat.tracing import *
