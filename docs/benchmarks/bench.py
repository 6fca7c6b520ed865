"""Measures the speed of one model beside other backends, on the same requests, each in a process of its own.

    python -m docs.benchmarks bench MODEL --tasks A,B --output DIR [OPTION ...]

MODEL is an .onnx file, or a folder with one or with genai_config.json. A line on stderr for each process that has
ended, the table on stdout; DIR gets bench.json, bench.md, bench.png and the processes' logs. Exit status 1: a backend
failed; 2: a mistake, in one line.
"""

from __future__ import annotations

import argparse
import sys

import harness  # noqa: F401  (puts the clone's root on the path)

from olive_ext.errors import OliveExtError


def main() -> int:
    """Runs one comparison."""
    from docs.benchmarks.speed.bench import bench
    from docs.benchmarks.speed.config import parsed
    from docs.benchmarks.speed.tables import print_summary
    from olive_ext.backends.progress import say

    try:
        config = parsed(sys.argv[1:], argparse.ArgumentParser(description=str(__doc__).splitlines()[0]))
        summary = bench(config, say=say)
    except OliveExtError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 2
    print_summary(summary, f"{config.model}: {', '.join(config.tasks)}")
    return int(any(row.error for row in summary.rows))


if __name__ == "__main__":
    sys.exit(main())
