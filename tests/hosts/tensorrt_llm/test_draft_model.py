"""`TrtllmDraftModel` over the double's EAGLE3 modules against our own head with attention over lists of keys."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.builders import tiny_eagle3_dir, tiny_llama_dir
from tests.doubles.tensorrt_llm.install import runtime_double
from trtllm_tree.draft.eagle3_head import Eagle3Head, load_eagle3_head
from trtllm_tree.engine.model_runner import ModelRunner
from trtllm_tree.errors import HostError
from trtllm_tree.hosts.tensorrt_llm.attention import make_fmha_class
from trtllm_tree.hosts.tensorrt_llm.draft_heads import Eagle3DraftHead
from trtllm_tree.hosts.tensorrt_llm.draft_model import TrtllmDraftModel
from trtllm_tree.hosts.tensorrt_llm.kv import TrtllmKVPool
from trtllm_tree.hosts.tensorrt_llm.probe import probe
from trtllm_tree.hosts.tensorrt_llm.step import publish, published
from trtllm_tree.ports import RoundBatch
from trtllm_tree.tree.lanes import TreeDraftInputs

TOPK, STEPS, NODES = 3, 4, 12
PAGE = 8
PROMPTS = [5, 9]


class HeadByHand:
    """Our head; every row names the request and the keys that it sees."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head = head
        self.keys: dict[tuple[int, object], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, own: Sequence[tuple[int, object]],
        seen: Sequence[Sequence[object]],
    ) -> torch.Tensor:  # fmt: skip
        """One forward of rows [T]: row t is key `own[t]` = (request, name), and sees keys `seen[t]` of its request."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            for row, key in enumerate(own):
                self.keys[key] = (k[row], v[row])
            out = []
            for row, (request, _) in enumerate(own):
                pairs = [self.keys[request, name] for name in seen[row]]
                keys, values = (torch.stack(side).double() for side in zip(*pairs, strict=True))
                groups = q.shape[1] // k.shape[1]
                keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
                weights = (torch.einsum("hd,shd->hs", q[row].double(), keys) * scale).softmax(-1)
                out.append(torch.einsum("hs,shd->hd", weights, values))
            return torch.stack(out).to(q.dtype)

        return self.head(tokens, hidden, positions, attend)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("draft_model")
    # The default layers of the double's capture ask for a target of six.
    target = tiny_llama_dir(root, num_layers=6)
    return target, tiny_eagle3_dir(root, target)


@pytest.fixture(
    params=[
        ("new", "v1", False, True),
        ("new", "v2", True, True),
        ("old", "v1", True, True),
        ("old", "v2", False, True),
        ("new", "v1", False, False),
    ],
    ids=["new-v1-shared", "new-v2-separate", "old-v1-separate", "old-v2-shared", "unfused"],
)
def parts(
    request: Any, tmp_path: Path, checkpoints: Any, monkeypatch: Any
) -> Iterator[tuple[Any, Any, HeadByHand]]:
    """The double's executor with our library in front, the bridge over its head, and the same head by hand."""
    layout, manager, separate, fused = request.param
    target, head_dir = checkpoints
    monkeypatch.setenv("TLLM_DOUBLE_DEVICE", "cpu")
    monkeypatch.setenv("TLLM_FMHA_LIBS", "trtllm_tree,fallback")
    monkeypatch.setenv("TRTLLM_FMHA_CACHE_SANITY_CHECK", "1")
    with runtime_double(tmp_path, layout):
        probe().resolved["fmha", "FMHA_LIBS"].value["trtllm_tree"] = make_fmha_class()
        config = importlib.import_module("tensorrt_llm.llmapi.llm_args").Eagle3DecodingConfig(
            max_draft_len=STEPS, max_total_draft_tokens=NODES - 1, use_dynamic_tree=True,
            dynamic_tree_max_topK=TOPK, speculative_model=str(head_dir),
        )  # fmt: skip
        config._allow_separate_draft_kv_cache = separate
        executor = importlib.import_module("tensorrt_llm._double.executor").Executor(
            target, speculative_config=config, dtype=torch.float32, kv_manager=manager, tokens_per_block=PAGE
        )
        if not fused:
            rotate_outside(executor.model.draft_model)
        layer = executor.model_config.pretrained_config.num_hidden_layers
        pool = TrtllmKVPool(
            executor.draft_kv_cache_manager or executor.kv_cache_manager, [layer], max_batch=4, device="cpu"
        )
        bridge = TrtllmDraftModel(
            Eagle3DraftHead(executor.model.draft_model), pool, max_batch=4, num_nodes=NODES
        )
        runner = ModelRunner(target, dtype=torch.float32, device=torch.device("cpu"))
        head = load_eagle3_head(
            head_dir,
            target_config=runner.config,
            embed_tokens=runner.embed_tokens,
            dtype=torch.float32,
            device="cpu",
        )
        executor.pool = pool
        yield executor, bridge, HeadByHand(head)


