"""Which GPUs this machine has, asked without torch: from the CUDA driver's Python bindings, or from nvidia-ml-py.

Both packages are optional, and so is a driver: what cannot be asked is no error.
"""

from __future__ import annotations

import importlib
from typing import Any

from trtllm_tree.support.leaf_rules import Capability


def gpu_capabilities() -> list[Capability] | None:
    """Compute capability of every GPU; None where neither package can tell."""
    for ask in (_from_driver, _from_nvml):
        found = ask()
        if found is not None:
            return found
    return None


def _from_driver() -> list[Capability] | None:
    """By cuda.bindings, which sees the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    driver = _module("cuda.bindings.driver")
    if driver is None:
        return None
    try:
        status, *_ = driver.cuInit(0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return None
        _, count = driver.cuDeviceGetCount()
        names = driver.CUdevice_attribute
        major = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        minor = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        devices = [driver.cuDeviceGet(index)[1] for index in range(count)]
        return [
            (driver.cuDeviceGetAttribute(major, device)[1], driver.cuDeviceGetAttribute(minor, device)[1])
            for device in devices
        ]
    # The bindings raise this where the driver's library is missing.
    except RuntimeError:
        return None


def _from_nvml() -> list[Capability] | None:
    """By nvidia-ml-py, which sees all GPUs."""
    nvml = _module("pynvml")
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _module(name: str) -> Any:
    """A module of an optional package, or None."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None
