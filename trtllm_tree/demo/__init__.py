"""The model pair that the demo and the tests run on: SmolLM2-135M-Instruct and an EAGLE3 head for it.

Owns the word `demo` as a model name. Loads neither torch nor transformers by itself.
"""

from __future__ import annotations

from pathlib import Path

from trtllm_tree.demo.target import demo_target_dir
from trtllm_tree.errors import ConfigError, Problem

__all__ = ["demo_target_dir", "resolve_head", "resolve_target"]

DEMO = "demo"


def resolve_target(name: str) -> Path:
    """The folder of the target model: the demo's (converted on first use), or an existing local folder.

    Raises:
        ConfigError: `model` is neither; or the demo's model cannot be had.
    """
    return demo_target_dir() if name == DEMO else _existing_dir("model", name)


def resolve_head(name: str) -> Path:
    """The folder of the draft head: the demo's EAGLE3 head (package data), or an existing local folder.

    Raises:
        ConfigError: `speculative_model` is neither.
    """
    return Path(__file__).parent / "eagle3" if name == DEMO else _existing_dir("speculative_model", name)


def _existing_dir(option: str, name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ConfigError(
            Problem(
                option,
                name,
                f"must be {DEMO!r} or an existing folder in Hugging Face layout",
                "Download the model to a local folder and give its path.",
            )
        )
    return path
