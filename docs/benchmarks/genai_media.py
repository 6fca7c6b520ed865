"""Pictures and sound beside onnxruntime-genai's own multimodal runtime, on the same package.

    python -m docs.benchmarks.genai_media pictures                    Gemma 3, tiny, random weights
    python -m docs.benchmarks.genai_media sounds out/speech/float     Whisper, as recipes/speech leaves it
    python -m docs.benchmarks.genai_media opens PACKAGE ...           what genai says to packages

`--python` is the interpreter that has genai, where it lives in an environment of its own (`pip install
onnxruntime-genai==0.18.0 onnxruntime numpy`). Both runtimes answer in a process of their own with `--num-threads`
threads, by turns, from the same files. Every round has pictures or sounds of its own; genai is given one request at a
time, as its examples do, or `--batch` sounds at once. Compared are processor time, the clock, tokens, and, outside of
the clock, log-probabilities.

Of Gemma 3's package genai 0.14.1 and 0.18 read red as blue: mobius 0.1.0 has pictures decoded as RGB and then turned
from BGR. The copy that both are given has no such step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("What is this?", "Who made it, and when?", "Is there a boat?", "How many are there?")
SPEECH = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
Asked = list[tuple[str, str]]
"""Prompts and files."""


class Genai:
    """`onnxruntime_genai.MultiModalProcessor` and `Generator`."""

    def __init__(self, given: argparse.Namespace) -> None:
        import onnxruntime_genai

        self.genai, self.kind, self.batch = onnxruntime_genai, given.kind, given.batch
        config = onnxruntime_genai.Config(given.packages[0])
        threads = {"session_options": {"intra_op_num_threads": given.num_threads}}
        parts = ("encoder",) if given.kind == "sounds" else ("vision", "embedding")
        config.overlay(json.dumps({"model": dict.fromkeys(("decoder", *parts), threads)}))
        self.model = onnxruntime_genai.Model(config)
        self.processor = self.model.create_multimodal_processor()

    def answer(self, asked: Asked, num_tokens: int) -> list[list[int]]:
        found = []
        for place in range(0, len(asked), self.batch):
            part = asked[place : place + self.batch]
            generator, length = self._generator(part, num_tokens)
            while not generator.is_done():
                generator.generate_next_token()
            found += [list(map(int, generator.get_sequence(row)))[length:] for row in range(len(part))]
        return found

    def score(self, prompt: str, file: str, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of the tokens that it has generated."""
        import numpy as np

        generator, _ = self._generator([(prompt, file)], len(tokens))
        found = []
        for token in tokens:
            row = np.asarray(generator.get_logits(), np.float64).reshape(-1)
            found.append(float(row[token] - row.max() - np.log(np.exp(row - row.max()).sum())))
            generator.generate_next_token()
        return found

    def _generator(self, asked: Asked, num_tokens: int) -> tuple[Any, int]:
        prompts, files = [prompt for prompt, _ in asked], [file for _, file in asked]
        if self.kind == "sounds":
            inputs = self.processor(prompts, audios=self.genai.Audios.open(*files))
        else:
            inputs = self.processor(f"<bos>{prompts[0]}", images=self.genai.Images.open(*files))
        length = inputs["input_ids"].shape()[-1]
        options = self.genai.GeneratorParams(self.model)
        options.set_search_options(do_sample=False, num_beams=1, batch_size=len(asked), max_length=length + num_tokens)
        generator = self.genai.Generator(self.model, options)
        generator.set_inputs(inputs)
        return generator, length


