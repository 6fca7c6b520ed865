"""Products, powers and texts of templates are refused before they take memory."""

from __future__ import annotations

import tracemalloc

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from olive_ext.session.bounded_templates import LONGEST_TEXT, BoundedEnvironment

LARGE = ["{{ 'a' * 9999999999 }}", "{{ [1] * 9999999999 }}", "{% for _ in range(99999) %}{{ 'a' * 9999 }}{% endfor %}"]
PLAIN = [
    "{{ '%5d|%-8s|%.2f' % (20240101, 'x', 1.5) }}",
    "{{ '{} {:>8} {:,}'.format(20240101, 'b', 99999999) }}",
    "{{ '{:{w}}'.format(20, w=6) }} at 10:30 of 20240101",
    "{{ 'a' ~ 1 ~ none ~ [1] }}",
    "{{ [1, 2] + [3] }}{{ 1 + 20240101 * 3 }}{{ 7 % 4 }}",
    "{{ ['a', 'b']|join(', ') }}{{ ', '.join(['a', 'b']) }}{{ 'a b'|replace(' ', '  ') }}",
    "{{ {'a': [1]}|tojson(indent=2) }}{{ 'a\\nb'|indent(4) }}{{ 'a'|center(9) }}",
    "{{ 'a b c'|wordwrap(2) }}{{ [1, 2, 3]|batch(2)|list }}{{ 'a\\tb'.expandtabs(4) }}",
]


@pytest.mark.parametrize("template", LARGE)
def test_what_would_take_gigabytes_is_refused_before_it_is_made(template: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SecurityError, match=r"LONGEST_TEXT|at most"):
            BoundedEnvironment().from_string(template).render(width=9999999999)
        assert tracemalloc.get_traced_memory()[1] < 8 * LONGEST_TEXT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("template", PLAIN)
def test_what_tasks_write_is_rendered_as_ever(template: str) -> None:
    assert BoundedEnvironment().from_string(template).render() == jinja2.Environment().from_string(template).render()
