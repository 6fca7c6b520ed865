"""The models that mteb drives, an encoder and a cross-encoder on a `TextEncoder`, and a run of tasks. Knows no
recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mteb
import numpy as np
import numpy.typing as npt
from mteb.abstasks.sts import AbsTaskSTS
from mteb.models.abs_encoder import get_prompt_name
from mteb.models.model_meta import ModelMeta
from mteb.similarity_functions import cos_sim, pairwise_cos_sim

from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.errors import ConfigError
from olive_ext.plugins.suites.mteb.text_encoder import TextEncoder, YesNoReranker

Array = npt.NDArray[np.float32]

_DOCUMENTS = ("document", "passage", "corpus")
"""Names that sentence-transformers gives the prompt of documents."""


class _Driven:
    @property
    def mteb_model_meta(self) -> Any:
        """Nothing is reported of the model."""
        return ModelMeta.create_empty()


class OrtEncoder(_Driven):
    """mteb's `EncoderProtocol`. With `keeps`, the embedding of each text that tasks asked for stays in `embedded`, by
    prompt and text."""

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

    @staticmethod
    def similarity(embeddings1: Any, embeddings2: Any) -> Any:
        """[N, M] cosines."""
        return cos_sim(embeddings1, embeddings2)

    @staticmethod
    def similarity_pairwise(embeddings1: Any, embeddings2: Any) -> Any:
        """[N] cosines."""
        return pairwise_cos_sim(embeddings1, embeddings2)


class OrtCrossEncoder(_Driven):
    """mteb's `CrossEncoderProtocol`."""

    def __init__(self, encoder: TextEncoder | YesNoReranker) -> None:
        self.encoder = encoder

    def predict(self, inputs1: Iterable[Any], inputs2: Iterable[Any], **_: Any) -> npt.NDArray[np.float32]:
        """[N] scores of the pairs."""
        batches = list(inputs1)
        queries, documents = ([text for batch in one for text in batch["text"]] for one in (batches, inputs2))
        if isinstance(self.encoder, TextEncoder):
            return self.encoder.score_pairs(queries, documents)
        instructions = [text for batch in batches for text in batch.get("instruction", ())]
        return self.encoder.score_pairs(queries, documents, instructions)


def mteb_model(encoder: TextEncoder | YesNoReranker, *, keeps: bool = False) -> OrtEncoder | OrtCrossEncoder:
    """The model as mteb drives it: a cross-encoder where it scores pairs."""
    if isinstance(encoder, YesNoReranker) or getattr(encoder.states, "scores_output", None) is not None:
        return OrtCrossEncoder(encoder)
    return OrtEncoder(encoder, keeps=keeps)


def load_tasks(names: Sequence[str]) -> list[Any]:
    """mteb's tasks of these names. Raises `ConfigError` for one that it does not have."""
    try:
        return [mteb.get_task(name) for name in names]
    except KeyError as error:
        raise ConfigError(f"'tasks': mteb {mteb.__version__}: {error.args[0]}", "tasks") from error


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
