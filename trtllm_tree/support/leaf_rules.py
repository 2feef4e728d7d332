"""What each attention leaf can serve, as numbers: leaves refuse by this table; `check` and the support page read it.

Must not know torch, nor how a leaf computes: dtypes are names, a GPU is its compute capability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trtllm_tree.support.report import Refused, Supported, TreeSupport

Capability = tuple[int, int]

FP8 = "float8_e4m3fn"
HALF_DTYPES = ("bfloat16", "float16")
FLOAT_DTYPES = (*HALF_DTYPES, "float32")
# Triton widens E4M3 from here on.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Package:
    """An optional package that a leaf calls: its import name, and how to get it."""

    name: str
    remedy: str


FLASHINFER = Package("flashinfer", "install flashinfer-python >= 0.6.12")
TOKENSPEED_MLA = Package("tokenspeed_mla", "install tokenspeed_mla >= 2.0 with nvidia-cutlass-dsl")


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """One kind of layer as a leaf sees it.

    Attributes:
        num_heads: Hq.
        num_kv_heads: Hkv; 1 for a latent cache.
        head_dim: D; for a latent cache Dqk, its rotary channels included.
        page_size: slots of a page.
        dtype: of queries and outputs.
        kv_dtype: of the cache.
        value_dim: Dv, leading channels of a latent row that are its value (MLA); None for GQA.
        sliding_window: rows see the last keys only.
        sinks: one learned logit a head joins the softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    kv_dtype: str
    value_dim: int | None = None
    sliding_window: bool = False
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class LeafRules:
    """The rules of one leaf; an empty one allows everything.

    Attributes:
        what: how it attends.
        cache: the caches that it reads: grouped heads (gqa), latent rows (mla) or any.
        needs: the GPU in words, "" if none is needed.
        exactly: compute capabilities that its kernels exist for.
        at_least: the oldest compute capability that they run on.
        head_dims: allowed D.
        latent_dims: allowed (Dqk, Dv).
        max_value_dim: largest Dv of a latent row, for a leaf that reads both caches.
        page_sizes: allowed page sizes.
        max_head_ratio: largest Hq / Hkv.
        max_heads: largest Hq, `other_heads` aside.
        other_heads: Hq allowed above `max_heads`.
        dtypes: allowed dtypes of queries.
        fp8_dtypes: those among them that an FP8 cache goes with.
        package: the optional package that it calls.
        host_planned: lengths are read on the host before every forward, so it runs in no CUDA graph.
        sliding_window: can serve layers with a sliding window.
        sinks: can serve layers with attention sinks.
    """

    what: str
    cache: Literal["gqa", "mla", "any"]
    needs: str = ""
    exactly: tuple[Capability, ...] = ()
    at_least: Capability = (0, 0)
    head_dims: tuple[int, ...] = ()
    latent_dims: tuple[tuple[int, int], ...] = ()
    max_value_dim: int | None = None
    page_sizes: tuple[int, ...] = ()
    max_head_ratio: int | None = None
    max_heads: int | None = None
    other_heads: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    fp8_dtypes: tuple[str, ...] = HALF_DTYPES
    package: Package | None = None
    host_planned: bool = False
    sliding_window: bool = False
    sinks: bool = False

    def runs_on(self, capability: Capability | None) -> bool:
        """Whether its kernels run on a GPU of this compute capability; None is a machine without a GPU."""
        if not self.needs:
            return True
        if capability is None:
            return False
        return capability in self.exactly if self.exactly else capability >= self.at_least

    def device_reasons(self, capability: Capability | None, device: str = "cpu") -> list[str]:
        """Why it cannot run on this GPU, or on `device` where there is none."""
        if self.runs_on(capability):
            return []
        if capability is None:
            return [f"needs {self.needs}, and this is {device}"]
        major, minor = capability
        return [f"needs {self.needs}, and this GPU has compute capability {major}.{minor}"]

    def fp8_reasons(self, shape: CallShape, capability: Capability | None) -> list[str]:
        """Why our own kernels cannot read an FP8 cache on this GPU; every leaf's cascade runs one of them there."""
        if shape.kv_dtype != FP8 or capability is None:
            return []
        reasons = []
        if capability < FP8_CAPABILITY:
            reasons.append(f"{FP8} needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}")
        # Leaves that know no such query say so themselves.
        if shape.dtype not in HALF_DTYPES and shape.dtype in self.fp8_dtypes:
            reasons.append(f"our kernels read {FP8} under a 16-bit dtype only")
        return reasons

    def shape_reasons(self, shape: CallShape) -> list[str]:
        """Why it cannot serve layers of this shape; empty if it can."""
        reasons = self._latent_reasons(shape) if self.cache == "mla" else self._grouped_reasons(shape)
        if shape.sliding_window and not self.sliding_window:
            reasons.append("serves no sliding window")
        if shape.sinks and not self.sinks:
            reasons.append("serves no attention sinks")
        return reasons + self._dtype_reasons(shape)

    def _grouped_reasons(self, shape: CallShape) -> list[str]:
        if shape.value_dim is not None:
            return self._any_latent_reasons(shape)
        reasons = self._page_reasons(shape)
        ratio, rest = divmod(shape.num_heads, shape.num_kv_heads)
        if rest:
            reasons.append(f"{shape.num_heads} query heads are no multiple of {shape.num_kv_heads} KV heads")
        elif self.max_head_ratio is not None and ratio > self.max_head_ratio:
            reasons.append(f"{ratio} query heads a KV head: at most {self.max_head_ratio}")
        if self.head_dims and shape.head_dim not in self.head_dims:
            reasons.append(f"head_dim {shape.head_dim}: must be one of {_list(self.head_dims)}")
        return reasons

    def _any_latent_reasons(self, shape: CallShape) -> list[str]:
        """Of a leaf that reads grouped heads, and perhaps latent rows too."""
        if self.cache != "any":
            return ["serves no latent (MLA) cache"]
        reasons = self._page_reasons(shape)
        if self.max_value_dim is not None and (shape.value_dim or 0) > self.max_value_dim:
            reasons.append(f"kv_lora_rank {shape.value_dim}: at most {self.max_value_dim}")
        return reasons

    def _latent_reasons(self, shape: CallShape) -> list[str]:
        if shape.value_dim is None or shape.num_kv_heads != 1:
            return ["serves latent (MLA) caches only"]
        reasons = self._page_reasons(shape)
        if (shape.head_dim, shape.value_dim) not in self.latent_dims:
            allowed = " or ".join(f"({value}, {head - value})" for head, value in self.latent_dims)
            found = (shape.value_dim, shape.head_dim - shape.value_dim)
            reasons.append(f"(kv_lora_rank, rotary channels) = {found}: must be {allowed}")
        heads = shape.num_heads
        if self.max_heads is not None and heads > self.max_heads and heads not in self.other_heads:
            limits = ", or ".join(map(str, (self.max_heads, *self.other_heads)))
            reasons.append(f"{heads} query heads: at most {limits}")
        return reasons

    def _page_reasons(self, shape: CallShape) -> list[str]:
        if not self.page_sizes or shape.page_size in self.page_sizes:
            return []
        return [f"page size {shape.page_size}: must be one of {_list(self.page_sizes)}"]

    def _dtype_reasons(self, shape: CallShape) -> list[str]:
        reasons = []
        if shape.dtype not in self.dtypes:
            reasons.append(f"dtype {shape.dtype}: must be {' or '.join(self.dtypes)}")
        unscaled_fp8 = shape.kv_dtype == FP8 and shape.dtype in self.fp8_dtypes
        if shape.kv_dtype != shape.dtype and not unscaled_fp8:
            under = "any dtype" if {*FLOAT_DTYPES} <= {*self.fp8_dtypes} else "a 16-bit dtype"
            rule = f"must be the same, or {FP8} (unscaled) under {under}"
            reasons.append(f"KV cache dtype {shape.kv_dtype} under {shape.dtype}: {rule}")
        return reasons


