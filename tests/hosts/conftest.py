"""Tiny LLMs for the embedded host, and what plain decoding says to a fixed set of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.embedded_engine import Build, Sizes, Truths, greedy, truths_of
from tests.mtp_models import MTP_KINDS, tiny_mtp_dir
from trtllm_tree import LLM, SpeculativeConfig

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 40, 66)


@pytest.fixture
def build(tiny_target: Path, tiny_head: Path, device: str) -> Build:
    """Makes an LLM with speculation of the given sizes, in float32."""

    def make(sizes: Sizes, **options: Any) -> LLM:
        topk, steps, nodes = sizes
        config = SpeculativeConfig(
            tree_topk=topk, num_steps=steps, num_nodes=nodes, speculative_model=str(tiny_head)
        )
        defaults = {"device": device, "dtype": "float32", "tokens_per_block": 16, "max_seq_len": 256}
        # These tests replace parts of a step by Python; graphs have their own (tests/gpu).
        defaults |= {"cuda_graphs": False}
        return LLM(str(tiny_target), speculative_config=config, **defaults | options)

    return make


@pytest.fixture(scope="session")
def plain(tiny_target: Path, device: str) -> Iterator[LLM]:
    """Plain decoding."""
    with LLM(str(tiny_target), device=device, dtype="float32", max_seq_len=512) as llm:
        yield llm


@pytest.fixture(scope="session")
def truths(plain: LLM) -> Truths:
    """Prompts around page borders, and their plain continuations."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    outputs = plain.generate(prompts, greedy())
    return {tuple(p): o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)}


@pytest.fixture(scope="session", params=MTP_KINDS)
def mtp_kind(request: pytest.FixtureRequest) -> str:
    """The model type of targets that draft with their MTP layer."""
    return request.param


@pytest.fixture(scope="session")
def mtp_target(tmp_path_factory: pytest.TempPathFactory, mtp_kind: str) -> Path:
    """Its drafts are never right, and depend on everything that they are made of."""
    return tiny_mtp_dir(tmp_path_factory.mktemp("mtp"), mtp_kind)


@pytest.fixture(scope="session")
def mtp_agreeing(tmp_path_factory: pytest.TempPathFactory, mtp_kind: str) -> Path:
    """Its drafts are often right."""
    return tiny_mtp_dir(tmp_path_factory.mktemp("mtp_agreeing"), mtp_kind, agrees=True)


@pytest.fixture(scope="session")
def make_mtp(device: str) -> Build:
    """Makes an LLM of a target with its MTP layer, in float32; with None for sizes it decodes plainly."""

    def make(target_dir: Path, sizes: Sizes | None, **options: Any) -> LLM:
        config = None
        if sizes is not None:
            topk, steps, nodes = sizes
            config = SpeculativeConfig(decoding_type="MTP", tree_topk=topk, num_steps=steps, num_nodes=nodes)
        defaults = {"device": device, "dtype": "float32", "max_seq_len": 256, "cuda_graphs": False}
        return LLM(str(target_dir), speculative_config=config, **defaults | options)

    return make


@pytest.fixture(scope="session")
def mtp_truths(mtp_target: Path, make_mtp: Build) -> Truths:
    """Plain continuations by `mtp_target`."""
    return truths_of(make_mtp(mtp_target, None), PROMPT_LENGTHS, 40)


@pytest.fixture(scope="session")
def mtp_agreed(mtp_agreeing: Path, make_mtp: Build) -> Truths:
    """Plain continuations by `mtp_agreeing`."""
    return truths_of(make_mtp(mtp_agreeing, None), PROMPT_LENGTHS, 40)
