"""The settings of embeddings: how a text becomes a vector, and the tasks of mteb that measure it. Knows no model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from olive_ext.config.base import Auto, PathText, StrictModel, word

Pooling = Literal["mean", "cls", "last"]


class EmbeddingSettings(StrictModel):
    """Keys of embedding models: those of Olive's `MTEBEvaluator`, and what a model's files say otherwise."""

    tasks: list[str] = Field(default_factory=list)
    """Tasks of mteb ("STS17"), by name. With tasks the model is measured as an embedding model, and `metrics` only
    declares priorities and goals."""

    eval_splits: list[str] | None = None
    """Splits of the tasks that are evaluated; None takes those of each task."""

    eval_subsets: list[str] | None = None
    """Subsets of the tasks (languages, mostly) that are evaluated; None takes all."""

    output_folder: PathText | None = None
    """Folder for mteb's own results, one JSON file for each task. None writes none."""

    model_class: Annotated[Literal["ort", "ortgenai"] | None, BeforeValidator(word)] = None
    """As in Olive's evaluator; both names mean this package's engine."""

    pooling: Annotated[Pooling | Auto, BeforeValidator(word)] = "auto"
    """Which of a text's hidden states are its embedding: their mean, that of the first token, or of the last. "auto"
    takes what the model's sentence-transformers files say, else "last" for decoders with a KV cache and "mean" for
    other graphs, unless the graph returns embeddings of whole texts itself ("sentence_embedding")."""

    normalize: bool = True
    """Divides embeddings by their length, as Olive's evaluator does."""

    prompts: dict[str, str] | None = None
    """What is put before texts, by mteb's names: a task, a type of task, "query", "document" or combinations such as
    "NFCorpus-query". None takes those of the model's sentence-transformers files; {} puts nothing, as Olive does."""
