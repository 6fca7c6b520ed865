"""Pictures of one to four coloured shapes and questions about them, drawn when a task is loaded: the same on every
machine, and nothing to download. `recipes/vision/make/train.py` draws its own from other seeds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import datasets
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 205, 40),
    "black": (20, 20, 20),
    "pink": (245, 140, 200),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = ("one", "two", "three", "four")
SIDE = 64
NUM_PICTURES = 60


class Shape(NamedTuple):
    """One shape of a picture, in a quarter of its own."""

    name: str
    colour: str
    place: int
    """Which of `PLACES`."""
    left: int
    top: int
    size: int


class Question(NamedTuple):
    """What is asked about a picture."""

    kind: str
    text: str
    answer: str


def choices(**_: Any) -> dict[str, datasets.Dataset]:
    """lm-eval's `custom_dataset` of questions for colours."""
    rows = documents(("colour",))
    names = list(COLOURS)
    return {
        "test": datasets.Dataset.from_list(
            [{**row, "choices": names, "number": names.index(row["answer"])} for row in rows]
        )
    }


def answers(**_: Any) -> dict[str, datasets.Dataset]:
    """lm-eval's `custom_dataset` of questions with a short answer: a shape, a number, a place."""
    return {"test": datasets.Dataset.from_list(documents(("shape", "count", "place")))}


def documents(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """A document for each picture with a question of one of these kinds, then a second question about each that has
    one; the pictures are the same for all kinds."""
    rng, pictures = random.Random(0), []
    while len(pictures) < NUM_PICTURES:
        shapes = scene(rng)
        if any(question.kind == "colour" for question in questions(shapes)):
            pictures.append(shapes)
    rounds: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for shapes in pictures:
        asked, image = [question for question in questions(shapes) if question.kind in kinds], draw(shapes)
        for rows, question in zip(rounds, rng.sample(asked, min(2, len(asked))), strict=False):
            rows.append({"image": image, **question._asdict()})
    return [*rounds[0], *rounds[1]]


def scene(rng: random.Random) -> list[Shape]:
    """One to four shapes, each somewhere in another quarter."""
    found = []
    for place in sorted(rng.sample(range(4), rng.randint(1, 4))):
        size, half = rng.randint(14, 24), SIDE // 2
        left, top = (place % 2) * half, (place // 2) * half
        corner = left + rng.randint(2, half - size - 2), top + rng.randint(2, half - size - 2)
        found.append(Shape(rng.choice(SHAPES), rng.choice(list(COLOURS)), place, *corner, size))
    return found


def questions(shapes: list[Shape]) -> list[Question]:
    """Everything that can be asked and has one answer."""
    names, colours = Counter(one.name for one in shapes), Counter(one.colour for one in shapes)
    both = Counter((one.colour, one.name) for one in shapes)
    found = [Question("count", "How many shapes are there?", NUMBERS[len(shapes) - 1])]
    for one in shapes:
        if names[one.name] == 1:
            found.append(Question("colour", f"What colour is the {one.name}?", one.colour))
        if colours[one.colour] == 1:
            found.append(Question("shape", f"What shape is {one.colour}?", one.name))
        if both[one.colour, one.name] == 1:
            found.append(Question("place", f"Where is the {one.colour} {one.name}?", PLACES[one.place]))
    return found


def draw(shapes: list[Shape]) -> Image.Image:
    """The shapes on white."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    for one in shapes:
        left, top, size, fill = one.left, one.top, one.size, COLOURS[one.colour]
        box, third = (left, top, left + size, top + size), size // 3
        if one.name == "circle":
            pen.ellipse(box, fill=fill)
        elif one.name == "square":
            pen.rectangle(box, fill=fill)
        elif one.name == "triangle":
            pen.polygon(((left, top + size), (left + size, top + size), (left + size // 2, top)), fill=fill)
        else:
            pen.rectangle((left + third, top, left + size - third, top + size), fill=fill)
            pen.rectangle((left, top + third, left + size, top + size - third), fill=fill)
    return picture
