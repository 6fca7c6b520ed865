"""The table of agreement: families, exporters, precisions, forms and providers, what each is held against, and bounds.

Log-probabilities are in nats. 1e-4: every value is computed from the same numbers, in fp32, in another order. Half
precision: 2e-2, because its 11 bits are rounded at other places; measured 4e-3. `MatMulNBits` of accuracy_level 4
rounds activations to 8 bits and is exact for rows of several tokens; a step of one takes another kernel, tree batches
add up attention in another order, and one flipped rounding has been measured to change a score by 6e-2.

More is compared for each export of the catalog (tests/families/test_decoders.py), at random
(tests/families/test_at_random.py), and of searches, samples and budgets beside this file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from olive_ext.engine.runners.trials import GROUPS
from tests.agreement.asked import LENGTHS
from tests.agreement.packages import ROUNDED
from tests.agreement.table import Row, check
from tests.exports.catalog import CATALOG
from tests.exports.hf import HEAD_SIZES
from tests.exports.media import MEDIA_FAMILIES
from tests.exports.ropes import FIRST_MAXIMUM, ORIGINAL
from tests.exports.step_wide import ALIKE, FORMS

MARKS = {
    "": [],
    "long": [pytest.mark.long],
    "exporters": [pytest.mark.exporters],
    "rounded": [pytest.mark.rounded],
    "webgpu": [pytest.mark.webgpu],
    "gpu": [pytest.mark.gpu],
}
ROWS: list[Any] = []
Settings = Mapping[str, Any]


def add(
    group: str,
    packages: str | Iterable[str],
    asked: str,
    nats: float,
    engines: Iterable[Settings] = ({},),
    *,
    fetched: Iterable[str] = (),
    mark: str = "",
    part: int | None = None,
    is_drawn: bool = False,
    **row: Any,
) -> None:
    """Rows of a group: each package in each form; with a `part`, the number of a further choice, one of three is for
    every run. A sample has one of those that are asked the same, or drawn. Those that are `fetched` take an exporter
    that is not at hand."""
    packages = [packages] if isinstance(packages, str) else list(packages)
    for (at, name), (place, engine) in product(enumerate([*packages, *fetched]), enumerate(list(engines))):
        own = mark if part is None or (at + place + part) % 3 == 0 else "long"
        marks = MARKS[own if name in packages else "exporters"]
        made = Row(name, asked, nats, engine=engine, **row)
        ROWS.append(pytest.param(made, marks=marks, id=f"{group}{':' * is_drawn} {asked}: {made}"))


def forms(shapes: Iterable[tuple[Any, ...]], *names: str, **more: Any) -> list[dict[str, Any]]:
    """Engines of slots, chunks and what else is named."""
    return [{**dict(zip(("num_slots", "chunk_size", *names), shape, strict=True)), **more} for shape in shapes]


def holds(text: str) -> Callable[[Any], bool]:
    """Whether a reason, or one of several notes, has a text."""
    return lambda found: any(text in one for one in ([found] if isinstance(found, str) else found))


def counts(fits: Callable[..., bool]) -> dict[str, Any]:
    """Counters that must fit."""
    return {"counters": lambda counters: fits(**counters)}


GRAPHS = ("scoring_head", "untouched")
SHAPES = [(1, 1), (3, 7), (8, 256)]
REUSES = counts(lambda tokens_reused, **_: tokens_reused > 0)


def shares(most: float) -> dict[str, Any]:
    """Whether prefixes were shared, and each token was fed once, or `most` times."""
    return counts(
        lambda tokens_fed, tokens_distinct, tokens_naive, **_: tokens_fed <= most * tokens_distinct < tokens_naive
    )


# Exports of the builder, the release installed and 0.18; `.ci/run` asks this of the oldest ONNX Runtime, too.
BUILDERS = ["llama-installed", "llama-genai-0.18", "qwen3-genai-0.18", "qwen3-installed"]
BINDING = {"kv_cache": "in_place", "kv_binding": "rows by pointer, past and present share one buffer"}
add("builder", BUILDERS, "mixed + first_tokens", 1e-4, forms([(3, 64)]), flags=True, facts=BINDING, part=0)
add("builder", BUILDERS, "answers_of_64", 1e-4, forms([(1, 32)]), part=0)
FEW_STEPS = counts(lambda steps, **_: steps < 12 * 64)
add("builder", BUILDERS, "answers_of_64", 1e-4, forms([(3, 32), (8, 32)]), facts=FEW_STEPS, part=1)
NO_IDLE_ROWS = counts(lambda idle_rows, copies, **_: idle_rows == 0 < copies)
add("builder", BUILDERS, "many_lengths", 1e-4, facts=NO_IDLE_ROWS)

# Slots, chunks and order change nothing beyond 1e-5. A step for each token takes its time.
AT_LENGTH = [(1, 1), (1, 256), (3, 7), (8, 1), (8, 256)]
ORDERS = [("", 85, [(1, 7), (3, 1), (3, 256), (8, 7)]), ("long", 510, AT_LENGTH)]
for (at, graph), (mark, count, shapes) in product(enumerate(GRAPHS), ORDERS):
    for row, (slots, chunk) in enumerate(shapes):
        asked = f"mixed_scores {count // 4 if chunk == 1 else count}"
        (base, other) = forms([(1, 256), (slots, chunk)], graph=graph)
        how: dict[str, Any] = {"against": base, "order": slots * chunk, "mark": mark, "part": at + row}
        add("order", BUILDERS, asked, 1e-5, [other], **how)

# Windowed caches at full length, with attention sinks; layers of two shapes.
IS_WINDOWED = {"kv_cache": "in_place", "notes": holds("sliding_window_cache"), **REUSES}
IS_WHOLE = {**IS_WINDOWED, "scored_row_products": []}
WINDOWED = [f"{family}-genai-0.18" for family in ("gemma3_text", "gpt_oss")]
add("windowed", WINDOWED, "windows", 1e-4, forms(SHAPES), facts=IS_WINDOWED, part=0)
add("windowed", WINDOWED, "windows", 1e-4, forms(SHAPES, graph="untouched"), facts=IS_WHOLE, part=1)
add("windowed", (), "windows", 1e-4, forms(SHAPES), against="plain", fetched=["gemma4_unified-genai-0.18"])

# Caches and weights that are not fp32, with the same file run plainly.
TYPES = (
    ("llama-genai-0.18-kv8", 1e-4, "in_place"),
    ("llama-genai-0.18-kv4", 1e-4, "in_place"),
    ("llama-genai-0.18-fp16-cuda", 2e-2, "in_place"),
    ("llama-genai-0.18-fp16-cpu", 2e-2, "returned"),
    ("llama-genai-0.18-int4", 1e-1, "in_place"),
)
TYPED = [(1, 1, "rows"), (3, 7, "rows"), (3, 7, "tree"), (8, 256, "rows"), (8, 256, "tree")]
for column, (name, nats, kv_cache) in enumerate(TYPES):
    asked, facts = ("windows 25 100" if nats < 1e-3 else "windows 25 100 0"), dict[str, Any](kv_cache=kv_cache)
    for row, (slots, chunk, scoring) in enumerate(TYPED):
        bound = 1e-4 if nats == 1e-1 and chunk > 1 and scoring == "rows" else nats
        if nats == 1e-1:
            facts = {**facts, "scoring": scoring}
        how = {"against": "plain", "provider": "cpu", "facts": facts, "part": row + column}
        engines = [one for graph in GRAPHS for one in forms([(slots, chunk)], scoring=scoring, graph=graph)]
        add("types", name, asked, bound, engines, **how)
IN_ROWS = {"scoring": "rows", "notes": holds("rounding of activations")}
add("types", "llama-genai-0.18-int4", asked, 1e-1, against="plain", facts=IN_ROWS)
ONE_TOKEN = {"chunk_size": 1, "notes": holds("steps are cut to 1 token")}
add("types", "llama-genai-0.18-fp16-cpu", asked, 2e-2, [{"chunk_size": 64}], against="plain", facts=ONE_TOKEN)

WHY = {"llama-genai-0.18": "after the last GroupQueryAttention: besides the head's MatMul, 4 products"}
WHY["llama-genai-0.18-int4"] = "rounding of activations"
# Products of the last layer on the scored rows only, besides the head's: the untouched graph's scores, and those of
# plain passes, from which steps of other lengths round otherwise.
for name, products, mark in (
    ("llama-genai-0.18", 4, ""),
    ("qwen3-genai-0.14", 4, "long"),
    ("gemma3_text-genai-0.18", 4, ""),
    ("phi3-genai-0.18", 4, "long"),
    ("llama-mobius", 4, ""),
    ("gemma4_text-mobius", 6, "long"),  # two of them around per-layer embeddings
    ("gpt2-mobius", 3, ""),
    ("qwen3_5_text-mobius", 4, ""),
    ("llama-optimum", 4, "long"),  # this and Gemma 4 have exporters that take seconds to install
    ("llama-genai-0.18-hidden", 0, ""),  # its last hidden states are an output
    ("llama-genai-0.18-int4", 0, ""),  # its activations are rounded
):
    facts = {"scored_row_products": lambda found, products=products: len(found) == products}
    if name in WHY:
        facts["scoring_head_reason"] = holds(WHY[name])
    add("late rows", name, "windows 40 150 8", 2e-6, facts=facts, against={"graph": "untouched"}, mark=mark)
    atol = 3e-4 if name == "qwen3_5_text-mobius" else 2e-5
    add("late rows", name, "windows 11 150 0", atol, facts=facts, against="plain", mark=mark)

# Factors that a graph chooses for a whole step: every text has those of its own length, whatever stands beside it.
LONGROPE = ["phi3_longrope-genai-0.14", "phi3_longrope-mobius"]
MORE = ["phi3_longrope-genai-0.18", "phi4_mini-genai-0.18", "phi4_mini-mobius", "phi3_longrope-mobius-static"]
BY_GENERATE: dict[str, Any] = {"against": "generate", "fetched": MORE}
SIDES = [{"num_slots": 1, "chunk_size": 256}, {"num_slots": 8, "chunk_size": 64, "overlaps_steps": True}]
add("sides", LONGROPE, "both_sides", 1e-4, SIDES, part=0, facts=REUSES, **BY_GENERATE)
BESIDE = forms([(3, 7)], graph="untouched")  # takes no side as an input
add("sides", LONGROPE, "both_sides", 1e-4, BESIDE, **BY_GENERATE)
add("sides", LONGROPE, "beams_on_one_side", 1e-4, [{"num_slots": 4}], **BY_GENERATE)
# The stem is computed once for a side and no more.
FEW = counts(lambda tokens_fed, **_: tokens_fed <= 2 * (ORIGINAL - 12) + 6 * (4 + 1) + 6 * (20 + 1))
add("sides", LONGROPE, "one_stem_on_both_sides", 1e-4, [{"num_slots": 8}], facts=FEW, against="generate")
FURTHER = ["phi3_further-genai-0.18", "phi3_further-mobius"]
add("sides", FURTHER, "several_chunks", 1e-4, [{}, {"num_slots": 1, "chunk_size": 256}, {"chunk_size": 100}])
# Dynamic NTK: `generate` keeps keys of other frequencies, which is what an answer by the token is here, too.
DYNAMIC = [f"step-wide dynamic {exporter}" for exporter in ("mobius", "genai")]
add("sides", DYNAMIC, "lengths_of_frequencies", 1e-4, forms([(8, 64)]), against="generate")

# Random texts on both sides of every length that decides in a graph, and random settings.


def drawn_engine(name: str, seed: int) -> Settings:
    """Slots, chunks and forms."""
    rng = random.Random(f"{name} {seed}")
    rounds = "int4" in name  # one token a step is rounded otherwise: docs/design/engine.md
    engine: dict[str, Any] = {
        "chunk_size": rng.choice([7 if rounds else 1, 7, 31, 64, 256, "auto"]),
        "num_slots": rng.choice([1, 2, 3, 5, 8]),
        "scoring": rng.choice(["auto", "auto", "rows"]),
        "graph": rng.choice(["scoring_head", "scoring_head", "untouched"]),
        "overlaps_steps": rng.choice(["auto", True]),
        "num_threads": rng.choice([1, 2]),
        "deterministic": rng.choice(["auto", True, False]),
    }
    if "genai" in name and rng.random() < 0.3:
        engine |= {"shapes": "bucketed", "overlaps_steps": "auto"}
    return engine


COMPUTED = {"fp16": 0.05, "bf16": 0.5}
"""Bounds by the type that is computed in; integer weights are computed with in fp32."""

NEAR = {name: recipe for name, recipe in CATALOG.items() if recipe.family in FIRST_MAXIMUM and not recipe.not_on_cpu}
STEP_WIDE = [f"step-wide {form} {exporter}" for form, exporter in product(FORMS, ("mobius", "genai"))]
STEP_WIDE = [name for name in STEP_WIDE if name.split()[1] not in ALIKE or name.endswith("mobius")]
EVERY_RUN = (*LONGROPE, "step-wide largest_position mobius", "step-wide dynamic genai")
for name, seed in [*product(EVERY_RUN, range(1)), *product((*NEAR, *STEP_WIDE), range(1, 12))]:
    types = (NEAR[name].dtype, NEAR[name].kv_dtype) if name in NEAR else ()
    add(
        *("lengths", name, f"near_lengths {seed}", max(2e-4, *(COMPUTED.get(one, 0) for one in ("", *types)))),
        [drawn_engine(name, seed)],
        against="alone",
        order=1 + seed,
        may_be_refused=name in STEP_WIDE and name.split()[1] not in ALIKE,
        mark="exporters" if seed else "",
        is_drawn=True,
        provider="cpu",
    )

# The scoring head takes few rows, whose last bits are its own: up to 1e-5 with AVX2, 2.5e-5 without. Each processor
# that has been tried has a group.
IN_GROUPS = {"scoring": "rows", "row_group": lambda found: found in GROUPS}
QUICKSTARTS = [f"rounded {name}" for name in ROUNDED]
ENGINES = [{}, {"num_slots": 1, "chunk_size": 7}]
add("rounded", QUICKSTARTS, "after_stems", 5e-5, ENGINES, against="groups", facts=IN_GROUPS, mark="rounded")

# Forms of a step score and answer what others do.
IS_WARM = {"shapes_warmed": lambda found: 0 < found < 150, "warm_up_s": lambda found: found > 0}
IS_WARM |= {"shapes": "bucketed", "shapes_late": 0}
for part, graph in enumerate(GRAPHS):
    rows = {"num_slots": 4, "scoring": "rows", "graph": graph}
    shaped = {**rows, "strict_shapes": True}
    add(
        *("few shapes", ["llama-installed", "qwen3-installed"], "endings", 2e-5, [shaped]),
        against=rows,
        facts=IS_WARM,
        same=["tokens_fed"],
        part=part,
    )
for chunk, longest in ((1, 20), (7, 60), (64, 300), (256, 300), (512, 300)):

    def is_full(tokens_fed: int, tokens_distinct: int, steps: int, chunk: int = chunk, **_: int) -> bool:
        return tokens_fed == tokens_distinct and steps <= -(-tokens_fed // chunk)

    engine, facts = {"scoring": "tree", "chunk_size": chunk}, {"scoring": "tree", **counts(is_full)}
    asked = f"long_endings {longest}"
    add("tree", "llama-installed", asked, 2e-5, [engine], against={"scoring": "rows"}, facts=facts)

# A cache that is written in place, hybrids whose states are forked, and an encoder-decoder.
BEAMS = ["llama-installed", "lfm2-genai-0.18"]
add("beams", BEAMS, "searches", 1e-4, [{"num_slots": 10}], fetched=["marian-optimum", "qwen3_5-genai-0.18"])
# Whisper's suppressed tokens are never said.
SUPPRESSING: dict[str, Any] = {"packages": "whisper suppressing", "asked": "suppressed_searches", "nats": 1e-4}
OVERLAPS = counts(lambda steps_overlapped, **_: steps_overlapped > 0)
AHEAD = [{"num_slots": 16, "overlaps_steps": True}, {"num_slots": 9, "graph": "untouched", "overlaps_steps": True}]
FIVE = {"num_slots": 1 + 4}
add("suppressed", **SUPPRESSING, engines=[FIVE], against="generate")
add("suppressed", **SUPPRESSING, engines=AHEAD[:1], against="generate", facts=OVERLAPS)
add("suppressed", **SUPPRESSING, engines=AHEAD[1:], against="generate", facts=OVERLAPS, mark="long")
add("suppressed", "whisper suppressing", "suppressed_scores", 1e-4, [FIVE], flags=True)
add("suppressed", "whisper suppressing", "suppressed_scores", 1e-4, AHEAD, flags=True, mark="long")
add("suppressed", "whisper checkpoint", "suppressed_searches 1", 1e-4, against="generate")

# What each passes its decoder differs: cross-attention KV by the encoder (the builder), by a decoder without a past or
# the branch of a merged one (optimum), or the encoder's states alone (mobius).
WHISPER, MERGED = "whisper-genai-0.18", "decoder_model_merged.onnx"
OTHERS = ["whisper-optimum", f"whisper-optimum/{MERGED}", "whisper-mobius"]
OTHERS += ["t5-optimum", f"t5-optimum/{MERGED}", "t5-mobius", "marian-optimum"]
for engine, batching in (
    ({"num_slots": 1, "chunk_size": 5}, "single"),
    ({"num_slots": 3, "chunk_size": 64, "graph": "untouched"}, "alike"),
):
    facts = {**shares(1), "encoder_runs": 3, "batching": batching}
    add("sources", WHISPER, "scored_sources", 1e-4, [engine], facts=facts, fetched=OTHERS)
REUSES_SIX = counts(lambda prefix_hits, **_: prefix_hits == 6)  # of several slots one may be empty
add("sources", WHISPER, "answered_sources", 1e-4, [{"num_slots": 1}], facts=REUSES_SIX, fetched=OTHERS)
add("sources", WHISPER, "answered_sources", 1e-4, [{"num_slots": 3}], fetched=OTHERS)
add("sources", WHISPER, "one_source_twice", 1e-4, [{"num_slots": 2}], facts={"encoder_runs": 1}, fetched=OTHERS)
add("sources", (), "translated", 1e-4, [{"num_slots": 1}], fetched=["marian-optimum"])
add("speech", "whisper export", "heard", 1e-4)
HEARD = [(1, 256, "scoring_head", "auto"), (4, 2, "untouched", True), (3, 1, "scoring_head", True)]
HEARD += [(2, 256, "untouched", "auto")]
for seed in range(8):
    engine = forms(HEARD, "graph", "overlaps_steps")[seed % 4]
    mark = "long" if seed else ""
    add("speech", "whisper export", f"heard_at_random {seed}", 1e-4, [engine], mark=mark)

# Checkpoints on transformers. Those whose layers are windowed or keep a state are not told what a token sees.
CHECKPOINTS = {"checkpoint llama": "tree", "checkpoint mistral": "rows", "checkpoint mamba": "rows"}
for name, scoring in CHECKPOINTS.items():
    facts = {"scoring": scoring}
    for engine, mark in (({}, ""), ({"chunk_size": 5}, "" if scoring == "tree" else "long")):
        add(
            "checkpoints", name, "windows 25 60 6", 2e-4, [engine], against="itself", flags=True, facts=facts, mark=mark
        )
ONCE = {**shares(1), "tokens_replayed": 0}
add("checkpoints", "checkpoint llama", "windows 25 60 0", 2e-4, against="itself", facts=ONCE)

# Pictures and sounds, however steps are cut and prefixes shared. States cannot be scored in tree batches.
PICTURES = ["gemma4_vl", "llava", "llava_clip", "gemma3", "qwen3_vl", "qwen2_5_vl_genai", "gemma4_seen"]
for name, others, nats, kind in (
    ("qwen2_5_vl", [*PICTURES, "qwen3_5"], 1e-4, "image"),
    ("qwen3_asr", ["gemma4_any"], 2e-4, "sound"),
):
    facts = {f"{kind}s_encoded": 3, **shares(1.05)}
    rows, tree = forms([(1, "item"), (3, 128)], scoring="rows"), forms([(2, "item")], scoring="tree")
    with_rows = [one for one in others if one != "qwen3_5"]
    add(f"{kind}s", name, "scored_items", nats, rows, facts=facts, fetched=others)
    add(f"{kind}s", name, "scored_items", nats, tree, facts=facts, fetched=with_rows)
    add(f"{kind}s", name, "answered_items", nats, [{"num_slots": 3}], fetched=others)
# Checkpoints on transformers.
SEEING = [f"checkpoint {name}" for name in MEDIA_FAMILIES if name != "qwen2_5_vl"]
ITSELF: dict[str, Any] = {"engines": [{"chunk_size": "item"}, {"chunk_size": 128}], "against": "itself"}
add("images", "checkpoint qwen2_5_vl", "scored_items + answered_items", 1e-4, fetched=SEEING, **ITSELF)
HEARING = ["checkpoint gemma4_any"]
add("sounds", "checkpoint qwen3_asr", "scored_sounds + answered_items", 1e-4, fetched=HEARING, **ITSELF)
ONE_EACH = {"images_encoded": 1, "sounds_encoded": 1}
add("sounds", (), "picture_and_sound", 2e-4, facts=ONE_EACH, fetched=["gemma4_any"])
add("sounds", (), "picture_and_sound", 2e-4, against="itself", fetched=HEARING)
# A decoder in which a picture's tokens see each other does as any other with what has no picture.
SHARED = counts(
    lambda tokens_fed, tokens_distinct, tokens_naive, steps, **_: (
        tokens_fed == tokens_distinct < tokens_naive / 3 and steps < tokens_fed / 4
    )
)
SHARED |= {"batching": "alike", "notes": holds("4 sliding layers beyond the window of 16")}
add("images", (), "texts_without_items", 1e-4, [{"num_slots": 3}], facts=SHARED, fetched=["gemma4_seen"])
TWO_RUNS = {"encoder_runs": 2}
add("speech", "checkpoint whisper", "heard", 1e-5, [{"chunk_size": 1}, {"chunk_size": 64}], facts=TWO_RUNS)
add("images", "llava_clip", "answered_items", 1e-4, forms([(2, 17)]))  # no token stands after its placeholders
BY_HAND = [{}, {"components": {"vision": "eyes.onnx", "embedding": "words.onnx"}}]
add("images", "by-hand folder", "scored_items", 1e-4, BY_HAND)
for form, count in product(("mask", "number"), (1, 2)):  # features with rows of padding, in one tensor or two
    facts = {"images_encoded": 3, "image_feature_bytes": 3 * count * 16 * 64 * 4}
    add("images", f"padded {form} {count}", "scored_items + answered_items", 1e-4, forms([(3, 16)]), facts=facts)

# What items of one run of an encoder do to each other shows for some numbers, sizes or contents only.
LEAKS = ["from four items on", "for eight items only", "scale by the largest value of a run", "dynamic quantization"]
for name in (*LEAKS, "the fifth item gets the sixth"):
    one, many = ({"encoder_batch_rows": rows, "num_slots": 3} for rows in (1, 1024))
    facts = {"images_one_by_one": holds("of the largest off those of each alone")}
    add("company", f"leak {name}", "pictures_of_one_size 11", 1e-5, [many], against=one, facts=facts)
for name, asked in (
    ("largest_picture", "pictures_of_many_sizes"),
    ("number_of_pictures", "pictures_of_many_sizes"),
    ("longest_sound", "sounds_that_grow"),
):
    one, many = ({"encoder_batch_rows": rows, "num_slots": 8} for rows in (1, 2048))
    add("company", f"beside {name}", asked, 1e-4, [many], against=one)
# As many in a run as `encoder_batch_rows` has room for and a power of two; encoders that have one item built in.
FAIL: dict[str, Any] = {"images_one_by_one": holds("several together fail: ")}
for name, asked, most, facts, mark in (
    ("qwen2_5_vl@", "pictures_of_many_sizes", 1024, {"image_encoder_runs": 2}, ""),
    ("qwen2_5_vl@", "pictures_of_many_sizes", 24, {"image_encoder_runs": 4}, ""),
    ("llava@", "pictures_of_one_size 10", 16 * 4, {"image_encoder_runs": 3}, ""),
    ("qwen3_vl@", "pictures_of_many_sizes", 24, {"image_encoder_runs": 4}, "exporters"),
    ("qwen3_5@", "pictures_of_many_sizes", 24, {"image_encoder_runs": 4}, "exporters"),
    ("gemma4_any@", "sounds_that_grow", 1024, {"sound_encoder_runs": 3}, "exporters"),
    ("gemma4_any@", "sounds_that_grow", 120, {"sound_encoder_runs": 4}, "exporters"),
    ("qwen3_asr@", "sounds_that_grow 0", 1024, {"sounds_one_by_one": holds("several together fail: ")}, "exporters"),
    ("gemma3@", "pictures_of_many_sizes 4", 1024, FAIL, "exporters"),
    ("gemma4_vl@", "pictures_of_many_sizes 4", 1024, FAIL, "exporters"),
):
    one, many = ({"encoder_batch_rows": rows, "num_slots": 16} for rows in (1, most))
    add("company", name, asked, 1e-5, [many], against=one, provider="cpu", facts=facts, mark=mark)
# mobius' Gemma 4 for WebGPU takes the first row's length for that of all.
rows: dict[str, Any] = {"against": {"num_slots": 1}, "provider": "cpu", "mark": "exporters"}
add("images", "gemma4_vl@webgpu", "many_lengths", 0, [{"num_slots": 3}], **rows)
SMALL: dict[str, Any] = {"num_slots": 2, "chunk_size": 16}
STRICT = {**SMALL, "strict_shapes": True}
TOGETHER = {**STRICT, "encoder_batch_rows": 64}
add(
    *("company", "mean of patches", "pictures_of_many_sizes 4", 1e-5, [{**SMALL, "shapes": "bucketed"}]),
    against={**SMALL, "shapes": "any"},
    provider="cpu",
    facts={"images_of_any_shape": holds("features of an item in a bucket are")},
)
# Pictures of up to 16 tokens: the encoder in the buckets 8, 16, 32 and once without; each bucket's rows picked; steps
# of 8, 16 and 32 tokens: features put in their places, embedded, brought to the decoder.
WARMED = {"encoder_shapes_warmed": 4 + 3 + 3 * 3, "encoder_shapes_late": 0, "shapes_late": 0, "images_encoded": 3}
add("company", "qwen2_5_vl@webgpu", "scored_items", 1e-4, [STRICT], provider="cpu", facts=WARMED)
FEW_RUNS = {"images_encoded": 10, "encoder_shapes_late": 0, "image_encoder_runs": 2}
ALONE: dict[str, Any] = {"against": STRICT, "provider": "cpu", "facts": FEW_RUNS}
add("company", "qwen2_5_vl@webgpu", "pictures_of_many_sizes", 1e-5, [TOGETHER], **ALONE)
for engine, facts in (
    ({}, {"image_encoder_runs": 7}),  # on the CPU one by one
    # The encoder's, what is picked of it, and three graphs for steps of 8, 16 and 32 tokens.
    (STRICT, {"encoder_shapes_warmed": 1 + 1 + 3 * 3, "encoder_shapes_late": 0}),
    # The same for 1, 2 and 4 pictures.
    (TOGETHER, {"encoder_shapes_warmed": 3 + 3 + 3 * 3, "encoder_shapes_late": 0, "image_encoder_runs": 3}),
):
    one = {"num_slots": 1}
    add(
        *("company", "plain llava webgpu", "pictures_of_one_size 7", 1e-5, [engine]),
        against=one,
        provider="cpu",
        facts={**facts, "images_encoded": 7},
    )

# No session meets a shape that it was not run with: caches that are returned grown, or written in place ("webgpu"),
# onnxruntime-genai's layout, encoders that return as many rows as an item has (Gemma 4).
SHAPED = ["gemma3@", "llava@", "qwen2_5_vl@", "qwen2_5_vl@webgpu", "llava_clip@", "qwen2_5_vl_genai@", "qwen3_asr@"]
WIDE = {"num_slots": 3, "chunk_size": 96, "encoder_batch_rows": 1}
KNOWN = [{**WIDE, "strict_shapes": True}, {**WIDE, "strict_shapes": True, "encoder_batch_rows": 64}]
MET: dict[str, Any] = {"against": WIDE, "provider": "cpu", "facts": {"encoder_shapes_late": 0}, "is_observed": True}
MORE_SHAPED = ["gemma4_vl@", "gemma4_any@"]
add("known shapes", SHAPED, "items_of_many_sizes", 1e-4, KNOWN, part=0, fetched=MORE_SHAPED, **MET)

# An encoder's states are stacked for as many rows as there are slots.
STACKED = {"encoder_shapes_late": 0, "encoder_shapes_warmed": lambda found: found >= 5}
STACKED["encoder_runs"] = lambda found: found >= len(LENGTHS)
MET |= {"against": {"num_slots": 5}, "provider": "", "facts": STACKED}
engines = [{"num_slots": 5, "strict_shapes": True}]
MORE_HEARD = ["heard mobius", "heard optimum"]
add("known shapes", "heard genai", "heard_beside_others", 1e-6, engines, fetched=MORE_HEARD, **MET)

# Tokens that stay on the device are those that the host reads; who decides that steps begin before the one before them
# is read, and who said so. A state cannot be cut back: what a dropped row was fed
# stays in it.
PINNED = {"overlaps_steps_reason": "engine.overlaps_steps"}
WAITS = {**counts(lambda steps_overlapped, **_: steps_overlapped == 0), "overlaps_steps": False}
add("ahead", "llama-installed", "many_lengths", 1e-4, [{"overlaps_steps": False}], facts={**WAITS, **PINNED})
WAITS["overlaps_steps_reason"] = lambda found: found.startswith("auto: ")
add("ahead", "llama-installed", "many_lengths", 1e-4, facts=WAITS)
for device, slots in product(("cpu", "webgpu"), (1, 3, 5)):
    serial = {"num_slots": slots, "chunk_size": 29, "overlaps_steps": False}
    ahead = [{**serial, "graph": graph, "overlaps_steps": True} for graph in GRAPHS]
    facts = {**counts(lambda steps_overlapped, **_: steps_overlapped > 40), **PINNED, "overlaps_steps": True}
    how = {"against": serial, "provider": device, "facts": facts}
    how["mark"] = "webgpu" if device == "webgpu" else ""
    add("ahead", "llama-installed", "steps_ahead", 0, ahead, **how)
    if slots == 3:
        add("ahead", "lfm2-installed", "steps_ahead", 0, [{**serial, "overlaps_steps": True}], **how)

# A device whose memory the host cannot address.
DEVICE: dict[str, Any] = {"num_slots": 3, "chunk_size": 29}
THERE: dict[str, Any] = {"against": DEVICE, "provider": "webgpu", "mark": "webgpu"}
LLAMA, QWEN = "llama-installed", "qwen3-installed"
CHANGES: Sequence[Settings] = [{"chunk_size": 1}, {"chunk_size": 7}, {"chunk_size": 256}, {"graph": "untouched"}]
CHANGED = [{**DEVICE, **change} for change in (*CHANGES, {"num_slots": 1}, {"num_slots": 5})]
add("webgpu", LLAMA, "forks", 1e-4, CHANGED, flags=True, **THERE)
INT4 = "genai llama int4 cpu int4_accuracy_level="
add("webgpu", f"{INT4}0", "scored_forks", 1e-4, [DEVICE], flags=True, **THERE)
add("webgpu", f"{INT4}4", "scored_forks", 0.5, [DEVICE], **THERE)  # activations in int8, blocked otherwise there
IS_THERE = {
    "providers": lambda found: found[0] == "WebGpuExecutionProvider",
    "kv_cache": "in_place",
    "kv_binding": "device values without address: a pool and a staging row",
    "scoring_head": "hidden",
    "scored_row_products": lambda found: len(found) == 4,
    "overlaps_steps": True,
    "overlaps_steps_reason": lambda found: found.startswith("auto: "),
}
add("webgpu", [LLAMA, QWEN], "many_tails", 1e-4, [DEVICE], flags=True, facts=IS_THERE, **THERE)
NO_TREES = {"scoring": "rows", "notes": holds("moved in the host's memory")}
add("webgpu", LLAMA, "forks", 1e-4, [{**DEVICE, "scoring": "tree"}], flags=True, facts=NO_TREES, **THERE)
BUCKETED = {"shapes": "bucketed", "shapes_late": 0}
add("webgpu", LLAMA, "many_tails", 1e-4, [{**DEVICE, "strict_shapes": True}], flags=True, facts=BUCKETED, **THERE)


def share_steps(tokens_fed: int, tokens_distinct: int, copies: int, steps: int, **_: int) -> bool:
    """Of 35 answers of four tokens, with eight slots: steps for the five questions, then for answers together."""
    return tokens_fed <= 1.02 * tokens_distinct and copies > 0 and steps <= 5 * 3 + 1.5 * 5 * (7 - 1) * 3 / 8


WIDER: dict[str, Any] = {**THERE, "against": {**DEVICE, "num_slots": 8}, "flags": True}
for scoring, facts in (("rows", {}), ("answers", counts(share_steps))):
    engine, facts = {**DEVICE, "num_slots": 8, "scoring": scoring}, {"scoring": scoring, **facts}
    add("webgpu", [LLAMA, QWEN, "gemma3_text-installed"], "short_answers", 1e-4, [engine], facts=facts, **WIDER)
facts = {"scoring": "answers", "scoring_reason": lambda found: found.startswith("by rule: ")}
add("webgpu", LLAMA, "short_answers", 1e-4, [{"num_slots": 8, "chunk_size": 29}], facts=facts, **WIDER)
ten: dict[str, Any] = {**DEVICE, "num_slots": 10}
add("webgpu", [LLAMA, QWEN], "searches", 1e-4, [ten], **{**THERE, "against": ten})
# 1, 2, ... 128 pictures and what is picked of them, and three graphs for steps of 8, 16 and 32 tokens.
facts = {"encoder_shapes_warmed": 8 + 8 + 3 * 3, "encoder_shapes_late": 0, "image_encoder_device": "webgpu"}
SEEN: dict[str, Any] = {**THERE, "against": SMALL, "is_observed": True}
add("webgpu", "plain llava webgpu", "scored_items", 1e-4, [STRICT], facts={**facts, "images_encoded": 3}, **SEEN)
SEEN["against"] = {**STRICT, "encoder_batch_rows": 1}
add("webgpu", "plain qwen2_5_vl webgpu", "pictures_of_many_sizes", 1e-4, [TOGETHER], facts=FEW_RUNS, **SEEN)
# Buckets of steps end in padding, whose positions later steps write anew.
facts = {"chunk_size": 31, "shapes_late": 0, "encoder_shapes_late": 0}
engine, THERE["against"] = {"num_slots": 2, "chunk_size": 31, "strict_shapes": True}, {"num_slots": 1}
add("webgpu", "plain llava webgpu", "pictures_there_and_back", 1e-4, [engine], facts=facts, **THERE)


# A CUDA device, which chooses kernels by the size of heads, windows, caps, sinks, experts, positions and states: in
# half precision against transformers, and with int4 against the same graph in a plain session there, in the form that
# is chosen there and row by row. A CPU has kernels for most of these packages, too. CUDA's windowed caches are written
# in place, which a plain session's are not, and no exporter quantizes such small experts.
ON_CUDA = {"providers": lambda found: found[0] == "CUDAExecutionProvider"}
TEXTS, BOTH, AUTO = "forks + many_tails", ({}, {"scoring": "rows"}), ({},)
SIZES = [f"llama_head{size}" for size in HEAD_SIZES]
WITH_STATES = ["lfm2", "qwen3_5"]
HALF, FAR = 2e-2, {"phi3_longrope": 5e-2, "lfm2": 5e-2, "qwen3_5": 5e-1, "t5": 3e-1}
"""On a CPU fp16 is up to 0.015 off transformers, but for these: 0.027, 0.020, 0.22 and 0.15. A plain session's scores
are within 0.004, with states 0.02."""
NOT_ON_CPU = ("gemma3_text", "lfm2", "qwen2_5_vl")  # norms of Q and K in the attention, PackedMultiHeadAttention


def on_cuda(
    families: Iterable[str], asked: str, engines: Iterable[Settings] = AUTO, kind: str = "cuda {} fp16", **more: Any
) -> None:
    """Rows on the device, and on a CPU."""
    facts = {**ON_CUDA, **more.pop("facts", {})}
    for family in families:
        nats, name = FAR.get(family, HALF), kind.format(family)
        if more.get("against") == "plain":
            nats = min(nats, FAR["lfm2"])
        add("cuda", name, asked, nats, engines, provider="cuda", mark="gpu", facts=facts, **more)
        if family not in NOT_ON_CPU:
            add("half", (), asked, nats, forms([(10, 64)]), provider="cpu", fetched=[name], **more)


on_cuda(["gemma2", "gemma3_text", "gpt_oss"], TEXTS, BOTH)
for families, engines in (([*SIZES, "phi3_longrope"], BOTH), (WITH_STATES, AUTO)):
    on_cuda(families, TEXTS, engines)
    for precision in ("fp16", "int4"):
        on_cuda(families, TEXTS, engines, f"cuda {{}} {precision}", against="plain")
CAPTURES = {"scoring": "packed", "steps_captured": lambda found: found > 0}
on_cuda(SIZES[:1], "answers_of_64", facts=CAPTURES)
on_cuda(["llama_head128", "lfm2"], "searches", [{"num_slots": 10}])
on_cuda(["whisper"], "scored_sources + answered_sources")
on_cuda(["t5"], "scored_sources + answered_sources", kind="cuda {} f16")
on_cuda(["qwen2_5_vl", "llava", "qwen3_asr"], "scored_items + answered_items", kind="{}@cuda")
# Packages in float32 without GroupQueryAttention, of which CUDA has no kernel in float32.
FLOATS = [DYNAMIC[0], WHISPER, "whisper export", "whisper suppressing", "whisper-mobius", "t5-mobius", "qwen2_5_vl"]
FLOATS += [f"{family}-mobius" for family in ("llama", "gpt2", "gemma4_text", "qwen3_5_text", "phi3_longrope")]
known: dict[tuple[str, ...], Row] = {}
for given in ROWS:
    (row,) = given.values
    if row.package in FLOATS and row.against in ("transformers", "generate", "plain") and row.provider != "webgpu":
        known.setdefault((row.package, row.asked.split()[0], row.against), row)
for row in known.values():
    nats = max(1e-4, row.nats)
    add("cuda", row.package, row.asked, nats, against=row.against, facts=ON_CUDA, provider="cuda", mark="gpu")


@pytest.mark.parametrize("row", ROWS)
def test_answers_are_those_that_they_are_held_against(row: Row) -> None:
    check(row)