def rotate_outside(draft_model: Any) -> None:
    """Make the head's attention module rotate by itself, as modules with QK norm do."""
    rope = importlib.import_module("tensorrt_llm._double.rope")
    module = draft_model.model.midlayer.self_attn
    params = module.attn.rope_params
    module.rope_fusion = False
    module.rotary_emb = rope.RotaryEmbedding(params, module.attn.head_dim)
    module.attn.rope_params, module.attn.rotary_cos_sin = rope.RopeParams(), None
    module.attn.position_embedding_type = type("Unrotated", (), {"name": "learned_absolute"})


def batch_of(executor: Any, prompts: Sequence[int], generations: int) -> Any:
    """Attention metadata of a batch: prompts of these lengths, then generation requests after them."""
    names = importlib.import_module("tensorrt_llm._double.metadata")
    metadata, total = executor.engine.eager.attn_metadata, len(prompts) + generations
    lens = [*prompts, *[NODES] * generations]
    metadata.request_ids = list(range(100, 100 + total))
    metadata.prompt_lens = [*prompts, *[1] * generations]
    metadata.kv_cache_params = names.KVCacheParams(
        use_cache=True,
        num_cached_tokens_per_seq=[0] * len(prompts) + [PROMPTS[i] for i in range(generations)],
        num_extra_kv_tokens=STEPS - 1,
    )
    metadata.seq_lens = torch.tensor(lens, dtype=torch.int32)
    metadata.num_contexts = len(prompts)
    metadata.prepare()
    metadata.use_spec_decoding = True
    metadata.is_spec_dec_tree = metadata.is_spec_dec_dynamic_tree = True
    metadata.spec_decoding_position_offsets = torch.full((200,), -77, dtype=torch.int32)
    return metadata


def round_batch(executor: Any, metadata: Any, capacity: Sequence[int]) -> RoundBatch:
    separate = executor.draft_kv_cache_manager is not None
    offsets = metadata.draft_kv_cache_block_offsets if separate else metadata.kv_cache_block_offsets
    limits = torch.tensor(capacity, dtype=torch.int32)
    first = metadata.num_contexts
    table = executor.pool.load_tables(offsets, slice(first, first + len(capacity)), limits)[0]
    lens = torch.zeros(len(capacity), dtype=torch.int32)
    return RoundBatch(
        slots=lens.long(), committed_lens=lens, write_slots=lens.new_empty(0, len(capacity), NODES),
        draft_page_table=table, draft_page_size=PAGE, max_committed_len=96,
    )  # fmt: skip


def state(metadata: Any) -> dict[str, Any]:
    names = (
        "num_contexts",
        "num_generations",
        "num_ctx_tokens",
        "num_tokens",
        "use_spec_decoding",
        "kv_cache_manager",
    )
    tensors = (
        "_seq_lens",
        "_seq_lens_cuda",
        "kv_lens_cuda_runtime",
        "kv_lens_runtime",
        "host_request_types_runtime",
    )
    return {name: getattr(metadata, name) for name in names} | {
        name: getattr(metadata, name).tolist() for name in tensors
    }


def reserve(executor: Any, rows: int) -> None:
    for manager in executor._kv_managers():
        manager.add_dummy_requests([100, 101, 102], rows)


