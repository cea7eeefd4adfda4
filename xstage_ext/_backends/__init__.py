"""Where the memory of a symmetric workspace comes from: one module per kind."""

from __future__ import annotations

from .base import BlockMemory
from .local import LocalMemory
from .posix_shm import SharedMemory
from .symm_mem import TorchSymmetricMemory

__all__ = ["BlockMemory", "LocalMemory", "SharedMemory", "TorchSymmetricMemory"]
