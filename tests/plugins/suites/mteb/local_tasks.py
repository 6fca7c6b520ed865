"""Tasks of mteb with data of their own, made of a few sentences: similarity, retrieval and reranking."""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from tests.exports.text import TEXT

SENTENCES = [f"{part.strip()}." for part in TEXT.split(". ")][:80]


def _metadata(name: str, kind: str, score: str) -> TaskMetadata:
    return TaskMetadata(
        name=name, description="made of a few sentences", reference=None, type=kind, category="t2t",
        modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"], main_score=score,
        dataset={"path": "local", "revision": "1"},
        date=("2026-01-01", "2026-01-02"), domains=["Written"], task_subtypes=[], license="mit",
        annotations_creators="derived", sample_creation="created", bibtex_citation="",
    )  # fmt: skip


class TinySTS(AbsTaskSTS):
    metadata = _metadata("TinySTS", "STS", "cosine_spearman")
    min_score, max_score = 0, 5

    def load_data(self, **_: Any) -> None:
        pairs = [(SENTENCES[i], SENTENCES[(i * 7 + 3) % 80], (i * 13) % 6) for i in range(60)]
        first, second, scores = zip(*pairs, strict=True)
        columns = {"sentence1": list(first), "sentence2": list(second), "score": [float(score) for score in scores]}
        self.dataset = {"default": {"test": Dataset.from_dict(columns)}}
        self.data_loaded = True


class TinyRetrieval(AbsTaskRetrieval):
    metadata = _metadata("TinyRetrieval", "Retrieval", "ndcg_at_10")

    def load_data(self, **_: Any) -> None:
        corpus = {"id": [f"d{i}" for i in range(80)], "text": SENTENCES, "title": [""] * 80}
        queries = {"id": [f"q{i}" for i in range(12)], "text": [SENTENCES[i * 6].split(" the ")[0] for i in range(12)]}
        split = {
            "corpus": Dataset.from_dict(corpus),
            "queries": Dataset.from_dict(queries),
            "relevant_docs": {f"q{i}": {f"d{(i * 6 + k) % 80}": 1 for k in range(5)} for i in range(12)},
            "top_ranked": self.ranked(),
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True

    def ranked(self) -> dict[str, list[str]] | None:
        return None


class TinyReranking(TinyRetrieval):
    metadata = _metadata("TinyReranking", "Reranking", "map_at_1000")

    def ranked(self) -> dict[str, list[str]] | None:
        return {f"q{i}": [f"d{(i * 6 + k) % 80}" for k in range(10)] for i in range(12)}


for _task in (TinySTS, TinyRetrieval, TinyReranking):
    sys.modules["mteb.get_tasks"]._TASKS_REGISTRY[_task.metadata.name] = _task
