"""Measures a model by mteb's tasks and, beside the float model, how far the embeddings of the same texts are apart; and
the models that mteb drives, an encoder and a cross-encoder on a `TextEncoder`.

Axes: N texts, H dimensions. Knows no recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import mteb
import numpy as np
import numpy.typing as npt
from mteb.abstasks.sts import AbsTaskSTS
from mteb.models.abs_encoder import AbsEncoder, get_prompt_name
from mteb.models.model_meta import ModelMeta
from scipy.stats import rankdata

from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.errors import ConfigError
from olive_ext.model import ResolvedModel
from olive_ext.plugins.suites.mteb.text_encoder import TextEncoder, unit
from olive_ext.report import Metric
from olive_ext.stats.paired_answers import difference_interval

Array = npt.NDArray[np.float32]

_DRAWS = 1000

_DOCUMENTS = ("document", "passage", "corpus")
"""Names that sentence-transformers gives the prompt of documents."""


def evaluate_tasks(
    model: ResolvedModel, reference: ResolvedModel | None, settings: EmbeddingSettings
) -> tuple[list[Metric], dict[str, Any]]:
    """mteb's scores of `settings.tasks`, and facts of the execution; with a `reference` its own, too, and how far both
    are apart. Raises `ConfigError` for an unknown task, and errors as `TextEncoder` does."""

    def scored(evaluated: ResolvedModel, how: EmbeddingSettings) -> tuple[Any, ...]:
        try:  # before the model is opened; each model's are its own
            tasks = [mteb.get_task(name) for name in settings.tasks]
        except KeyError as error:
            raise ConfigError(f"'tasks': mteb {mteb.__version__}: {error.args[0]}", "tasks") from error
        queries, pairs = keep_queries(tasks), keep_pairs(tasks)
        with closing(TextEncoder(evaluated, how)) as encoder:
            embeds = None
            if encoder.states.scores_output is None:
                embeds = OrtEncoder(encoder, keeps=reference is not None)
            scores = run_tasks(embeds or OrtCrossEncoder(encoder), tasks, how)
            return scores, queries, pairs, embeds and embeds.embedded, encoder.describe()

    scores, queries, pairs, embedded, execution = scored(model, settings)
    metrics = [
        Metric(task, name, "none", value, None, True) for task, some in scores.items() for name, value in some.items()
    ]
    if reference is not None:
        other_settings = settings.model_copy(update={"output_folder": None})
        other_scores, other_queries, other_pairs, other_embedded, _ = scored(reference, other_settings)
        for task, other in other_scores.items():
            change = scores[task]["main_score"] - other["main_score"]
            metrics.append(Metric(task, "reference_main_score", "none", other["main_score"], None, True))
            metrics.append(Metric(task, "main_score_change", "none", change, None, True))
        for task, values in queries.items():
            others = other_queries[task]
            differences = np.array([values[query] - others[query] for query in values if query in others])
            if len(differences) > 1:
                low, high, _ = difference_interval(differences)  # 95 %, over queries
                metrics += _change(task, "ndcg_at_10", float(differences.mean()), (low, high), len(differences))
        metrics += [metric for task in pairs for metric in _correlations(task, pairs[task], other_pairs[task])]
        if embedded and other_embedded:
            metrics += _agreement(embedded, other_embedded)
    return metrics, execution


def _agreement(embedded: Mapping[Any, Array], other: Mapping[Any, Array]) -> list[Metric]:
    """How far two models' embeddings are apart on the texts that both have, by (prompt, text). Raises `ConfigError` for
    other sizes or no common text."""
    keys = [key for key in embedded if key in other]
    if not keys or len(embedded[keys[0]]) != len(other[keys[0]]):
        raise ConfigError("'reference': its embeddings have another size, or other prompts, than the model's")
    ours, theirs = (unit(np.stack([side[key] for key in keys])) for side in (embedded, other))
    cosines, count = (ours * theirs).sum(1), len(keys)
    error = float(cosines.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    return [
        Metric("embeddings", "cosine_mean", "none", float(cosines.mean()), error, True, count),
        Metric("embeddings", "cosine_min", "none", float(cosines.min()), None, True, count),
    ]


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
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])


def _change(task: str, name: str, value: float, interval: tuple[float, float], count: int) -> list[Metric]:
    named = {"": value, "_low": interval[0], "_high": interval[1]}
    return [Metric(task, f"{name}_change{end}", "none", one, None, True, count) for end, one in named.items()]


_NO_FACTS = ModelMeta.create_empty()
"""Nothing is reported of the model."""


class OrtEncoder(AbsEncoder):  # type: ignore[misc,unused-ignore] # where mteb is not installed
    """mteb's encoder, whose similarities are cosines. With `keeps`, the embedding of each text that tasks asked for
    stays in `embedded`, by prompt and text."""

    mteb_model_meta = _NO_FACTS

    def __init__(self, encoder: TextEncoder, *, keeps: bool = False) -> None:
        self.encoder = encoder
        self.embedded: dict[tuple[str, str], Array] | None = {} if keeps else None

    def encode(
        self, inputs: Iterable[Any], *, task_metadata: Any, prompt_type: Any = None, **_: Any
    ) -> npt.NDArray[np.float32]:
        """[N, H] of a loader's texts, after the prompt that mteb picks for the task."""
        texts = [text for batch in inputs for text in batch["text"]]
        prompt = self.prompt(task_metadata, prompt_type)
        vectors = self.encoder.encode(texts, prompt)
        if self.embedded is not None:
            self.embedded.update(((prompt, text), vector) for text, vector in zip(texts, vectors, strict=True))
        return vectors

    def prompt(self, task_metadata: Any, prompt_type: Any) -> str:
        """What is put before the texts of a task."""
        prompts = self.encoder.prompts
        name = get_prompt_name(prompts, task_metadata, prompt_type)
        if name is None and prompt_type is None:  # a query or a document without its prompt gets none
            name = self.encoder.default_prompt_name
        elif name is None and prompt_type.value == "document":
            name = next((kind for kind in _DOCUMENTS if kind in prompts), None)
        return prompts.get(name, "") if name else ""