_NEEDS_BLACKWELL, _BLACKWELL = "SM100 or SM103 (B200, B300)", ((10, 0), (10, 3))

LEAF_RULES = {
    "trtllm_gen": LeafRules(
        what="FlashInfer's trtllm-gen decode gives a causal prefix partial",
        cache="gqa",
        needs=_NEEDS_BLACKWELL,
        exactly=_BLACKWELL,
        head_dims=(64, 128, 256),
        page_sizes=(16, 32, 64),
        max_head_ratio=32,
        dtypes=HALF_DTYPES,
        package=FLASHINFER,
    ),
    "trtllm_gen_mla": LeafRules(
        what="FlashInfer's trtllm-gen MLA decode gives a causal prefix partial",
        cache="mla",
        needs=_NEEDS_BLACKWELL,
        exactly=_BLACKWELL,
        latent_dims=((576, 512), (320, 256)),
        page_sizes=(32, 64),
        max_heads=64,
        other_heads=(128,),
        dtypes=("bfloat16",),
        package=FLASHINFER,
    ),
    "cute_mla": LeafRules(
        what="the CuTe DSL MLA decode of tokenspeed_mla gives a causal prefix partial",
        cache="mla",
        needs=_NEEDS_BLACKWELL,
        exactly=_BLACKWELL,
        latent_dims=((576, 512),),
        page_sizes=(16, 32, 64),
        max_heads=128,
        dtypes=HALF_DTYPES,
        package=TOKENSPEED_MLA,
    ),
    "triton": LeafRules(
        what="our tree_decode kernel does prefix and masked window in one pass",
        cache="any",
        needs="compute capability 8.0",
        at_least=(8, 0),
        head_dims=(64, 80, 96, 128, 256),
        max_value_dim=512,
        page_sizes=(16, 32, 64),
    ),
    "flashinfer_fa2": LeafRules(
        what="FlashInfer's FA2 paged prefill gives a full prefix partial, planned on the host",
        cache="gqa",
        needs="SM80 or newer",
        at_least=(8, 0),
        head_dims=(64, 128, 256),
        dtypes=HALF_DTYPES,
        package=FLASHINFER,
        host_planned=True,
    ),
    "reference": LeafRules(
        what="torch gives a prefix partial on any device",
        cache="any",
        fp8_dtypes=FLOAT_DTYPES,
        sliding_window=True,
        sinks=True,
    ),
}

