"""Programs that nobody has read, each run in a process of its own. Knows no task and no model. On Linux alone: who
imports this asks for the platform."""

from olive_ext.sandbox.sandbox import MODES, Limits, Outcome, Sandbox

__all__ = ["MODES", "Limits", "Outcome", "Sandbox"]
