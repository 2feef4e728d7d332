"""Builds the embedded engine for a config: loads, sizes, wires. With topk 1 no tree object is made."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from trtllm_tree.attention.base import AttentionLeaf, LeafShape
from trtllm_tree.attention.cascade import TreeCascade
from trtllm_tree.attention.compact import KVCompactor
from trtllm_tree.attention.leaves.reference import ReferenceLeaf
from trtllm_tree.attention.leaves.triton import TritonLeaf
from trtllm_tree.config.engine import EngineConfig
from trtllm_tree.config.speculative import SpeculativeConfig
from trtllm_tree.draft.eagle import Eagle
from trtllm_tree.draft.eagle3_head import Eagle3Head, load_eagle3_head
from trtllm_tree.engine.chain_attention import TorchDecodeAttention
from trtllm_tree.engine.engine import Engine
from trtllm_tree.engine.kv_cache import KVCache, LayerSpec
from trtllm_tree.engine.layer_options import layer_options
from trtllm_tree.engine.model_runner import ModelRunner, load_model_config, target_layer_specs
from trtllm_tree.engine.plain import PlainDecode
from trtllm_tree.engine.ports import DecodeAttentionFactory
from trtllm_tree.errors import ConfigError, UnsupportedError
from trtllm_tree.hosts.embedded.attention import CascadeDecodeAttention
from trtllm_tree.hosts.embedded.config import ResolvedConfig, resolve_config
from trtllm_tree.hosts.embedded.draft_model import EmbeddedDraftModel
from trtllm_tree.hosts.embedded.kv import EmbeddedKVPool, build_cache
from trtllm_tree.hosts.embedded.spec_hook import SpecDecode
from trtllm_tree.round import SpecRound, TreeParts
from trtllm_tree.sampling.edits import LogitEdits
from trtllm_tree.sampling.grammar import GrammarCompiler, SlotGrammars
from trtllm_tree.sampling.gumbel import GumbelSampler, SlotDraws
from trtllm_tree.sampling.logprobs import TargetLogprobs
from trtllm_tree.sampling.rejection import TreeRejectionSampler
from trtllm_tree.support.head import head_problems
from trtllm_tree.support.model_facts import read_model_facts
from trtllm_tree.support.report import Refused, Supported
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


def build_host(
    config: EngineConfig, speculative: SpeculativeConfig | None, *, target_dir: Path, head_dir: Path | None
) -> EmbeddedHost:
    """Load the models and wire the engine.

    Args:
        target_dir: local Hugging Face directory of the target.
        head_dir: EAGLE3 checkpoint; needed exactly when `speculative` is given.

    Raises:
        ConfigError: a head that does not fit, a limit that cannot be held, a device that is not there.
        UnsupportedError: layers or backends that cannot run, all named.
    """
    target_facts = read_model_facts(target_dir)
    if target_facts is not None and (problems := scope_problems(target_facts, "embedded")):
        raise UnsupportedError(problems)
    model_config = load_model_config(target_dir)
    resolved = resolve_config(
        config, speculative, target_dir=target_dir, head_dir=head_dir, model_config=model_config
    )
    layers = target_layer_specs(model_config)
    # Checked before the target is loaded, which takes a while.
    if head_dir is not None and (problems := head_problems(head_dir, target_dir)):
        raise ConfigError(problems)
    target_attention = _attention(resolved.device, _target_shape(resolved, model_config, layers))
    draft_attention = target_attention
    if head_dir is not None:
        # A head's layer is grouped heads that see all of their keys, whatever the target's are.
        draft_attention = _attention(resolved.device, _head_shape(resolved, head_dir))
    if speculative is not None and speculative.is_tree:
        resolve_tree_support(
            target_attention.cascade.leaf, draft_attention.cascade.leaf, _sampler_class(speculative)
        )
    runner = ModelRunner(target_dir, dtype=resolved.dtype, device=resolved.device)
    tokenizer = AutoTokenizer.from_pretrained(target_dir, local_files_only=True)
    num_slots, device = resolved.max_batch_size + 1, resolved.device
    max_rows, vocab_size = resolved.max_batch_size * resolved.window_len, runner.config.vocab_size
    draws = SlotDraws(num_slots, max_rows, device=device)
    edits = LogitEdits(num_slots, max_rows, vocab_size, device=device)
    logprobs = TargetLogprobs(edits)
    if speculative is None or head_dir is None:
        cache = _cache(resolved, layers, None)
        hook: PlainDecode | SpecDecode = PlainDecode(
            num_slots, device, target_attention.decode, draws, edits, logprobs
        )
    else:
        head = load_eagle3_head(
            head_dir,
            target_config=runner.config,
            embed_tokens=runner.embed_tokens,
            dtype=resolved.dtype,
            device=resolved.device,
        )
        cache = _cache(resolved, layers, LayerSpec(head.num_kv_heads, head.head_dim))
        hook = _speculation(
            speculative,
            resolved,
            runner,
            head,
            cache,
            target_attention,
            draft_attention,
            draws,
            edits,
            logprobs,
        )
    eos_ids, spec_round = (
        _eos_ids(target_dir, tokenizer),
        hook.round if isinstance(hook, SpecDecode) else None,
    )
    grammars = SlotGrammars(
        GrammarCompiler(tokenizer, vocab_size, eos_ids),
        edits,
        None if spec_round is None else spec_round.drafted,
    )
    engine = Engine(
        runner,
        cache,
        hook,
        draws,
        edits,
        logprobs,
        grammars=grammars,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        max_batch_size=resolved.max_batch_size,
        max_num_tokens=resolved.max_num_tokens,
        max_seq_len=resolved.max_seq_len,
        cuda_graphs=config.cuda_graphs and resolved.device.type == "cuda" and _is_capturable(runner),
    )
    return EmbeddedHost(engine, tokenizer, spec_round)


def _is_capturable(runner: ModelRunner) -> bool:
    if not runner.is_capturable:
        _LOGGER.warning(
            "cuda_graphs: the experts of %s in %s wait for the device, so decode steps run eagerly; "
            "in bfloat16 they are captured",
            type(runner.model).__name__,
            str(runner.dtype).removeprefix("torch."),
        )
    return runner.is_capturable


def default_leaf(device: torch.device | str, shape: LeafShape | None = None) -> AttentionLeaf:
    """The attention leaf of a device: our kernel on a GPU that it runs on, torch elsewhere. Logs the choice.

    Without a `shape` the device alone decides.
    """
    device = torch.device(device)
    kernel_leaf = TritonLeaf(device, shape)
    answer = kernel_leaf.tree_support().verify
    runs = device.type == "cuda" and isinstance(answer, Supported)
    leaf = kernel_leaf if runs else ReferenceLeaf(shape=shape)
    cache = "grouped heads" if shape is None or shape.value_dim is None else "latent rows"
    why = f" (triton: {answer.reason})" if isinstance(answer, Refused) else ""
    _LOGGER.info("tree attention over %s on %s%s: leaf %s", cache, device, why, leaf.name)
    return leaf


@dataclass(frozen=True)
class _Attention:
    """Attention over one cache: of trees, and of the consecutive rows of chains."""

    cascade: TreeCascade
    decode: DecodeAttentionFactory


def _attention(device: torch.device, shape: LeafShape | None) -> _Attention:
    """Chains run on our kernel where the leaf has one, in torch elsewhere."""
    cascade = TreeCascade(default_leaf(device, shape))
    decode = CascadeDecodeAttention(cascade, device) if cascade.leaf.one_pass else TorchDecodeAttention()
    return _Attention(cascade, decode)


def _target_shape(resolved: ResolvedConfig, config: Any, layers: dict[str, LayerSpec]) -> LeafShape:
    """What the target's layers ask of a leaf."""
    layer, options = next(iter(layers.values())), layer_options(config)
    return _leaf_shape(
        resolved,
        config.num_attention_heads,
        layer,
        sliding_window=any(each.sliding_window is not None for each in options),
        sinks=any(each.sinks for each in options),
    )


