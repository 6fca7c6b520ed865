"""`olive-ext bench`: its options and what it does."""

from __future__ import annotations

import sys
from argparse import Namespace

from olive_ext.cli.options import Form, Option, written_values
from olive_ext.config.bench import BenchConfig


def _option(flag: str, key: str, metavar: str, form: Form = "value") -> Option:
    return Option(flag, key, metavar, form, owner=BenchConfig)


BENCH_OPTIONS: tuple[Option, ...] = (
    _option("--hf", "hf", "DIR"),
    _option("--tasks", "tasks", "A,B", "commas"),
    _option("--include-path", "include_path", "DIR", "names"),
    _option("--limit", "limit", "N"),
    _option("--num-fewshot", "num_fewshot", "K"),
    _option("--gen-kwargs", "gen_kwargs", "K=V,...", "arguments"),
    _option("--peers", "peers", "A,B", "commas"),
    _option("--once", "once", "A,B", "commas"),
    _option("--batch-sizes", "batch_sizes", "1,4,...", "commas"),
    _option("--probe", "probe", "N"),
    _option("--rounds", "rounds", "N"),
    _option("--warmup", "warmup", "N"),
    _option("--num-threads", "num_threads", "N"),
    _option("--timeout", "timeout", "SECONDS"),
    _option("--provider", "execution_provider", "NAME"),
    _option("--provider-option", "provider_options", "K=V", "pairs"),
    _option("--device", "device", "NAME"),
    _option("--dtype", "dtype", "NAME"),
    _option("--max-length", "max_length", "N"),
    _option("--reference", "reference", "PEER"),
    _option("--growth", "growth", "1,4,...", "commas"),
    _option("--growth-context", "growth_context", "512,...", "commas"),
    _option("--seed", "seed", "N"),
    _option("--output", "output_dir", "DIR"),
)


def bench_command(arguments: Namespace) -> int:
    """Runs the comparison; a line on stderr for each process that has ended, the table on stdout."""
    values = written_values(arguments, options=BENCH_OPTIONS)
    config = BenchConfig.parse({"model": arguments.model, **values})
    from olive_ext.bench import bench
    from olive_ext.bench.tables import print_summary

    print_summary(bench(config, say=_say), f"{config.model}: {', '.join(config.tasks)}")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"olive-ext: {line}\n")
    sys.stderr.flush()
