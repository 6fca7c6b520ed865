"""What an export lost of its checkpoint: how far an ONNX model and the transformers model that it was made of are
apart, from which length on, in which layer, and which value of the configuration was left out. Knows no task."""

from olive_ext.plugins.diagnose.conversion.agreement import Agreement
from olive_ext.plugins.diagnose.conversion.checkpoint import hold_against

__all__ = ["Agreement", "hold_against"]
