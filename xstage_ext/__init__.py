"""Fused communication and computation for distributed DiT and MoE inference on NVLink nodes."""

from __future__ import annotations

from . import _binary
from . import errors as errors
from .errors import PeerError as PeerError
from .errors import PeerTimeout as PeerTimeout
from .errors import PlanError as PlanError
from .errors import RoutingError as RoutingError
from .errors import WorkspaceError as WorkspaceError
from .errors import XStageError as XStageError
from .version import __version__ as __version__

try:
    _binary.load()
    from ._plan_report import plan_report as plan_report
    from .attention import UlyssesAttention as UlyssesAttention
    from .functional import ulysses_attention as ulysses_attention
    from .megamoe import MegaMoE as MegaMoE
    from .planner.attention_choice import AttentionProblem as AttentionProblem
    from .planner.problem import MoEProblem as MoEProblem
    from .support import explain as explain
    from .support import is_supported as is_supported
    from .ulysses import ulysses_a2a as ulysses_a2a
    from .weights import convert_weights_ as convert_weights_
    from .workspace import SymmetricWorkspace as SymmetricWorkspace
except errors.BinaryError as error:
    if _binary.asked_by_command():
        raise SystemExit(f"error: {error}") from None
    raise
