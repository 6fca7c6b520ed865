"""The gate of a pull request: an evaluation is compared with a baseline that the repository keeps.

`decision` reads the file, pairs and judges; `formats` lays the result out for machines. Statistics and words of the
verdict are those of every comparison.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress

from olive_ext.errors import printable
from olive_ext.registry import Command, Plugin


def points(text: str) -> float:
    """Points of accuracy; raises `ArgumentTypeError`."""
    with suppress(ValueError):
        if 0 < float(text) < 100:
            return float(text)
    raise ArgumentTypeError(f"{text!r}: give points of accuracy, above 0 and below 100")


_RUN = "Folder of an evaluation, or a .json or .yaml file with the keys of an evaluation, which is then made here."
_BASELINE = "File with the baseline: metrics with errors, and each document's values under a key of its content."
_WITHIN = "Points of accuracy whose loss is too much. By default the evaluation's `matters`, else 1."

plugin = Plugin(
    commands={
        "gate": Command(
            "Hold an evaluation against a baseline in the repository.",
            "olive_ext.plugins.gate:gate_command",
            (
                ("run", "RUN", _RUN, {}),
                ("--baseline", "FILE", _BASELINE, {"required": True}),
                ("--update-baseline", "", "Write the baseline from the evaluation.", {"action": "store_true"}),
                ("--within", "POINTS", _WITHIN, {"type": points}),
                ("--junit", "FILE", "File for the result as JUnit XML, a case a bound.", {}),
            ),
        )
    }
)


def gate_command(arguments: Namespace) -> int:
    """Prints the decision on an evaluation; 0: passed, 1: a loss, 3: it cannot be decided. Writes the baseline instead
    with `--update-baseline`."""
    from olive_ext.plugins.gate.decision import GateResult, gate
    from olive_ext.plugins.gate.formats import annotation_lines, lines, write_formats
    from olive_ext.report.verdict import EXIT_STATUS

    gated = gate(arguments.run, arguments.baseline, arguments.within, update=arguments.update_baseline)
    if not isinstance(gated, GateResult):
        sys.stdout.write(f"baseline: {printable(arguments.baseline)}\n")
        return 0
    for line in (*lines(gated), *annotation_lines(gated, os.environ)):
        sys.stdout.write(f"{printable(line)}\n")
    write_formats(gated, arguments.junit, os.environ)
    return EXIT_STATUS[gated.status]
