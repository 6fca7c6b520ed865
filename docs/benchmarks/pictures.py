"""Pictures beside lm-eval's hf-multimodal, seconds to the first token of the first pictures, and memory.

    python -m docs.benchmarks.pictures speed tiny|base     answers and scores, ours and transformers by turns
    python -m docs.benchmarks.pictures first [PACKAGE]     time to the first token, ten pictures, cold and warmed
    python -m docs.benchmarks.pictures memory PACKAGE      resident memory over 2,000 pictures

`tiny` and `base` are LLaVA with random weights: two small towers, or SigLIP base and the layers of Qwen2.5-0.5B (mobius
exports both; weights take 2 GB). Answers are compared with hf-multimodal's; choices, which it does not score, with
transformers called once for each, as hf-multimodal would have to. Each backend has `--num-threads` threads, in one
process, by turns, and what is compared is processor time, which changes less than the clock when other programs run.
Every round has pictures of its own, so nothing is left from the round before.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from lm_eval.api.instance import Instance
from PIL import Image

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.python_processes import module_command
from olive_ext.text.requests import GenerationRequest

SIDES = {"tiny": 32, "base": 224}
FAMILIES = {"tiny": "llava", "base": "llava_base"}
TEXTS = ("What is this?", "Who made it, and when?", "Is there a boat?", "How many are there?")
CHOICES = (" A cat.", " Two boats.", " None.", " It is a red house.")
CALL = 200
"""Requests of a call whose memory is looked at."""

NUM_TOKENS = 8
"""Of a generated answer."""

Asked = tuple[str, str, Image.Image]
"""Question, choice, and picture."""


def noise(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Transformers:
    """A forward pass for each choice, and lm-eval's hf-multimodal for answers."""

    def __init__(self, family: str, num_threads: int) -> None:
        import torch
        import transformers
        from lm_eval.models.hf_vlms import HFMultimodalLM

        from tests.exports.media import media_export
        from tests.families.pictures import PictureReference

        torch.set_num_threads(num_threads)
        reference = PictureReference("llava", media_export(family)[1])  # with what the export computes otherwise
        patch = reference.model.config.vision_config.patch_size
        self.processor = transformers.LlavaProcessor(
            reference.processor, reference.tokenizer, patch_size=patch, vision_feature_select_strategy="full"
        )
        self.model = reference.model
        self.model.set_attn_implementation("sdpa")
        with tempfile.TemporaryDirectory() as folder:
            self.processor.save_pretrained(folder)
            self.model.name_or_path = folder  # where lm-eval looks for the processor
            self.lm = HFMultimodalLM(pretrained=self.model, batch_size=1)

    def score(self, asked: Sequence[Asked]) -> list[float]:
        import torch

        found = []
        for text, choice, image in asked:
            given = self.processor(images=[image], text=f"<image> {text}{choice}", return_tensors="pt")
            num_targets = len(self.processor.tokenizer.encode(choice, add_special_tokens=False))
            with torch.inference_mode():
                logits = self.model(**given, logits_to_keep=num_targets + 1).logits[0, :-1]
            rows = logits.log_softmax(-1).gather(-1, given["input_ids"][0, -num_targets:, None])
            found.append(float(rows.sum()))
        return found

    def generate(self, asked: Sequence[Asked]) -> list[str]:
        return list(self.lm.generate_until(_generations(asked), disable_tqdm=True))


class Ours:
    """`OrtLM`."""

    def __init__(self, family: str, num_threads: int) -> None:
        from tests.exports.media import media_export

        self.lm = OrtLM(str(media_export(family)[0]), engine={"num_threads": num_threads})

    def score(self, asked: Sequence[Asked]) -> list[float]:
        given = [
            Instance("loglikelihood", {}, (f"<image> {text}", choice, {"visual": [image]}), place)
            for place, (text, choice, image) in enumerate(asked)
        ]
        return [float(logprob) for logprob, _ in self.lm.loglikelihood(given, disable_tqdm=True)]

    def generate(self, asked: Sequence[Asked]) -> list[str]:
        return list(self.lm.generate_until(_generations(asked), disable_tqdm=True))


def _generations(asked: Sequence[Asked]) -> list[Instance]:
    until = {"until": ["<eos>"], "max_gen_toks": NUM_TOKENS, "do_sample": False}
    return [
        Instance("generate_until", {}, (f"<image> {text}", dict(until), {"visual": [image]}), place)
        for place, (text, _, image) in enumerate(asked)
    ]


