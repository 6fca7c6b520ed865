"""Limits of templates: what would turn for ever, whatever its loops go over, and what published templates do."""

from __future__ import annotations

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from olive_ext.text import bounded_templates
from olive_ext.text.bounded_templates import BoundedEnvironment

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