def draft_context(executor: Any, metadata: Any) -> Any:
    return executor.model.spec_worker.draft_kv_cache_context(metadata, executor.draft_kv_cache_manager)


@torch.inference_mode()
def test_prompts_chains_and_lanes_are_what_the_head_says_by_hand(parts):
    executor, bridge, by_hand = parts
    torch.manual_seed(0)
    reserve(executor, 40)
    spec, hidden_size = executor.engine.eager.spec_metadata, bridge.hidden_size
    features = torch.randn(sum(PROMPTS), 3 * hidden_size)
    prompt_hidden = bridge.fuse(features)
    torch.testing.assert_close(prompt_hidden, by_hand.head.fuse(features))
    assert bridge.d2t is not None and torch.equal(bridge.d2t, by_hand.head.d2t)
    assert bridge.draft_vocab_size == by_hand.head.draft_vocab_size

    # A mixed batch: the two prompts, and a generation request that this call has nothing to do with.
    metadata = batch_of(executor, PROMPTS, 1)
    before = state(metadata)
    tokens = torch.randint(0, 300, (sum(PROMPTS),), dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in PROMPTS])
    owners = [(b, p) for b, length in enumerate(PROMPTS) for p in range(length)]
    with bridge.bind(metadata, spec, draft_context(executor, metadata)):
        out = bridge.prefill_rows(tokens, prompt_hidden, positions)
    wanted = by_hand.rows(tokens, prompt_hidden, positions, owners, [list(range(p + 1)) for _, p in owners])
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    assert state(metadata) == before and published(metadata) is None

    # The same two requests decode: step 0 is a chain behind each prompt, some of whose rows stay.
    metadata = batch_of(executor, [], 2)
    before = state(metadata)
    batch = round_batch(executor, metadata, [40, 40])
    rows = STEPS + 1
    tokens, hidden = torch.randint(0, 300, (2, rows), dtype=torch.int32), torch.randn(2, rows, hidden_size)
    chain_positions = torch.tensor(PROMPTS).unsqueeze(1) + torch.arange(rows)
    kept = [3, 1]
    last = torch.tensor([kept[0] - 1, rows + kept[1] - 1])
    with bridge.bind(metadata, spec, draft_context(executor, metadata)):
        out = bridge.chain_rows(tokens, hidden, chain_positions, batch, last)
        logits = bridge.logits(out.squeeze(1))
    owners = [(b, PROMPTS[b] + r) for b in range(2) for r in range(rows)]
    wanted = by_hand.rows(
        tokens.flatten(),
        hidden.flatten(0, 1),
        chain_positions.flatten(),
        owners,
        [list(range(p + 1)) for _, p in owners],
    )[last]
    torch.testing.assert_close(out.squeeze(1), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, by_hand.head.logits(wanted).float(), rtol=1e-4, atol=1e-4)
    assert state(metadata) == before and published(metadata) is None

    check_lanes(executor, bridge, by_hand, metadata, [PROMPTS[b] + kept[b] for b in range(2)], [40, 40])


@torch.inference_mode()
def test_lanes_without_a_page_are_drafted_without_them(parts):
    executor, bridge, by_hand = parts
    torch.manual_seed(1)
    reserve(executor, 40)
    metadata = batch_of(executor, [], 2)
    batch, spec = round_batch(executor, metadata, [40, 40]), executor.engine.eager.spec_metadata
    tokens = torch.randint(0, 300, (2, 6), dtype=torch.int32)
    hidden, positions = torch.randn(2, 6, bridge.hidden_size), torch.arange(6).expand(2, 6)
    with bridge.bind(metadata, spec, draft_context(executor, metadata)):
        bridge.chain_rows(tokens, hidden, positions, batch)
    owners = [(b, p) for b in range(2) for p in range(6)]
    by_hand.rows(
        tokens.flatten(),
        hidden.flatten(0, 1),
        positions.flatten(),
        owners,
        [list(range(p + 1)) for _, p in owners],
    )
    # One request's pages end inside its lanes' window, as behind a prefill; the block after is somebody else's.
    check_lanes(executor, bridge, by_hand, metadata, [6, 6], [PAGE, 40])


