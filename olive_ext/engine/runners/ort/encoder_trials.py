"""Whether the items of one run of an encoder, and what fills it up, leave each other's features as they are. Each trial
is given a function that runs the encoder on items, and knows no session.

One item does to another what nothing in the interface tells: attention across pictures, a norm over all of them, a
scale by the largest activation of the run (dynamic quantization), a branch for their number. Some of it shows only for
some numbers of items, sizes or contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from olive_ext.engine.media import MediaItem
from olive_ext.engine.runners.ort.counted_session import LateShapeError
from olive_ext.engine.runners.ort.encoder_arrays import Array, Arrays, difference_of
from olive_ext.engine.runners.ort.encoder_shapes import EncoderShapes
from olive_ext.errors import first_line

Loaded = tuple[MediaItem, Arrays]
"""An item, and what an encoder is given of it."""

Encode = Callable[[Sequence[Loaded]], list[list[Array]]]
"""From items to the rows of each [N, H], of each output."""

SCALES = (1.0, 8.0, 1 / 64, 0.0)
"""Of the values of items that are tried together: what is taken of all of them is then none's own."""


def company_problem(found: Sequence[Loaded], encode: Encode) -> str:
    """What is wrong with so many items in a run; empty where nothing is. They are tried as they are, and in the other
    order with noise of unlike sizes in place of their contents."""
    noise = [(item, _noise(arrays, place)) for place, (item, arrays) in enumerate(found)]
    for tried in (list(found), noise[::-1]):
        try:
            together = encode(tried)
            alone = [encode([one])[0] for one in tried]
        except LateShapeError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a provider throws: then it takes one at a time
            return f"several together fail: {first_line(error)}"
        problems = map(difference_of, alone, together)
        if problem := next(filter(None, problems), ""):
            return f"features of {len(found)} together {problem} those of each alone"
    return ""


def padding_problem(one: Loaded, shapes: EncoderShapes, encode: Encode) -> str:
    """What is wrong with an item in a bucket; empty where nothing is."""
    item, arrays = one
    for content in (arrays, *(_noise(arrays, place) for place in range(len(SCALES)))):
        shapes.note_trial("not yet tried")
        alone = encode([(item, content)])[0]
        shapes.note_trial("")
        try:
            padded = encode([(item, shapes.filled(content))])[0]
        except LateShapeError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a provider throws: then it takes no padding
            return f"an item in a bucket fails: {first_line(error)}"
        if problem := difference_of(alone, padded):
            return f"features of an item in a bucket {problem} those without"
    return ""


def _noise(arrays: Arrays, place: int) -> Arrays:
    """An item of the same shapes with noise for content; masks and places stay."""
    rng, scale = np.random.default_rng(place), SCALES[place % len(SCALES)]
    return {
        name: (scale * rng.standard_normal(array.shape)).astype(array.dtype)
        if array.dtype.kind == "f" and "mask" not in name
        else array
        for name, array in arrays.items()
    }
