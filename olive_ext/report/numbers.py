"""Numbers, lists and facts as people read them: with the digits that the error bar supports, signs and units. Knows no
report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that reads null as NaN, which strict JSON lacks."""

MINUS = "\N{MINUS SIGN}"
NO_VALUE = "\N{EM DASH}"
Z95 = 1.959964
"""Standard errors on either side of a 95 % interval."""

SAME_NATS = 1e-6
"""Below it two distributions are equal but for rounding."""

_SPACE = "\N{NO-BREAK SPACE}"
_BYTES = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Spread:
    """A number's distribution over positions."""

    mean: Number
    stderr: float | None
    """Standard error of the mean, over documents; None for a single document."""

    median: Number
    p90: Number
    p99: Number
    p999: Number
    maximum: Number


@dataclass(frozen=True)
class Bin:
    """Positions of one kind: how many, and their mean KL in nats."""

    label: str
    count: int
    mean: float | None
    """Mean KL in nats; None where there are no positions."""


class FormattedValue(NamedTuple):
    """A value and its error bar as texts; the latter empty where there is none."""

    value: str
    error: str = ""
    """Half of an interval around the value, or a whole interval that is not around it: "0.1 to 1.3"."""

    @property
    def margin(self) -> str:
        """The error bar, after a sign if it is half an interval; empty where there is none."""
        return f"± {self.error}" if self.error and " to " not in self.error else self.error

    def __str__(self) -> str:
        return f"{self.value} {f'({self.error})' if ' to ' in self.error else self.margin}".rstrip()


def number(value: float) -> str:
    """Four decimals; whole numbers without; very large and very small ones with four digits and an exponent."""
    if not math.isfinite(value) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{value:.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e7 else f"{value:.3e}"


def decimals(stderr: float | None, most: int = 4) -> int:
    """Decimals that show an error bar's first two digits."""
    if stderr is None or not math.isfinite(stderr) or stderr <= 0:
        return most
    return min(most, max(0, 1 - math.floor(math.log10(stderr))))


def with_error(value: float, stderr: float | None, most: int = 4) -> FormattedValue:
    """Value and error bar with the same number of decimals."""
    if not math.isfinite(value):
        return FormattedValue(_odd(value))
    if stderr is None or not math.isfinite(stderr):
        return FormattedValue(signed_minus(number(value)))
    if max(abs(value), stderr) >= 1e7:
        return FormattedValue(signed_minus(number(value)), number(stderr))
    places = decimals(stderr, most)
    return FormattedValue(signed_minus(f"{value:.{places}f}"), f"{stderr:.{places}f}")


def nats(value: float) -> str:
    """Three significant digits, as 0.0123 or 1.2e-05."""
    if not math.isfinite(value):
        return _odd(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return signed_minus(f"{value:.1e}")
    return signed_minus(f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}")


def nats_with_error(value: float, stderr: float | None) -> FormattedValue:
    """As `with_error`, but a small value keeps three digits of its own where there is no error bar to go by."""
    if stderr is None or not stderr > 0:
        return FormattedValue(nats(value))
    return with_error(value, stderr, most=7)


def percent(value: float, stderr: float | None = None) -> str:
    """A share as 97.31 %; two digits of the error bar decide how many places."""
    places = decimals(None if stderr is None else stderr * 100, most=2)
    return f"{value * 100:.{places}f}{_SPACE}%"


def plus(value: float, places: int) -> str:
    """`value` with its sign, a real minus; zero without."""
    if not math.isfinite(value):
        return _odd(value)
    text = f"{value:+.{places}f}"
    return text[1:] if float(text) == 0 else signed_minus(text)


def size(num_bytes: float) -> str:
    """Bytes in decimal units, as disks are sold and downloads counted."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 999.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1000, unit + 1
    places = 0 if unit == 0 else max(0, 2 - math.floor(math.log10(max(abs(value), 1))))
    return f"{value:.{places}f}{_SPACE}{_BYTES[unit]}"


def count(value: float) -> str:
    """A whole number with commas between thousands."""
    return f"{value:,.0f}"


def count_of(known: float, whole: float | None) -> str:
    """A number of things, and of how many they are, where that is known."""
    return count(known) if whole is None else f"{count(known)} of {count(whole)}"


def duration(seconds: float) -> str:
    """Seconds below two minutes, then minutes, then hours."""
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 100 else 0}f}{_SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes}{_SPACE}min {rest:02d}{_SPACE}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_SPACE}h {minutes:02d}{_SPACE}min"


def predicted(seconds: float) -> str:
    """A time that is predicted, in two digits of one unit."""
    if seconds < 1:
        return f"less than 1{_SPACE}s"
    unit, size = next((one for one in (("s", 1), ("min", 60)) if seconds < 99.5 * one[1]), ("h", 3600))
    return f"about {float(f'{seconds / size:.2g}'):g}{_SPACE}{unit}"


def moment(created: str) -> str:
    """An ISO 8601 time as 2026-11-21 12:00 UTC; any other text unchanged."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".strip()


def signed_minus(text: str) -> str:
    """`text` with a minus sign in front instead of a hyphen."""
    return MINUS + text[1:] if text.startswith("-") else text


def joined(names: Sequence[str]) -> str:
    """The names as "one, two and three"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _odd(value: float) -> str:
    return "not a number" if math.isnan(value) else ("\N{INFINITY}" if value > 0 else f"{MINUS}\N{INFINITY}")


def fact(value: Any) -> str:
    """One fact on one line, nested ones as key=value."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return signed_minus(number(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={fact(item)}" for key, item in value.items()) or NO_VALUE
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value)) or NO_VALUE
    return str(value)


def flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested facts as one level of dotted names and texts of one line, in the same order."""
    facts_by_name: dict[str, str] = {}
    for key, value in facts.items():
        is_nested = isinstance(value, Mapping) and value
        facts_by_name |= flat(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": fact(value)}
    return facts_by_name
