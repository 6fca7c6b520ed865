"""Documents of five protocols of lmms-eval, drawn here: pictures of words, in the columns that each protocol reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, Value
from datasets import Sequence as Texts
from PIL import Image as Pictures
from PIL import ImageDraw

WORDS = ("north", "42", "copper", "river", "7.5", "window")

SPLITS = {
    "docvqa_val": "validation",
    "ocrbench": "test",
    "chartqa": "test",
    "textvqa_val": "validation",
    "mmmu_val": "validation",
}


def drawn(word: str, place: int) -> Pictures.Image:
    """The word on a ground of its own."""
    image = Pictures.new("RGB", (64, 40), ((place * 70) % 256, 200, 255 - place * 40))
    ImageDraw.Draw(image).text((4 + place, 10), word, fill=(0, 0, 0))
    return image


def write(folder: Path, task: str, answers: Sequence[str]) -> Path:
    """A folder with the task's split; `answers` are the documents' references, one for each of `WORDS`."""
    folder.mkdir(parents=True)
    rows = [
        _COLUMNS[task](place, word, answer) for place, (word, answer) in enumerate(zip(WORDS, answers, strict=True))
    ]
    columns = {name: _type(name, value) for name, value in rows[0].items()}
    Dataset.from_list(rows, Features(columns)).to_parquet(folder / f"{SPLITS[task]}.parquet")
    return folder


def _type(name: str, value: Any) -> Any:
    if name.startswith("image"):
        return Image()
    return Texts(Value("string")) if isinstance(value, list) else Value("string")


def _docvqa(place: int, word: str, answer: str) -> dict[str, Any]:
    return {"questionId": str(place), "question": "What is written?", "image": drawn(word, place), "answers": [answer]}


def _ocrbench(place: int, word: str, answer: str) -> dict[str, Any]:
    kind = ("Doc-oriented VQA", "Digit String Recognition")[place % 2]
    named = {"dataset": "drawn", "question_type": kind, "question": "What is written in the image?"}
    return {**named, "image": drawn(word, place), "answer": [answer]}


def _chartqa(place: int, word: str, answer: str) -> dict[str, Any]:
    kind = ("human_test", "augmented_test")[place % 2]
    return {"type": kind, "question": "Which value is shown?", "image": drawn(word, place), "answer": answer}


def _textvqa(place: int, word: str, answer: str) -> dict[str, Any]:
    references = [answer] * 4 + [word] * 6
    asked = {"question_id": str(place), "question": "what does the sign say?"}
    return {**asked, "image": drawn(word, place), "answers": references, "ocr_tokens": [word]}


def _mmmu(place: int, word: str, answer: str) -> dict[str, Any]:
    """Open questions and choices by turns; every question has two pictures, the second in its midst."""
    is_open = place % 3 != 2
    return {
        "id": f"validation_Art_{place}",
        "question": f"Between <image 1> and <image 2>: which is it, {word}?",
        "question_type": "open" if is_open else "multiple-choice",
        "options": "[]" if is_open else "['north', 'south', 'east']",
        "answer": answer if is_open else "A",
        "subfield": "drawn",
        "image_1": drawn(word, place),
        "image_2": drawn(WORDS[place - 1], place + 3),
    }


_COLUMNS = {
    "docvqa_val": _docvqa,
    "ocrbench": _ocrbench,
    "chartqa": _chartqa,
    "textvqa_val": _textvqa,
    "mmmu_val": _mmmu,
}