def _head_shape(resolved: ResolvedConfig, head_dir: Path) -> LeafShape:
    """What the draft head's layer asks of a leaf; its config has been checked."""
    facts = read_model_facts(head_dir)
    assert facts is not None, "an unchecked head"
    assert facts.num_heads and facts.num_kv_heads and facts.head_dim, "an unchecked head"
    return _leaf_shape(resolved, facts.num_heads, LayerSpec(facts.num_kv_heads, facts.head_dim))


def _leaf_shape(
    resolved: ResolvedConfig,
    num_heads: int,
    layer: LayerSpec,
    *,
    sliding_window: bool = False,
    sinks: bool = False,
) -> LeafShape:
    return LeafShape(
        num_heads=num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        page_size=resolved.page_size,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        value_dim=layer.value_dim,
        sliding_window=sliding_window,
        sinks=sinks,
        max_batch=resolved.max_batch_size,
        max_rows=resolved.window_len,
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
    runner: ModelRunner,
    head: Eagle3Head,
    cache: KVCache,
    target: _Attention,
    draft: _Attention,
    draws: SlotDraws,
    edits: LogitEdits,
    logprobs: TargetLogprobs,
) -> SpecDecode:
    batch, nodes, device = resolved.max_batch_size, config.num_nodes, resolved.device
    draft_model = EmbeddedDraftModel(head, cache, draft.cascade, draft.decode, nodes)
    features = runner.keep_features(head.aux_layer_ids, max(resolved.max_num_tokens, batch * nodes))
    hidden = features[: batch * nodes]
    # One sampler for all: a request at temperature 0 gets the argmax of the same pass.
    spec_round = SpecRound(
        config,
        drafter=Eagle(draft_model, config, max_batch=batch, vocab_size=head.draft_vocab_size, device=device),
        sampler=_sampler_class(config)(draws, batch, nodes, device=device, tree=config.is_tree),
        hidden=hidden,
        num_slots=batch + 1,
        tree=_tree_parts(config, hidden, cache, batch) if config.is_tree else None,
        edits=edits,
    )
    return SpecDecode(spec_round, draft_model, cache, target.cascade, target.decode, features, logprobs)


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
