"""What every test needs: the device, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

# Kernels choose the interpreter when they are decorated, so this must precede their import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernel tests run: the real kernels on a GPU, Triton's interpreter on a CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
