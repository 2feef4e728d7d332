"""Invariant I15: what may run as a tree is decided once, and every blocker is reported together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.support.report import Refused, Supported, TreeSupport
from trtllm_tree.support.resolve import resolve_tree_support, tree_blockers


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


def blockers(target: FakeBackend, draft: FakeBackend) -> list[tuple[str, object, str]]:
    return [(problem.option, problem.value, problem.rule) for problem in tree_blockers(target, draft)]


def test_backends_that_support_their_part_are_no_blockers():
    # Each side answers for its own part only: a target that has no lanes is fine.
    target = FakeBackend("target", lanes="no lane tables", children=[FakeBackend("mla", lanes="no lanes")])
    draft = FakeBackend("draft", verify="no verify masks")
    assert blockers(target, draft) == []
    resolve_tree_support(target, draft)
    leaf = ReferenceLeaf()
    resolve_tree_support(leaf, leaf)


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
        resolve_tree_support(target, draft)
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
        resolve_tree_support(target, draft)
    assert len(caught.value.problems) == 5
    assert len(str(caught.value).splitlines()) == 5


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
        resolve_tree_support(Legacy(), FakeBackend("draft"))
