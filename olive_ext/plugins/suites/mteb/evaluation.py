"""A model measured by mteb's tasks, and beside the float model: how far the embeddings of the same texts are apart.

Axes: N texts, H dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
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
"""Texts whose neighbours are compared, evenly taken of those that tasks ask for: all pairs of cosines are made."""

_WORST = 5

_DRAWS = 1000


@dataclass(frozen=True)
class TaskScores:
    """Metrics of the tasks, and facts of the execution."""

    metrics: tuple[Metric, ...]
    execution: Mapping[str, Any]


@dataclass(frozen=True)
class Agreement:
    """How far two models' embeddings of the same texts are apart."""

    cosines_N: Array
    rank_correlation: float
    """Mean Spearman correlation of a text's cosines to the others; NaN of fewer than three texts."""

    worst: tuple[tuple[str, float], ...]
    """The texts with the least cosines, and these."""


def evaluate_tasks(model: ResolvedModel, reference: ResolvedModel | None, settings: EmbeddingSettings) -> TaskScores:
    """mteb's scores of `settings.tasks`; with a `reference` its own, and what lies between. Raises `ConfigError` for
    an unknown task and where mteb is missing, and errors as `TextEncoder` does."""
    try:
        from olive_ext.plugins.suites.mteb import mteb_models
    except ImportError as error:
        problem = f"'tasks' need mteb ({error}): install the extra 'mteb' ('.[mteb]' in a clone)"
        raise ConfigError(problem, code="needs_package") from error

    def scored(one: ResolvedModel, own: EmbeddingSettings) -> tuple[Any, ...]:
        tasks = mteb_models.load_tasks(settings.tasks)  # before the model is opened; each model's are its own
        queries, pairs = mteb_models.keep_queries(tasks), mteb_models.keep_pairs(tasks)
        opened = YesNoReranker if own.reranker == "yes_no" else TextEncoder
        with closing(opened(one, own)) as encoder:
            driven = mteb_models.mteb_model(encoder, keeps=reference is not None)
            scores = mteb_models.run_tasks(driven, tasks, own)
            return scores, queries, pairs, getattr(driven, "embedded", None), encoder.describe()

    scores, queries, pairs, embedded, execution = scored(model, settings)
    metrics = [
        Metric(task, name, "none", value, None, True) for task, some in scores.items() for name, value in some.items()
    ]
    if reference is not None:
        float_settings = settings.model_copy(update={"embedding_precision": "float32", "output_folder": None})
        theirs, their_queries, their_pairs, their_embedded, _ = scored(reference, float_settings)
        metrics += _changes(scores, theirs)
        metrics += [metric for task in queries for metric in _paired(task, queries[task], their_queries[task])]
        metrics += [metric for task in pairs for metric in _correlations(task, pairs[task], their_pairs[task])]
        if embedded and their_embedded:
            compared = agreement(embedded, their_embedded)
            metrics += _of_agreement(compared)
            worst = [{"text": text, "cosine": cosine} for text, cosine in compared.worst]
            execution = {**execution, "worst_texts": worst}
            logger.info(
                "texts whose embeddings differ most: %s", "; ".join(f"{c:.4f} {t!r}" for t, c in compared.worst)
            )
    return TaskScores(tuple(metrics), execution)


def agreement(own: Mapping[Any, Array], other: Mapping[Any, Array]) -> Agreement:
    """The agreement on texts that both have, by (prompt, text). `ConfigError` for other sizes or no common text."""
    keys = [key for key in own if key in other]
    if not keys or len(own[keys[0]]) != len(other[keys[0]]):
        raise ConfigError("'reference': its embeddings have another size, or other prompts, than the model's")
    ours, theirs = (unit(np.stack([side[key] for key in keys])) for side in (own, other))
    cosines_N = (ours * theirs).sum(1)
    worst = sorted(
        zip((f"{prompt}{text}" for prompt, text in keys), cosines_N.tolist(), strict=True), key=lambda x: x[1]
    )
    taken = np.unique(np.linspace(0, len(keys) - 1, min(len(keys), _NEIGHBOURS)).astype(int))
    return Agreement(cosines_N, _rank_correlation(ours[taken], theirs[taken]), tuple(worst[:_WORST]))


def _rank_correlation(ours: Array, theirs: Array) -> float:
    from scipy.stats import rankdata

    if len(ours) < 3:
        return float("nan")
    others = ~np.eye(len(ours), dtype=bool)
    ranks = [rankdata((side @ side.T)[others].reshape(len(ours), -1), axis=1) for side in (ours, theirs)]
    first, second = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    scale = np.sqrt((first**2).sum(1) * (second**2).sum(1))
    return float(np.mean((first * second).sum(1) / np.maximum(scale, 1e-12)))


def _changes(own: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]) -> Sequence[Metric]:
    pairs = [(task, own[task]["main_score"], scores["main_score"]) for task, scores in other.items()]
    return [
        metric
        for task, ours, theirs in pairs
        for metric in (
            Metric(task, "reference_main_score", "none", theirs, None, True),
            Metric(task, "main_score_change", "none", ours - theirs, None, True),
        )
    ]


def _paired(task: str, own: Mapping[Any, float], other: Mapping[Any, float]) -> list[Metric]:
    """The mean change of nDCG@10 by query, and its 95 % interval over queries."""
    differences = np.array([own[query] - other[query] for query in own if query in other])
    if len(differences) < 2:
        return []
    interval = difference_interval(differences)
    return _change(task, "ndcg_at_10", float(differences.mean()), interval, len(differences))


def _correlations(task: str, own: Sequence[tuple[Array, Array]], other: Sequence[tuple[Array, Array]]) -> list[Metric]:
    """The change of Spearman's correlation of wanted scores and cosines, a mean over subsets, and its 95 % interval
    with the pairs of each subset drawn anew, both models' cosines together (percentiles of 1,000 draws)."""
    random = np.random.default_rng(0)
    drawn, changes, number = np.zeros(_DRAWS), [], 0
    for (wanted, ours), (_, theirs) in zip(own, other, strict=True):
        if len(wanted) < 3:
            return []
        number += len(wanted)
        changes.append(_spearman(wanted, ours) - _spearman(wanted, theirs))
        for draw in range(_DRAWS):
            at = random.integers(0, len(wanted), len(wanted))
            drawn[draw] += (_spearman(wanted[at], ours[at]) - _spearman(wanted[at], theirs[at])) / len(own)
    low, high = np.nanquantile(drawn, (0.025, 0.975)).tolist()
    return _change(task, "spearman", float(np.mean(changes)), (low, high), number)


def _spearman(first: Array, second: Array) -> float:
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])


def _change(task: str, name: str, value: float, interval: tuple[float, float], count: int) -> list[Metric]:
    named = {"": value, "_low": interval[0], "_high": interval[1]}
    return [Metric(task, f"{name}_change{end}", "none", one, None, True, count) for end, one in named.items()]


def _of_agreement(found: Agreement) -> Sequence[Metric]:
    cosines, count = found.cosines_N, len(found.cosines_N)
    error = float(cosines.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    return [
        Metric("embeddings", "cosine_mean", "none", float(cosines.mean()), error, True, count),
        Metric("embeddings", "cosine_min", "none", float(cosines.min()), None, True, count),
        Metric("embeddings", "neighbour_rank_correlation", "none", found.rank_correlation, None, True, count),
    ]
