"""The base class of workers of MTP layers. What it drafts itself is not imitated.

It stands on the common parts alone, so that a test can take a call from it and leave Eagle3's worker whole.
"""

from __future__ import annotations

from typing import Any

from .layout import NEW
from .spec_worker import _SharedWorker

_RAN = "the built-in MTP worker ran"

if NEW:

    class MTPEagleWorker(_SharedWorker):
        """The real one is a thin layer over Eagle3's worker by now, with the constructor that it has always had."""

        def __init__(
            self, spec_config, model_config=None, use_separate_draft_kv_cache=False, *, mapping=None
        ):
            super().__init__(use_separate_draft_kv_cache)
            self.spec_config, self.model_config, self.mapping = spec_config, model_config, mapping

        def set_draft_model(self, draft_model: Any) -> None: ...

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._forward_impl(*args, **kwargs)

        def _forward_impl(
            self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
            resource_manager=None,
        ):  # fmt: skip
            raise NotImplementedError(_RAN)

else:

    class MTPEagleWorker(_SharedWorker):  # type: ignore[no-redef]
        """In a module of its own."""

        def __init__(self, spec_config, model_config=None, use_separate_draft_kv_cache=False):
            super().__init__(use_separate_draft_kv_cache)
            self.spec_config, self.model_config = spec_config, model_config

        def forward(
            self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
            resource_manager=None,
        ):  # fmt: skip
            raise NotImplementedError(_RAN)


class MTPEagleDynamicTreeWorker(MTPEagleWorker):
    """TensorRT-LLM's own trees: whoever sees this was not given the plugin's worker."""
