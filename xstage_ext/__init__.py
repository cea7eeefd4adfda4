"""Fused communication and computation for distributed DiT and MoE inference on NVLink nodes."""

from __future__ import annotations

from . import _binary
from .version import __version__ as __version__

_binary.load()

from . import errors as errors  # noqa: E402
from ._plan_report import plan_report as plan_report  # noqa: E402
from .attention import UlyssesAttention as UlyssesAttention  # noqa: E402
from .functional import ulysses_attention as ulysses_attention  # noqa: E402
from .megamoe import MegaMoE as MegaMoE  # noqa: E402
from .planner.attention_choice import AttentionProblem as AttentionProblem  # noqa: E402
from .planner.problem import MoEProblem as MoEProblem  # noqa: E402
from .support import explain as explain  # noqa: E402
from .support import is_supported as is_supported  # noqa: E402
from .ulysses import ulysses_a2a as ulysses_a2a  # noqa: E402
from .weights import convert_weights_ as convert_weights_  # noqa: E402
from .workspace import SymmetricWorkspace as SymmetricWorkspace  # noqa: E402
