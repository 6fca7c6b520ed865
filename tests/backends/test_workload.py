"""How much requests ask, estimated from their texts; and how long that takes by measured rates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.backends.workload import RATES, CountingLM, forecast, new_letters, parameters, seconds_of, work_of
from olive_ext.config import ModelSettings
from olive_ext.model import resolve
from tests.exports import genai_export


@given(st.lists(st.text("ab", max_size=6), max_size=8))
def test_new_letters_are_the_nodes_of_the_prefix_tree(texts: list[str]) -> None:
    nodes = {text[:end] for text in texts for end in range(1, len(text) + 1)}
    assert sum(new_letters(texts)) == len(nodes)


def request(doc: int, *args: Any, task: str = "t") -> Any:
    return SimpleNamespace(args=args, task_name=task, doc_id=doc)


def test_work_counts_documents_requests_new_tokens_and_the_longest_answers() -> None:
    found = work_of([request(0, "stem one", "x"), request(0, "stem one", "y"), request(1, "stem two", "z")], list)
    assert (len(found.documents), found.tokens) == (2, [9.0, 1.0, 4.0])
    assert str(found) == "2 documents, 3 requests, about 14 tokens to compute"
    written = work_of([request(0, "q", {"max_gen_toks": 7}), request(0, "q", {}, task="u")], list)
    assert (len(written.documents), written.tokens, written.answers) == (2, [1.0, 0.0], 263)
    assert str(found + written).endswith("about 15 tokens to compute, at most 263 to generate")


def test_model_that_counts_answers_nothing() -> None:
    lm = CountingLM(list)
    assert lm.loglikelihood([request(0, "a", "b")]) == [(-1.0, False)]
    assert lm.loglikelihood_rolling([request(1, "ab")]) == [-1.0]
    assert lm.generate_until([request(2, "ab", {"max_gen_toks": 5})]) == [""]
    assert (len(lm.work.documents), sum(lm.work.tokens), lm.work.answers) == (3, 6.0, 5)


@pytest.mark.slow
def test_forecast_is_by_the_products_of_the_graph() -> None:
    model = resolve(ModelSettings(model=str(genai_export("llama"))))
    hidden, rate = parameters(model), RATES["cpu"]
    seconds, machine = seconds_of(model, 1000, 10) or (0.0, "")
    cores = int(machine.partition(" ")[0])
    assert seconds == pytest.approx(2 * hidden * (1000 / rate.scored + 10 / rate.generated) / cores)
    assert hidden == parameters(model.patched({"max_length": 64})) > 64 * 1024  # at least the LM head
    assert machine in forecast(model, 1000, 10)
