"""TensorRT-LLM's target models with our worker in them, registered under the architectures that they serve.

They are the built-in models, word for word, unless TLLM_TREE_ENABLE=1 and the config drafts a tree when one is built.
Then a report of everything that stands in the way comes first, and our worker takes the place of the built-in one.
Importing this module imports TensorRT-LLM's models and nothing else of it, so that a version in which trees cannot work
still gets classes that say so. Must not know what a worker does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from typing import Any

import torch

from trtllm_tree.errors import UnsupportedError
from trtllm_tree.hosts.tensorrt_llm.plugin import log_line, trees_enabled, use_attention
from trtllm_tree.hosts.tensorrt_llm.probe import ProbeReport, probe
from trtllm_tree.hosts.tensorrt_llm.symbols import FEATURES, SYMBOLS, TREE_FEATURES, WORKER_OWNER
from trtllm_tree.hosts.tensorrt_llm.translate import is_effective_tree, plain_config

# Owns a worker in no version read so far; if one makes it, it is served as well.
_MISTRAL = ("tensorrt_llm._torch.models.modeling_mistral", "MistralForCausalLM")
_OWNER_MODULE = "tensorrt_llm._torch.models.modeling_speculative"
_REGISTRY_MODULE = "tensorrt_llm._torch.models.modeling_utils"
# By decoding_type, the symbol of the worker's base class and the name of ours.
_WORKERS = {
    "Eagle3": (("worker", "Eagle3OneModelWorker"), "TreeEagleWorker"),
    "MTP": (("mtp", "MTPEagleWorker"), "TreeMTPEagleWorker"),
}
# Behind this comes a model's built-in class.
_Model: Any = object


class TreeTargetModel(_Model):
    """What makes a TensorRT-LLM target model ours; its built-in class comes behind it."""

    def __init__(self, model_config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the model; with our worker if it drafts trees.

        Raises:
            UnsupportedError: trees are on and cannot be drafted here, with every reason, before anything is built.
            ConfigError: an option of ours that is wrong.
        """
        spec_config = getattr(model_config, "spec_config", None)
        if not trees_enabled():
            super().__init__(model_config, *args, **kwargs)
            return
        report = _require_trees(model_config, type(self)) if is_effective_tree(spec_config) else None
        use_attention(report)
        super().__init__(model_config, *args, **kwargs)
        if report is not None:
            _refuse_layers(self, spec_config)
            self._own_worker(model_config, report)

    def forward(
        self,
        attn_metadata: Any,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        return_context_logits: bool = False,
        spec_metadata: Any = None,
        resource_manager: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The built-in forward, behind the opening of our worker's window."""
        open_window = getattr(self.spec_worker, "open_window", None)
        if open_window is not None:
            open_window(attn_metadata, spec_metadata, input_ids, position_ids, resource_manager)
        return super().forward(
            attn_metadata=attn_metadata,
            input_ids=input_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_context_logits=return_context_logits,
            spec_metadata=spec_metadata,
            resource_manager=resource_manager,
            **kwargs,
        )

    def _own_worker(self: Any, model_config: Any, report: ProbeReport) -> None:
        """Replace the worker, wherever the model holds it."""
        from trtllm_tree.hosts.tensorrt_llm.draft_heads import draft_head
        from trtllm_tree.hosts.tensorrt_llm.worker import tree_eagle_worker

        symbol, worker_name = _WORKERS[model_config.spec_config.decoding_type]
        base = report.resolved[symbol].value
        options = {
            "mapping": model_config.mapping,
            "model_config": model_config,
            "use_separate_draft_kv_cache": self.use_separate_draft_kv_cache,
        }
        known = inspect.signature(base.__init__).parameters
        given = {name: value for name, value in options.items() if name in known}
        worker = tree_eagle_worker(base, worker_name)(model_config.spec_config, **given)
        if hasattr(worker, "set_draft_model"):
            worker.set_draft_model(self.draft_model)
        # Not the draft model itself: the worker would register it a second time, as its own child.
        make_head = functools.partial(draft_head, self.draft_model, model_config, report)
        worker.prepare_rounds(make_head, report.resolved["worker", "ResourceManagerType"].value)
        built_in, self.spec_worker = self.spec_worker, worker
        for index, module in enumerate(self.epilogue):
            if module is built_in:
                self.epilogue[index] = worker
        log_line(rank=model_config.mapping.rank, worker=type(worker), verify=worker.verify, report=report)


def _require_trees(model_config: Any, model: type) -> ProbeReport:
    """The probe's report, if nothing stands in the way of trees.

    Raises:
        UnsupportedError: with everything that does.
    """
    from trtllm_tree.hosts.tensorrt_llm.refusals import refusals

    report = probe()
    spec_config = model_config.spec_config
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    architecture, needed = (
        model.__name__.removeprefix("Tree"),
        TREE_FEATURES.get(spec_config.decoding_type, "trees"),
    )
    # Its own layers' symbols, of a model whose symbols are known.
    own = (f"model:{architecture}", f"{needed}:{architecture}")
    problems = report.problems(needed, *(feature.id for feature in FEATURES if feature.id in own))
    problems += refusals(model_config, spec_config, model_config.mapping, capability=capability)
    if problems:
        raise UnsupportedError(problems)
    return report


def _refuse_layers(model: Any, spec_config: Any) -> None:
    """What only built layers tell.

    Raises:
        UnsupportedError: with every layer that our attention cannot serve.
    """
    from trtllm_tree.hosts.tensorrt_llm.attention import attention_problems

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A public field once, filled in by TensorRT-LLM from the limit of the whole engine.
    batch = getattr(spec_config, "_max_batch_size", None) or getattr(spec_config, "max_batch_size", None) or 1
    rows = plain_config(spec_config).num_nodes
    if problems := attention_problems(model, max_batch=batch, max_rows=rows, device=device):
        raise UnsupportedError(problems)


def _built_in_models() -> dict[str, type]:
    """The target models that are there, by architecture; those that own a worker, where that can be told."""
    places = [
        (module, symbol.name) for symbol in SYMBOLS if symbol.kind == "model" for module in symbol.modules
    ]
    owner = _attribute(_OWNER_MODULE, WORKER_OWNER)
    found = {name: _attribute(module, name) for module, name in (*places, _MISTRAL)}
    return {
        name: model
        for name, model in found.items()
        if inspect.isclass(model) and (owner is None or issubclass(model, owner))
    }


def _attribute(module: str, name: str) -> Any:
    """None where it is missing; what else may be wrong with it is the probe's to say."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:
        return None


def _register() -> None:
    """Make the subclasses names of this module, which ranks import them by."""
    register = importlib.import_module(_REGISTRY_MODULE).register_auto_model
    for architecture, model in _built_in_models().items():
        name = f"Tree{model.__name__}"
        members = {"__module__": __name__, "__doc__": f"{architecture} with draft trees."}
        made = types.new_class(
            name, (TreeTargetModel, model), exec_body=lambda space, m=members: space.update(m)
        )
        globals()[name] = register(architecture)(made)


_register()
