"""What slots hold between two steps, and what becomes of a request's sampling options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.hosts.tensorrt_llm.slots import (
    SlotOptions,
    SlotTrees,
    UploadedDraws,
    ignored_options,
    request_options,
    tree_slot_storage,
)
from trtllm_tree.sampling.gumbel import SlotDraws

CPU = torch.device("cpu")
SLOTS, NODES, VOCAB = 5, 6, 97
CHAIN = [-1, 0, 1, 2, 3, 4]


def config(**options: Any) -> SimpleNamespace:
    names = ("temperature", "top_k", "top_p", "min_p", "random_seed")
    return SimpleNamespace(**{name: options.get(name) for name in names})


def request(id_: int, slot: int | None, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(py_request_id=id_, py_seq_slot=slot, sampling_config=config(**options))


def chunk(id_: int, slot: int, prompt: list[int], start: int, size: int) -> SimpleNamespace:
    made = request(id_, slot)
    made.is_last_context_chunk = start + size == len(prompt)
    made.context_current_position, made.context_chunk_size = start, size
    made.get_token = lambda beam, position: prompt[position]
    return made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.0, 0, 1.0, 0.0)),
        ({"temperature": 0.7}, (0.7, 0, 1.0, 0.0)),
        ({"top_p": 0.9}, (1.0, 0, 0.9, 0.0)),
        ({"top_k": 20, "min_p": 0.1}, (1.0, 20, 1.0, 0.1)),
        ({"top_k": 2**40, "temperature": 1.0}, (1.0, 2**31 - 1, 1.0, 0.0)),
        ({"temperature": 0.0, "top_p": 0.9}, (0.0, 0, 0.9, 0.0)),
        ({"temperature": 0.8, "top_k": 1}, (0.0, 1, 1.0, 0.0)),
        ({"temperature": 0.8, "top_p": 0.0}, (0.0, 0, 0.0, 0.0)),
    ],
)
def test_options_are_read_as_tensorrt_llm_reads_them(
    options: dict[str, Any], expected: tuple[float, ...]
) -> None:
    lists = {name: [value] for name, value in options.items()}
    for form in (options, lists):
        read = request_options(request(3, 0, **form))
        assert (read.temperature, read.top_k, read.top_p, read.min_p) == expected


def test_a_request_without_a_seed_gets_one_by_its_id_and_none_that_people_give() -> None:
    read = [request_options(request(id_, 0, temperature=1.0)).seed for id_ in (1, 2, 1)]
    assert read[0] == read[2] != read[1]
    assert min(read) >= 2**63
    assert request_options(request(1, 0, random_seed=[1])).seed == 1


def test_uploaded_options_draw_what_the_engine_draws() -> None:
    """The same rows by `SlotDraws.reset`, with seeds of all 64 bits and every option, in slots out of order."""
    params = {
        4: (SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05), 2**64 - 3),
        0: (SamplingParams(temperature=1.5), 7),
        2: (SamplingParams(), 11),
    }
    expected, uploaded = SlotDraws(SLOTS, 12, device=CPU), UploadedDraws(SLOTS, 12, device=CPU)
    for slot, (param, seed) in params.items():
        expected.reset(slot, param, seed)
    options = [
        SlotOptions(
            p.temperature or 0.0, p.top_k or 0, 1.0 if p.top_p is None else p.top_p, p.min_p or 0.0, seed
        )
        for p, seed in params.values()
    ]
    uploaded.upload(list(params), options)
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    slots = torch.tensor([2, 0, 4])
    positions = torch.arange(12).view(3, 4) + 90
    wanted = expected.draw(logits, slots, positions).clone()
    assert torch.equal(uploaded.draw(logits, slots, positions), wanted)
    argmax = logits.argmax(dim=1).int()
    assert not torch.equal(wanted[4:], argmax[4:]) and torch.equal(wanted[:4], argmax[:4])


def test_greedy_verification_ignores_temperature_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    draws = UploadedDraws(SLOTS, 2, device=CPU, greedy=True)
    for _ in range(2):
        draws.upload([1], [SlotOptions(9.0, 0, 1.0, 0.0, 1)])
    assert len([r for r in caplog.records if "temperature" in r.message]) == 1
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = draws.draw(logits, torch.tensor([1, 1]), torch.tensor([[3], [4]]))
    assert torch.equal(drawn, logits.argmax(dim=1).int())


VALUES = {
    "repetition_penalty": (1.3, 1.0),
    "presence_penalty": (0.5, 0.0),
    "frequency_penalty": (-0.5, 0.0),
    "min_length": (8, 0),
    "no_repeat_ngram_size": (3, 2**30),
    "top_p_decay": (0.9, 1.0),
}
PARTS: dict[str, tuple[str, Any, Any]] = {
    "py_bad_words": ("bad words", [[3, 4]], []),
    "bad_words_list": ("bad words", torch.zeros(1, 2, 3), None),
    "py_embedding_bias": ("embedding_bias", torch.zeros(7), None),
    "embedding_bias": ("embedding_bias", torch.zeros(1, 7), None),
    "py_return_log_probs": ("logprobs", True, False),
    "py_return_context_logits": ("return_context_logits", True, False),
    "py_return_generation_logits": ("return_generation_logits", True, False),
    "py_logits_post_processors": ("logits processors", [print], []),
    "guided_decoding_params": ("guided_decoding", object(), None),
}


def test_options_that_a_tree_does_without_are_found_where_they_ask_for_something() -> None:
    for name, (asking, neutral) in VALUES.items():
        for form in (lambda value: value, lambda value: [value]):
            made = request(1, 0)
            assert ignored_options(made) == []
            setattr(made.sampling_config, name, form(neutral))
            assert ignored_options(made) == []
            setattr(made.sampling_config, name, form(asking))
            assert ignored_options(made) == [name]
    for name, (option, asking, neutral) in PARTS.items():
        made = request(1, 0, temperature=0.7, top_k=5, min_p=0.1)
        setattr(made, name, neutral)
        assert ignored_options(made) == []
        setattr(made, name, asking)
        assert ignored_options(made) == [option]


def test_an_ignored_option_is_told_once_with_the_request_and_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trees = SlotTrees(SLOTS, NODES, CPU)
    for id_, name in ((7, "min_length"), (8, "min_length"), (9, "repetition_penalty")):
        made = request(id_, id_ % SLOTS)
        setattr(made.sampling_config, name, [2])
        trees.note([made], [])
        trees.note([], [made])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "request 7" in said[0] and "min_length, which is ignored under draft trees" in said[0]
    assert "request 9" in said[1] and "repetition_penalty" in said[1]


def test_a_request_that_is_new_in_its_slot_starts_with_the_chain_and_others_keep_their_tree() -> None:
    trees = SlotTrees(SLOTS, NODES, CPU)
    trees.restart(UploadedDraws(SLOTS, NODES, device=CPU))
    star = torch.tensor([-1, 0, 0, 0, 0, 0], dtype=torch.int32)
    first, second = request(10, 1), request(11, 3)
    trees.note([first], [second])
    trees.next_parents.parents[1] = trees.next_parents.parents[3] = star
    trees.note([], [first, second])
    assert trees.next_parents.parents[1].tolist() == trees.next_parents.parents[3].tolist() == star.tolist()
    trees.note([request(12, 3)], [first])
    assert trees.next_parents.parents[3].tolist() == CHAIN
    assert trees.next_parents.parents[1].tolist() == star.tolist()
    trees.forget(1)
    assert trees.next_parents.parents[1].tolist() == CHAIN
    trees.next_parents.parents[1] = star
    trees.note([], [first])
    assert trees.next_parents.parents[1].tolist() == CHAIN


def test_options_go_up_once_per_request_and_not_for_requests_that_pad() -> None:
    class Counted(UploadedDraws):
        def upload(self, slots: Any, options: Any) -> None:
            calls.append((list(slots), [option.seed for option in options]))

    calls: list[tuple[list[int], list[int]]] = []
    trees = SlotTrees(SLOTS, NODES, CPU)
    trees.restart(Counted(SLOTS, NODES, device=CPU))
    pad = request(99, 4, random_seed=[9])
    pad.is_cuda_graph_dummy = True
    batch = [request(1, 2, random_seed=[5]), request(2, 0, random_seed=[6])]
    for _ in range(3):
        trees.note(batch[:1], [batch[1], pad, request(98, None)])
    assert calls == [([2, 0], [5, 6])]
    trees.note([request(3, 0, random_seed=[7])], batch[:1])
    assert calls[1:] == [([0], [7])]
    trees.restart(Counted(SLOTS, NODES, device=CPU))
    trees.note([], batch)
    assert calls[2:] == [([2, 0], [5, 6])]


def test_a_prompt_that_goes_on_says_which_token_lies_behind_its_chunk() -> None:
    prompt = [50, 51, 52, 53, 54, 55, 56]
    trees = SlotTrees(SLOTS, NODES, CPU)
    trees.note([chunk(1, 0, prompt, 0, 3), chunk(2, 1, prompt, 3, 4), request(3, 2)], [])
    assert [(row.is_last, row.next_token) for row in trees.context_rows] == [
        (False, 53),
        (True, 0),
        (True, 0),
    ]
    trees.note([], [request(3, 2)])
    assert trees.context_rows == ()


class BuiltInStorage:
    """What our storage needs of TensorRT-LLM's."""

    def __init__(self, num_slots: int, n_dt: int, mask_width: int, top_k: int = 1) -> None:
        self.top_k, self.dummy_slot_id = top_k, num_slots
        self.packed_mask = torch.zeros(num_slots + 1, n_dt, mask_width, dtype=torch.int32)
        self.all_ids_buf = torch.zeros(num_slots, dtype=torch.int64)
        self.invalid: list[int] = []

    def fill_all_slot_ids(self, context_requests: Any, generation_requests: Any) -> None:
        slots = [r.py_seq_slot for r in (*context_requests, *generation_requests)]
        self.all_ids_buf[: len(slots)] = torch.tensor(slots)

    def mark_invalid(self, slot_id: int) -> None:
        self.invalid.append(slot_id)


def test_our_storage_takes_the_place_of_the_built_in_one_in_the_middle_of_a_step() -> None:
    built_in = BuiltInStorage(SLOTS - 1, NODES, 1, top_k=4)
    built_in.fill_all_slot_ids([request(1, 3)], [request(2, 1)])
    storage = tree_slot_storage(BuiltInStorage)(built_in)
    assert isinstance(storage, BuiltInStorage) and storage.dummy_slot_id == built_in.dummy_slot_id
    assert storage.all_ids_buf[:2].tolist() == [3, 1]
    # A chain for the dummy as well, not a tree of the built-in top-k.
    assert storage.top_k == 1
    assert storage.trees.next_parents.parents.tolist() == [CHAIN] * SLOTS
    storage.fill_all_slot_ids([], [request(2, 2)])
    storage.trees.next_parents.parents[2] = 0
    storage.mark_invalid(2)
    assert storage.invalid == [2] and storage.trees.next_parents.parents[2].tolist() == CHAIN
