"""What one line of the op benchmark is made of: a shape, what it costs at least, and the calls to time.

Owns the arithmetic of floors and of cold buffers. It must not know how time is measured, nor any single op.

Legend: B requests, N nodes or rows, K lanes, S draft steps, E entries, V vocabulary, P prefix keys, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]

# Several times the L2 cache of any GPU: with this much touched in turn, every read comes from memory.
COLD_BYTES = 256 * 2**20
# A call that touches less than COLD_BYTES / MAX_SETS is bound by latency, wherever its inputs lie.
MAX_SETS = 128
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float32": torch.float32,
    "int32": torch.int32,
}


@dataclass(frozen=True)
class Case:
    """One shape of one op. `dtype` is that of the inputs that make up its bytes (the KV cache, the logits)."""

    shape: Mapping[str, int]
    dtype: str = "int32"

    def __getitem__(self, name: str) -> int:
        return self.shape[name]

    def __str__(self) -> str:
        return " ".join([*(f"{name}={size}" for name, size in self.shape.items()), self.dtype])

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Cost:
    """The least that any implementation does: every input byte read once, every output byte written once.

    `flops` counts matrix arithmetic, a multiply-add as two; 0 for ops that have none.
    """

    bytes_moved: int
    flops: int = 0

    @property
    def num_sets(self) -> int:
        """Buffer sets that a measurement goes through in turn, so that none is in a cache."""
        return max(2, min(MAX_SETS, -(-COLD_BYTES // self.bytes_moved)))


@dataclass(frozen=True)
class Ceilings:
    """What a GPU reaches at best: bytes/s from memory, and FLOP/s of a large bfloat16 matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, cost: Cost) -> float:
        """No call of this cost ends sooner."""
        return 1e6 * max(cost.bytes_moved / self.bytes_per_s, cost.flops / self.flops_per_s)


@dataclass(frozen=True)
class Baseline:
    """Another way to the same end.

    Attributes:
        build: makes one call per buffer set; whatever it raises becomes the reason why there is no number.
        tolerance: largest relative difference (Frobenius) of its result from the op's; None where it computes
            something else, such as a decode of one row.
    """

    build: Callable[[], list[Call]]
    tolerance: float | None = None


@dataclass(frozen=True)
class Workload:
    """The op's calls, one per buffer set, each returning its result, and what to compare them with."""

    calls: list[Call]
    baselines: Mapping[str, Baseline] = field(default_factory=dict)


@dataclass(frozen=True)
class OpBench:
    """How one op is measured.

    Attributes:
        op: name of its folder under kernels/, or of a benchmark of several ops.
        tests: arguments of the pytest run that must pass first; the first is a file.
        cases: its shapes, the first `num_quick` of them for a quick run.
        cost: cost of a case.
        build: the workload of a case on the generator's device; (case, buffer sets, generator).
    """

    op: str
    tests: tuple[str, ...]
    cases: tuple[Case, ...]
    cost: Callable[[Case], Cost]
    build: Callable[[Case, int, torch.Generator], Workload]
    num_quick: int = 1


def normal(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Standard normal values on the generator's device."""
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    return values if dtype == torch.bfloat16 else values.to(dtype)


def random_ids(generator: torch.Generator, shape: tuple[int, ...], high: int) -> torch.Tensor:
    """Uniform int32 values below `high`."""
    return torch.randint(high, shape, generator=generator, device=generator.device, dtype=torch.int32)


def random_parents(generator: torch.Generator, batch: int, nodes: int) -> torch.Tensor:
    """Parents int32 [B, N] of random trees: every node hangs on a uniformly drawn earlier one."""
    device = generator.device
    draw = torch.rand(batch, nodes, generator=generator, device=device)
    parents = (draw * torch.arange(nodes, device=device)).int()
    parents[:, 0] = -1
    return parents


def page_table(generator: torch.Generator, batch: int, max_pages: int) -> torch.Tensor:
    """Page table int32 [B, max_pages] over B * max_pages pages in random order."""
    pages = torch.randperm(batch * max_pages, generator=generator, device=generator.device)
    return pages.view(batch, max_pages).int()
