"""`olive-ext bench`: our backend and others on the same requests, each measured in a process of its own.

Other rooms import `bench`, and `tables.print_summary` to show what it returns. This room knows no evaluation framework;
`worker`, which runs inside the measured processes, opens backends by name.
"""

from olive_ext.bench.bench import bench

__all__ = ["bench"]
