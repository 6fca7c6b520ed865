"""Measures a model by mteb's tasks and, beside the float model, how far the embeddings of the same texts are apart.

Axes: N texts, H dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.errors import ConfigError
from olive_ext.model import ResolvedModel
from olive_ext.plugins.suites.mteb.text_encoder import TextEncoder, YesNoReranker, unit
from olive_ext.report import Metric
from olive_ext.stats.paired_answers import difference_interval

logger = logging.getLogger("olive.olive_ext")

Array = npt.NDArray[np.float32]

_NEIGHBOURS = 2000
"""The most texts whose neighbours are compared, taken evenly from those that tasks ask for: all pairs of cosines are
computed."""

_WORST = 5

_DRAWS = 1000


def evaluate_tasks(
    model: ResolvedModel, reference: ResolvedModel | None, settings: EmbeddingSettings
) -> tuple[list[Metric], dict[str, Any]]:
    """mteb's scores of `settings.tasks`, and facts of the execution; with a `reference` its own, too, and how far both
    are apart. Raises `ConfigError` for an unknown task and where mteb is missing, and errors as `TextEncoder` does."""
    try:
        from olive_ext.plugins.suites.mteb import mteb_models
    except ImportError as error:
        problem = f"'tasks' need mteb ({error}): install the extra 'mteb' ('.[mteb]' in a clone)"
        raise ConfigError(problem, code="needs_package") from error

    def scored(evaluated: ResolvedModel, how: EmbeddingSettings) -> tuple[Any, ...]:
        tasks = mteb_models.load_tasks(settings.tasks)  # before the model is opened; each model's are its own
        queries, pairs = mteb_models.keep_queries(tasks), mteb_models.keep_pairs(tasks)
        opened = YesNoReranker if how.reranker == "yes_no" else TextEncoder
        with closing(opened(evaluated, how)) as encoder:
            driven = mteb_models.mteb_model(encoder, keeps=reference is not None)
            scores = mteb_models.run_tasks(driven, tasks, how)
            return scores, queries, pairs, getattr(driven, "embedded", None), encoder.describe()

    scores, queries, pairs, embedded, execution = scored(model, settings)
    metrics = [
        Metric(task, name, "none", value, None, True) for task, some in scores.items() for name, value in some.items()
    ]
    if reference is not None:
        float_settings = settings.model_copy(update={"embedding_precision": "float32", "output_folder": None})
        other_scores, other_queries, other_pairs, other_embedded, _ = scored(reference, float_settings)
        for task, other in other_scores.items():
            change = scores[task]["main_score"] - other["main_score"]
            metrics.append(Metric(task, "reference_main_score", "none", other["main_score"], None, True))
            metrics.append(Metric(task, "main_score_change", "none", change, None, True))
        metrics += [metric for task in queries for metric in _paired(task, queries[task], other_queries[task])]
        metrics += [metric for task in pairs for metric in _correlations(task, pairs[task], other_pairs[task])]
        if embedded and other_embedded:
            agreement, worst = _agreement(embedded, other_embedded)
            metrics += agreement
            execution["worst_texts"] = [{"text": text, "cosine": cosine} for text, cosine in worst]
            named = "; ".join(f"{cosine:.4f} {text!r}" for text, cosine in worst)
            logger.info("texts whose embeddings differ most: %s", named)
    return metrics, execution


def _agreement(
    embedded: Mapping[Any, Array], other: Mapping[Any, Array]
) -> tuple[list[Metric], list[tuple[str, float]]]:
    """How far two models' embeddings are apart on the texts that both have, by (prompt, text): metrics, and the texts
    with the smallest cosines. Raises `ConfigError` for other sizes or no common text."""
    keys = [key for key in embedded if key in other]
    if not keys or len(embedded[keys[0]]) != len(other[keys[0]]):
        raise ConfigError("'reference': its embeddings have another size, or other prompts, than the model's")
    ours, theirs = (unit(np.stack([side[key] for key in keys])) for side in (embedded, other))
    cosines, count = (ours * theirs).sum(1), len(keys)
    texts = (f"{prompt}{text}" for prompt, text in keys)
    worst = sorted(zip(texts, cosines.tolist(), strict=True), key=itemgetter(1))[:_WORST]
    taken = np.unique(np.linspace(0, count - 1, min(count, _NEIGHBOURS)).astype(int))
    ranks = _rank_correlation(ours[taken], theirs[taken])
    error = float(cosines.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    metrics = [
        Metric("embeddings", "cosine_mean", "none", float(cosines.mean()), error, True, count),
        Metric("embeddings", "cosine_min", "none", float(cosines.min()), None, True, count),
        Metric("embeddings", "neighbour_rank_correlation", "none", ranks, None, True, count),
    ]
    return metrics, worst


def _rank_correlation(ours: Array, theirs: Array) -> float:
    """Mean Spearman correlation of a text's cosines to the others; NaN of fewer than three texts."""
    from scipy.stats import rankdata

    if len(ours) < 3:
        return float("nan")
    others = ~np.eye(len(ours), dtype=bool)
    ranks = [rankdata((side @ side.T)[others].reshape(len(ours), -1), axis=1) for side in (ours, theirs)]
    first, second = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    scale = np.sqrt((first**2).sum(1) * (second**2).sum(1))
    return float(np.mean((first * second).sum(1) / np.maximum(scale, 1e-12)))


def _paired(task: str, values: Mapping[Any, float], other: Mapping[Any, float]) -> list[Metric]:
    """The mean change of nDCG@10 by query, and its 95 % interval over queries."""
    differences = np.array([values[query] - other[query] for query in values if query in other])
    if len(differences) < 2:
        return []
    interval = difference_interval(differences)
    return _change(task, "ndcg_at_10", float(differences.mean()), interval, len(differences))


def _correlations(
    task: str, pairs: Sequence[tuple[Array, Array]], other: Sequence[tuple[Array, Array]]
) -> list[Metric]:
    """The change of Spearman's correlation of wanted scores and cosines, a mean over subsets, and its 95 % interval
    with the pairs of each subset drawn anew, both models' cosines together (percentiles of 1,000 draws)."""
    random = np.random.default_rng(0)
    drawn, changes, number = np.zeros(_DRAWS), [], 0
    for (wanted, ours), (_, theirs) in zip(pairs, other, strict=True):
        if len(wanted) < 3:
            return []
        number += len(wanted)
        changes.append(_spearman(wanted, ours) - _spearman(wanted, theirs))
        for draw in range(_DRAWS):
            at = random.integers(0, len(wanted), len(wanted))
            drawn[draw] += (_spearman(wanted[at], ours[at]) - _spearman(wanted[at], theirs[at])) / len(pairs)
    low, high = np.nanquantile(drawn, (0.025, 0.975)).tolist()
    return _change(task, "spearman", float(np.mean(changes)), (low, high), number)


def _spearman(first: Array, second: Array) -> float:
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])


def _change(task: str, name: str, value: float, interval: tuple[float, float], count: int) -> list[Metric]:
    named = {"": value, "_low": interval[0], "_high": interval[1]}
    return [Metric(task, f"{name}_change{end}", "none", one, None, True, count) for end, one in named.items()]
