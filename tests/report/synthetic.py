"""Reports that look like real ones, of any number of documents, made without a model.

Numbers follow from a seed; texts include what breaks pages: markup, quotes, control characters, text that runs to the
left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from olive_ext.report import Metric, Report
from olive_ext.report.comparison import ALL, Bin, Comparison, Divergence, Flip, Outcome, Spread
from olive_ext.stats.compared_fields import CLASSES
from olive_ext.stats.distances import HISTOGRAM_EDGES
from olive_ext.stats.paired_answers import compare_outcomes

TASKS = (("arc_easy", "acc_norm"), ("hellaswag", "acc_norm"), ("gsm8k", "exact_match"), ("mmlu_anatomy", "acc"))
HOSTILE = (
    "</script><script>document.title = 'broken'</script>",
    "<!-- <script> <b>bold?</b> &amp; &lt; \" ' ` ${x} {{ y }}",
    "null \x00 bell \x07 escape \x1b[31m delete \x7f line\u2028separator",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u202e turned \u202c \u0645\u0631\u062d\u0628\u0627",
    "half a surrogate \ud83d, emoji \U0001f680, combining e\u0301, wide \u4e2d\u6587",
    "a_very_long_word_" * 40,
)
_QUESTIONS = (
    "Which statement best explains why photosynthesis is the foundation of most food webs?",
    "A baker fills 12 trays with 24 rolls each and sells 173 rolls before noon. How many rolls are left?",
    "The person is seen kneeling on the floor with a bucket beside her. She",
    "Which of the following structures passes through the foramen magnum?",
)
_ANSWERS = (
    "Sunlight is the source of energy for nearly all ecosystems.",
    "The producers in all ecosystems are plants.",
    "12 x 24 = 288 rolls are baked. 288 - 173 = 115 rolls are left.\n#### 115",
    "12 x 24 = 288 rolls are baked. 288 - 173 = 125 rolls are left.\n#### 125",
    "wrings the cloth out and wipes the tiles in small circles.",
    "puts the bucket on her head and dances around the kitchen.",
)


def comparison(
    num_documents: int, *, shift: float = 0.02, kl: float = 0.012, num_flips: int | None = None, seed: int = 0
) -> Comparison:
    """Of `num_documents` documents in each task: `shift` of the answers lost, mean KL around `kl` nats.

    With `num_flips` there are so many flipped documents, whatever the outcomes say.
    """
    random = np.random.default_rng(seed)
    outcomes: list[Outcome] = []
    both: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]] = []
    flips: list[Flip] = []
    for place, (task, metric) in enumerate(TASKS):
        right = random.random(num_documents) < (0.71, 0.58, 0.34, 0.46)[place]
        lost = random.random(num_documents) < shift * (0.6, 1.6, 2.4, 0.9)[place] + 0.01
        won = random.random(num_documents) < 0.016
        other = np.where(right, ~lost, won)
        both.append((right, other))
        filter_name = "strict-match" if task == "gsm8k" else "none"
        outcomes.append(compare_outcomes(task, metric, filter_name, right, other))
        flipped = np.flatnonzero(right != other)
        flips += [_flip(task, metric, filter_name, int(number), bool(right[number])) for number in flipped]
    outcomes.append(compare_outcomes(ALL, "accuracy", "none", *map(np.concatenate, zip(*both, strict=True))))
    if num_flips is not None:
        flips = [_flip(*TASKS[number % 4], "none", number, number % 3 > 0) for number in range(num_flips)]
    return Comparison(
        reference={"path": "models/quickstart-135m", "kind": "hf", "mode": "resident", "content_hash": "5f1c0a9d"},
        divergences=tuple(_divergence(task, num_documents, kl, random) for task in (ALL, *(task for task, _ in TASKS))),
        outcomes=tuple(outcomes),
        flips=tuple(flips),
        metrics=_results(outcomes, "reference"),
    )


def report(path: str = "models/quickstart-135m-int4", found: Comparison | None = None, *, size: float = 98e6) -> Report:
    """An evaluation of a model at `path`, with the comparison `found`."""
    outcomes = found.outcomes if found is not None else ()
    results = _results(outcomes, "candidate")
    metrics = [
        Metric(item.task, item.metric, item.filter, item.candidate, _stderr(item.candidate, item.num_documents), True,
               item.num_documents)
        for item in outcomes
        if item.task != ALL
    ]  # fmt: skip
    metrics += [
        Metric("wikitext", "word_perplexity", "none", 24.8132, None, False, 62),
        Metric("wikitext", "bits_per_byte", "none", 0.8913, None, False, 62),
        Metric("size_on_disk", "bytes", "none", size, None, False),
        Metric("tokens_per_second", "tokens_per_second", "none", 4182.4, None, True),
        Metric("peak_memory", "bytes", "none", 1.42e9, None, False),
    ]
    return Report(
        metrics=tuple(metrics),
        results=results,
        model={"path": path, "kind": "onnx", "content_hash": "9b3e77c2", "kv": "view", "max_length": 2048},
        providers=(
            {"name": "CPUExecutionProvider", "device": "cpu", "options": {"threads": "8"}, "origin": "default"},
        ),
        versions={"olive-ext": "0.1.0", "onnxruntime": "1.31.1", "lm-eval": "0.4.13", "transformers": "5.23.0"},
        engine={"seconds": 312.4, "seconds_load": 2.7, "tokens_naive": 2_418_220, "tokens_fed": 803_114, "steps": 9120},
        config={
            "tasks": [task for task, _ in TASKS] + ["wikitext", "size_on_disk"],
            "limit": 400,
            "num_fewshot": 2,
            "reference": "models/quickstart-135m",
            "gen_kwargs": {"max_gen_toks": 128},
            "output_dir": "out/int4",
            "model": {"path": path},
        },
        created="2026-11-21T12:00:00+00:00",
        comparison=found,
    )


def _stderr(share: float, count: int) -> float:
    return math.sqrt(max(share * (1 - share), 1e-9) / count)


def _results(outcomes: Sequence[Outcome], which: str) -> dict[str, object]:
    """As lm-eval's `simple_evaluate` gives them."""
    results: dict[str, object] = {}
    for item in (item for item in outcomes if item.task != ALL):
        value = getattr(item, which)
        error = _stderr(value, item.num_documents)
        results[item.task] = {f"{item.metric},{item.filter}": value, f"{item.metric}_stderr,{item.filter}": error}
    if results:
        perplexity = 24.8132 if which == "candidate" else 24.1077
        results["wikitext"] = {"word_perplexity,none": perplexity, "bits_per_byte,none": perplexity / 27.84}
    return {
        "results": results,
        "versions": dict.fromkeys(results, 1.0),
        "n-shot": dict.fromkeys(results, 2),
        "n-samples": {
            **{
                task: {"original": 2376, "effective": outcomes[0].num_documents}
                for task in results
                if task != "wikitext"
            },
            **({"wikitext": {"original": 62, "effective": 62}} if results else {}),
        },
        "higher_is_better": {"wikitext": {"word_perplexity": False, "bits_per_byte": False}},
        "configs": {task: {"output_type": "multiple_choice", "num_fewshot": 2} for task in results},
        "config": {"fewshot_seed": 1234},
    }


