"""Fused communication and computation for distributed DiT and MoE inference on NVLink nodes."""

from __future__ import annotations

from . import _binary

_binary.load()

__version__ = "0.1.0"