class Ours:
    """A session."""

    def __init__(self, given: argparse.Namespace) -> None:
        import olive_ext
        from olive_ext.text.requests import GenerationRequest, ScoringRequest

        self.generation, self.scoring = GenerationRequest, ScoringRequest
        self.field = "audio" if given.kind == "sounds" else "images"
        self.session = olive_ext.open(given.packages[0], engine={"num_threads": given.num_threads})

    def answer(self, asked: Asked, num_tokens: int) -> list[list[int]]:
        requests = [
            self.generation(self._prompt(prompt), max_new_tokens=num_tokens, **{self.field: [file]})
            for prompt, file in asked
        ]
        return [list(output.tokens) for output in self.session.generate(requests)]

    def score(self, prompt: str, file: str, tokens: Sequence[int]) -> list[float]:
        request = self.scoring(self._prompt(prompt), list(tokens), **{self.field: [file]})
        return list(self.session.loglikelihood([request])[0].token_logprobs)

    def _prompt(self, prompt: str) -> str:
        return "" if self.field == "audio" else prompt  # the package says what a decoder of speech begins with


RUNTIMES = {"ours": Ours, "genai": Genai}


def child(given: argparse.Namespace) -> None:
    """Opens the package and answers lines of JSON."""
    out, sys.stdout = sys.stdout, sys.stderr
    runtime = RUNTIMES[given.child](given)
    print("{}", file=out, flush=True)  # it is open
    for line in sys.stdin:
        call = json.loads(line)
        start = time.process_time(), time.perf_counter()
        found = getattr(runtime, call["call"])(*call["args"])
        processor, clock = time.process_time() - start[0], time.perf_counter() - start[1]
        print(json.dumps({"found": found, "processor": processor, "clock": clock}), file=out, flush=True)


