"""What templates compute is refused before it takes memory, whichever operator, method or filter asks for it."""

from __future__ import annotations

import tracemalloc

import jinja2
import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from olive_ext.text import bounded_templates
from olive_ext.text.bounded_templates import LONGEST_TEXT, BoundedEnvironment

DOUBLED = (
    "{%% set ns = namespace(x='a') %%}{%% for i in range(40) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x|length }}"
)
LARGE = [
    "{{ 'a' * 9999999999 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%.9999999999f' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ '{:9999999999d}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ 'a'.zfill(width) }}",
    "{{ '\\t'.expandtabs(999999999) }}",
    "{{ 'a'|center(9999999999) }}",
    "{{ 'a\\nb'|indent(999999999, true) }}",
    "{{ 'a'|batch(999999999, 'x')|list|length }}",
    "{{ {'a': 1}|tojson(indent=999999999) }}",
    "{{ lipsum(n=100000000) }}",
    "{{ (1).to_bytes(9999999999, 'big')|length }}",
    DOUBLED % "ns.x + ns.x",
    DOUBLED % "ns.x ~ ns.x",
    DOUBLED % "ns.x.replace('a', ns.x ~ 'a')",
    DOUBLED % "ns.x.join(ns.x ~ 'b')",
    DOUBLED % "[ns.x, ns.x]|join(ns.x)",
    DOUBLED % "(ns.x ~ ns.x)|replace('a', ns.x ~ 'a')",
]
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


def test_a_filter_that_was_set_later_has_the_limit_too() -> None:
    environment = BoundedEnvironment()
    environment.filters["tojson"] = lambda value, indent: " " * indent
    with pytest.raises(SecurityError, match="'tojson' gives more than"):
        environment.from_string("{{ [1]|tojson(999999999) }}").render()


INNER = "{% for _ in range(900) %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        f"{{% for _ in range(100) %}}{INNER}{{% endfor %}}",
        f"{{% macro m() %}}{{% endmacro %}}{{% for _ in range(100) %}}{{{{ m() }}}}{INNER}{{% endfor %}}",
        f"{{% for _ in range(100) %}}{{% set x %}}a{{% endset %}}{INNER}{{% endfor %}}",
        "{% set l = [0] * 900 %}{% for _ in l %}{% for _ in l %}{% endfor %}{% endfor %}",
        "{% set l = 'a' * 900 %}{% for _ in l %}{% for _ in l|map('upper') %}{% endfor %}{% endfor %}",
        f"{{% for _ in '{'a' * 90}' %}}{{% for _ in {[0] * 90} %}}{{% endfor %}}{{% endfor %}}",
    ],
    ids=["ranges", "macro", "block", "lists", "iterators", "literals"],
)
def test_loops_of_any_kind_are_counted(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MOST_LOOPED", 1000)
    environment = BoundedEnvironment()
    for _ in range(2):  # the count begins anew, also behind an error
        with pytest.raises(SecurityError, match=r"loops of more than 1,000 turns \(MOST_LOOPED\)"):
            environment.from_string(template).render()
        assert environment.from_string(INNER).render() == ""


def test_counted_loops_give_what_they_gave() -> None:
    template = (
        "{% for k, v in d.items() if v %}{{ loop.index }}/{{ loop.length }}{{ k }}{% else %}none{% endfor %}"
        "{% for x in l|map('upper') %}{{ x }}{{ ',' if not loop.last }}{% endfor %}"
        "{% for t in tree recursive %}{{ t.n }}{{ loop(t.c) }}{% endfor %}{% for x in nothing %}{% endfor %}"
    )
    values = {"d": {"a": 1, "b": 0}, "l": ["p", "q"], "tree": [{"n": 1, "c": [{"n": 2, "c": []}]}]}
    assert BoundedEnvironment().from_string(template).render(values) == "1/1aP,Q12"
    with pytest.raises(TypeError):
        BoundedEnvironment().from_string("{% for x in 5 %}{% endfor %}").render()
    with pytest.raises(UndefinedError):
        BoundedEnvironment().from_string("{% for x in a.b.c %}{% endfor %}").render()
