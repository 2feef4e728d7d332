"""Invariant I15: what may run as a tree is decided once, and every blocker is reported together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.support.report import Refused, Supported, TreeSupport
from trtllm_tree.support.resolve import resolve_tree_support, tree_answers, tree_blockers


@dataclass
class FakeBackend:
    """A backend with a fixed answer, which counts how often it is asked."""

    name: str
    verify: str | None = None
    lanes: str | None = None
    children: Sequence[FakeBackend] = ()
    asked: int = 0

    def tree_support(self) -> TreeSupport:
        self.asked += 1
        return TreeSupport(
            verify=Refused(self.verify) if self.verify else Supported(),
            lanes=Refused(self.lanes) if self.lanes else Supported(),
        )

    def child_backends(self) -> Sequence[FakeBackend]:
        return self.children


@dataclass(frozen=True)
class FakeSampler:
    """A sampling backend, as far as it is asked."""

    name: str
    supports_tree_verify: bool


SAMPLER = FakeSampler("walks", True)


def blockers(target: FakeBackend, draft: FakeBackend) -> list[tuple[str, object, str]]:
    return [(problem.option, problem.value, problem.rule) for problem in tree_blockers(target, draft)]


def test_backends_that_support_their_part_are_no_blockers():
    # Each side answers for its own part only: a target that has no lanes is fine.
    target = FakeBackend("target", lanes="no lane tables", children=[FakeBackend("mla", lanes="no lanes")])
    draft = FakeBackend("draft", verify="no verify masks")
    assert blockers(target, draft) == []
    resolve_tree_support(target, draft, SAMPLER)
    leaf = ReferenceLeaf()
    resolve_tree_support(leaf, leaf, SAMPLER)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (
            FakeBackend("xqa", verify="gives no log-sum-exp"),
            FakeBackend("triton"),
            ("verify attention backend", "xqa", "gives no log-sum-exp"),
        ),
        (
            FakeBackend("triton"),
            FakeBackend("swa", lanes="has a sliding window"),
            ("lanes attention backend", "swa", "has a sliding window"),
        ),
    ],
)
def test_each_blocker_names_part_backend_reason_and_remedy(target, draft, expected):
    assert blockers(target, draft) == [expected]
    with pytest.raises(UnsupportedError) as caught:
        resolve_tree_support(target, draft, SAMPLER)
    for word in (*expected, "tree_topk=1"):
        assert str(word) in str(caught.value)


def test_all_blockers_are_reported_at_once():
    target = FakeBackend(
        "hybrid",
        children=[
            FakeBackend("gdn", verify="follows a chain"),
            FakeBackend("router", verify="sinks", children=[FakeBackend("deep", verify="no lse")]),
        ],
    )
    draft = FakeBackend(
        "draft-router", lanes="no frozen window", children=[FakeBackend("leaf", lanes="no lse")]
    )
    expected = [
        ("verify attention backend", "gdn", "follows a chain"),
        ("verify attention backend", "router", "sinks"),
        ("verify attention backend", "deep", "no lse"),
        ("lanes attention backend", "draft-router", "no frozen window"),
        ("lanes attention backend", "leaf", "no lse"),
    ]
    assert blockers(target, draft) == expected
    with pytest.raises(UnsupportedError) as caught:
        resolve_tree_support(target, draft, SAMPLER)
    assert len(caught.value.problems) == 5
    assert len(str(caught.value).splitlines()) == 5


def test_a_sampling_backend_without_trees_is_one_more_blocker_in_the_report():
    target, draft = FakeBackend("xqa", verify="gives no log-sum-exp"), FakeBackend("triton")
    sampler = FakeSampler("ratios", False)
    assert tree_blockers(draft, draft, SAMPLER) == []
    with pytest.raises(UnsupportedError) as caught:
        resolve_tree_support(target, draft, sampler)
    found = [(problem.option, problem.value) for problem in caught.value.problems]
    assert found == [("verify attention backend", "xqa"), ("sampling backend", "ratios")]
    assert "tree_topk=1" in str(caught.value).splitlines()[1]


def test_a_composite_cannot_answer_for_a_child():
    # However deep a child sits, and whatever the composites above it claim, it is asked itself, and once.
    leaf = FakeBackend("leaf", verify="no lse")
    composite = FakeBackend(
        "outer", children=[FakeBackend("inner", children=[FakeBackend("core", children=[leaf])])]
    )
    draft = FakeBackend("draft")
    assert blockers(composite, draft) == [("verify attention backend", "leaf", "no lse")]
    assert (leaf.asked, composite.asked, draft.asked) == (1, 1, 1)


def test_a_backend_without_an_answer_is_no_silent_yes():
    class Legacy:
        name = "legacy"

        def child_backends(self) -> Sequence[FakeBackend]:
            return ()

    with pytest.raises(AttributeError, match="tree_support"):
        resolve_tree_support(Legacy(), FakeBackend("draft"), SAMPLER)


def test_a_nested_composites_own_refusal_stands_beside_those_of_its_children():
    deep = FakeBackend("deep", verify="no lse")
    inner = FakeBackend("inner", verify="routes by length", children=[FakeBackend("fine"), deep])
    outer = FakeBackend("outer", children=[inner, FakeBackend("gdn", verify="follows a chain")])
    assert [rule for _, _, rule in blockers(outer, FakeBackend("draft"))] == [
        "routes by length",
        "no lse",
        "follows a chain",
    ]


def test_target_and_draft_trees_that_differ_answer_for_their_own_part():
    # The same words under the other part must not count.
    target = FakeBackend("target", children=[FakeBackend("mla", verify="no verify", lanes="no lanes")])
    draft = FakeBackend("draft", children=[FakeBackend("gqa", verify="no verify", lanes="no lanes")])
    assert blockers(target, draft) == [
        ("verify attention backend", "mla", "no verify"),
        ("lanes attention backend", "gqa", "no lanes"),
    ]


def test_a_backend_that_is_shared_is_asked_once_and_named_once_a_part():
    leaf = FakeBackend("leaf", verify="no verify", lanes="no lanes")
    target = FakeBackend(
        "target", children=[FakeBackend("a", children=[leaf]), FakeBackend("b", children=[leaf])]
    )
    assert blockers(target, leaf) == [
        ("verify attention backend", "leaf", "no verify"),
        ("lanes attention backend", "leaf", "no lanes"),
    ]
    assert leaf.asked == 1


def test_composites_that_route_to_each_other_end():
    first, second = FakeBackend("first"), FakeBackend("second", verify="no lse")
    first.children, second.children = [second], [first]
    assert blockers(first, FakeBackend("draft")) == [("verify attention backend", "second", "no lse")]


def test_backends_that_a_composite_makes_when_asked_do_not_hide_each_other():
    @dataclass
    class Making(FakeBackend):
        """Its children exist only while somebody holds them, so their ids could come again."""

        def child_backends(self) -> Sequence[FakeBackend]:
            return [FakeBackend(f"{self.name}{index}", verify=f"reason {index}") for index in range(20)]

    names = [name for _, name, _ in blockers(Making("made"), FakeBackend("draft"))]
    assert names == [f"made{index}" for index in range(20)]


def test_the_answers_cover_every_backend_and_its_part():
    target = FakeBackend("outer", children=[FakeBackend("leaf", verify="no lse")])
    found = [
        (answer.part, answer.backend, answer.answer) for answer in tree_answers(target, FakeBackend("draft"))
    ]
    assert found == [
        ("verify", "outer", Supported()),
        ("verify", "leaf", Refused("no lse")),
        ("lanes", "draft", Supported()),
    ]


def test_the_embedded_host_resolves_before_it_loads_anything(monkeypatch, tmp_path):
    from tests.builders import tiny_eagle3_dir, tiny_llama_dir
    from trtllm_tree.config.engine import EngineConfig
    from trtllm_tree.config.speculative import SpeculativeConfig
    from trtllm_tree.hosts.embedded import eagle3_side, host

    def loads(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded before support was resolved")

    refused = TreeSupport(verify=Refused("no verify"), lanes=Refused("no lanes"))
    monkeypatch.setattr(ReferenceLeaf, "tree_support", lambda self: refused)
    for module, name in ((host, "ModelRunner"), (eagle3_side, "load_eagle3_head"), (host, "build_cache")):
        monkeypatch.setattr(module, name, loads)
    target_dir = tiny_llama_dir(tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        host.build_host(
            EngineConfig(model="tiny", device="cpu"),
            SpeculativeConfig(tree_topk=2, num_steps=2, speculative_model="head"),
            target_dir=target_dir,
            head_dir=tiny_eagle3_dir(tmp_path, target_dir),
        )
    assert [problem.rule for problem in caught.value.problems] == ["no verify", "no lanes"]
