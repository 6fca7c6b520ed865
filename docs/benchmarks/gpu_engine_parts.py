"""The parts of gpu.py that run the engine on the shapes of real models.

Token ids are drawn: no tokenizer is needed. A part whose package is missing says so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hollow import fill

Results = dict[str, Any]
LETTERS = 10
CONTEXT, SHOTS, OWN = 2048, 700, 150
"""Positions of the context; tokens that all questions share, and tokens of each."""

STEP_SIZES = (1024, 512, 256, 128, 2048, 4096)
"""Tokens of a step. Those of which illegal accesses were reported come last: what went before is kept."""


class Opened:
    """An engine on a package, and the seconds that ONNX Runtime has run for it."""

    def __init__(self, device: Any, package: Path, **engine: Any) -> None:
        from olive_ext.config import EngineConfig, ModelSettings
        from olive_ext.engine.engine import open_engine
        from olive_ext.model import resolve

        settings = ModelSettings(
            model=str(package),
            execution_provider=device.name,
            max_length=CONTEXT,
            engine=EngineConfig(**engine),
        )
        self.seconds_inside = 0.0
        kind, inside = device.ort.InferenceSession, device.ort.InferenceSession.run_with_iobinding

        def timed(session: Any, *arguments: Any) -> None:
            begin = time.perf_counter()
            inside(session, *arguments)
            self.seconds_inside += time.perf_counter() - begin

        kind.run_with_iobinding = timed
        self.engine = open_engine(resolve(settings))

    def run(self, requests: Sequence[Any]) -> tuple[list[Any], Results]:
        """Results, and seconds of the wall, inside ONNX Runtime and outside, with the steps."""
        self.engine.reset()
        counters, inside = self.engine.counters, self.seconds_inside
        steps, fed, begin = counters.steps, counters.tokens_fed, time.perf_counter()
        results = self.engine.run(requests)
        wall, inside = time.perf_counter() - begin, self.seconds_inside - inside
        facts = {"wall_s": wall, "inside_s": inside, "outside_s": wall - inside}
        return results, {**facts, "steps": counters.steps - steps, "tokens": counters.tokens_fed - fed}


def questions(
    number: int,
    vocab_size: int,
    shots: int = SHOTS,
    own: int = OWN,
    answer: int = 1,
    *,
    lengths: Sequence[int] = (),
    seed: int = 7,
) -> list[Any]:
    """Requests in MMLU-Pro's shape: ten answers of `answer` tokens after each question's own tokens, after shots. With
    `lengths` questions have as many tokens of their own as is drawn of these."""
    from olive_ext.engine.requests import Request

    draw = random.Random(seed)
    tokens = lambda count: tuple(draw.randrange(4, vocab_size) for _ in range(count))  # noqa: E731
    shared = tokens(shots)
    return [
        Request((*shared, *question, letter, *tokens(answer - 1)), answer)
        for question in (tokens(draw.choice(lengths) if lengths else own) for _ in range(number))
        for letter in range(4, 4 + LETTERS)
    ]


def llama(device: Any, models: Path) -> Iterator[Results]:
    """300 questions on Llama-3.2-1B's shape: wall, inside and outside of ONNX Runtime, by the tokens of a step."""
    yield from _shape(device, models / "llama-3.2-1b" / "fp16", STEP_SIZES)


def llama_rows(device: Any, models: Path) -> Iterator[Results]:
    """The same row by row, where each length of a question is one of the attention's."""
    yield from _shape(device, models / "llama-3.2-1b" / "fp16", (1024,), scoring="rows")


def gemma(device: Any, models: Path) -> Iterator[Results]:
    """300 questions on Gemma-4 E2B's shape, and Hugging Face at its best batch, one row for a question's answers."""
    ours: Results = {}
    for results in _shape(device, models / "gemma-4-e2b" / "fp16", (1024,)):
        ours |= results
        yield results
    for results in _hugging_face(device, models / "gemma-4-e2b" / "hf"):
        yield results
        best = results.get("hf_questions_per_second")
        if best and "1024" in ours:
            yield {"ours_over_hf": ours["1024"]["questions_per_second"] / best}


