"""Pictures beside lm-eval's hf-multimodal: answers and scores, ours and transformers by turns.

    python -m docs.benchmarks pictures tiny|base

`tiny` and `base` are LLaVA with random weights: two small towers, or SigLIP base and the layers of Qwen2.5-0.5B (mobius
exports both; weights take 2 GB). Answers are compared with hf-multimodal's; choices, which it does not score, with
transformers called once for each, as hf-multimodal would have to. Each backend has `--num-threads` threads, in one
process, by turns, and what is compared is processor time, which changes less than the clock when other programs run.
Every round has pictures of its own, so nothing is left from the round before.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import parser_of, spread, timed
from lm_eval.api.instance import Instance
from PIL import Image

from olive_ext.backends.lm_eval import OrtLM

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
        from tests.families.pictures import MediaReference

        torch.set_num_threads(num_threads)
        reference = MediaReference("llava", media_export(family)[1])  # with what the export computes otherwise
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

    def score(self, questions: Sequence[Asked]) -> list[float]:
        import torch

        answers = []
        for text, choice, image in questions:
            given = self.processor(images=[image], text=f"<image> {text}{choice}", return_tensors="pt")
            num_targets = len(self.processor.tokenizer.encode(choice, add_special_tokens=False))
            with torch.inference_mode():
                logits = self.model(**given, logits_to_keep=num_targets + 1).logits[0, :-1]
            rows = logits.log_softmax(-1).gather(-1, given["input_ids"][0, -num_targets:, None])
            answers.append(float(rows.sum()))
        return answers

    def generate(self, questions: Sequence[Asked]) -> list[str]:
        return list(self.lm.generate_until(_generations(questions), disable_tqdm=True))


class Ours:
    """`OrtLM`."""

    def __init__(self, family: str, num_threads: int) -> None:
        from tests.exports.media import media_export

        self.lm = OrtLM(str(media_export(family)[0]), engine={"num_threads": num_threads})

    def score(self, questions: Sequence[Asked]) -> list[float]:
        given = [
            Instance("loglikelihood", {}, (f"<image> {text}", choice, {"visual": [image]}), index)
            for index, (text, choice, image) in enumerate(questions)
        ]
        return [float(logprob) for logprob, _ in self.lm.loglikelihood(given, disable_tqdm=True)]

    def generate(self, questions: Sequence[Asked]) -> list[str]:
        return list(self.lm.generate_until(_generations(questions), disable_tqdm=True))


def _generations(questions: Sequence[Asked]) -> list[Instance]:
    until = {"until": ["<eos>"], "max_gen_toks": NUM_TOKENS, "do_sample": False}
    return [
        Instance("generate_until", {}, (f"<image> {text}", dict(until), {"visual": [image]}), index)
        for index, (text, _, image) in enumerate(questions)
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
            questions = [(text, choice, image) for image in images for text, choice in texts]
            rounds.append(_round([getattr(backend, kind) for backend in backends], questions, number % 2 > 0))
        print(f"{given.shape}: {name}: {count} pictures x {len(texts)}: {_told(rounds[1:])}", flush=True)


@dataclass(frozen=True)
class Timed:
    """What one backend took for a round's requests, and what it answers."""

    processor: float
    clock: float
    answers: list[Any]

    @classmethod
    def of(cls, call: Callable[[Sequence[Asked]], list[Any]], questions: Sequence[Asked]) -> Timed:
        gc.collect()
        answers, clock, processor = timed(lambda: call(questions))
        return cls(processor, clock, answers)


def _round(
    calls: Sequence[Callable[[Sequence[Asked]], list[Any]]], questions: Sequence[Asked], is_reversed: bool
) -> list[Timed]:
    """Ours and theirs, whichever begins."""
    turn = -1 if is_reversed else 1
    return [Timed.of(call, questions) for call in calls[::turn]][::turn]


def _told(rounds: Sequence[Sequence[Timed]]) -> str:
    processor, clock = (
        [getattr(theirs, kind) / getattr(ours, kind) for ours, theirs in rounds] for kind in ("processor", "clock")
    )
    ours, theirs = (
        1000 * statistics.median(one.processor / len(one.answers) for one in side) for side in zip(*rounds, strict=True)
    )
    return (
        f"transformers / ours {spread(processor)} in processor time, {statistics.median(clock):.2f} by the clock; "
        f"ours {ours:.1f} ms of processor time a request, "
        f"transformers {theirs:.1f}; {max(_agreement(*(one.answers for one in pair)) for pair in rounds)}"
    )


def _agreement(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if isinstance(ours[0], float):
        return f"log-probabilities within {max(map(abs, np.subtract(ours, theirs))):.0e} nats"
    return f"{sum(map(str.__ne__, ours, theirs))} of {len(ours)} answers differ"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("shape", choices=SIDES)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--num-threads", type=int, default=1)
    speed(parser.parse_args())


if __name__ == "__main__":
    main()
