"""Makes rounds visible: drafts and what was kept of them, recorded on the host and drawn as one HTML page."""

from __future__ import annotations

from trtllm_tree.trace.page import render_html
from trtllm_tree.trace.recorder import TracedRound, TraceRecorder

__all__ = ["TraceRecorder", "TracedRound", "render_html"]
