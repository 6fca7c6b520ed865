"""Writes docs/picture_families.json and the part of docs/decoders.md made of it: families that see pictures or hear.

    python -m docs.picture_families [FAMILY ...]      rows of other families are kept

Exports are made on first use and kept (tests/exports). The reference is transformers on the same weights.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROWS = HERE / "picture_families.json"
SETTINGS = ((1, 256), (3, 0), (8, 128))
"""Slots and chunk size, 0 for as many tokens as the largest item has; the others are compared with the first."""

SIZES = ((40, 40), (60, 30), (24, 70))
LENGTHS = (9000, 24321, 50000)
"""Samples of the sounds."""

TARGETS = (" blue stone", " of the garden number")
VERBS = ("sees", "paints", "of the")
COLUMNS = {
    "export": "export",
    "features": "features",
    "score": "score",
    "answers": "answers",
    "alone": "alone",
    "told": "check says",
}
"""Keys of a row, and the heads of the table."""

INTRODUCTION = """
## Pictures and sound

In fp32 on the CPU, compared with transformers on the same weights (`python -m docs.picture_families`). If `check`
reports a fault of the export, transformers gets the same fault, and the last column has what `check` says.

- **features**: largest difference of an encoder's output, over the largest value.
- **score**: largest difference of a target's log-probability, in nats.
- **answers**: greedy answers of 12 tokens that are equal, with 1, 3 and 8 slots.
- **alone**: largest difference, in nats, between targets asked together, which share pictures, and each asked alone.

"""


def measure(family: str) -> dict[str, str]:
    """The row of one family."""
    import olive_ext
    from olive_ext.config import ModelSettings
    from olive_ext.model import resolve
    from olive_ext.session.requests import GenerationRequest, ScoringRequest
    from tests.exports.genai_layout import GENAI_LAYOUT
    from tests.exports.media import SOUND_FAMILIES, media_export
    from tests.exports.mobius import RELEASE
    from tests.families.pictures import MediaReference, picture, sound

    package, hf = media_export(family)
    is_sound = family in SOUND_FAMILIES
    reference = MediaReference(family, hf)
    items: list[Any] = [sound(seed, length) for seed, length in enumerate(LENGTHS)] if is_sound else []
    items = items or [picture(seed, *size) for seed, size in enumerate(SIZES)]
    field, marker = "audio" if is_sound else "images", reference.marker
    asked = [(f"Ann {verb} the {marker} and", target, [one]) for one in items for verb in VERBS for target in TARGETS]
    requests = [ScoringRequest(context, target, **{field: given}) for context, target, given in asked]
    text, rng, found = f"Ann sees the {marker} and", random.Random(11), []
    largest = max(map(reference.num_tokens, items))
    for num_slots, chunk_size in SETTINGS:
        with olive_ext.open(package, engine={"num_slots": num_slots, "chunk_size": chunk_size or largest}) as session:
            order = rng.sample(range(len(requests)), len(requests))
            outputs = session.loglikelihood([requests[place] for place in order])
            scores = [outputs[order.index(place)].token_logprobs for place in range(len(requests))]
            fork = session.counters.tokens_fed / session.counters.tokens_distinct
            answers = session.generate([GenerationRequest(text, max_new_tokens=12, **{field: [one]}) for one in items])
            found.append((scores, fork, [answer.tokens for answer in answers]))
    with olive_ext.open(package) as session:
        alone = []
        for request in requests:
            session.gc()
            alone.append(session.loglikelihood([request])[0].token_logprobs)
    model, ((scores, *_), *others) = resolve(ModelSettings(model=str(package))), found
    equal = [
        all(reference.continues(reference.ids(text, [one]), [one], answers[place], 12) for *_, answers in found)
        for place, one in enumerate(items)
    ]
    return {
        "family": family,
        "export": "genai layout" if family in GENAI_LAYOUT else RELEASE[0].replace("-onnx==", " "),
        "features": f"{max(_features(model, reference, one, is_sound) for one in items):.1e}",
        "score": f"{_largest(scores, [reference.score(*one) for one in asked]):.1e}",
        "answers": f"{sum(equal)} of {len(equal)}",
        "fork": f"{max(fork for _, fork, _ in found):.2f}",
        "batch": f"{max(_largest(scores, other) for other, *_ in others):.1e}",
        "alone": f"{_largest(scores, alone):.1e}",
        "told": "; ".join(model.media.notes),  # type: ignore[union-attr]
    }


def _features(model: Any, reference: Any, item: Any, is_sound: bool) -> float:
    """Difference of a picture's or sound's features, over the largest of them."""
    import onnxruntime

    from olive_ext.media.encoder import MediaEncoder
    from olive_ext.media.graphs import ItemGraphs
    from olive_ext.media.processor import MediaProcessor
    from olive_ext.model.providers.devices import Device
    from olive_ext.model.types import Modality

    modality = Modality.AUDIO if is_sound else Modality.IMAGE
    spec = next(spec for spec in model.media.encoders if spec.modality is modality)
    graph, open_session = str(spec.files.graph), onnxruntime.InferenceSession
    encoder = MediaEncoder(spec, lambda: open_session(graph), ItemGraphs(Device("cpu"), open_session))
    found = encoder.features(MediaProcessor(model.media, model.files).item(modality, item))[0].numpy()
    expected = reference.features([item]).numpy()
    return float(abs(found - expected).max() / abs(expected).max())


def _largest(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    return max(abs(a - b) for rows in zip(left, right, strict=True) for a, b in zip(*rows, strict=True))


def render() -> str:
    """The part of the page; empty where nothing was measured."""
    rows = sorted(_kept().values(), key=lambda row: row["family"])
    if not rows:
        return ""
    head = "| family | " + " | ".join(COLUMNS.values()) + " |\n|" + "---|" * (1 + len(COLUMNS)) + "\n"
    lines = ["| " + " | ".join((row["family"], *(row[column] for column in COLUMNS))) + " |\n" for row in rows]
    return INTRODUCTION + head + "".join(lines)


def _kept() -> dict[str, dict[str, str]]:
    return json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else {}


def main() -> None:
    from docs import decoders
    from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES

    for family in sys.argv[1:] or [*MEDIA_FAMILIES, *SOUND_FAMILIES]:
        rows = {**_kept(), family: measure(family)}
        print(json.dumps(rows[family]), flush=True)
        ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        decoders.PAGE.write_text(decoders.render(json.loads(decoders.ROWS.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
