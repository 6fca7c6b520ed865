"""Writes docs/decoders.md: the results of every exported decoder, compared with a reference. Run from the root:

    python -m docs.decoders                       every export of tests/exports on the CPU
    python -m docs.decoders --provider webgpu     on a WebGPU device; rows of other providers are kept
    python -m docs.decoders NAME ...              some of them

The reference is Hugging Face transformers on the same weights where the export claims to be the same model in fp32, or
one plain forward pass of the untouched file. Exports are made on first use and kept (tests/exports). Each runs in a
process of its own, so that a crash is a row and not the end.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from docs import picture_families

HERE = Path(__file__).resolve().parent
ROWS = HERE / "decoders.json"
PAGE = HERE / "decoders.md"
PLUGINS = {"webgpu": "onnxruntime_ep_webgpu"}
INTEGERS = {"int4", "int8"}
SETTINGS = ((1, 256), (3, 7), (8, 64))
"""Slots and chunk size; the others are compared with the first."""

INTRODUCTION = """# What runs

Families of decoders, in tiny sizes with random weights, made by real exporters and compared with Hugging Face
transformers on the same weights. What runs depends on a graph's form, not on its size. `olive-ext check MODEL` says
whether yours runs, and why. `docs/decoders.json` has every export (fp16, int4, int8 and quantized caches too), made by
`python -m docs.decoders`.

"""
LONGEST_REASON = 130
"""Characters of a refusal that the page shows."""


Logits = Callable[[Any, list[int]], Any]


@dataclass(frozen=True)
class Reference:
    """Whole forward passes of an export's source, or of its untouched graph."""

    label: str
    logits: Logits
    export: Any

    def score(self, context: Sequence[int], target: Sequence[int]) -> list[float]:
        logprobs_SV = self._logprobs([*context, *target][:-1])
        return [float(logprobs_SV[len(context) - 1 + i, token]) for i, token in enumerate(target)]

    def generate(self, prompt: Sequence[int], num_tokens: int, stop_ids: Collection[int]) -> list[int]:
        answer: list[int] = []
        while len(answer) < num_tokens:
            token = int(self._last(list(prompt), answer).argmax())
            if token in stop_ids:
                break
            answer.append(token)
        return answer

    def _last(self, prompt: list[int], answer: list[int]) -> Any:
        """Logits after an answer. Integer weights round their activations, in a step of one token with another kernel
        than in a whole pass: an answer is what such steps say, here as everywhere."""
        from tests.exports.plain import cached_logits
        from tests.exports.ropes import FIRST_MAXIMUM

        if self.export.dtype in INTEGERS:
            whole, first = prompt + answer, FIRST_MAXIMUM.get(self.export.family, 0)
            anew = first + 1 if len(prompt) <= first < len(whole) else len(prompt)  # where long factors begin
            return cached_logits(self.export, whole[:anew], whole[anew:])
        return self.logits(self.export, [*prompt, *answer])[-1]

    def _logprobs(self, tokens: list[int]) -> Any:
        logits_SV = self.logits(self.export, tokens).astype(np.float64)
        largest_S1 = logits_SV.max(-1, keepdims=True)
        return logits_SV - largest_S1 - np.log(np.exp(logits_SV - largest_S1).sum(-1, keepdims=True))


def references(export: Any) -> list[Reference]:
    """The reference, and plain forward passes where the CPU can run them."""
    from tests.exports.plain import hf_logits, plain_logits

    is_same_model = not export.differs and export.dtype == export.kv_dtype == "fp32"
    found = [Reference("HF", hf_logits, export)] if is_same_model or export.not_on_cpu else []
    return found if export.not_on_cpu else [*found, Reference("plain", plain_logits, export)]


def measure(name: str, provider: str) -> dict[str, str]:
    """The row of one export: numbers, or the reason why there are none."""
    import olive_ext
    from olive_ext.errors import OliveExtError
    from tests.exports import export as get

    export = get(name)
    row = {"name": name, "family": export.family, "exporter": export.exporter, "dtype": export.dtype}
    row |= {"kv": export.kv_dtype, "provider": provider}
    libraries = {provider: PLUGINS[provider]} if provider in PLUGINS else None

    def opened(num_slots: int, chunk_size: int) -> Any:
        engine = {"num_slots": num_slots, "chunk_size": chunk_size}
        return olive_ext.open(export.path, execution_provider=provider, provider_libraries=libraries, engine=engine)

    try:
        return row | _numbers(export, opened)
    except OliveExtError as error:
        return row | {"refused": " ".join(str(error).replace(str(export.path), name).split())}


