"""Fused communication and computation for distributed DiT and MoE inference on NVLink nodes."""

from __future__ import annotations

from . import _binary
from .version import __version__ as __version__

_binary.load()

from .workspace import SymmetricWorkspace as SymmetricWorkspace  # noqa: E402
