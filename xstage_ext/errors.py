"""Every exception that xstage raises on its own account."""

from __future__ import annotations


class XStageError(RuntimeError):
    """Base of all errors below.

    Attributes
    ----------
    record
        The fault record behind an error that a kernel found; else None.
    """

    # No constructor of its own: torch.compile cannot trace one, and a refusal in traced code would
    # lose its text.
    record: object | None = None


class BinaryError(XStageError):
    """The compiled libraries are missing or do not fit this Python package."""


class PlanError(XStageError):
    """No plan is feasible, or a plan given by hand is not; says the nearest feasible value."""


class ProfileError(XStageError):
    """A machine profile is missing, malformed, of another version, or describes another GPU."""


class CalibrationError(XStageError):
    """A machine cannot be measured, or the measurements do not determine a parameter."""


class WorkspaceError(XStageError):
    """A workspace is closed, too small, out of slots, or its ranks disagree."""


class RoutingError(XStageError):
    """A kernel masked an expert id that is out of range."""


class PeerTimeout(XStageError):
    """A rank waited for another longer than the deadline."""


class PeerError(XStageError):
    """Another rank refused the same call, gave up on it, or has ended."""