# What each host tries, in this order.
HOST_LEAVES = {
    "embedded": ("triton", "reference"),
    "tensorrt_llm": ("trtllm_gen", "trtllm_gen_mla", "triton"),
}
# The GPUs that a host runs trees on, where not all that its leaves run on.
HOST_GPUS: dict[str, tuple[Capability, ...]] = {"tensorrt_llm": ((9, 0), *_BLACKWELL)}


@dataclass(frozen=True)
class PlannedLeaf:
    """The leaf that would serve, before anything is loaded: a `support.resolve.Backend` without torch.

    Attributes:
        name: the leaf, or all that were tried where none can serve.
        reasons: why none can serve; empty where one can.
    """

    name: str
    reasons: tuple[str, ...] = ()

    def tree_support(self) -> TreeSupport:
        """Verify and lanes are one attention."""
        return leaf_support(self.reasons)

    def child_backends(self) -> Sequence[PlannedLeaf]:
        """A leaf has none."""
        return ()


def plan_leaf(names: Sequence[str], shape: CallShape, capability: Capability | None) -> PlannedLeaf:
    """The first leaf of `names` that can serve `shape` on a GPU of this capability; None is a CPU."""
    reasons = []
    for name in names:
        found = leaf_reasons(name, shape, capability)
        if not found:
            return PlannedLeaf(name)
        reasons.append(f"{name}: {', '.join(found)}")
    return PlannedLeaf(" or ".join(names), tuple(reasons))


def plan_host_leaf(host: str, shape: CallShape, capability: Capability | None) -> PlannedLeaf:
    """The leaf that `host` takes for `shape` on a GPU of this capability; None is a CPU."""
    names, gpus = HOST_LEAVES[host], HOST_GPUS.get(host)
    if gpus is None or capability is None or capability in gpus:
        return plan_leaf(names, shape, capability)
    known = " or ".join(f"{major}.{minor}" for major, minor in gpus)
    rule = f"trees run on compute capability {known} there, and this GPU has {capability[0]}.{capability[1]}"
    return PlannedLeaf(" or ".join(names), (rule,))


def leaf_reasons(name: str, shape: CallShape, capability: Capability | None) -> list[str]:
    """Why a leaf cannot serve `shape` on a GPU of this capability; None is a CPU."""
    rules = LEAF_RULES[name]
    return (
        rules.device_reasons(capability) + rules.fp8_reasons(shape, capability) + rules.shape_reasons(shape)
    )


def leaf_support(reasons: Sequence[str]) -> TreeSupport:
    """One answer for verify and lanes: refused with every reason, or supported if there is none."""
    answer = Refused("; ".join(reasons)) if reasons else Supported()
    return TreeSupport(verify=answer, lanes=answer)


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
