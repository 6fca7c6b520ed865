from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from docs.benchmarks.speed.job import BenchRun
from docs.benchmarks.speed.summary import Summary, summarize
from docs.benchmarks.speed.tables import HEADS, cells, facts, print_summary, to_markdown
from docs.benchmarks.speed.work import Work

TOKENS = {"naive": 1000, "distinct": 200, "attended": 5000, "rows": 10}
MEMORY = {"before": 1e8, "weights": 1e8, "open": 3e8, "warm": 3e8, "peak": 5e8}
BACKENDS = ("olive-ext", "hf", "onnxruntime")


def run(backend: str, size: int | None, number: int, seconds: float, **fields: object) -> BenchRun:
    given: dict[str, object] = {"seconds": {"loglikelihood": seconds}, "memory": MEMORY, "seconds_total": seconds + 3}
    return BenchRun(backend, size, number, **{**given, **fields})  # type: ignore[arg-type]


def runs() -> list[BenchRun]:
    counters = {"tokens_fed": 210.0, "tokens_distinct": 200.0, "host_bytes": 400.0}
    agreed = {"max_difference": 1e-6, "mean_difference": 1e-7, "choices": [5, 5], "differs": False}
    wrong = {"max_difference": 2.0, "mean_difference": 1e-2, "choices": [4, 5], "differs": True}
    return [
        run("olive-ext", None, 0, 1.0, counters=counters, tokens=TOKENS, agreement=agreed),
        run("hf", 1, 0, 9.0, agreement=agreed),
        run("hf", 4, 0, 6.0, agreement=agreed),
        BenchRun("onnxruntime", None, 0, error="NotImplementedError: no generation"),
        run("olive-ext", None, 1, 2.0, counters=counters, agreement=agreed),
        run("hf", 4, 1, 8.0, agreement=wrong),
    ]


def summary() -> Summary:
    work = Work(layers=1e6, attention=100.0, head=1e5, matrices=((1, 1, 1),))
    return summarize(BACKENDS, runs(), 40, reference="hf", work=work, ceiling=1e9)


def test_rows_are_medians_of_the_best_batch_size_and_pair_the_runs_of_a_round() -> None:
    found = summary()
    ours, hf, plain = found.rows
    assert (hf.batch_size, hf.rounds, hf.seconds, hf.requests_per_second) == (4, 2, 7.0, pytest.approx(40 / 7))
    assert hf.tokens_per_second == pytest.approx(1000 / 7)
    assert (hf.memory_above, hf.memory_peak, hf.seconds_total) == (2e8, 5e8, 10.0)
    assert (ours.speedup, hf.speedup) == (None, (5.0, 4.0, 6.0))
    assert hf.agreement["choices"] == [4, 5], "of the worst round"
    assert (plain.rounds, plain.error) == (0, "NotImplementedError: no generation")
    assert cells(plain, "hf") == ("onnxruntime", *[""] * (len(HEADS) - 2), "failed")
    assert "onnxruntime failed: NotImplementedError: no generation" in facts(found)
    assert found.fed_over_distinct == pytest.approx(1.05)
    assert found.host_bytes == 10.0
    operations = 210 * 1e6 + 5000 * 210 / 200 * 100 + 10 * 1e5
    assert found.utilisation == pytest.approx(operations / 1.5 / 1e9)
    early = summarize(BACKENDS, runs()[:1], 40).rows[1]
    assert cells(early, None)[-1] == "not run"


def test_mapped_weights_that_are_read_later_are_the_models_own() -> None:
    late = run("hf", 1, 0, 1.0, memory={**MEMORY, "weights": 2.5e8})
    assert late.memory_above == 5e8 - 3.5e8


def test_utilisation_counts_the_last_layer_for_the_rows_it_ran_on() -> None:
    work = Work(layers=1e6, attention=0.0, head=1e5, matrices=((1, 1, 1),))
    counters = {"tokens_fed": 200.0}
    late = {"scored_row_products": [[500, 500]]}
    given = run("olive-ext", None, 0, 1.0, counters=counters, tokens=TOKENS, execution=late)
    found = summarize(("olive-ext",), [given], 1, work=work, ceiling=1e9)
    assert found.utilisation == pytest.approx((200 * (1e6 - 5e5) + 10 * (1e5 + 5e5)) / 1e9)


def test_generated_tokens_count_as_distinct() -> None:
    counters = {"tokens_fed": 200.0, "tokens_distinct": 20.0, "tokens_generated": 180.0}
    found = summarize(("olive-ext",), [run("olive-ext", None, 0, 1.0, counters=counters, tokens=TOKENS)], 1)
    assert found.fed_over_distinct == 1.0


def test_table_and_page_name_every_backend_and_flag_the_wrong_one() -> None:
    with redirect_stdout(io.StringIO()) as out:
        print_summary(summary(), "a [b] c")
    page = to_markdown(summary(), "a [b] c")
    for text, title in ((out.getvalue(), "a [b] c"), (page, r"a \[b\] c")):
        assert all(name in text for name in (*BACKENDS, title, "5.00 (4.00 to 6.00)", "tokens fed / distinct: 1.050"))
    differing = summarize(BACKENDS, runs(), 40, reference=None).rows[1]
    assert cells(differing, None)[-1] == "DIFFERS, max 2.0e+00, mean 1.0e-02, choices 4 of 5"


def test_facts_leave_out_what_is_not_known() -> None:
    assert facts(summarize(("olive-ext",), [BenchRun("olive-ext", error="no")], 3)) == [
        "3 requests",
        "olive-ext failed: no",
    ]
