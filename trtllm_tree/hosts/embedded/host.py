"""Builds the embedded engine for a config: loads, sizes, wires. With topk 1 no tree object is made."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Eagle
from trtllm_tree.engine.engine import Engine
from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.engine.model_runner import ModelRunner, load_model_config, target_layer_specs
from trtllm_tree.engine.plain import PlainDecode
from trtllm_tree.errors import UnsupportedError
from trtllm_tree.hosts.embedded.attention import HostAttention, host_attention, leaf_shape, target_shape
from trtllm_tree.hosts.embedded.config import ResolvedConfig, resolve_config
from trtllm_tree.hosts.embedded.draft_model import DraftPlan, EmbeddedDraftModel
from trtllm_tree.hosts.embedded.eagle3_side import eagle3_plan
from trtllm_tree.hosts.embedded.kv import EmbeddedKVPool, build_cache
from trtllm_tree.hosts.embedded.mtp_layer import mtp_plan
from trtllm_tree.hosts.embedded.spec_hook import SpecDecode
from trtllm_tree.round import SpecRound, TreeParts
from trtllm_tree.sampling.edits import LogitEdits
from trtllm_tree.sampling.grammar import GrammarCompiler, SlotGrammars
from trtllm_tree.sampling.gumbel import GumbelSampler, SlotDraws
from trtllm_tree.sampling.logprobs import TargetLogprobs
from trtllm_tree.sampling.rejection import TreeRejectionSampler
from trtllm_tree.support.model_facts import read_model_facts
from trtllm_tree.support.resolve import resolve_tree_support
from trtllm_tree.support.scope import scope_problems
from trtllm_tree.tree.future import FutureParentMap
from trtllm_tree.tree.spec import TreeSpec

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbeddedHost:
    """A ready engine. `spec_round` is None for plain decoding."""

    engine: Engine
    tokenizer: Any
    spec_round: SpecRound | None


@dataclass(frozen=True)
class _SlotOptions:
    """How each request's tokens are chosen, by pool slot."""

    draws: SlotDraws
    edits: LogitEdits
    logprobs: TargetLogprobs


def build_host(
    config: EngineConfig, speculative: SpeculativeConfig | None, *, target_dir: Path, head_dir: Path | None
) -> EmbeddedHost:
    """Load the models and wire the engine.

    Args:
        target_dir: local Hugging Face directory of the target.
        head_dir: EAGLE3 checkpoint; needed exactly when `speculative` drafts with one. An MTP layer is the target's.

    Raises:
        ConfigError: a drafter that does not fit, a limit that cannot be held, a device that is not there.
        UnsupportedError: layers or backends that cannot run, all named.
    """
    target_facts = read_model_facts(target_dir)
    if target_facts is not None and (problems := scope_problems(target_facts, "embedded")):
        raise UnsupportedError(problems)
    model_config = load_model_config(target_dir)
    # The drafter is looked at before the target is loaded, which takes a while.
    resolved = resolve_config(
        config, speculative, target_dir=target_dir, head_dir=head_dir, model_config=model_config
    )
    layers = target_layer_specs(model_config)
    plan = None if speculative is None else _draft_plan(speculative, head_dir, model_config, layers)
    target = host_attention(resolved.device, target_shape(resolved, model_config, layers))
    draft = target
    if plan is not None:
        draft = host_attention(resolved.device, leaf_shape(resolved, plan.num_heads, plan.layer))
    if speculative is not None and speculative.is_tree:
        resolve_tree_support(target.cascade.leaf, draft.cascade.leaf, _sampler_class(speculative))
    runner = ModelRunner(target_dir, dtype=resolved.dtype, device=resolved.device)
    if resolved.cuda_graphs and not runner.is_capturable:
        _warn_of_experts(type(runner.model).__name__, runner)
    tokenizer = AutoTokenizer.from_pretrained(target_dir, local_files_only=True)
    options = _slot_options(resolved, runner.config.vocab_size)
    cache = _cache(resolved, layers, None if plan is None else plan.layer)
    if speculative is None or plan is None:
        num_slots = resolved.max_batch_size + 1
        hook: PlainDecode | SpecDecode = PlainDecode(
            num_slots, resolved.device, target.decode, options.draws, options.edits, options.logprobs
        )
    else:
        hook = _speculation(speculative, resolved, plan, runner, cache, target, draft, options)
    engine = _engine(resolved, runner, cache, hook, options, tokenizer)
    return EmbeddedHost(engine, tokenizer, hook.round if isinstance(hook, SpecDecode) else None)


