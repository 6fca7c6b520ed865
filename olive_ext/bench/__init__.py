"""`olive-ext bench`: our backend and others on the same requests, side by side."""

from olive_ext.bench.bench import bench

__all__ = ["bench"]
