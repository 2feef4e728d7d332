"""`TreeDrafter` in TensorRT-LLM's host-driven flow: an executor loop of the documented order of calls, on tiny models.

The loop plays TensorRT-LLM: it puts placeholders for drafts on its requests, has them drafted and padded, verifies the
last token and the drafts in one forward of the target, keeps what agrees, and never tells the drafter anything else.
"""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders import tiny_deepseek_dir, tiny_llama_dir
from tests.doubles.tensorrt_llm import double_entries, module_path
from tests.hosts.tensorrt_llm.conftest import Install
from tests.oracles.draft_tree import DraftTreeOracle
from trtllm_tree.draft.eagle import Candidates
from trtllm_tree.errors import ConfigError, HostUnavailableError, UnsupportedError

DRAFTER = "trtllm_tree.hosts.tensorrt_llm.drafter"
BASE = "tensorrt_llm._torch.speculative.drafter"
# What the double only names, at work: the newest constructor, and an older one.
BASES = {
    "new": """
class Drafter:
    _needs_padding_kv_extension = False

    def __init__(self, max_draft_len=None, max_total_draft_tokens=None, max_concurrency=None, draft_len_schedule=None):
        self.max_draft_len, self.max_total_draft_tokens = max_draft_len, max_total_draft_tokens
        self._static_max_total_draft_tokens, self.max_concurrency = max_total_draft_tokens, max_concurrency

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        raise NotImplementedError

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests, resource_manager=None):
        for request in scheduled_requests.generation_requests:
            missing = self._static_max_total_draft_tokens - len(request.py_draft_tokens)
            request.py_draft_tokens.extend([0] * missing)
""",
    "1.2.1": """
class Drafter:
    def __init__(self, max_concurrency=None):
        self.max_concurrency = max_concurrency

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        raise NotImplementedError
""",
}
STEPS = 4


@dataclass
class Request:
    """What the flow looks at of TensorRT-LLM's request."""

    request_id: int
    tokens: list[int]
    py_orig_prompt_len: int
    py_max_new_tokens: int
    py_draft_tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.py_orig_prompt_len :]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.py_max_new_tokens

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class Loop:
    """The executor without overlap. `drafter=None` decodes plainly."""

    def __init__(self, target_dir: Path, drafter: Any = None, *, num_drafts: int = STEPS) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
        self.drafter, self.num_drafts, self.forwards = drafter, num_drafts, 0

    def run(self, requests: list[Request], *, batch: int = 8) -> None:
        # A prompt's first token is there before its request drafts.
        if self.drafter is not None:
            self.drafter.prepare_draft_tokens(
                SimpleNamespace(context_requests=requests, generation_requests=[])
            )
        for request in requests:
            request.tokens.append(self._argmax(request.tokens)[-1])
        while live := [request for request in requests if not request.done]:
            self.step(live[:batch])
            # Requests that wait go first, as after a pause.
            requests = live[batch:] + live[:batch]

    def step(self, requests: list[Request]) -> None:
        scheduled = SimpleNamespace(context_requests=[], generation_requests=requests)
        for request in requests:
            request.py_draft_tokens = [0] * self.num_drafts if self.drafter is not None else []
        if self.drafter is not None:
            self.drafter.prepare_draft_tokens(scheduled, None)
            for request in requests:
                request.drafted.append(len(request.py_draft_tokens))
                assert all(type(token) is int for token in request.py_draft_tokens)
            if hasattr(self.drafter, "pad_draft_tokens_for_cuda_graph"):
                self.drafter.pad_draft_tokens_for_cuda_graph(scheduled, None)
        for request in requests:
            assert len(request.py_draft_tokens) <= self.num_drafts, (
                "more drafts than KV rows were reserved for"
            )
            chosen = self._argmax(request.tokens + request.py_draft_tokens)[len(request.tokens) - 1 :]
            kept = 0
            while not request.done:
                request.tokens.append(chosen[kept])
                if kept == len(request.py_draft_tokens) or request.py_draft_tokens[kept] != chosen[kept]:
                    break
                kept += 1
            request.accepted.append(kept)

    def _argmax(self, tokens: list[int]) -> list[int]:
        self.forwards += 1
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


