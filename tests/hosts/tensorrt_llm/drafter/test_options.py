"""How a `TreeDrafter` is made, sent to a rank and loaded, and what is refused."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.builders import tiny_deepseek_dir
from tests.doubles.tensorrt_llm import double_entries
from tests.hosts.tensorrt_llm.conftest import Install
from tests.hosts.tensorrt_llm.drafter.flow import BASE, DRAFTER, STEPS, drafter_of, drafts_of, make_requests
from trtllm_tree.errors import ConfigError, HostUnavailableError, UnsupportedError


def test_a_rank_gets_a_drafter_without_its_model(newest: Any, tiny_target: Path) -> None:
    drafter = drafter_of(newest, tiny_target, 4)
    expected = drafts_of(drafter, make_requests())
    sent = pickle.dumps(drafter)
    assert len(sent) < 4000
    there = pickle.loads(sent)
    assert there._model is None and there.max_draft_len == STEPS
    assert drafts_of(there, make_requests()) == expected
    assert pickle.loads(pickle.dumps(drafter.decoding_config())).drafter.max_draft_len == STEPS


def test_the_base_class_is_told_what_its_version_asks(drafting: Any, tiny_target: Path) -> None:
    drafter = drafter_of(drafting, tiny_target, 4, max_concurrency=3)
    assert drafter.max_concurrency == 3 and drafter.max_draft_len == STEPS
    assert drafter._needs_padding_kv_extension
    assert getattr(drafter, "max_total_draft_tokens", STEPS) == STEPS
    config = drafter.decoding_config()
    assert (config.drafter, config.max_draft_len) == (drafter, STEPS)


def test_the_model_is_loaded_by_a_step_of_prompts(newest: Any, tiny_target: Path) -> None:
    drafter = drafter_of(newest, tiny_target, 4)
    assert drafter._model is None
    drafter.prepare_draft_tokens(SimpleNamespace(context_requests=make_requests(), generation_requests=[]))
    assert drafter._model is not None


def test_wrong_options_are_refused_together_and_models_before_they_are_loaded(
    newest: Any, tiny_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        drafter_of(
            newest,
            tmp_path / "nowhere",
            17,
            max_draft_len=0,
            max_batch_size=0,
            max_seq_len=True,
            dtype="int8",
            device="tpu",
        )
    options = [problem.option for problem in caught.value.problems]
    assert options == [
        "tree_topk", "max_draft_len", "max_batch_size", "max_seq_len", "dtype", "device", "draft_model",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"draft_model.*config\.json"):
        drafter_of(newest, tmp_path, 4)
    with pytest.raises(ConfigError, match="num_nodes"):
        drafter_of(newest, tiny_target, 4, num_nodes=2)
    with pytest.raises(UnsupportedError, match="latent attention"):
        drafter_of(newest, tiny_deepseek_dir(tmp_path), 4)


def test_without_the_flow_importing_it_says_what_is_missing(install_double: Install) -> None:
    entries = [entry for entry in double_entries("new") if entry["module"] != BASE]
    install_double(entries, "new")
    sys.modules.pop(DRAFTER, None)
    with pytest.raises(UnsupportedError, match=BASE):
        importlib.import_module(DRAFTER)


def test_without_tensorrt_llm_importing_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_tree.hosts.tensorrt_llm import probe as probing

    monkeypatch.setattr(probing.importlib.util, "find_spec", lambda name: None)
    sys.modules.pop(DRAFTER, None)
    with pytest.raises(HostUnavailableError):
        importlib.import_module(DRAFTER)
