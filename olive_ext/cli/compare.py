"""`olive-ext compare`: its arguments and what it does."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace

REPORT_HELP = (
    "Folder with a report.json, the file itself, or a folder of such folders; NAME=PATH gives the report a name. Two "
    "or more, the first being the baseline."
)
BASELINE_HELP = "Name or path of the report that the others are held against; by default the first."
OUTPUT_HELP = "Folder for compare.html. Without it only the table is printed."
COMPARE_OPTIONS = (("--baseline", "baseline", "REPORT", BASELINE_HELP), ("--output", "output", "DIR", OUTPUT_HELP))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `compare`."""
    parser.add_argument("reports", metavar="REPORT", nargs="+", help=REPORT_HELP)
    for flag, name, metavar, text in COMPARE_OPTIONS:
        parser.add_argument(flag, dest=name, metavar=metavar, help=text)


def compare_command(arguments: Namespace) -> int:
    """Prints one table over the reports, and writes the page where a folder for it is named."""
    from olive_ext.report import check_writable, print_page, write_page
    from olive_ext.run import compare

    if arguments.output is not None:
        check_writable(arguments.output, "--output")
    page = compare(arguments.reports, arguments.baseline)
    print_page(page)
    if arguments.output is not None:
        sys.stdout.write(f"{write_page(page, arguments.output)}\n")
    return 0