class OrtCrossEncoder:
    """mteb's `CrossEncoderProtocol`."""

    mteb_model_meta = _NO_FACTS

    def __init__(self, encoder: TextEncoder) -> None:
        self.encoder = encoder

    def predict(self, inputs1: Iterable[Any], inputs2: Iterable[Any], **_: Any) -> npt.NDArray[np.float32]:
        """[N] scores of the pairs."""
        queries, documents = ([text for batch in one for text in batch["text"]] for one in (inputs1, inputs2))
        return self.encoder.score_pairs(queries, documents)


def keep_queries(tasks: Sequence[Any]) -> dict[str, dict[tuple[str, str, str], float]]:
    """For each retrieval or reranking task, what its next run fills in: nDCG@10 by split, subset and query."""
    kept: dict[str, dict[tuple[str, str, str], float]] = {}
    for task in tasks:
        if (original := getattr(task, "task_specific_scores", None)) is not None:
            of_task = kept.setdefault(task.metadata.name, {})

            def keep(scores: Any, *rest: Any, _own: Any = of_task, _original: Any = original, **named: Any) -> Any:
                where = named["hf_split"], named["hf_subset"]
                _own.update(((*where, query), one["ndcg_cut_10"]) for query, one in scores.items())
                return _original(scores, *rest, **named)

            task.task_specific_scores = keep
    return kept


def keep_pairs(tasks: Sequence[Any]) -> dict[str, list[tuple[Array, Array]]]:
    """For each similarity task, what its next run fills in: for each subset, the wanted scores and the cosines of its
    pairs."""
    kept: dict[str, list[tuple[Array, Array]]] = {}
    similarity: list[Any] = [task for task in tasks if isinstance(task, AbsTaskSTS)]
    for task in similarity:
        of_task = kept.setdefault(task.metadata.name, [])

        def keep(scores: Any, wanted: Any, _own: Any = of_task, _original: Any = task._calculate_scores) -> Any:
            _own.append((np.asarray(wanted, np.float32), np.asarray(scores["cosine_scores"], np.float32)))
            return _original(scores, wanted)

        task._calculate_scores = keep
    return kept


def run_tasks(model: Any, tasks: Sequence[Any], settings: EmbeddingSettings) -> dict[str, dict[str, float]]:
    """For each task its "main_score", and that of each split and subset under `<split>_<subset>`: what Olive 0.13's
    evaluator reports, by the same road through mteb."""
    chosen = {"eval_splits": settings.eval_splits, "eval_subsets": settings.eval_subsets}
    folder = None if settings.output_folder is None else str(settings.output_folder)
    options: dict[str, Any] = {name: value for name, value in chosen.items() if value}
    results = mteb.MTEB(tasks=list(tasks)).run(
        model, output_folder=folder, overwrite_results=True, verbosity=0, **options
    )
    reported: dict[str, dict[str, float]] = {}
    for result in results:
        scores = {"main_score": float(result.main_score)}
        for split, entries in result.scores.items():
            for entry in entries:
                subset = entry.get("hf_subset", "")
                scores[f"{split}_{subset}" if subset else split] = float(entry.get("main_score", 0.0))
        reported[result.task_name] = scores
    return reported