@torch.inference_mode()
def test_a_layer_that_goes_elsewhere_with_a_tree_is_named(parts):
    executor, bridge, _ = parts
    reserve(executor, 40)
    metadata = batch_of(executor, [], 2)
    batch, spec = round_batch(executor, metadata, [40, 40]), executor.engine.eager.spec_metadata
    tokens, hidden = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, bridge.hidden_size)
    managed = executor.model.draft_model.model.midlayer.self_attn.attn._fmha_manager
    managed.fmha_libs = managed.fmha_libs[1:]
    layer = executor.model_config.pretrained_config.num_hidden_layers
    # The double's own library does not take such rows quietly either; the real one does.
    type(managed.fmha_libs[0]).forward = lambda self, q, k, v, metadata, args: args.output.zero_()
    context = draft_context(executor, metadata)
    with (
        bridge.bind(metadata, spec, context),
        pytest.raises(HostError, match=rf"layers \[{layer}\] did not attend"),
    ):
        bridge.chain_rows(tokens, hidden, torch.arange(3).expand(2, 3), batch)
    # Nor does a call begin behind a target's forward that left its step alone.
    left: Any = SimpleNamespace(pool=executor.pool, positions=tokens, require_attended=refuse)
    publish(metadata, left)
    with pytest.raises(HostError, match="the target's"), bridge.bind(metadata, spec):
        pass


def refuse() -> None:
    raise HostError("the target's")


def check_lanes(
    executor: Any,
    bridge: TrtllmDraftModel,
    by_hand: HeadByHand,
    metadata: Any,
    frontier: list[int],
    capacity: list[int],
) -> None:
    """All lane steps of a round, along a tree drawn at random."""
    batch, spec = round_batch(executor, metadata, capacity), executor.engine.eager.spec_metadata
    lanes = TreeDraftInputs(4, TOPK, STEPS, "cpu")
    lanes.begin(torch.tensor(frontier, dtype=torch.int32), batch.draft_page_table, PAGE)
    limits = [-(-rows // PAGE) * PAGE for rows in capacity]
    views = executor.pool.group_regions()[0]
    paths: list[list[list[int]]] = [[[] for _ in range(TOPK)] for _ in range(2)]
    for step in range(1, STEPS):
        own_columns = [(step - 1) * TOPK + lane for lane in range(TOPK)]
        for b in range(2):
            picked = torch.randint(0, TOPK, (TOPK,)).tolist()
            paths[b] = [
                [*paths[b][parent], column] for parent, column in zip(picked, own_columns, strict=True)
            ]
        lanes.lane_mask[:2] = torch.tensor(
            [[[sum(1 << column for column in path)] for path in request] for request in paths]
        )
        tokens, hidden = (
            torch.randint(0, 300, (2, TOPK), dtype=torch.int32),
            torch.randn(2, TOPK, bridge.hidden_size),
        )
        others = [view.nan_to_num(9.0) for view in views]
        with bridge.bind(metadata, spec, draft_context(executor, metadata)):
            out = bridge.lane_rows(step, tokens, hidden, lanes, batch)
        there = {(b, c): frontier[b] + c < limits[b] for b in range(2) for c in range((STEPS - 1) * TOPK)}
        owners = [(b, ("lane", column)) for b in range(2) for column in own_columns]
        seen = [
            [*range(frontier[b]), *(("lane", c) for c in path if there[b, c])]
            for b in range(2)
            for path in paths[b]
        ]
        positions = torch.tensor([frontier[b] + step - 1 for b in range(2) for _ in own_columns])
        wanted = by_hand.rows(tokens.flatten(), hidden.flatten(0, 1), positions, owners, seen)
        torch.testing.assert_close(out.flatten(0, 1), wanted, rtol=1e-4, atol=1e-4)
        stored = sum(there[b, column] for b in range(2) for column in own_columns)
        for now, then in zip(views, others, strict=True):
            assert int((now.nan_to_num(9.0) != then).any(dim=1).any(dim=-1).sum()) == stored, (
                "a lane without a page was stored"
            )
    assert published(metadata) is None