class Process:
    """One runtime in a process of its own."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        python = given.python if name == "genai" else sys.executable
        options = [given.kind, given.packages[0], "--num-threads", given.num_threads, "--batch", given.batch]
        command = [str(word) for word in (python, Path(__file__).resolve(), *options, "--child", name)]
        paths = [] if python != sys.executable else filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        threads = str(given.num_threads)  # torch's, too
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def __call__(self, call: str, *args: Any) -> Answered:
        assert self.process.stdin is not None
        print(json.dumps({"call": call, "args": args}), file=self.process.stdin, flush=True)
        return Answered(**self._read())

    def close(self) -> None:
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass(frozen=True)
class Answered:
    """What was found, and seconds of the processor and of the clock."""

    found: Any
    processor: float
    clock: float


def compare(processes: Sequence[Process], name: str, asked: Sequence[Asked], num_tokens: int) -> list[Answered]:
    """Prints a line; returns the last answers of both. The first of `asked` warms both up."""
    rounds = []
    for number, one in enumerate(asked):
        turn = -1 if number % 2 else 1
        rounds.append([process("answer", one, num_tokens) for process in processes[::turn]][::turn])
    last = asked[-1][-1]
    tokens = rounds[-1][1].found[-1]
    scores = [process("score", *last, tokens).found for process in processes]
    apart = max(abs(one - other) for one, other in zip(*scores, strict=True))
    print(f"{name}: {_told(rounds[1:])}; log-probabilities within {apart:.0e} nats", flush=True)
    return rounds[-1]


def _told(rounds: Sequence[Sequence[Answered]]) -> str:
    ratios, clocks = (
        [getattr(genai, kind) / getattr(ours, kind) for ours, genai in rounds] for kind in ("processor", "clock")
    )
    told = (
        f"genai / ours {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) in processor time, "
        f"{statistics.median(clocks):.2f} by the clock"
    )
    for name, side in zip(("ours", "genai"), zip(*rounds, strict=True), strict=True):
        seconds = statistics.median(one.processor for one in side)
        told += f"; {name} {1000 * seconds / len(side[0].found):.1f} ms a request, "
        told += f"{sum(map(len, side[0].found)) / seconds:.0f} tokens/s"
    pairs = [pair for ours, genai in rounds for pair in zip(ours.found, genai.found, strict=True)]
    return f"{told}; {sum(one != other for one, other in pairs)} of {len(pairs)} answers differ"


def _gemma3(folder: Path) -> Path:
    """The package with 256 tokens a picture, which genai takes for granted, without the step that swaps colours."""
    from tests.exports.media import media_export

    shutil.copytree(media_export("gemma3_256")[0], folder)
    file = folder / "processor_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    steps = content["processor"]["transforms"]
    content["processor"]["transforms"] = [step for step in steps if step["operation"]["type"] != "ConvertRGB"]
    file.write_text(json.dumps(content), encoding="utf-8")
    return folder


def pictures(given: argparse.Namespace, processes: Sequence[Process], folder: Path) -> None:
    """Four questions about each picture, and one."""
    from docs.benchmarks.pictures import noise

    for name, texts in (("pictures repeat", TEXTS), ("none repeats", TEXTS[:1])):
        rounds = []
        for number in range(given.rounds + 1):
            files = [folder / f"{name}-{number}-{seed}.png" for seed in range(given.requests // len(texts))]
            for seed, file in enumerate(files):
                noise(1000 * number + seed + len(texts), 128, 128).save(file)
            rounds.append([(f"<start_of_image> {text}", str(file)) for file in files for text in texts])
        compare(processes, name, rounds, 8)


def sounds(given: argparse.Namespace, processes: Sequence[Process], folder: Path) -> None:
    """Sounds as those of recipes/speech, and the word error rate of both."""
    import numpy as np
    from transformers import AutoTokenizer

    from olive_ext.backends.word_errors import normalized, word_error_rate
    from recipes.speech.tasks import tones

    rounds, said = [], []
    for number in range(given.rounds + 1):
        rng = np.random.default_rng(number)
        said = [tones.some_words(rng, 6) for _ in range(given.requests)]
        asked = [(SPEECH, str(folder / f"{number}-{place}.wav")) for place in range(given.requests)]
        for words, (_, path) in zip(said, asked, strict=True):
            with wave.open(path, "wb") as file:
                file.setparams((1, 2, tones.RATE, 0, "NONE", ""))
                file.writeframes((tones.sound(words, rng) * 32767).astype("<i2").tobytes())
        rounds.append(asked)
    answered = compare(processes, f"{given.requests} sounds, {given.batch} at once in genai", rounds, 12)
    decode = AutoTokenizer.from_pretrained(given.packages[0]).decode
    rates = [
        word_error_rate(
            normalized(" ".join(words), decode(tokens, skip_special_tokens=True))
            for words, tokens in zip(said, one.found, strict=True)
        )
        for one in answered
    ]
    print(f"word error rate of the last round: ours {rates[0]:.4f}, genai {rates[1]:.4f}")


def opens(python: str, packages: Sequence[str]) -> None:
    """A line for each package: what genai's model and processor of pictures and sound say to it."""
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); "  # nothing from the working directory
        "import onnxruntime_genai as genai; model = genai.Model(sys.argv[1]); "
        "print('opens, as', model.type); model.create_multimodal_processor(); print('has a processor')"
    )
    for package in packages:
        done = subprocess.run([python, "-c", code, package], capture_output=True, text=True, check=False)
        print(f"{package}: {'; '.join([*done.stdout.splitlines(), *done.stderr.splitlines()[-1:]])}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("kind", choices=("pictures", "sounds", "opens"))
    parser.add_argument("packages", metavar="PACKAGE", nargs="*")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has onnxruntime-genai")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1, help="sounds that genai is given at once")
    parser.add_argument("--child", choices=RUNTIMES, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.child:
        child(given)
    elif given.kind == "opens":
        opens(given.python, given.packages)
    else:
        compare_both(given)


def compare_both(given: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if given.kind == "pictures":
            given.packages = [str(_gemma3(folder / "package"))]
        processes = [Process(name, given) for name in RUNTIMES]
        for process in processes:
            stack.callback(process.close)
        (sounds if given.kind == "sounds" else pictures)(given, processes, folder)


if __name__ == "__main__":
    main()