def _numbers(export: Any, opened: Callable[[int, int], Any]) -> dict[str, str]:
    from olive_ext.session.requests import GenerationRequest, ScoringRequest

    rng = random.Random(11)
    draw = lambda low, high: [rng.randrange(40, 1000) for _ in range(rng.randint(low, high))]  # noqa: E731
    source = _source(export)
    stems = [draw(5, 60 if source is None else 35) for _ in range(6)]
    pairs = [(rng.choice(stems) + draw(0, 10), draw(1, 8)) for _ in range(40)]
    requests = [ScoringRequest(context, target, source=source) for context, target in pairs]
    alike = [ScoringRequest(draw(20, 20), draw(4, 4), source=source) for _ in range(16)]
    text = draw(90, 90)
    found = []
    for num_slots, chunk_size in SETTINGS:
        with opened(num_slots, chunk_size) as session:
            order = rng.sample(range(len(requests)), len(requests))
            outputs = session.loglikelihood([requests[i] for i in order])
            scores = [outputs[order.index(i)].token_logprobs for i in range(len(requests))]
            counters = session.counters
            fork = counters.tokens_fed / counters.tokens_distinct
            begun = counters.steps
            scores += [output.token_logprobs for output in session.loglikelihood(alike)]
            texts = len(alike) / (counters.steps - begun)
            rolled = 0.0 if source is not None else session.loglikelihood_rolling([text])[0].logprob
            begun, generated = counters.steps, counters.tokens_generated
            answers = session.generate([GenerationRequest(stem, max_new_tokens=16, source=source) for stem in stems])
            rows = (counters.tokens_generated - generated) / (counters.steps - begun)
            found.append((scores, fork, rolled, [list(answer.tokens) for answer in answers]))
            prefix, stop_ids = session.tokenizer.prefix_token_id, session.stop_ids
    scorer, *_ = found_references = references(export)
    expected = {used.label: [used.score(*pair) for pair in pairs] for used in found_references}
    rolling = 0.0 if source is not None else sum(scorer.score([prefix], text))
    wanted_answers = [scorer.generate(stem, 16, stop_ids) for stem in stems]
    (scores, fork, rolled, _), *others = found
    equal = [all(answers[i] == wanted for *_, answers in found) for i, wanted in enumerate(wanted_answers)]
    return {
        "reference": scorer.label,
        "score": f"{_largest(scores[: len(pairs)], expected[scorer.label]):.1e}",
        "plain": f"{_largest(scores[: len(pairs)], expected['plain']):.1e}" if "plain" in expected else "",
        "roll": f"{abs(rolled / rolling - 1):.1e}" if rolling else "",
        "generate": f"{sum(equal)} of {len(stems)}",
        "fork": f"{max(fork for _, fork, *_ in found):.2f}",
        "batch": f"{max(_largest(scores, other) for other, *_ in others):.1e}",
        "texts": f"{texts:.1f}",
        "rows": f"{rows:.1f}",
    }


def _source(export: Any) -> Any:
    """The input of an encoder-decoder's encoder; None for a decoder alone."""
    from tests.exports.plain import SOURCE, features

    kinds = {"whisper": lambda: features()[0], "t5": lambda: SOURCE, "marian": lambda: SOURCE}
    return kinds[export.family]() if export.family in kinds else None


def _largest(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    pairs = (pair for rows in zip(left, right, strict=True) for pair in zip(*rows, strict=True))
    return max(abs(a - b) for a, b in pairs)


def render(rows: Sequence[dict[str, str]]) -> str:
    """The page: a line for each family, what is refused, and families with pictures or sound."""
    rows = sorted(rows, key=lambda row: (row["family"], row["name"], row["provider"]))
    run = [row for row in rows if "refused" not in row]
    families = {row["family"]: [one for one in run if one["family"] == row["family"]] for row in run}
    refused = [
        (row["name"], row["provider"], textwrap.shorten(row["refused"], LONGEST_REASON, placeholder=" ..."))
        for row in rows
        if "refused" in row
    ]
    return "".join(
        (
            INTRODUCTION,
            _table(
                ("family", "exported by", "providers", "nats from transformers, fp32", "greedy answers equal"),
                [_family(name, exports) for name, exports in families.items()],
            ),
            "\n## Refused, by name\n\n",
            _table(("export", "provider", "the message"), refused),
            picture_families.render(),
        )
    )


def _family(name: str, exports: Sequence[dict[str, str]]) -> tuple[str, ...]:
    exact = [float(row["score"]) for row in exports if row["reference"] == "HF" and row["dtype"] == "fp32"]
    answers = [[int(number) for number in row["generate"].split(" of ")] for row in exports]
    return (
        name,
        ", ".join(dict.fromkeys(row["exporter"] for row in exports)),
        ", ".join(dict.fromkeys(row["provider"] for row in exports)),
        f"{max(exact):.1e}" if exact else "",
        f"{sum(equal for equal, _ in answers)} of {sum(number for _, number in answers)}",
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _in_process(name: str, provider: str) -> dict[str, str]:
    command = [sys.executable, "-m", "docs.decoders", "--one", name, "--provider", provider]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent)
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode == 0 and last[0].startswith("{"):
        return json.loads(last[0])
    reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    print(f"{name}: {reason}", file=sys.stderr)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.provider)))
        return
    from tests.exports import ALL

    kept = json.loads(ROWS.read_text()) if ROWS.is_file() else []
    rows = {(row["name"], row["provider"]): row for row in kept}
    for name in arguments.names or ALL:
        row = _in_process(name, arguments.provider)
        if row:
            rows[name, arguments.provider] = row
            print(json.dumps(row), flush=True)
            ROWS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
            PAGE.write_text(render(list(rows.values())))


if __name__ == "__main__":
    main()