def int4(device: Any, models: Path) -> Iterator[Results]:
    """The same with int4 weights. `ep.cuda.fpa_intb_gemm`, which is off, takes 1.28 times as long, and wins 13 % of the
    time of decoding 8 rows."""
    yield from _shape(device, models / "llama-3.2-1b" / "int4", (1024,))


def decode(device: Any, models: Path) -> Iterator[Results]:
    """Tokens a second of 8, 64 and 256 rows after 1,500 positions: packed and in slots of their own, fp16 and int4."""
    from olive_ext.engine.requests import Generation, Request

    forms = {
        f"{precision} {scoring}": (precision, scoring) for precision in ("fp16", "int4") for scoring in ("auto", "rows")
    }
    is_real, expected = device.name == "cuda", dict[tuple[str, int], Any]()
    prompts, tokens = (1500, 128) if is_real else (20, 4)
    for name, (precision, scoring) in forms.items():
        if (package := _package(models / "llama-3.2-1b" / precision)) is None:
            yield {name: f"no package llama-3.2-1b/{precision}"}
            continue
        opened, speeds = Opened(device, package, num_slots=256, scoring=scoring), Results()
        for rows in (8, 64, 256) if is_real else (2,):
            draw = random.Random(rows)
            shared = tuple(draw.randrange(4, 1000) for _ in range(prompts))
            asked = [Request((*shared, 4 + row), 0, Generation(tokens)) for row in range(rows)]
            opened.run([Request((*one.tokens, 5), 0, one.generation) for one in asked])
            answers, facts = opened.run(asked)
            first = expected.setdefault((precision, rows), answers)
            same = sum(a.tokens == b.tokens for a, b in zip(first, answers, strict=True))
            speeds[str(rows)] = {"tokens_per_second": rows * tokens / facts["wall_s"], "equal_answers": same, **facts}
        facts = opened.engine.describe()
        chosen = {"batching": facts["batching"], "captured": facts.get("steps_captured"), "notes": facts["notes"]}
        yield {name: {**speeds, **chosen}}
        opened.engine.close()


def _shape(device: Any, folder: Path, sizes: Sequence[int], **engine: Any) -> Iterator[Results]:
    if (package := _package(folder)) is None:
        yield {"not run": f"no package {folder.parent.name}/{folder.name}"}
        return
    number = 300 if device.name == "cuda" else 3
    points: list[tuple[float, float]] = []
    for size in sizes:
        opened = Opened(device, package, chunk_size=size, **engine)
        _, first = opened.run(questions(number, 1000, lengths=range(OWN // 2, 3 * OWN // 2), seed=8))
        _, second = opened.run(questions(number, 1000, lengths=range(OWN // 2, 3 * OWN // 2), seed=9))
        _, facts = opened.run(questions(number, 1000))
        new_lengths = {"first_s": first["wall_s"], "second_s": second["wall_s"]}
        yield {str(size): {**facts, **new_lengths, "questions_per_second": number / facts["wall_s"]}}
        opened.engine.close()
        points.append((facts["tokens"] / facts["steps"], facts["inside_s"] / facts["steps"]))
        if len(points) > 1:
            token, fixed = np.polyfit(*zip(*points, strict=True), 1).tolist()
            yield {"slope": {"fixed_ms": 1e3 * fixed, "token_us": 1e6 * token}}


def _hugging_face(device: Any, folder: Path) -> Iterator[Results]:
    """Questions a second at several batch sizes: logits of the last position, whose row all answers are read from."""
    if not (folder / "config.json").exists():
        yield {"hf": f"no folder {folder.parent.name}/hf"}
        return
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.float16 if device.name == "cuda" else torch.float32
    with torch.device(device.name):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    speeds: dict[str, float] = {}
    for batch in (16, 64, 128) if device.name == "cuda" else (2,):
        tokens = torch.randint(4, 1000, (batch, SHOTS + OWN), device=device.name)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            with torch.inference_mode():
                model(tokens, logits_to_keep=1, use_cache=False).logits.float().log_softmax(-1).cpu()
            seconds.append(time.perf_counter() - begin)
        speeds[str(batch)] = batch / min(seconds[1:])
        yield {"hf_by_batch": speeds, "hf_questions_per_second": max(speeds.values())}


def _package(folder: Path) -> Path | None:
    """The package with its weights; None where there is none."""
    if not any(folder.rglob("*.onnx")):
        return None
    fill(folder)
    return folder
