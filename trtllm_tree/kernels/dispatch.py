"""Which implementation of an op runs: the Triton kernel or the torch reference.

Nothing cleverer than the device: CUDA tensors take the kernel, CPU tensors the reference. The
environment variable TLLM_TREE_KERNELS (`auto`, `reference`, `triton`) overrides this for tests; with
`triton` on CPU tensors the process must have been started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import torch

from trtllm_tree.errors import ConfigError, Problem

_CHOICES = ("auto", "reference", "triton")


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on `tensor` runs its Triton kernel.

    Raises:
        ConfigError: TLLM_TREE_KERNELS has an unknown value.
    """
    choice = os.environ.get("TLLM_TREE_KERNELS", "auto")
    if choice not in _CHOICES:
        raise ConfigError(
            Problem(
                "TLLM_TREE_KERNELS", choice, f"must be one of {', '.join(_CHOICES)}", "Unset it for `auto`."
            )
        )
    return tensor.is_cuda if choice == "auto" else choice == "triton"