def _draft_plan(
    speculative: SpeculativeConfig, head_dir: Path | None, model_config: Any, layers: dict[str, LayerSpec]
) -> DraftPlan:
    if speculative.decoding_type == "MTP":
        return mtp_plan(model_config, layers)
    assert head_dir is not None, "the host's rules ask for a head"
    return eagle3_plan(head_dir)


def _slot_options(resolved: ResolvedConfig, vocab_size: int) -> _SlotOptions:
    num_slots, device = resolved.max_batch_size + 1, resolved.device
    max_rows = resolved.max_batch_size * resolved.window_len
    edits = LogitEdits(num_slots, max_rows, vocab_size, device=device)
    return _SlotOptions(SlotDraws(num_slots, max_rows, device=device), edits, TargetLogprobs(edits))


def _engine(
    resolved: ResolvedConfig,
    runner: ModelRunner,
    cache: KVCache,
    hook: PlainDecode | SpecDecode,
    options: _SlotOptions,
    tokenizer: Any,
) -> Engine:
    eos_ids = _eos_ids(resolved.target_dir, tokenizer)
    grammars = SlotGrammars(
        GrammarCompiler(tokenizer, runner.config.vocab_size, eos_ids),
        options.edits,
        hook.round.drafted if isinstance(hook, SpecDecode) else None,
    )
    return Engine(
        runner,
        cache,
        hook,
        options.draws,
        options.edits,
        options.logprobs,
        grammars=grammars,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        max_batch_size=resolved.max_batch_size,
        max_num_tokens=resolved.max_num_tokens,
        max_seq_len=resolved.max_seq_len,
        cuda_graphs=resolved.cuda_graphs and runner.is_capturable,
    )


def _warn_of_experts(owner: str, runner: ModelRunner) -> None:
    _LOGGER.warning(
        "cuda_graphs: the experts of %s in %s wait for the device, so decode steps run eagerly; "
        "in bfloat16 they are captured",
        owner,
        str(runner.dtype).removeprefix("torch."),
    )


def _cache(resolved: ResolvedConfig, layers: dict[str, LayerSpec], draft: LayerSpec | None) -> KVCache:
    return build_cache(
        layers,
        draft,
        num_tokens=resolved.num_kv_tokens,
        page_size=resolved.page_size,
        max_batch_size=resolved.max_batch_size,
        max_extent=resolved.max_extent,
        dtype=resolved.kv_dtype,
        device=resolved.device,
    )


def _speculation(
    config: SpeculativeConfig,
    resolved: ResolvedConfig,
    plan: DraftPlan,
    runner: ModelRunner,
    cache: KVCache,
    target: HostAttention,
    draft: HostAttention,
    options: _SlotOptions,
) -> SpecDecode:
    batch, nodes, device = resolved.max_batch_size, config.num_nodes, resolved.device
    side, features = plan.load(runner, max(resolved.max_num_tokens, batch * nodes))
    if resolved.cuda_graphs and runner.is_capturable and not side.graph_safe:
        _warn_of_experts(f"the MTP layer of {type(runner.model).__name__}", runner)
    draft_model = EmbeddedDraftModel(side, cache, draft.cascade, draft.decode, nodes)
    hidden = features[: batch * nodes]
    # One sampler for all: a request at temperature 0 gets the argmax of the same pass.
    spec_round = SpecRound(
        config,
        drafter=Eagle(draft_model, config, max_batch=batch, vocab_size=side.vocab_size, device=device),
        sampler=_sampler_class(config)(options.draws, batch, nodes, device=device, tree=config.is_tree),
        hidden=hidden,
        num_slots=batch + 1,
        tree=_tree_parts(config, hidden, cache, batch) if config.is_tree else None,
        edits=options.edits,
    )
    return SpecDecode(
        spec_round, draft_model, cache, target.cascade, target.decode, features, options.logprobs
    )


def _sampler_class(config: SpeculativeConfig) -> type[GumbelSampler] | type[TreeRejectionSampler]:
    return TreeRejectionSampler if config.use_rejection_sampling else GumbelSampler


def _tree_parts(config: SpeculativeConfig, hidden: torch.Tensor, cache: KVCache, batch: int) -> TreeParts:
    return TreeParts(
        spec=TreeSpec(batch, config.num_nodes, hidden),
        parents=FutureParentMap(batch + 1, config.num_nodes, hidden.device),
        compactor=KVCompactor(EmbeddedKVPool(cache)),
    )


def _eos_ids(target_dir: Path, tokenizer: Any) -> list[int]:
    """The model's stop tokens: those of its generation config, else the tokenizer's."""
    ids: int | list[int] | None = None
    if (target_dir / "generation_config.json").exists():
        ids = GenerationConfig.from_pretrained(target_dir, local_files_only=True).eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
