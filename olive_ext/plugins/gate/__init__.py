"""The gate of a pull request: an evaluation is compared with a baseline that the repository keeps.

Statistics and words of the verdict are those of every comparison.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from contextlib import suppress

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
            "olive_ext.plugins.gate.decision:gate_command",
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
