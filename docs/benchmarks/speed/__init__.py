"""Our backend and others on the same requests, each measured in a process of its own.

`bench` builds the requests and runs the processes, `worker` is what runs inside them, and `peers` opens backends by
name.
"""

from docs.benchmarks.speed.bench import bench

__all__ = ["bench"]
