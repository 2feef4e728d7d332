"""Triton kernel of `rotate_append`: one program a row and tile of heads. It must not know what the rows are."""

from __future__ import annotations

import torch

from trtllm_tree.kernels._triton import INTERPRET, tl, triton

_BLOCK_H = 4


@triton.jit
def _turned(x_ptr, channel, in_head, heads_mask, cos, sin, F: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The channels of heads at `x_ptr` [H, 1] in float32, turned; `cos` and `sin` are [1, D]."""
    x = tl.load(x_ptr + channel, mask=heads_mask & in_head, other=0.0).to(tl.float32)
    if F > 0:
        if INTERLEAVED:
            partner, is_first = channel ^ 1, channel % 2 == 0
        else:
            partner, is_first = tl.where(channel < F, channel + F, channel - F), channel < F
        rotary = channel < 2 * F
        other = tl.load(x_ptr + partner, mask=heads_mask & rotary, other=0.0).to(tl.float32)
        turned = x * cos + tl.where(is_first, -other, other) * sin
        x = tl.where(rotary, turned, x)
    return x


@triton.jit
def _stored(x, DTYPE: tl.constexpr, CACHE_DTYPE: tl.constexpr):
    """`x` as the cache holds it: rounded to the rows' dtype first."""
    x = x.to(DTYPE)
    if CACHE_DTYPE != DTYPE:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    return x.to(CACHE_DTYPE)


@triton.jit
def rotate_append_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    num_heads,
    num_kv_heads,
    num_positions,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_cache_stride_p,
    k_cache_stride_h,
    k_cache_stride_s,
    v_cache_stride_p,
    v_cache_stride_h,
    v_cache_stride_s,
    q_out_stride_t,
    q_out_stride_h,
    D: tl.constexpr,
    F: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    channel = tl.arange(0, BLOCK_D)[None, :]
    in_head = channel < D
    cos, sin = 1.0, 0.0
    if F > 0:
        position = tl.load(positions_ptr + t)
        position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
        frequency = channel // 2 if INTERLEAVED else channel % F
        turn_ptr = cos_sin_ptr + (position * F + frequency) * 2
        cos = tl.load(turn_ptr, mask=channel < 2 * F, other=1.0)
        sin = tl.load(turn_ptr + 1, mask=channel < 2 * F, other=0.0)
    query_tiles = tl.cdiv(num_heads, BLOCK_H)
    if tile < query_tiles:
        head = (tile * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        there = head < num_heads
        in_ptr = q_ptr + t * q_stride_t + head * q_stride_h
        turned = _turned(in_ptr, channel, in_head, there, cos, sin, F, INTERLEAVED)
        out_ptr = q_out_ptr + t * q_out_stride_t + head * q_out_stride_h
        tl.store(out_ptr + channel, turned.to(q_out_ptr.dtype.element_ty), mask=there & in_head)
    else:
        slot = tl.load(slots_ptr + t)
        head = ((tile - query_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        there = (head < num_kv_heads) & (slot >= 0)
        page, offset = (slot // PAGE_SIZE).to(tl.int64), slot % PAGE_SIZE
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        cache_dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
        key_ptr = k_ptr + t * k_stride_t + head * k_stride_h
        key = _turned(key_ptr, channel, in_head, there, cos, sin, F, INTERLEAVED)
        row_ptr = k_cache_ptr + page * k_cache_stride_p + offset * k_cache_stride_s + head * k_cache_stride_h
        tl.store(row_ptr + channel, _stored(key, dtype, cache_dtype), mask=there & in_head)
        value_ptr = v_ptr + t * v_stride_t + head * v_stride_h
        value = tl.load(value_ptr + channel, mask=there & in_head, other=0.0)
        row_ptr = v_cache_ptr + page * v_cache_stride_p + offset * v_cache_stride_s + head * v_cache_stride_h
        tl.store(row_ptr + channel, _stored(value, dtype, cache_dtype), mask=there & in_head)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
    q_out: torch.Tensor,
) -> None:
    """Launch the kernel; arguments as in the op."""
    if INTERPRET and k_cache.dtype != q.dtype:
        _launch_widened(q, k, v, k_cache, v_cache, slots, cos_sin, positions, interleaved, q_out)
        return
    rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1:3]
    tiles = triton.cdiv(num_heads, _BLOCK_H) + triton.cdiv(num_kv_heads, _BLOCK_H)
    rotates = cos_sin is not None
    rotate_append_kernel[(rows, tiles)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        slots,
        # Without a rotation these are not read.
        cos_sin if rotates else slots,
        positions if rotates else slots,
        q_out,
        num_heads,
        num_kv_heads,
        cos_sin.shape[0] if rotates else 1,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *q_out.stride()[:2],
        D=head_dim,
        F=cos_sin.shape[1] if rotates else 0,
        PAGE_SIZE=page_size,
        INTERLEAVED=interleaved,
        BLOCK_H=_BLOCK_H,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=2,
    )


def _launch_widened(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
    q_out: torch.Tensor,
) -> None:
    """The interpreter rounds to FP8 wrongly: torch does that last step for it."""
    wide = [torch.zeros(cache.shape, dtype=q.dtype, device=q.device) for cache in (k_cache, v_cache)]
    rotation = {"cos_sin": cos_sin, "positions": positions, "interleaved": interleaved}
    launch(q, k, v, wide[0], wide[1], slots, **rotation, q_out=q_out)
    stored = slots[slots >= 0].long()
    pages, offsets = stored // k_cache.shape[2], stored % k_cache.shape[2]
    for cache, rows in zip((k_cache, v_cache), wide, strict=True):
        cache[pages, :, offsets] = rows[pages, :, offsets].float().clamp(-448.0, 448.0).to(cache.dtype)


def aot_specs() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """Representative instances for the ahead-of-time compile test."""
    specs: list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]] = []
    for cache, frequencies, interleaved in (
        ("*bf16:16", 64, False),
        ("*fp8e4nv:16", 32, True),
        ("*bf16:16", 0, False),
    ):
        signature = {
            name: "*bf16:16" if name.endswith("_ptr") else "i32"
            for name in rotate_append_kernel.arg_names
            if name.islower()
        }
        signature |= {"k_cache_ptr": cache, "v_cache_ptr": cache, "slots_ptr": "*i32:16"}
        signature |= {"cos_sin_ptr": "*fp32:16", "positions_ptr": "*i64:16"}
        constants = {"D": 128, "F": frequencies, "PAGE_SIZE": 32, "INTERLEAVED": interleaved}
        constants |= {"BLOCK_H": _BLOCK_H, "BLOCK_D": 128}
        specs.append((rotate_append_kernel, signature, constants, {"num_warps": 2}))
    return specs