def _divergence(task: str, num_documents: int, kl: float, random: np.random.Generator) -> Divergence:
    values = kl / 3.1 * random.lognormal(0, 1.5, 20_000)
    edges = [*HISTOGRAM_EDGES.tolist(), math.inf]
    counts = np.histogram(values, edges)[0]
    mean = float(values.mean())
    quantiles = np.quantile(values, [0.5, 0.9, 0.99, 0.999, 1]).tolist()
    ratio = math.exp(1.7 * mean)
    edges_of_positions = [0, *(16 * 2**place for place in range(8))]
    positions = [f"{low}-{high - 1}" for low, high in itertools.pairwise(edges_of_positions)]
    return Divergence(
        task=task,
        num_documents=num_documents,
        num_positions=num_documents * 37,
        kl=Spread(mean, mean * 1.2 / math.sqrt(num_documents), *quantiles),
        kl_lower=mean,
        kl_sampling_error=0.0,
        top1_agreement=1 - 2.1 * math.sqrt(mean) / 2,
        top1_agreement_stderr=0.3 / math.sqrt(num_documents),
        top_probability_difference=-0.31 * math.sqrt(mean) / 10,
        top_probability_rms=math.sqrt(mean) / 2.2,
        perplexity_reference=18.274,
        perplexity_candidate=18.274 * ratio,
        perplexity_ratio=ratio,
        perplexity_ratio_stderr=0.11 / math.sqrt(num_documents),
        histogram=tuple(Bin(f"{edge:.2g}", int(n), None) for edge, n in zip(edges, counts, strict=False)),
        by_position=tuple(Bin(name, 900, mean * (1.6 - 0.09 * place)) for place, name in enumerate(positions)),
        by_class=tuple(
            Bin(name, 4000, mean * factor) for name, factor in zip(CLASSES, (1.3, 0.5, 1.7, 0.8, 0.6, 0.2), strict=True)
        ),
    )


def _flip(task: str, metric: str, filter_name: str, number: int, is_lost: bool) -> Flip:
    hostile = HOSTILE[number // 7 % len(HOSTILE)] if number % 7 == 0 else ""
    pair = number % 3
    answers = (_ANSWERS[2 * pair], _ANSWERS[2 * pair + 1])
    long = "\n\n".join(_QUESTIONS) * 3 if number % 11 == 0 else ""
    return Flip(
        task=task,
        doc_id=number,
        direction="right_to_wrong" if is_lost else "wrong_to_right",
        question=f"{_QUESTIONS[number % 4]} {hostile}{long}".strip(),
        target=answers[0],
        reference_answer=answers[0 if is_lost else 1] + hostile,
        candidate_answer=answers[1 if is_lost else 0] + hostile,
        metric=metric,
        filter=filter_name,
    )