def speed(given: argparse.Namespace) -> None:
    """A line for each kind of work."""
    backends = [backend(FAMILIES[given.shape], given.num_threads) for backend in (Ours, Transformers)]
    repeated = [(text, choice) for text in TEXTS for choice in CHOICES]
    works: dict[str, tuple[str, list[tuple[str, str]]]] = {
        "choices, pictures repeat": ("score", repeated),
        "choices, none repeats": ("score", repeated[:1]),
        "answers, pictures repeat": ("generate", [(text, "") for text in TEXTS]),
        "answers, none repeats": ("generate", [(TEXTS[0], "")]),
    }
    for name, (kind, texts) in works.items():
        count = max(1, given.requests // len(texts))
        rounds = []
        for number in range(-1, given.rounds):  # the first warms both up, with one picture
            sides = [SIDES[given.shape]] * 2
            images = [noise(1000 * (number + 1) + seed, *sides) for seed in range(1 if number < 0 else count)]
            asked = [(text, choice, image) for image in images for text, choice in texts]
            rounds.append(_round([getattr(backend, kind) for backend in backends], asked, number % 2 > 0))
        print(f"{given.shape}: {name}: {count} pictures x {len(texts)}: {_told(rounds[1:])}", flush=True)


@dataclass(frozen=True)
class Timed:
    """What one backend took for a round's requests, and what it found."""

    processor: float
    clock: float
    found: list[Any]

    @classmethod
    def of(cls, call: Callable[[Sequence[Asked]], list[Any]], asked: Sequence[Asked]) -> Timed:
        gc.collect()
        start = time.process_time(), time.perf_counter()
        found = call(asked)
        return cls(time.process_time() - start[0], time.perf_counter() - start[1], found)


def _round(
    calls: Sequence[Callable[[Sequence[Asked]], list[Any]]], asked: Sequence[Asked], is_reversed: bool
) -> list[Timed]:
    """Ours and theirs, whichever begins."""
    turn = -1 if is_reversed else 1
    return [Timed.of(call, asked) for call in calls[::turn]][::turn]


def _told(rounds: Sequence[Sequence[Timed]]) -> str:
    processor, clock = (
        [getattr(theirs, kind) / getattr(ours, kind) for ours, theirs in rounds] for kind in ("processor", "clock")
    )
    ours, theirs = (
        1000 * statistics.median(one.processor / len(one.found) for one in side) for side in zip(*rounds, strict=True)
    )
    return (
        f"transformers / ours {statistics.median(processor):.2f} ({min(processor):.2f} to {max(processor):.2f}) in "
        f"processor time, {statistics.median(clock):.2f} by the clock; ours {ours:.1f} ms of processor time a request, "
        f"transformers {theirs:.1f}; {max(_agreement(*(one.found for one in pair)) for pair in rounds)}"
    )


def _agreement(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if isinstance(ours[0], float):
        return f"log-probabilities within {max(map(abs, np.subtract(ours, theirs))):.0e} nats"
    return f"{sum(map(str.__ne__, ours, theirs))} of {len(ours)} answers differ"


def first(given: argparse.Namespace) -> None:
    """A table: opening and ten pictures of other sizes, one after the other, cold and warmed (`strict_shapes`). Each in
    processes of its own, by turns, because the first picture imports the image processor."""
    if not given.packages:
        from tests.exports.media import media_export

        given.packages = [str(media_export("qwen2_5_vl", "f32", "webgpu")[0])]
    sides: dict[str, list[list[list[float]]]] = {"cold": [], "warmed": []}
    for number in range(given.rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            options = [given.packages[0], "--num-threads", str(given.num_threads), "--child", name]
            command = module_command("docs.benchmarks.pictures", "first", *options)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            sides[name].append(json.loads(done.stdout.splitlines()[-1]))
    print("| ms of processor time (clock) | " + " | ".join(sides) + " |\n|---|" + "--:|" * len(sides))
    for place, row in enumerate(["opening", *(f"picture {number}" for number in range(1, 11))]):
        cells = [[statistics.median(one[place][kind] for one in side) for kind in (0, 1)] for side in sides.values()]
        print(f"| {row} | " + " | ".join(f"{cell[0]:.0f} ({cell[1]:.0f})" for cell in cells) + " |")


def first_in_this_process(given: argparse.Namespace) -> None:
    """Prints milliseconds of the processor and the clock as JSON: opening, and each picture to its first token."""
    times = [clocks()]
    engine = {"num_threads": given.num_threads, "strict_shapes": given.child == "warmed"}
    with olive_ext.open(given.packages[0], execution_provider="cpu", engine=engine) as session:
        times.append(clocks())
        marker = session.media.marker_text(next(iter(session.media.markers)))  # type: ignore[union-attr]
        for seed in range(10):
            image = noise(seed, 40 + 6 * seed, 100 - 6 * seed)
            session.generate([GenerationRequest(f"{marker} What is this?", images=[image], max_new_tokens=1)])
            times.append(clocks())
    print(json.dumps([[1000 * (end - start) for start, end in zip(*pair, strict=True)] for pair in pairwise(times)]))


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def memory(given: argparse.Namespace) -> None:
    """What is resident, and what of it are features that are kept, as pictures of 256 x 256 pixels go by in files."""
    with (
        olive_ext.open(given.package, engine={"num_threads": given.num_threads}) as session,
        tempfile.TemporaryDirectory() as folder,
    ):
        marker = session.media.marker_text(next(iter(session.media.markers)))  # type: ignore[union-attr]
        files = [Path(folder) / f"{seed}.png" for seed in range(given.pictures)]
        for seed, file in enumerate(files):
            noise(seed, 256, 256).save(file)
        asked = [GenerationRequest(f"{marker} What is this?", images=[file], max_new_tokens=1) for file in files]
        for begin in range(0, given.pictures, CALL):
            session.generate(asked[begin : begin + CALL])
            gc.collect()
            resident, facts = psutil.Process().memory_info().rss / 2**20, session.describe_execution()
            kept = facts["image_feature_bytes"] / 2**20
            print(f"{facts['images_encoded']} pictures encoded: {resident:.1f} MB, {kept:.1f} of features", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("speed")
    one.add_argument("shape", choices=SIDES)
    one.add_argument("--requests", type=int, default=32)
    one.add_argument("--rounds", type=int, default=3)
    one.set_defaults(run=speed)
    one = commands.add_parser("first")
    one.add_argument("packages", metavar="PACKAGE", nargs="*")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--child", choices=("cold", "warmed"), help=argparse.SUPPRESS)
    one.set_defaults(run=lambda given: (first_in_this_process if given.child else first)(given))
    one = commands.add_parser("memory")
    one.add_argument("package")
    one.add_argument("--pictures", type=int, default=2000)
    one.set_defaults(run=memory)
    for one in commands.choices.values():
        one.add_argument("--num-threads", type=int, default=1)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
