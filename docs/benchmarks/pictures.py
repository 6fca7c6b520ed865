"""Pictures beside lm-eval's hf-multimodal, seconds to the first token of the first pictures, and memory.

    python -m docs.benchmarks.pictures speed tiny|base     answers and scores, ours and transformers by turns
    python -m docs.benchmarks.pictures first PACKAGE       time to the first token, ten pictures
    python -m docs.benchmarks.pictures memory PACKAGE      resident memory over 500 pictures

`tiny` and `base` are LLaVA with random weights: two small towers, or SigLIP base and the layers of Qwen2.5-0.5B (mobius
exports both; weights take 2 GB). Answers are compared with hf-multimodal's; choices, which it does not score, with
transformers called once for each, as hf-multimodal would have to. Each backend has `--num-threads` threads, in one
process, and what is compared is processor time: it does not change when other programs run. Every round has pictures of
its own, so nothing is left from the round before.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from PIL import Image

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.text.requests import GenerationRequest

SIDES = {"tiny": 32, "base": 224}
FAMILIES = {"tiny": "llava", "base": "llava_base"}
TEXTS = ("What is this?", "Who made it, and when?", "Is there a boat?", "How many are there?")
CHOICES = (" A cat.", " Two boats.", " None.", " It is a red house.")
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
        ratios, seconds, equal = [], [], []
        for number in range(-1, given.rounds):  # the first warms both up
            images = [
                noise(1000 * (number + 1) + seed, SIDES[given.shape], SIDES[given.shape]) for seed in range(count)
            ]
            asked = [(text, choice, image) for image in images for text, choice in texts]
            times, results = zip(*(_timed(getattr(one, kind), asked) for one in backends), strict=True)
            if number >= 0:
                ratios.append(times[1] / times[0])
                seconds.append(times[0] / len(asked))
                equal.append(_agreement(*results))
        print(
            f"{given.shape}: {name}: {count} pictures x {len(texts)}: transformers / ours "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"ours {1000 * statistics.median(seconds):.1f} ms of processor time a request; {max(equal)}",
            flush=True,
        )


def _timed(call: Callable[[Sequence[Asked]], Any], asked: Sequence[Asked]) -> tuple[float, Any]:
    gc.collect()
    start = time.process_time()
    found = call(asked)
    return time.process_time() - start, found


def _agreement(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if isinstance(ours[0], float):
        return f"log-probabilities within {max(map(abs, np.subtract(ours, theirs))):.0e} nats"
    return f"{sum(map(str.__ne__, ours, theirs))} of {len(ours)} answers differ"


def first(given: argparse.Namespace) -> None:
    """Processor and clock time of opening, and of ten pictures of other sizes, one after the other."""
    start = time.process_time(), time.perf_counter()
    with olive_ext.open(given.package, engine={"num_threads": given.num_threads}) as session:
        print(f"open: {time.process_time() - start[0]:.2f} / {time.perf_counter() - start[1]:.2f} s")
        marker = session.media.marker_text(next(iter(session.media.markers)))  # type: ignore[union-attr]
        for seed in range(10):
            image = noise(seed, 40 + 6 * seed, 100 - 6 * seed)
            start = time.process_time(), time.perf_counter()
            session.generate([GenerationRequest(f"{marker} What is this?", images=[image], max_new_tokens=1)])
            spent = 1000 * (time.process_time() - start[0]), 1000 * (time.perf_counter() - start[1])
            print(f"picture {seed + 1}: {spent[0]:.0f} / {spent[1]:.0f} ms", flush=True)


def memory(given: argparse.Namespace) -> None:
    """The most that was resident, as pictures of 256 x 256 pixels go by in files."""
    with (
        olive_ext.open(given.package, engine={"num_threads": given.num_threads}) as session,
        tempfile.TemporaryDirectory() as folder,
    ):
        marker = session.media.marker_text(next(iter(session.media.markers)))  # type: ignore[union-attr]
        files = [Path(folder) / f"{seed}.png" for seed in range(given.pictures)]
        for seed, file in enumerate(files):
            noise(seed, 256, 256).save(file)
        asked = [GenerationRequest(f"{marker} What is this?", images=[file], max_new_tokens=1) for file in files]
        tenth = given.pictures // 10
        for name, part in (("a tenth", asked[:tenth]), ("all", asked)):
            session.generate(part)
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            encoded = session.describe_execution()["images_encoded"]
            print(f"{name}: {encoded} pictures encoded, {most:.1f} MB at most", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("speed")
    one.add_argument("shape", choices=SIDES)
    one.add_argument("--requests", type=int, default=32)
    one.add_argument("--rounds", type=int, default=3)
    one.set_defaults(run=speed)
    one = commands.add_parser("first")
    one.add_argument("package")
    one.set_defaults(run=first)
    one = commands.add_parser("memory")
    one.add_argument("package")
    one.add_argument("--pictures", type=int, default=500)
    one.set_defaults(run=memory)
    for one in commands.choices.values():
        one.add_argument("--num-threads", type=int, default=1)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
