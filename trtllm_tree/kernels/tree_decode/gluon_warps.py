"""What the warps of tree_decode's specialised kernel do: produce key blocks, widen FP8 ones, consume them.

Owns the rings that they share and the softmax. It must not know who is launched, nor how keys are split.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _bit_or(a, b):
    return a | b


@gluon.jit
def ring(
    dtype: gl.constexpr,
    layout: gl.constexpr,
    readers: gl.constexpr,
    STAGES: gl.constexpr,
    BOX: gl.constexpr,
    D: gl.constexpr,
):
    """Buffers of `STAGES` key blocks, and per block the barriers `full` and `empty`."""
    ring = gl.allocate_shared_memory(dtype, [STAGES * 2, 1, 1, BOX, D], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return ring, full, empty


@gluon.jit
def _copy_block(desc, table_ptr, kv_head, max_pages, block, full, ring, slot, BOXES: gl.constexpr):
    """Start the copies of one block; what is beyond the table or negative is the dummy page 0."""
    mbarrier.expect(full.index(slot), BOXES * desc.block_type.nbytes)
    for i in gl.static_range(BOXES):
        index = block * BOXES + i
        page = gl.maximum(gl.load(table_ptr + index, mask=index < max_pages, other=0), 0)
        tma.async_copy_global_to_shared(
            desc, [page, kv_head, 0, 0], full.index(slot), ring.index(slot * BOXES + i)
        )


@gluon.jit
def produce(
    k_desc,
    v_desc,
    table_ptr,
    kv_head,
    max_pages,
    first_block,
    end_block,
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Fill the rings block by block, as they empty: one warp."""
    for block in range(first_block, end_block):
        slot = (block - first_block) % STAGES
        # The first wait for each slot is on the phase before the barrier's first: it passes.
        phase = ((block - first_block) // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), phase)
        _copy_block(k_desc, table_ptr, kv_head, max_pages, block, k_full, k_ring, slot, BOXES)
        mbarrier.wait(v_empty.index(slot), phase)
        _copy_block(v_desc, table_ptr, kv_head, max_pages, block, v_full, v_ring, slot, BOXES)


@gluon.jit
def _release(empty, slot):
    # All warps have read the slot before the one thread that arrives says so.
    gl.thread_barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _widen_block(
    raw, raw_full, raw_empty, ring, full, empty, slot, phase, BOX: gl.constexpr, D: gl.constexpr
):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    mbarrier.wait(raw_full.index(slot), phase)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    for i in gl.static_range(2):
        value = raw.index(slot * 2 + i).reshape([BOX, D]).load(LAYOUT)
        ring.index(slot * 2 + i).reshape([BOX, D]).store(value.to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(raw_empty.index(slot), count=1)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def widen(
    first_block,
    end_block,
    k_raw,
    v_raw,
    k_raw_full,
    k_raw_empty,
    v_raw_full,
    v_raw_empty,
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    FP8_QUERY: gl.constexpr,
    BOX: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Bring V, and K under an exact query, from FP8 to float16, which loses nothing."""
    for block in range(first_block, end_block):
        slot = (block - first_block) % STAGES
        phase = (block - first_block) // STAGES & 1
        if not FP8_QUERY:
            _widen_block(k_raw, k_raw_full, k_raw_empty, k_ring, k_full, k_empty, slot, phase, BOX, D)
        _widen_block(v_raw, v_raw_full, v_raw_empty, v_ring, v_full, v_empty, slot, phase, BOX, D)


@gluon.jit
def _scores(q, ring, slot, BOX: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Start q . k of both pages of a block."""
    zero = gl.zeros([64, BOX], gl.float32, LAYOUT)
    k0 = ring.index(slot * 2).reshape([BOX, D]).permute((1, 0))
    k1 = ring.index(slot * 2 + 1).reshape([BOX, D]).permute((1, 0))
    s0 = warpgroup_mma(q, k0, zero, use_acc=False, is_async=True)
    s1 = warpgroup_mma(q, k1, zero, use_acc=False, is_async=True)
    return s0, s1


@gluon.jit
def _values(p0, p1, ring, slot, acc, BOX: gl.constexpr, D: gl.constexpr):
    """Start acc + p . v of both pages of a block."""
    acc = warpgroup_mma(p0, ring.index(slot * 2).reshape([BOX, D]), acc, is_async=True)
    return warpgroup_mma(p1, ring.index(slot * 2 + 1).reshape([BOX, D]), acc, is_async=True)


@gluon.jit
def _softmax(s0, s1, row_max, row_sum, scale_log2):
    new_max = gl.maximum(row_max, gl.maximum(gl.max(s0, 1), gl.max(s1, 1)) * scale_log2)
    rescale = gl.exp2(row_max - new_max)
    w0 = gl.exp2(s0 * scale_log2 - new_max[:, None])
    w1 = gl.exp2(s1 * scale_log2 - new_max[:, None])
    return w0, w1, new_max, row_sum * rescale + gl.sum(w0 + w1, 1), rescale


@gluon.jit
def _mask_bits(ptr, valid, start, window):
    """Mask bits of the 64 columns from `start` on, which may be negative, of the rows at `ptr`."""
    word = start >> 6
    words = (window + 63) // 64
    low = gl.load(ptr + word, mask=valid & (word >= 0) & (word < words), other=0).to(gl.uint64)
    high = gl.load(ptr + word + 1, mask=valid & (word >= -1) & (word + 1 < words), other=0).to(gl.uint64)
    shift = (start & 63).to(gl.uint64)
    # In two steps, since a shift by 64 is undefined.
    return (low >> shift) | ((high << 1) << (63 - shift))


@gluon.jit
def _visible(bits, start, window, BOX: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of the 64 columns from `start` on each row sees, [rows, 64]; negative ones are the prefix."""
    n = gl.arange(0, BOX, gl.SliceLayout(0, LAYOUT))
    # Halves of the word, since 64-bit shifts of a whole tile cost registers.
    low = bits.to(gl.uint32)[:, None]
    high = (bits >> 32).to(gl.uint32)[:, None]
    half = gl.where((n < 32)[None, :], low, high) >> (n & 31).to(gl.uint32)[None, :]
    column = start + n
    in_window = ((half & 1) != 0) & ((column >= 0) & (column < window))[None, :]
    return in_window | (column < 0)[None, :]


@gluon.jit
def _zero_unseen(tile, mask_ptr, mask_stride_r, num_rows, start, window, LAYOUT: gl.constexpr):
    """Zero the rows of a V tile that no row of the request sees: 0 * NaN would leak out of them.

    Both warpgroups write the same, so they need not wait for one another.
    """
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    seen = gl.zeros([64], gl.uint64, gl.SliceLayout(1, LAYOUT))
    for first in range(0, num_rows, 64):
        row = first + r
        seen |= _mask_bits(mask_ptr + row.to(gl.int64) * mask_stride_r, row < num_rows, start, window)
    bits = gl.reduce(seen, 0, _bit_or)
    column = start + r
    kept = (((bits >> r.to(gl.uint64)) & 1) != 0) & (column >= 0) & (column < window)
    value = tile.load(LAYOUT)
    tile.store(gl.where((kept | (column < 0))[:, None], value, 0.0).to(value.dtype))


@gluon.jit
def consume(
    first_m,
    q_ptr,
    mask_ptr,
    result_ptr,
    scale_log2,
    num_rows,
    window,
    prefix_len,
    q_stride_r,
    q_stride_h,
    mask_stride_r,
    result_stride_r,
    result_stride_h,
    first_block,
    main_end,
    end_block,
    k_ring,
    v_ring,
    k_full,
    k_empty,
    v_full,
    v_empty,
    SPLIT: gl.constexpr,
    FP8: gl.constexpr,
    FP8_QUERY: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    D: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    ROW_EXTRA: gl.constexpr,
):
    """Attend 64 folded rows to the blocks of a split, and store what came out: one warpgroup."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 32 if FP8_QUERY else 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    m = first_m + gl.arange(0, 64, gl.SliceLayout(1, LOAD))
    d = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    offset = (m // GROUP).to(gl.int64) * q_stride_r + m % GROUP * q_stride_h
    valid = (m // GROUP < num_rows)[:, None] & (d < HEAD_DIM)[None, :]
    q = gl.load(q_ptr + offset[:, None] + d[None, :], mask=valid, other=0.0)
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype
    if FP8_QUERY:
        q = gl.minimum(gl.maximum(q.to(gl.float32), -448.0), 448.0).to(gl.float8e4nv)
        q = gl.convert_layout(q, gl.DotOperandLayout(0, S_LAYOUT, 4))
    else:
        q = gl.convert_layout(q.to(dtype), gl.DotOperandLayout(0, S_LAYOUT, 2))

    row_max = gl.full([64], float("-inf"), gl.float32, S_ROW)
    row_sum = gl.zeros([64], gl.float32, S_ROW)
    acc = gl.zeros([64, D], gl.float32, O_LAYOUT)

    if main_end > first_block:
        mbarrier.wait(k_full.index(0), 0)
        t0, t1 = _scores(q, k_ring, 0, BOX, D, S_LAYOUT)
        s0, s1 = warpgroup_mma_wait(0, deps=[t0, t1])
        _release(k_empty, 0)
        w0, w1, row_max, row_sum, rescale = _softmax(s0, s1, row_max, row_sum, scale_log2)
        p0 = gl.convert_layout(w0.to(dtype), P_LAYOUT)
        p1 = gl.convert_layout(w1.to(dtype), P_LAYOUT)
        slot = 0
        phase = 0
        for _ in range(first_block + 1, main_end):
            next_slot = slot + 1
            next_phase = phase
            if next_slot == STAGES:
                next_slot = 0
                next_phase = phase ^ 1
            mbarrier.wait(k_full.index(next_slot), next_phase)
            t0, t1 = _scores(q, k_ring, next_slot, BOX, D, S_LAYOUT)
            mbarrier.wait(v_full.index(slot), phase)
            total = _values(p0, p1, v_ring, slot, acc, BOX, D)
            s0, s1 = warpgroup_mma_wait(2, deps=[t0, t1])
            _release(k_empty, next_slot)
            w0, w1, row_max, row_sum, rescale = _softmax(s0, s1, row_max, row_sum, scale_log2)
            acc, _, _ = warpgroup_mma_wait(0, deps=[total, p0, p1])
            _release(v_empty, slot)
            acc = acc * gl.convert_layout(rescale, O_ROW)[:, None]
            p0 = gl.convert_layout(w0.to(dtype), P_LAYOUT)
            p1 = gl.convert_layout(w1.to(dtype), P_LAYOUT)
            slot = next_slot
            phase = next_phase
        mbarrier.wait(v_full.index(slot), phase)
        acc = warpgroup_mma_wait(0, deps=[_values(p0, p1, v_ring, slot, acc, BOX, D)])
        _release(v_empty, slot)

    # The rest of the prefix and the window. Columns count from the window's start.
    row = (first_m + gl.arange(0, 64, S_ROW)) // GROUP
    row_ptr = mask_ptr + row.to(gl.int64) * mask_stride_r
    for block in range(main_end, end_block):
        slot = (block - first_block) % STAGES
        phase = (block - first_block) // STAGES & 1
        start = block * (2 * BOX) - prefix_len
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.wait(v_full.index(slot), phase)
        # A page at a time, to keep the mask in registers; a page behind the window is left out.
        for i in range(gl.minimum(gl.cdiv(window - start, BOX), 2)):
            k = k_ring.index(slot * 2 + i).reshape([BOX, D])
            v = v_ring.index(slot * 2 + i).reshape([BOX, D])
            if start + BOX > 0:
                _zero_unseen(v, mask_ptr, mask_stride_r, num_rows, start, window, LOAD)
                fence_async_shared()
                gl.thread_barrier()
            zero = gl.zeros([64, BOX], gl.float32, S_LAYOUT)
            scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False)
            bits = _mask_bits(row_ptr, row < num_rows, start, window)
            visible = _visible(bits, start, window, BOX, S_LAYOUT)
            scores = gl.where(visible, scores * scale_log2, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 1))
            # A row that has seen nothing yet keeps the max -inf, and -inf - -inf is NaN.
            base = gl.where(new_max == float("-inf"), 0.0, new_max)
            weights = gl.exp2(scores - base[:, None])
            rescale = gl.exp2(row_max - base)
            row_sum = row_sum * rescale + gl.sum(weights, 1)
            row_max = new_max
            acc = acc * gl.convert_layout(rescale, O_ROW)[:, None]
            acc = warpgroup_mma(gl.convert_layout(weights.to(dtype), P_LAYOUT), v, acc)
            start += BOX
        _release(k_empty, slot)
        _release(v_empty, slot)

    m = first_m + gl.arange(0, 64, O_ROW)
    row = (m // GROUP).to(gl.int64)
    d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    valid = (row < num_rows)[:, None] & (d < HEAD_DIM)[None, :]
    total = gl.convert_layout(row_sum, O_ROW)
    ptr = result_ptr + row * result_stride_r + m % GROUP * result_stride_h
    if SPLIT:
        gl.store(ptr[:, None] + d[None, :], acc, mask=valid)
        gl.store(ptr + HEAD_DIM, gl.convert_layout(row_max, O_ROW), mask=row < num_rows)
        gl.store(ptr + HEAD_DIM + 1, total, mask=row < num_rows)
    else:
        acc = acc / gl.where(total > 0.0, total, 1.0)[:, None]
        gl.store(ptr[:, None] + d[None, :], acc.to(result_ptr.dtype.element_ty), mask=valid)
