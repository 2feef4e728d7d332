"""Waiting for the device as an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_fails() -> Iterator[None]:
    """Whatever waits for the device in here raises; behind it nothing does, whatever was raised."""
    try:
        with warnings.catch_warnings():
            # torch says once a process that the mode is new; where warnings are errors, it would stay switched on.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
