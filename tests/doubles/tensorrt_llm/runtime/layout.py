"""Which layout the double speaks, and the device that stands for "cuda". `install` writes its own `NEW`."""

from __future__ import annotations

import os

import torch

NEW = True


def device() -> torch.device:
    """The device of every tensor that TensorRT-LLM would put on "cuda"."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(os.environ.get("TLLM_DOUBLE_DEVICE", found))
