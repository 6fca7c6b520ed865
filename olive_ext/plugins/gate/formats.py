"""The gate's result for people and machines: lines, markdown, JUnit XML, annotations of GitHub and Azure Pipelines.

Knows no statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from olive_ext.errors import ConfigError, counted, printable
from olive_ext.plugins.gate.decision import GateBound, GateResult
from olive_ext.report import write_texts
from olive_ext.report.comparison import Status
from olive_ext.report.plain_text import literal
from olive_ext.report.verdict import EXIT_STATUS

SUMMARY = "GITHUB_STEP_SUMMARY"
LEVEL = (
    "Level: where nothing was lost, at most 5 % of comparisons find a loss, over all metrics and tasks together (2.5 % "
    "by the exact test of all answers, 2.5 % by Holm's correction of the others); where some metric of a task lost as "
    "much as matters, at most 2.5 % pass."
)
_WORDS: Mapping[Status, str] = {"ok": "passed", "small_loss": "passed", "loss": "loss", "unknown": "cannot tell"}
_SIGNS: Mapping[Status, str] = {"ok": "✅", "small_loss": "✅", "loss": "❌", "unknown": "❓"}


def lines(gated: GateResult) -> list[str]:
    """The decision, its figures, and a line a bound: a name of several lines would start a machine's command."""
    bounds = [f"  {_WORDS[bound.status]:11} {bound.name}: {bound.text}" for bound in gated.bounds]
    more = [f"  note: {note}" for note in gated.notes] + [f"  next: {gated.next_step}"] * bool(gated.next_step)
    return [text.replace("\n", " ") for text in (_headline(gated), *bounds, *more)]


def markdown(gated: GateResult) -> str:
    """A section with a table, a row a bound."""
    rows = [
        f"| {_SIGNS[bound.status]} {_WORDS[bound.status]} | {literal(bound.name)} | {literal(bound.text)} |"
        for bound in gated.bounds
    ]
    notes = [f"- {literal(note)}" for note in gated.notes]
    parts = [f"## {_SIGNS[gated.status]} {literal(_headline(gated))}", ""]
    return "\n".join([*parts, "| | bound | figures |", "|---|---|---|", *rows, "", *notes, "", LEVEL, ""])


def junit(gated: GateResult) -> str:
    """JUnit XML, which allows no control characters: a case for each bound. A loss is a failure, "cannot tell" an
    error, and what is not judged skipped."""
    counts = [sum(bound.status == status for bound in gated.bounds) for status in ("loss", "unknown")]
    tests = str(len(gated.bounds) + len(gated.notes))
    numbers = {"tests": tests, "failures": str(counts[0]), "errors": str(counts[1]), "skipped": str(len(gated.notes))}
    suites = ElementTree.Element("testsuites", numbers)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "olive-ext gate", **numbers})
    for bound in gated.bounds:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "gate", "name": printable(bound.name)})
        if EXIT_STATUS[bound.status]:
            kind = "failure" if bound.status == "loss" else "error"
            ElementTree.SubElement(case, kind, {"type": _WORDS[bound.status], "message": printable(bound.text)})
        ElementTree.SubElement(case, "system-out").text = printable(bound.text)
    for note in gated.notes:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "gate", "name": printable(note)})
        ElementTree.SubElement(case, "skipped", {"message": printable(note)})
    ElementTree.SubElement(suite, "system-out").text = printable(f"{_headline(gated)}\n{LEVEL}")
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def annotation_lines(gated: GateResult, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each bound that is lost or undecided, as the machine reads it from stdout; empty elsewhere."""
    bad = [bound for bound in gated.bounds if EXIT_STATUS[bound.status]]
    if environment.get("GITHUB_ACTIONS") == "true":
        for bound in bad:
            title = _escaped(bound.name, {":": "%3A", ",": "%2C"})
            yield f"::{_level_of(bound)} title={title}::{_escaped(f'{_WORDS[bound.status]}: {bound.text}')}"
    elif environment.get("TF_BUILD", "").lower() == "true":
        for bound in bad:
            text = _escaped(f"{bound.name}: {_WORDS[bound.status]}: {bound.text}", {"%": "%AZP25"})
            yield f"##vso[task.logissue type={_level_of(bound)}]{text}"


def write_formats(gated: GateResult, junit_file: str | None, environment: Mapping[str, str]) -> None:
    """Writes the JUnit file, and adds to the job's summary where the machine names one. Raises `RunError` and
    `ConfigError`."""
    if junit_file is not None:
        write_texts({Path(junit_file): junit(gated)}, Path(junit_file).parent, "the JUnit file")
    if summary := environment.get(SUMMARY):
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown(gated))
        except OSError as error:
            raise ConfigError(
                f"cannot write it: {error.strerror or error}", SUMMARY, summary, code="no_access"
            ) from error


def _headline(gated: GateResult) -> str:
    word = _WORDS[gated.status]
    finding = gated.verdict.finding.removeprefix(f"{word}: ")
    return f"{word}: {finding} ({counted(gated.verdict.num_documents, 'document')})"


def _level_of(bound: GateBound) -> str:
    return "error" if bound.status == "loss" else "warning"


def _escaped(text: str, more: Mapping[str, str] | None = None) -> str:
    """As GitHub reads commands; `more` for properties, or instead."""
    codes = {"%": "%25", "\r": "%0D", "\n": "%0A", **(more or {})}
    return text.translate({ord(letter): code for letter, code in codes.items()})
