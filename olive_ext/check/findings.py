"""What a check found: facts with their reasons, and problems. Plain data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from olive_ext.errors import OliveExtError


@dataclass(frozen=True)
class Fact:
    """One line: what it is about, what it came to, and why."""

    name: str
    value: str
    reason: str = ""


@dataclass
class Section:
    """Facts about one thing, in the order of resolution."""

    title: str
    facts: list[Fact] = field(default_factory=list)

    def add(self, name: str, value: object, reason: str = "") -> None:
        self.facts.append(Fact(name, str(value), reason))


@dataclass
class Findings:
    """Everything a check found; `problems` are sentences that name what is wrong."""

    sections: list[Section] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def section(self, title: str) -> Section:
        """A new section at the end."""
        self.sections.append(Section(title))
        return self.sections[-1]

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """A user's error in the block becomes a problem, and the check goes on behind it."""
        try:
            yield
        except OliveExtError as error:
            self.problems.append(str(error))

    def extend(self, other: Findings, where: str) -> None:
        """Takes over what another check found, under titles that begin with `where`."""
        self.sections += [Section(f"{where}: {section.title}", section.facts) for section in other.sections]
        self.problems += [f"{where}: {problem}" for problem in other.problems]

    def text(self) -> str:
        """The sections for a terminal: names in a column, reasons behind the values."""
        return "\n".join(_lines(section) for section in self.sections if section.facts)


def _lines(section: Section) -> str:
    width = max(len(fact.name) for fact in section.facts)
    lines = [section.title]
    for fact in section.facts:
        reason = f"  ({fact.reason})" if fact.reason else ""
        lines.append(f"  {fact.name:<{width}}  {fact.value}{reason}")
    return "\n".join(lines) + "\n"
