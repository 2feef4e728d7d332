"""The split-KV kernel of `tree_decode`: one program attends one share of a request's keys for a tile of rows.

Rows of one KV head are folded (m = r * group + g), so each key is read once per row tile. Key blocks that
lie in the prefix take an unmasked loop, by TMA where the layout allows; what is left of the prefix and the
window take a short masked loop. It must not know who merges the splits, nor how tiles are chosen.
"""

from __future__ import annotations

from trtllm_tree.kernels._triton import bit_or, tl, triton


@triton.jit
def _page_of(table_ptr, index, max_pages):
    """Page of a table entry; what is beyond the table or negative is the dummy page 0."""
    return tl.maximum(tl.load(table_ptr + index, mask=index < max_pages, other=0), 0)


@triton.jit
def _load_box(
    desc,
    ptr,
    table_ptr,
    box,
    max_pages,
    kv_head,
    stride_page,
    stride_head,
    stride_token,
    TMA: tl.constexpr,
    BOX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys [box * BOX, (box + 1) * BOX) as [BOX, BLOCK_D]: one TMA copy of one page, or gathered rows."""
    if TMA:
        page = _page_of(table_ptr, box, max_pages)
        rows = desc.load([page, kv_head, 0, 0]).reshape([BOX, BLOCK_D])
    else:
        position = box * BOX + tl.arange(0, BOX)
        d = tl.arange(0, BLOCK_D)
        page = _page_of(table_ptr, position // PAGE_SIZE, max_pages).to(tl.int64)
        offset = page * stride_page + kv_head.to(tl.int64) * stride_head + position % PAGE_SIZE * stride_token
        if HEAD_DIM == BLOCK_D:
            rows = tl.load(ptr + offset[:, None] + d[None, :])
        else:
            rows = tl.load(ptr + offset[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    return rows


@triton.jit
def tree_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    page_table_ptr,
    prefix_lens_ptr,
    mask_ptr,
    out_ptr,
    workspace_ptr,
    scale_log2,
    num_rows,
    num_kv_heads,
    window,
    max_pages,
    num_splits,
    q_stride_b,
    q_stride_r,
    q_stride_h,
    k_stride_page,
    k_stride_head,
    k_stride_token,
    v_stride_page,
    v_stride_head,
    v_stride_token,
    page_table_stride_b,
    mask_stride_b,
    mask_stride_r,
    out_stride_b,
    out_stride_r,
    out_stride_h,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    FP8_QUERY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BOX: tl.constexpr,
    BOXES: tl.constexpr,
    TAIL_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
    ROW_EXTRA: tl.constexpr,
):
    """One program: (row tile and request and head, split); see the module."""
    BLOCK_N: tl.constexpr = BOX * BOXES
    # Row tiles of one split are neighbours, so that the second reader of a key finds it in L2.
    num_tiles = tl.cdiv(num_rows * GROUP, BLOCK_M)
    first_m = tl.program_id(0) % num_tiles * BLOCK_M
    split = tl.program_id(0) // num_tiles
    b = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % num_kv_heads
    kv_head64 = kv_head.to(tl.int64)
    m = first_m + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m // GROUP
    row64 = row.to(tl.int64)
    head = kv_head64 * GROUP + m % GROUP
    row_valid = row < num_rows
    out_mask = row_valid[:, None] & (d < HEAD_DIM)[None, :]

    q_offset = b * q_stride_b + row64 * q_stride_r + head * q_stride_h
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=out_mask, other=0.0)
    if FP8_QUERY:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -448.0), 448.0).to(tl.float8e4nv)
    q = q.to(QK)

    # The masked rest counts as whole blocks, and all of it belongs to the last split.
    prefix_len = tl.load(prefix_lens_ptr + b)
    num_full = prefix_len // BLOCK_N
    num_blocks = num_full + tl.cdiv(prefix_len - num_full * BLOCK_N + window, BLOCK_N)
    first_block = (num_blocks * split // num_splits).to(tl.int32)
    last_block = tl.minimum(num_full, (num_blocks * (split + 1) // num_splits).to(tl.int32))
    table_ptr = page_table_ptr + b * page_table_stride_b

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for block in tl.range(first_block, last_block, num_stages=STAGES):
        box = block * BOXES
        # fmt: off
        k0 = _load_box(k_desc, k_ptr, table_ptr, box, max_pages, kv_head, k_stride_page, k_stride_head,
                       k_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
        scores0 = tl.dot(q, tl.trans(k0.to(QK)), input_precision="ieee")
        block_max = tl.max(scores0, 1)
        if BOXES == 2:
            k1 = _load_box(k_desc, k_ptr, table_ptr, box + 1, max_pages, kv_head, k_stride_page,
                           k_stride_head, k_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
            scores1 = tl.dot(q, tl.trans(k1.to(QK)), input_precision="ieee")
            block_max = tl.maximum(block_max, tl.max(scores1, 1))
        new_max = tl.maximum(row_max, block_max * scale_log2)
        rescale = tl.exp2(row_max - new_max)
        acc = acc * rescale[:, None]
        weights0 = tl.exp2(scores0 * scale_log2 - new_max[:, None])
        block_sum = tl.sum(weights0, 1)
        v0 = _load_box(v_desc, v_ptr, table_ptr, box, max_pages, kv_head, v_stride_page, v_stride_head,
                       v_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
        acc = tl.dot(weights0.to(PV), v0.to(PV), acc, input_precision="ieee")
        if BOXES == 2:
            weights1 = tl.exp2(scores1 * scale_log2 - new_max[:, None])
            block_sum += tl.sum(weights1, 1)
            v1 = _load_box(v_desc, v_ptr, table_ptr, box + 1, max_pages, kv_head, v_stride_page,
                           v_stride_head, v_stride_token, TMA, BOX, PAGE_SIZE, HEAD_DIM, BLOCK_D)
            acc = tl.dot(weights1.to(PV), v1.to(PV), acc, input_precision="ieee")
        # fmt: on
        row_sum = row_sum * rescale + block_sum
        row_max = new_max

    if split == num_splits - 1:
        # Columns count from the window's start and blocks from a multiple of TAIL_N, which divides 64: the
        # mask bits of a block lie in one word. The rest of the prefix has negative columns.
        n = tl.arange(0, TAIL_N)
        rest = prefix_len - num_full * BLOCK_N
        first_column = -tl.cdiv(rest, TAIL_N) * TAIL_N
        mask_offset = b * mask_stride_b + row64 * mask_stride_r
        for i in tl.range(0, tl.cdiv(window - first_column, TAIL_N), num_stages=1):
            start = first_column + i * TAIL_N
            column = start + n
            in_rest = (column >= -rest) & (column < 0)
            # As a vector: newer interpreters take `vector & scalar` for an integer.
            has_columns = mask_offset * 0 + start >= 0
            bits = tl.load(mask_ptr + mask_offset + start // 64, mask=row_valid & has_columns, other=0)
            bits = bits >> (start & 63)
            any_bits = tl.reduce(bits, 0, bit_or)
            in_window = column < window
            seen = ((((any_bits >> n) & 1) != 0) & in_window) | in_rest
            # Halves of the word, since 64-bit shifts of a whole tile cost registers.
            low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
            half = tl.where((n < 32)[None, :], low[:, None], high[:, None])
            visible = ((((half >> (n & 31)[None, :]) & 1) != 0) & in_window[None, :]) | in_rest[None, :]

            # Slots that no row of the tile sees are not read: 0 * NaN would leak out of V.
            position = prefix_len + column
            page_index = position // PAGE_SIZE
            page = tl.load(table_ptr + page_index, mask=seen & (page_index < max_pages), other=0)
            page = tl.maximum(page, 0).to(tl.int64)
            offset = position % PAGE_SIZE
            key_mask = seen[:, None] & (d < HEAD_DIM)[None, :]
            k_offset = page * k_stride_page + kv_head64 * k_stride_head + offset * k_stride_token
            k = tl.load(k_ptr + k_offset[:, None] + d[None, :], mask=key_mask, other=0.0).to(QK)
            v_offset = page * v_stride_page + kv_head64 * v_stride_head + offset * v_stride_token
            v = tl.load(v_ptr + v_offset[:, None] + d[None, :], mask=key_mask, other=0.0).to(PV)

            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row that has seen nothing yet keeps the max -inf, and -inf - -inf is NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(row_max - base)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(PV), v, acc * rescale[:, None], input_precision="ieee")
            row_max = new_max

    if SPLIT:
        num_heads = num_kv_heads * GROUP
        batch = tl.num_programs(1) // num_kv_heads
        index = ((split * batch + b) * num_rows + row64) * num_heads + head
        row_ptr = workspace_ptr + index * (HEAD_DIM + ROW_EXTRA)
        tl.store(row_ptr[:, None] + d[None, :], acc, mask=out_mask)
        tl.store(row_ptr + HEAD_DIM, row_max, mask=row_valid)
        tl.store(row_ptr + HEAD_DIM + 1, row_sum, mask=row_valid)
    else:
        acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        out_offset = b * out_stride_b + row64 * out_stride_r + head * out_stride_h
        tl.store(out_ptr + out_offset[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
