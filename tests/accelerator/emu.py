"""The device "emu": builds it, and gives torch the functions that it expects of an accelerator."""

import importlib.util
import os
import subprocess
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("emu.cpp")


def build(folder: Path) -> Path:
    """Compile the device."""
    library = folder / "emu.so"
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    names = ("c10", "torch_cpu", "torch", "torch_python")
    subprocess.run(
        [
            *("g++", "-std=c++20", "-shared", "-fPIC", "-O0", "-DTORCH_EXTENSION_NAME=emu", "-o", str(library)),
            *(f"-I{path}" for path in includes),
            *(str(SOURCE), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in names)),
        ],
        check=True,
        timeout=280,
    )
    return library


# The device's own generator. Kernels do not draw from it, so programs draw explicitly.
GENERATOR = torch.Generator()


class _Module(ModuleType):
    """torch.emu: what torch asks of an accelerator."""

    is_available = is_initialized = staticmethod(lambda: True)
    # By which torch.utils.checkpoint finds out whether there are generators to keep.
    _initialized = True
    device = staticmethod(lambda _: nullcontext())
    device_count = staticmethod(lambda: int(os.environ.get("EMU_DEVICES", 8)))
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda _: None)
    manual_seed = manual_seed_all = staticmethod(GENERATOR.manual_seed)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_rng_state = staticmethod(lambda device=None: GENERATOR.get_state())
    set_rng_state = staticmethod(lambda state, device=None: GENERATOR.set_state(state))
    # A test may say so. There are no graphs of this device.
    is_capturing = False
    is_current_stream_capturing = property(lambda self: lambda: self.is_capturing)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    # FSDP2 asks the module of a device for these.
    Stream = staticmethod(lambda priority=0: torch.Stream("emu"))
    Event = staticmethod(lambda: torch.Event("emu"))
    current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream())
    stream = staticmethod(lambda stream: stream)


def load(library: Path) -> ModuleType:
    """Make "emu" a device of this process, with collectives.

    Args:
        library: What `build` returned.

    Returns:
        A module with take_events(): what ran on the device, and when the host waited for it. Its allocated_bytes() and
        peak_bytes() count memory of the device, and reset_peak() begins a new peak. After run_late(seed), streams run
        late, in an order that the seed decides; run_at_once() ends this.
    """
    spec = importlib.util.spec_from_file_location("emu", library)
    emu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emu)
    torch.utils.rename_privateuse1_backend("emu")
    torch._register_device_module("emu", _Module("torch.emu"))
    torch.utils.generate_methods_for_privateuse1_backend()

    def make(store, rank, size, timeout):
        return emu.backend_over(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("emuccl", make, devices=["emu"])
    return emu
