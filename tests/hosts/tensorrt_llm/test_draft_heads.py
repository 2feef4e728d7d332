"""What the two kinds of drafters read of a target, and whose vocabulary they score."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doubles.tensorrt_llm.install import runtime_double
from trtllm_tree.hosts.tensorrt_llm.draft_heads import Eagle3DraftHead, MtpDraftHead, draft_head
from trtllm_tree.hosts.tensorrt_llm.probe import probe

HIDDEN, VOCAB, RANKS = 8, 13, 2


@pytest.fixture(params=["new", "old"], autouse=True)
def _double(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("TLLM_DOUBLE_DEVICE", "cpu")
    with runtime_double(tmp_path, request.param):
        yield


def parts(name: str) -> Any:
    return getattr(importlib.import_module("tensorrt_llm._double.model_parts"), name)


def model_config(mapping: Any, kind: str = "MTP") -> Any:
    return SimpleNamespace(
        mapping=mapping,
        pretrained_config=SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=1e-5),
        torch_dtype=torch.float32,
        spec_config=SimpleNamespace(decoding_type=kind),
    )


def layer_of(config: Any) -> Any:
    """An MTP layer, as far as it is asked for scores."""
    head = importlib.import_module("tensorrt_llm._double.mtp").DeepseekV3MTPHead
    return SimpleNamespace(shared_head=head(config))


def allgather() -> Any:
    return probe().resolved["mtp", "allgather"].value


def sharded(whole: torch.Tensor, rank: int) -> tuple[Any, Any]:
    """One rank's columns of scores [V, H], and a mapping that knows the other rank's; rows of NaN make them equal."""
    size = -(-VOCAB // RANKS)
    padded = torch.cat((whole, torch.full((size * RANKS - VOCAB, HIDDEN), torch.nan)))
    shards = padded.split(size)
    seen: list[torch.Tensor] = []

    class Shard(torch.nn.Module):
        """A column-parallel head, which gathers by itself unless it is told not to."""

        num_embeddings, gather_output = VOCAB, True

        def forward(self, rows: torch.Tensor, *, is_spec_decoding_head: bool = False) -> torch.Tensor:
            assert not self.gather_output and is_spec_decoding_head
            seen[:] = [rows]
            return rows @ shards[rank].T

    def of_all_ranks(own: torch.Tensor) -> list[torch.Tensor]:
        found = [seen[0] @ shard.T for shard in shards]
        torch.testing.assert_close(own, found[rank], equal_nan=True)
        return found

    return Shard(), parts("Mapping")(tp_size=RANKS, tp_rank=rank, world_size=RANKS, shards=of_all_ranks)


@pytest.mark.parametrize("rank", range(RANKS))
def test_scores_that_are_sharded_over_ranks_are_those_of_the_whole_vocabulary(rank: int) -> None:
    torch.manual_seed(0)
    whole = parts("LMHead")(VOCAB, HIDDEN, torch.float32)
    rows = torch.randn(5, HIDDEN)
    config = model_config(parts("Mapping")())
    module = SimpleNamespace(mtp_layers=[layer_of(config)], lm_head=whole)
    expected = MtpDraftHead(module, config, allgather()).logits(rows, None)
    assert expected.shape == (5, VOCAB)
    torch.testing.assert_close(expected, rows @ whole.weight.T)
    shard, mapping = sharded(whole.weight.detach(), rank)
    config = model_config(mapping)
    module = SimpleNamespace(mtp_layers=[layer_of(config)], lm_head=shard)
    head = MtpDraftHead(module, config, allgather())
    found = head.logits(rows, None)
    assert head.draft_vocab_size == VOCAB and found.stride(-1) == 1
    torch.testing.assert_close(found, expected)


def test_an_mtp_layer_reads_the_targets_last_rows_and_the_tokens_ids_are_the_targets() -> None:
    calls: list[dict[str, Any]] = []

    def layer(**given: Any) -> str:
        calls.append(given)
        return "handed on"

    config, metadata = model_config(parts("Mapping")()), object()
    lm_head = parts("LMHead")(VOCAB, HIDDEN, torch.float32)
    module = SimpleNamespace(mtp_layers=[layer], lm_head=lm_head, embed_tokens=object())
    head = draft_head(module, config, probe())
    assert isinstance(head, MtpDraftHead) and head.d2t is None and head.hidden_size == HIDDEN
    rows, metadata_of_step = torch.randn(3, HIDDEN), SimpleNamespace(layers_to_capture=())
    assert head.feature_shape(metadata_of_step) == (HIDDEN, torch.float32)
    assert head.features(rows, metadata_of_step) is rows and head.fuse(rows) is rows
    ids, positions = torch.arange(3), torch.arange(4, 7)
    assert head.run(ids, positions, rows, metadata, metadata_of_step) == "handed on"
    assert calls == [
        {
            "input_ids": ids,
            "position_ids": positions,
            "hidden_states": rows,
            "embed_tokens": module.embed_tokens,
            "attn_metadata": metadata,
        }
    ]


def test_an_eagle3_head_reads_what_was_captured_and_not_the_last_rows() -> None:
    inner = SimpleNamespace(hidden_size=HIDDEN, dtype=torch.float32)
    module = SimpleNamespace(model=inner, config=SimpleNamespace(vocab_size=VOCAB))
    head = draft_head(module, model_config(None, "Eagle3"), probe())
    assert isinstance(head, Eagle3DraftHead)
    # A buffer may be wider than what was captured.
    captured = torch.randn(5, 4 * HIDDEN)
    step = SimpleNamespace(hidden_states=captured, hidden_size=HIDDEN, layers_to_capture=(1, 2, 3))
    assert head.feature_shape(step) == (3 * HIDDEN, torch.float32)
    assert torch.equal(head.features(torch.randn(5, HIDDEN), step), captured[:, : 3 * HIDDEN])
