"""The small invented valley that the quickstart model learns: its people, their facts, and what is held out.

Knows nothing of text: sentences are written in `documents`.
"""

import random
import zlib
from dataclasses import dataclass

HEADS = ("Al", "Bri", "Cor", "Dal", "El", "Fen", "Gar", "Hol")
TAILS = ("mar", "na", "ric", "wyn")
TRADES = ("baker", "smith", "miller", "weaver", "potter", "tailor", "fisher", "farmer", "cooper", "mason", "printer",
          "painter", "gardener", "sailor", "teacher", "doctor")  # fmt: skip
VILLAGES = ("Ashby", "Birch", "Cobham", "Dunmore", "Eastlea", "Fernhill", "Grange", "Hatton", "Ivydale", "Kelsey",
            "Longford", "Marsh", "Norwood", "Oakham", "Preston", "Redhill")  # fmt: skip
PETS = ("cat", "dog", "hen", "goat", "pony", "mouse", "duck", "rabbit", "goose", "parrot", "sheep", "donkey", "turtle",
        "fox", "pig", "crow")  # fmt: skip
FOODS = ("bread", "soup", "cheese", "plums", "honey", "fish", "beans", "cake", "apples", "rice", "eggs", "onions",
         "pears", "nuts", "jam", "pasta")  # fmt: skip
OBJECTS = ("key", "lamp", "drum", "kite", "rope", "bell", "map", "ring", "box", "coat", "flute", "hammer", "book",
           "cup", "basket", "mirror", "ladder", "candle", "spoon", "clock", "saddle", "bottle", "brush",
           "coin")  # fmt: skip
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
PLACES = ("mill", "well", "barn", "bridge", "tower", "market", "harbour", "forge", "inn", "school", "chapel", "stable",
          "orchard", "cellar", "quarry", "garden")  # fmt: skip
TIMES = ("morning", "day", "summer", "winter", "spring", "Sunday", "Monday", "evening")


@dataclass(frozen=True)
class Person:
    """One inhabitant; every field is a fact that the training text tells many times."""

    name: str
    pronoun: str
    trade: str
    village: str
    pet: str
    food: str


RELATIONS = {"trade": TRADES, "village": VILLAGES, "pet": PETS, "food": FOODS}


def _people() -> tuple[Person, ...]:
    rng = random.Random(20)
    names = [head + tail for head in HEADS for tail in TAILS]
    kinds = (("he", "she"), *RELATIONS.values())
    return tuple(Person(name, *(rng.choice(values) for values in kinds)) for name in names)


PEOPLE = _people()


def is_held_out(*parts: object) -> bool:
    """Whether this combination (a fifth of all) may appear in evaluation documents only, never in training text."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % 5 == 0
