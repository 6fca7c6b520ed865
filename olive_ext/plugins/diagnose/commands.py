"""The commands `locate` and `mend`, and their options. Knows no exit status."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from olive_ext.cli.exit_status import going_on
from olive_ext.cli.options import OF_COMPARISONS, OF_WORKERS, OPTIONS, Option, advised, written_values
from olive_ext.plugins.diagnose.settings import LocationConfig, MendingConfig

LOCATE_OPTIONS: tuple[Option, ...] = (
    *(replace(one, owner=LocationConfig) for one in OPTIONS if one.flag not in OF_COMPARISONS | OF_WORKERS),
    Option("--top", "top", "N", owner=LocationConfig),
)
"""The options of `evaluate` that name the model and the tasks, and the command's own."""

MEND_OPTIONS: tuple[Option, ...] = (
    *(replace(option, owner=MendingConfig) for option in LOCATE_OPTIONS),
    Option("--within", "within", "kl_mean=NATS", "arguments", owner=MendingConfig),
    Option("--at-most", "at_most", "SIZE", owner=MendingConfig),
)


def locate_command(arguments: Namespace) -> int:
    """Prints the weights that lose most; writes the map where a folder for it is named."""
    config = LocationConfig.parse(written_values(arguments, arguments.model, LOCATE_OPTIONS))
    with going_on(config.output_dir and Path(config.output_dir, "journal")):
        from olive_ext.plugins.diagnose.remedy.locate import locate
        from olive_ext.plugins.diagnose.remedy.pages import show_map

        show_map(locate(config, progress=True))
    if config.output_dir is not None:
        sys.stdout.write(f"page: {Path(config.output_dir, 'loss_map.html')}\n")
    return 0


def mend_command(arguments: Namespace) -> int:
    """Writes the mended model and prints its bill. Raises `RequirementError` after them where it breaks its bound on
    documents that chose nothing."""
    config = MendingConfig.parse(written_values(arguments, arguments.model, MEND_OPTIONS))
    with going_on(config.unfinished):
        from olive_ext.plugins.diagnose.remedy.mend import mend
        from olive_ext.plugins.diagnose.remedy.pages import refuse_broken, show_bill

        bill = mend(config, progress=True)
    sys.stdout.write(f"model: {config.output_dir}\npage: {Path(config.output_dir, 'bill.html')}\n")
    show_bill(bill, advised)
    refuse_broken(bill)
    return 0
