"""Fresh processes that play a group's ranks: `launch` starts them, `scenarios` is what they do."""

from .launch import Outcome, launch, left_behind

__all__ = ["Outcome", "launch", "left_behind"]
