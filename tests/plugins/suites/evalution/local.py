"""The same fp32 weights twice, as an ONNX package in our engine and in Evalution's own transformers engine; requests of
all kinds, drawn from the words that the tiny tokenizers know; and Evalution's MMLU, HellaSwag and GSM8K on rows that
are written here, offline: the shapes of the real ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from datasets import Dataset
from evalution import Model
from evalution.benchmarks.gsm8k import GSM8K
from evalution.benchmarks.hellaswag import HellaSwag
from evalution.benchmarks.mmlu import MMLU
from evalution.engines import TransformersCompat
from evalution.engines.base import (
    BaseInferenceSession,
    GenerationRequest,
    LoglikelihoodRequest,
    RollingLoglikelihoodRequest,
)

from olive_ext.plugins.suites.evalution import OrtEngine, OrtInferenceSession
from tests.exports import TEXT, genai_export, hf_model

FAMILIES = ("llama", "qwen3", "gemma3_text")


def onnx_model(family: str = "llama", **fields: Any) -> Model:
    return Model(path=str(genai_export(family)), **fields)


def open_ours(family: str = "llama", **settings: Any) -> OrtInferenceSession:
    return OrtEngine(**settings).build(onnx_model(family))


@cache
def theirs(family: str = "llama") -> BaseInferenceSession:
    """One text at a time: in a batch of several it generates up to the largest `max_new_tokens`, and leaves the padding
    behind a text's end in the text."""
    engine = TransformersCompat(dtype="float32", device="cpu", batch_size=1)
    return engine.build(Model(path=str(hf_model(family))))


WORDS = TEXT.split()


class Draw:
    """Draws with a seed of its own; contexts share beginnings."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._stems = [self._words(5, 60) for _ in range(6)]

    def scoring(self, number: int) -> LoglikelihoodRequest:
        """One in seven has no context; one in five is given as ids."""
        metadata = {"number": number}
        if number % 5 == 0:
            return LoglikelihoodRequest(
                context_input_ids=self._ids(1, 80), continuation_input_ids=self._ids(1, 12), metadata=metadata
            )
        context = "" if number % 7 == 0 else self._prompt()
        return LoglikelihoodRequest(context, " " + self._words(1, 6), metadata=metadata)

    def rolling(self, number: int) -> RollingLoglikelihoodRequest:
        """Some longer than the context, one in nine empty, one in four as ids."""
        metadata = {"number": number}
        if number % 4 == 0:
            return RollingLoglikelihoodRequest("", input_ids=self._ids(1, 700), metadata=metadata)
        return RollingLoglikelihoodRequest("" if number % 9 == 0 else self._words(1, 300), metadata=metadata)

    def generation(self, number: int) -> GenerationRequest:
        """Prompts, chats and ids, some with stops."""
        rest = {
            "stop": [[], ["e"], ["zz", " t"]][number % 3],
            "max_new_tokens": 1 + number % 13,
            "metadata": {"number": number},
        }
        if number % 4 == 0:
            return GenerationRequest(messages=[{"role": "user", "content": self._words(1, 20)}], **rest)
        if number % 4 == 1:
            return GenerationRequest(prompt="", rendered_prompt="ids", input_ids=self._ids(1, 40), **rest)
        return GenerationRequest(prompt=self._prompt(), **rest)

    def _prompt(self) -> str:
        return f"{self._rng.choice(self._stems)} {self._words(1, 10)}"

    def _words(self, low: int, high: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(low, high)))

    def _ids(self, low: int, high: int) -> list[int]:
        return [self._rng.randrange(4, 1000) for _ in range(self._rng.randint(low, high))]


SENTENCES = [f"{sentence}." for sentence in TEXT.split(". ")]
SUBJECTS = ("anatomy", "astronomy")


def mmlu_rows(split: str) -> list[dict[str, Any]]:
    rng = random.Random(split)
    return [
        {
            "question": f"{' '.join(rng.choices(SENTENCES, k=2))} Which?",
            "choices": rng.sample(SENTENCES, 4),
            "answer": rng.randrange(4),
            "subject": SUBJECTS[number % 2],
        }
        for number in range(10 if split == "dev" else 24)
    ]


def hellaswag_rows(split: str) -> list[dict[str, Any]]:
    rng = random.Random(split)
    return [
        {
            "ctx_a": rng.choice(SENTENCES),
            "ctx_b": "he",
            "activity_label": "Painting",
            "endings": rng.sample(SENTENCES, 4),
            "label": str(rng.randrange(4)),
            "source_id": f"local~{number}",
            "split_type": "indomain",
        }
        for number in range(24)
    ]


def gsm8k_rows(split: str) -> list[dict[str, Any]]:
    rng = random.Random(split)
    return [
        {"question": f"{rng.choice(SENTENCES)} How many?", "answer": f"So many.\n#### {rng.randrange(100)}"}
        for _ in range(16)
    ]


def loader(rows: Callable[[str], list[dict[str, Any]]]) -> Callable[..., Dataset]:
    """In the place of `datasets.load_dataset`."""
    return lambda *_, split, **__: Dataset.from_list(rows(split))


class LocalMMLU(MMLU):  # Evalution has no types
    def dataset_loader(self) -> Any:
        return loader(mmlu_rows)


class LocalHellaSwag(HellaSwag):
    def dataset_loader(self) -> Any:
        return loader(hellaswag_rows)


class LocalGSM8K(GSM8K):
    def dataset_loader(self) -> Any:
        return loader(gsm8k_rows)


def all_suites() -> list[Any]:
    """Scores in a stream, scores in lists, and generations."""
    return [
        LocalMMLU(num_fewshot=1, stream=False),
        LocalHellaSwag(stream=False),
        LocalGSM8K(variant="base", stream=False, max_new_tokens=12),
    ]
