"""How a call is timed: inside a CUDA graph that goes through all buffer sets, so that every read is cold.

Owns graphs, events and the measured ceilings. It must not know any op.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch

from trtllm_tree.bench.ops.entry import Call, Ceilings

# What large kernels reach, not what a data sheet says. A GPU that is not here is held to its own measurement.
KNOWN_GPUS = {"H200": Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12)}
_MAX_PASSES = 64


def graph_passes(num_sets: int, floor_us: float) -> int:
    """How often one graph goes through its sets: about a millisecond of work, so that its launch hides.

    Two microseconds are what a small kernel takes at least.
    """
    return max(1, min(_MAX_PASSES, round(1000 / (num_sets * max(2.0, floor_us)))))


def median_us(calls: Sequence[Call], *, passes: int = 1, replays: int = 20) -> float:
    """Microseconds of one call: the median replay of the graph of all calls, divided by their number."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return 1000 * statistics.median(times) / (passes * len(calls))


def num_launches(call: Call) -> int | None:
    """Kernels, copies and fills of one eager call; None where the profiler sees no device activity."""
    return len(launches(call)) or None


def launches(call: Call) -> list[str]:
    """The names of the kernels, copies and fills that one eager call runs, in no particular order."""
    from torch.profiler import ProfilerActivity, profile

    # Compiles kernels and makes what is made once.
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.events() or []
    return [event.name for event in events if event.device_type.name == "CUDA"]


def measured_ceilings(*, replays: int = 10) -> Ceilings:
    """What this GPU reaches now, by a sum over 4 GiB and a bfloat16 product of 8192 cubed."""
    read_us, num_bytes = _time_of_a_read(replays)
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    matmul_us = median_us([lambda: torch.mm(left, right, out=product)], replays=replays)
    return Ceilings(bytes_per_s=1e6 * num_bytes / read_us, flops_per_s=1e6 * 2 * size**3 / matmul_us)


def _time_of_a_read(replays: int) -> tuple[float, int]:
    """(us, bytes) of a sum over 4 GiB, which are free again afterwards."""
    values, total = torch.zeros(2**30, device="cuda"), torch.zeros((), device="cuda")
    time_us = median_us([lambda: torch.sum(values, dim=0, out=total)], replays=replays)
    return time_us, values.numel() * values.element_size()


def ceilings_of(gpu: str, measured: Ceilings) -> Ceilings:
    """The ceilings that floors are computed from on the GPU of this name."""
    return next((known for name, known in KNOWN_GPUS.items() if name in gpu), measured)
