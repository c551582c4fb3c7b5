"""A CUDA platform without a card: loads the real extensions, fakes the capability."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

# What the extensions of vLLM 0.20.2 take from the driver's library.
DRIVER_SYMBOLS = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
]


def driver_stub(folder: Path) -> None:
    """Load a libcuda.so.1 whose functions all return 100, CUDA_ERROR_NO_DEVICE."""
    library = folder / "libcuda.so.1"
    if not library.exists():
        source = folder / "stub.c"
        source.write_text(
            "".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER_SYMBOLS)
        )
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source],
            check=True,
        )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def fake_cuda(capability: tuple[int, int], stub_folder: Path) -> type:
    """Make current_platform a CUDA platform of this capability."""
    # Without it vLLM counts no driver and switches Triton off.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    driver_stub(stub_folder)
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class FakeCuda(CudaPlatformBase):
        faked = capability

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*cls.faked)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "no card"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 96 << 30

        @classmethod
        def is_fully_connected(cls, device_ids):
            return True

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 188

    platforms._current_platform = FakeCuda()
    return FakeCuda
