"""Pictures of coloured shapes, drawn when a task is loaded: the same on every machine, and nothing to download."""

from __future__ import annotations

import random
from typing import Any

import datasets
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (235, 205, 40)}
SHAPES = ("circle", "square", "triangle")
SIDE = 64
NUM_DOCUMENTS = 48


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """lm-eval's `custom_dataset`: each document has a picture, the names of its shape and colour, and their numbers."""
    rng = random.Random(0)
    rows = []
    for _number in range(NUM_DOCUMENTS):
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        place = rng.randint(2, SIDE - 34), rng.randint(2, SIDE - 34), rng.randint(16, 32)
        rows.append({"image": draw(shape, colour, *place), "shape": shape, "colour": colour})
    for row in rows:
        row |= {"colours": list(COLOURS), "answer": list(COLOURS).index(row["colour"])}
    return {"test": datasets.Dataset.from_list(rows)}


def draw(shape: str, colour: str, left: int, top: int, size: int) -> Image.Image:
    """One shape on white."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen, box = ImageDraw.Draw(picture), (left, top, left + size, top + size)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon(((left, top + size), (left + size, top + size), (left + size // 2, top)), fill=COLOURS[colour])
    return picture
