"""Compute capabilities without torch: from the driver's bindings, else from nvidia-ml-py, else not known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

import pytest

from trtllm_tree.support.gpus import gpu_capabilities

Capability = tuple[int, int]


class NvmlError(Exception):
    """As pynvml's."""


def driver(found: Sequence[Capability], *, status: int = 0) -> ModuleType:
    module = ModuleType("cuda.bindings.driver")
    names = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    module.__dict__.update(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUdevice_attribute=names,
        cuInit=lambda flags: (status,),
        cuDeviceGetCount=lambda: (0, len(found)),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetAttribute=lambda side, device: (0, found[device][side]),
    )
    return module


def nvml(found: Sequence[Capability], init: Callable[[], None] = lambda: None) -> ModuleType:
    module = ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(found),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda index: list(found[index]),
    )
    return module


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(driver: ModuleType | None = None, pynvml: ModuleType | None = None) -> None:
        for name, module in (("cuda.bindings.driver", driver), ("pynvml", pynvml)):
            # None makes an import fail as if the package were not installed.
            monkeypatch.setitem(sys.modules, name, module)
        if driver is not None:
            for name in ("cuda", "cuda.bindings"):
                monkeypatch.setitem(sys.modules, name, ModuleType(name))

    return install


def test_the_driver_is_asked_first(modules: Callable[..., None]) -> None:
    modules(driver([(9, 0), (10, 3)]), nvml([(8, 0)]))
    assert gpu_capabilities() == [(9, 0), (10, 3)]
    modules(driver([]), nvml([(8, 0)]))
    assert gpu_capabilities() == []


def test_nvml_is_asked_where_the_driver_cannot_be(modules: Callable[..., None]) -> None:
    modules(None, nvml([(8, 6)]))
    assert gpu_capabilities() == [(8, 6)]
    modules(driver([(9, 0)], status=100), nvml([(8, 6)]))
    assert gpu_capabilities() == [(8, 6)]


def test_a_machine_that_cannot_be_asked_is_not_known(modules: Callable[..., None]) -> None:
    def no_library() -> None:
        raise NvmlError("libnvidia-ml.so.1")

    modules(None, None)
    assert gpu_capabilities() is None
    modules(None, nvml([(9, 0)], no_library))
    assert gpu_capabilities() is None