@pytest.fixture(params=["new", "1.2.1"])
def drafting(request: pytest.FixtureRequest, install_double: Install) -> Iterator[Any]:
    """The module under test over a double whose `Drafter` works."""
    yield from _drafting(request.param, install_double)


@pytest.fixture
def newest(install_double: Install) -> Iterator[Any]:
    yield from _drafting("new", install_double)


def _drafting(layout: str, install_double: Install) -> Iterator[Any]:
    root = install_double(double_entries(layout), layout)
    path = module_path(root, BASE)
    before = path.read_text(encoding="utf-8")
    path.write_text(BASES[layout], encoding="utf-8")
    sys.modules.pop(DRAFTER, None)
    yield importlib.import_module(DRAFTER)
    sys.modules.pop(DRAFTER, None)
    path.write_text(before, encoding="utf-8")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A draft model that agrees with the target now and then: the target, with noise."""
    folder = tiny_llama_dir(tmp_path_factory.mktemp("draft"))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def make_requests(lengths: tuple[int, ...] = (1, 3, 17, 66), max_new: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]
    return [Request(10 + i, list(p), len(p), max_new) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[list[int]]:
    requests = make_requests()
    Loop(tiny_target).run(requests)
    return [request.output for request in requests]


def drafter_of(module: Any, folder: Path, topk: int, **options: Any) -> Any:
    options = {"max_draft_len": STEPS, "max_seq_len": 256, "dtype": "float32"} | options
    return module.TreeDrafter(str(folder), tree_topk=topk, **options)


@pytest.mark.parametrize("topk", [1, 4])
def test_tokens_are_those_of_plain_decoding_and_drafts_are_accepted(
    drafting: Any, tiny_target: Path, other: Path, plain: list[list[int]], topk: int
) -> None:
    requests = make_requests()
    loop = Loop(tiny_target, drafter_of(drafting, other, topk))
    loop.run(requests)
    assert [request.output for request in requests] == plain
    accepted = [kept for request in requests for kept in request.accepted]
    # Some are rejected, too: what a draft left behind is undone.
    assert sum(accepted) > 0 and 0 in accepted


def test_a_draft_model_equal_to_the_target_drafts_a_chain_that_is_always_accepted(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 1)).run(requests)
    assert [request.output for request in requests] == plain
    for request in requests:
        assert request.accepted[:-1] == request.drafted[:-1] == [STEPS] * (len(request.drafted) - 1)


def test_a_tree_of_an_equal_draft_model_is_accepted_now_and_then(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 4)).run(requests)
    assert [request.output for request in requests] == plain
    assert all(sum(request.accepted) > 0 for request in requests)


@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_are_those_of_a_slow_drafter_without_a_cache(
    newest: Any, tiny_target: Path, other: Path, topk: int
) -> None:
    """Also after the sequence was cut: K/V of what is no longer there must not be seen."""
    drafter, requests = drafter_of(newest, other, topk), make_requests((5, 40), max_new=30)
    loop = Loop(tiny_target, drafter)
    loop.run(requests)
    slow = SlowDrafter(other, topk, 1 + STEPS if topk == 1 else 32)
    for cut in (0, 22, 9):
        sequences = [request.tokens[: len(request.tokens) - cut] for request in requests]
        # The second is then another sequence of the same length, but for its first tokens.
        sequences[1][20:25] = [9] * 5
        again = [
            Request(request.request_id, s, 0, 999) for request, s in zip(requests, sequences, strict=True)
        ]
        assert _draft(drafter, again) == [slow.path(tokens) for tokens in sequences]


def test_prompts_are_computed_once(
    newest: Any, tiny_target: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests((17, 66))
    loop = Loop(tiny_target, drafter_of(newest, other, 4))
    prefilled: list[int] = []
    draft_lm = sys.modules["trtllm_tree.hosts.tensorrt_llm.draft_lm"].DraftLM
    whole = draft_lm._prefill_rows

    def count(self: Any, segments: Any) -> None:
        prefilled.append(sum(segment.length for segment in segments))
        whole(self, segments)

    monkeypatch.setattr(draft_lm, "_prefill_rows", count)
    loop.run(requests)
    # A prompt and its first token, but for the S + 1 rows that every round computes.
    assert prefilled == [17 + 66 + 2 - 2 * (STEPS + 1)]


@pytest.mark.parametrize("at", [1, 2])
def test_a_forward_that_fails_is_not_hidden_and_leaves_nothing_wrong(
    newest: Any, other: Path, at: int
) -> None:
    drafter, requests = drafter_of(newest, other, 3), make_requests((40,))
    _draft(drafter, requests)
    tokens = list(requests[0].tokens)
    requests[0].tokens[10:15] = [9] * 5
    runner, calls = drafter._model._runner, []
    whole = runner.forward

    def fail(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == at:
            raise RuntimeError("out of memory")
        return whole(*args)

    runner.forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        _draft(drafter, requests)
    requests[0].tokens = tokens
    assert _draft(drafter, requests) == [SlowDrafter(other, 3, 32).path(requests[0].tokens)]


class SlowDrafter:
    """The best path of a tree whose every candidate is scored by a whole forward."""

    def __init__(self, model_dir: Path, topk: int, num_nodes: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.topk, self.num_nodes = topk, num_nodes

    def path(self, tokens: list[int]) -> list[int]:
        tree = DraftTreeOracle(self.topk, STEPS)
        for _ in range(STEPS):
            lanes = [
                [tree.entries[entry].token for entry in reversed(tree.ancestry(lane))]
                for lane in (tree.lanes[-1] if tree.lanes else [-1])
            ]
            rows = [self._children(tokens + lane) for lane in lanes]
            tree.grow([row[0] for row in rows], [row[1] for row in rows])
        nodes = tree.select(self.num_nodes, tokens[-1])
        worth = [0.0]
        for node in nodes[1:]:
            worth.append(worth[node.parent] + math.exp(node.score))
        number, path = max(range(len(nodes)), key=worth.__getitem__), []
        while number:
            path.append(nodes[number].token)
            number = nodes[number].parent
        return path[::-1]

    @torch.no_grad()
    def _children(self, tokens: list[int]) -> tuple[list[float], list[int]]:
        best = self.model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(self.topk)
        return best.values.tolist(), best.indices.tolist()


def _draft(drafter: Any, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        request.py_draft_tokens = [0] * STEPS
    drafter.prepare_draft_tokens(SimpleNamespace(context_requests=[], generation_requests=requests))
    return [request.py_draft_tokens for request in requests]


def test_more_requests_than_slots_all_finish_and_those_with_a_slot_draft(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 1, max_batch_size=2)).run(requests, batch=3)
    assert [request.output for request in requests] == plain
    assert all(0 in r.drafted or sum(r.accepted) for r in requests)
    assert sum(sum(request.accepted) for request in requests) > 0


def test_ended_requests_give_their_slots_away_and_ids_may_come_again(
    newest: Any, tiny_target: Path, plain: list[list[int]]
) -> None:
    drafter = drafter_of(newest, tiny_target, 1, max_batch_size=4)
    for _ in range(2):
        requests = make_requests()
        # The same ids in another order: every slot holds another request's tokens.
        for request, number in zip(requests, (13, 12, 11, 10), strict=True):
            request.request_id = number
        Loop(tiny_target, drafter).run(requests)
        assert [request.output for request in requests] == plain
        assert all(set(request.drafted[:-1]) == set(request.accepted[:-1]) == {STEPS} for request in requests)


def test_a_request_that_cannot_be_drafted_for_is_decoded_plainly_and_alone(
    newest: Any, tiny_target: Path, tmp_path: Path, plain: list[list[int]]
) -> None:
    requests = make_requests()
    Loop(tiny_target, drafter_of(newest, tiny_target, 1, max_seq_len=45)).run(requests)
    assert [request.output for request in requests] == plain
    # The last has 66 prompt tokens; the third grows past 45 only at its end.
    assert not any(requests[3].drafted) and requests[2].drafted[0] == STEPS
    small = tiny_llama_dir(tmp_path, vocab_size=290)
    known, unknown = Request(1, [5, 6, 7], 3, 9), Request(2, [5, 295, 7], 3, 9)
    drafts = _draft(drafter_of(newest, small, 1), [unknown, known])
    assert drafts[0] == [] and len(drafts[1]) == STEPS


def test_no_more_is_drafted_than_was_reserved_or_is_still_wanted(newest: Any, tiny_target: Path) -> None:
    drafter = drafter_of(newest, tiny_target, 1)
    requests = [Request(i, [5, 6, 7], 3, 99) for i in range(4)]
    for request, reserved in zip(requests, (0, 2, 4, 4), strict=True):
        request.py_draft_tokens = [0] * reserved
    requests[3].py_max_new_tokens = 2
    drafter.prepare_draft_tokens(SimpleNamespace(context_requests=[], generation_requests=requests))
    assert [len(request.py_draft_tokens) for request in requests] == [0, 2, 4, 1]


def test_prompts_longer_than_a_prefill_chunk_are_drafted_for(
    newest: Any, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_tree.hosts.tensorrt_llm import draft_lm

    lengths = (50, 3, 33, 20)
    whole = _draft(drafter_of(newest, tiny_target, 4), make_requests(lengths))
    monkeypatch.setattr(draft_lm, "_PREFILL_ROWS", 16)
    assert _draft(drafter_of(newest, tiny_target, 4), make_requests(lengths)) == whole


def test_a_rank_gets_a_drafter_without_its_model(newest: Any, tiny_target: Path) -> None:
    drafter = drafter_of(newest, tiny_target, 4)
    expected = _draft(drafter, make_requests())
    sent = pickle.dumps(drafter)
    assert len(sent) < 4000
    there = pickle.loads(sent)
    assert there._model is None and there.max_draft_len == STEPS
    assert _draft(there, make_requests()) == expected
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


def test_the_best_path_has_the_largest_expected_acceptance_of_all(newest: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        nodes = int(torch.randint(2, 12, (), generator=generator))
        parents = [-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes)]
        scores = [0.0] * nodes
        for node in range(1, nodes):
            scores[node] = scores[parents[node]] - 2 * float(torch.rand((), generator=generator))
        tokens = list(range(100, 100 + nodes))

        def path_to(node: int, parents: list[int] = parents) -> list[int]:
            return [] if node == 0 else [*path_to(parents[node]), node]

        worth = {node: sum(math.exp(scores[one]) for one in path_to(node)) for node in range(nodes)}
        drafted = Candidates(*(torch.tensor([row]) for row in (tokens, parents, scores)))
        (path,) = newest.best_paths(drafted)
        assert path == [tokens[node] for node in path_to(max(worth, key=worth.__getitem__))]


def test_scores_that_are_no_numbers_are_on_no_path(newest: Any) -> None:
    parents, nan, inf = [-1, 0, 1, 0], math.nan, math.inf
    for scores, expected in (
        ([0.0, -1.0, nan, nan], [11]),
        ([0.0, nan, -1.0, -3.0], [13]),
        ([0.0, -inf, -inf, -inf], []),
    ):
        drafted = Candidates(*(torch.tensor([row]) for row in ([10, 11, 12, 13], parents, scores)))
        assert newest.best_paths(drafted) == [expected]
