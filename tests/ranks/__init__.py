"""Fresh processes that play a group's ranks: `launch` starts them, `scenarios` is what they do."""

from .launch import Outcome, launch

__all__ = ["Outcome", "launch"]
