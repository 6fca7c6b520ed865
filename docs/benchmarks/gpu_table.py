"""Measures our backend and others on a GPU, on requests in the shapes of MMLU-Pro and GSM8K: one command, no network.

    python docs/benchmarks/gpu_table.py OUT

Makes the models (Gemma-4 E2B and Llama-3.2-1B shapes, random weights) and the tasks: N questions of ~150 tokens after
5 fixed shots of ~700 tokens together, with 10 answers of one token each, or of five; and prompts after 8 shots of ~900
tokens, as GSM8K-CoT has them, that are answered greedily. Each is a row: against Hugging Face in the same rounds, the
last against onnxruntime-genai, too, and a few questions against a plain session and Olive's ortgenai. Ours alone: more
of the prompts with 64 and with 256 rows in a step, and long answers to short prompts, as AIME has them. A few questions
are profiled: OUT/*/host_device_copies.json lists the copies between host and device, and a large one ends this with 1.
Gemma 4 needs --packages, see make_models.py. `--device cpu --shapes tiny` tries everything out on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import bench, bench_table, run_script

LETTERS = "ABCDEFGHIJ"
VOCABULARY = (
    "the a of to in is that for as with on by from at which when where if then than each every most other another "
    "value number energy force field system state law rate market price cost demand court contract cell protein acid "
    "bond reaction pressure temperature volume mass charge current theory culture mind memory child society history "
    "state war king trade function matrix vector graph proof set group ring limit series network memory process engine "
    "following statement correct given assume find determine calculate increases decreases equal greater less between"
)
LOADER = """import datasets
from pathlib import Path


def load(**_):
    rows = str(Path(__file__).parent / "questions.jsonl")
    return {"test": datasets.load_dataset("json", data_files=rows)["train"]}
"""
TASK = """task: {name}
custom_dataset: !function local.load
test_split: test
description: {shots}
doc_to_text: "{{{{question}}}}"
{form}
metadata:
  version: 1
"""
CHOICES = """output_type: multiple_choice
doc_to_choice: {choices}
doc_to_target: answer
metric_list:
  - metric: acc"""
GREEDY = """output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n\\n\\n"]
  do_sample: false
  max_gen_toks: {tokens}
metric_list:
  - metric: exact_match"""

ONE, FIVE, COT, LONG = "mmlu_pro_shape", "mmlu_pro_shape_5", "gsm8k_cot_shape", "aime_shape"
"""Names of the tasks."""


class Writer:
    """Questions of a given number of tokens, the same for the same seed and tokenizer."""

    def __init__(self, tokenizer: Any, seed: int = 7) -> None:
        self._tokenizer = tokenizer
        self._words = VOCABULARY.split()
        self._draw = random.Random(seed)

    def question(self, tokens: int) -> str:
        """A question with ten options, up to the word "Answer:"."""
        options = "".join(f"{letter}. {' '.join(self._draw.choices(self._words, k=3))}\n" for letter in LETTERS)
        words: list[str] = []
        while self._length(text := f"Question: {' '.join(words)}?\n{options}Answer:") < tokens:
            words += self._draw.choices(self._words, k=max(1, (tokens - self._length(text)) // 2))
        return text

    def shots(self, number: int, tokens: int) -> str:
        """Questions with their answers, `tokens` of them together."""
        made = (f"{self.question(tokens // number - 3)} {self._draw.choice(LETTERS)}\n\n" for _ in range(number))
        return "".join(made)

    def _length(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


def write_tasks(folder: Path, tokenizer: Any, questions: int, new_tokens: int, long_tokens: int) -> None:
    """The tasks in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(tokenizer)
    shots, more = writer.shots(5, 700), writer.shots(8, 900)
    rows = ({"question": writer.question(150), "answer": number % len(LETTERS)} for number in range(questions))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(text, encoding="utf-8")
    (folder / "shots.txt").write_text(shots, encoding="utf-8")
    (folder / "local.py").write_text(LOADER, encoding="utf-8")
    five = [f"{letter} of the in to" for letter in LETTERS]
    forms = {
        ONE: (shots, CHOICES.format(choices=json.dumps(list(LETTERS)))),
        FIVE: (shots, CHOICES.format(choices=json.dumps(five))),
        COT: (more, GREEDY.format(tokens=new_tokens)),
        LONG: ("", GREEDY.format(tokens=long_tokens)),
    }
    for name, (text, form) in forms.items():
        task = TASK.format(name=name, shots=json.dumps(text), form=form)
        (folder / f"{name}.yaml").write_text(task, encoding="utf-8")


def make_models(given: argparse.Namespace, shape: str) -> Path:
    """The folder with hf and the precisions."""
    folder = given.out / shape
    script = Path(__file__).parent / "make_models.py"
    command = [sys.executable, str(script), str(folder), "--shape", shape, "--precision", given.precisions]
    command += ["--device", given.device]
    command += ["--packages", str(given.packages)] if given.packages else []
    command += ["--tokenizer", given.tokenizer] if given.tokenizer else []
    subprocess.run(command, check=True)
    return folder


def shared_options(given: argparse.Namespace, tasks: Path) -> Iterator[object]:
    """Of `bench`, whatever it is compared with."""
    yield from ("--include-path", tasks, "--num-fewshot", 0, "--max-length", 2048)
    yield from ("--provider", given.device, "--device", "cuda:0" if given.device == "cuda" else given.device)


def speed_options(given: argparse.Namespace, models: Path) -> Iterator[object]:
    """All questions, against Hugging Face, which takes batches."""
    yield from ("--limit", given.questions, "--rounds", given.rounds, "--warmup", 64)
    yield from ("--hf", models / "hf", "--peers", "hf", "--batch-sizes", given.batch_sizes)
    yield from ("--probe", max(1, given.questions // 20))


def whole_options(given: argparse.Namespace) -> Iterator[object]:
    """As many questions as the real benchmark has, ours alone: Hugging Face would take ten minutes a round."""
    yield from ("--limit", given.whole, "--rounds", 1, "--warmup", 64, "--peers", "")


def greedy_options(given: argparse.Namespace, models: Path) -> Iterator[object]:
    """Answers that are generated, against Hugging Face and onnxruntime-genai."""
    yield from ("--limit", given.generations, "--rounds", given.rounds, "--warmup", 4)
    yield from ("--hf", models / "hf", "--peers", "hf,onnxruntime-genai", "--batch-sizes", given.batch_sizes)
    yield from ("--probe", max(1, given.generations // 20))


def rows_options(given: argparse.Namespace, num_rows: int) -> Iterator[object]:
    """More such answers, ours alone, so many at once."""
    yield from ("--limit", given.many, "--rounds", 1, "--warmup", 4, "--peers", "")
    yield from ("--set", f"engine.num_slots={num_rows}")


def long_options(given: argparse.Namespace) -> Iterator[object]:
    """Answers of tens of thousands of tokens, ours alone: as many at once as the memory has blocks for."""
    yield from ("--limit", given.long, "--rounds", 1, "--warmup", 1, "--peers", "")
    yield from ("--max-length", given.long_tokens + 512)


def answer_options(given: argparse.Namespace) -> Iterator[object]:
    """A few questions against a plain session on the same file, the reference for int4, and Olive's ortgenai."""
    yield from ("--limit", given.checked, "--rounds", 1, "--peers", "onnxruntime,olive-ortgenai", "--batch-sizes", 1)


def rows(given: argparse.Namespace, models: Path) -> dict[str, tuple[str, Iterator[object], dict[str, float]]]:
    """Task, options and goals of each row, by the end of its name."""
    every = {
        "": (ONE, speed_options(given, models), {"hf": 4.0}),
        "-5-tokens": (FIVE, speed_options(given, models), {"hf": 8.0}),
        "-greedy": (COT, greedy_options(given, models), {"hf": 5.0, "onnxruntime-genai": 3.0}),
        **{f"-greedy-{number}": (COT, rows_options(given, number), {}) for number in (64, 256) if given.many},
        **({"-long": (LONG, long_options(given), {})} if given.long else {}),
        "-answers": (ONE, answer_options(given), {"onnxruntime": 1.0, "olive-ortgenai": 1.0}),
        "-whole": (ONE, whole_options(given), {}),
    }
    return {name: row for name, row in every.items() if name != "-whole" or given.whole}


def profile_copies(given: argparse.Namespace, model: Path, tasks: Path, out: Path) -> bool:
    """Profiles a few questions; whether no large tensor was copied between host and device. Launches wait for their
    kernels, so that the times by operator are the device's."""
    out.mkdir(parents=True, exist_ok=True)
    rows = (tasks / "questions.jsonl").read_text(encoding="utf-8").splitlines()[: given.checked]
    contexts = [(tasks / "shots.txt").read_text(encoding="utf-8") + json.loads(row)["question"] for row in rows]
    (out / "contexts.json").write_text(json.dumps(contexts), encoding="utf-8")
    words = [model, out, "--contexts", out / "contexts.json", "--provider", given.device]
    return run_script("host_device_copies.py", words, CUDA_LAUNCH_BLOCKING="1") == 0


def main() -> None:
    """Runs every row of each shape and precision and writes OUT/table.md after each."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", metavar="A,B", default="llama-3.2-1b,gemma-4-e2b")
    parser.add_argument("--precisions", metavar="A,B", default="fp16,int4")
    parser.add_argument("--questions", metavar="N", type=int, default=1200, help="questions to compare speed on")
    parser.add_argument("--whole", metavar="N", type=int, default=12000, help="questions for ours alone; 0 for none")
    parser.add_argument("--generations", metavar="N", type=int, default=128, help="prompts that are answered greedily")
    parser.add_argument("--new-tokens", metavar="N", type=int, default=128, help="tokens of such an answer at most")
    parser.add_argument("--many", metavar="N", type=int, default=512, help="such prompts for ours alone; 0 for none")
    parser.add_argument("--long", metavar="N", type=int, default=64, help="questions answered at length; 0 for none")
    parser.add_argument("--long-tokens", metavar="N", type=int, default=32000, help="tokens of such an answer at most")
    parser.add_argument("--checked", metavar="N", type=int, default=5, help="questions to check answers on")
    parser.add_argument("--batch-sizes", metavar="A,B", default="16,64,128")
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--packages", metavar="DIR", type=Path)
    parser.add_argument("--tokenizer", metavar="DIR|NAME")
    given = parser.parse_args()
    results, goals, copying = {}, {}, []
    for shape in given.shapes.split(","):
        models = make_models(given, shape)
        from transformers import AutoTokenizer

        tasks = given.out / shape / "task"
        questions = max(given.questions, given.whole, given.generations, given.many, given.long)
        tokenizer = AutoTokenizer.from_pretrained(models / "hf")
        write_tasks(tasks, tokenizer, questions, given.new_tokens, given.long_tokens)
        for precision in given.precisions.split(","):
            name = f"{shape}-{precision}"
            shared, model = [*shared_options(given, tasks)], models / precision
            for end, (task, options, goal) in rows(given, models).items():
                row = f"{name}{end}"
                goals[row] = goal
                results[row] = bench(model, given.out / row, ["--tasks", task, *shared, *options])
                text = bench_table(results, goals)
                (given.out / "table.md").write_text(text, encoding="utf-8")
            if not profile_copies(given, model, tasks, given.out / name):
                copying.append(name)
    print(text)
    if copying:
        sys.exit(f"something large crosses between host and device (host_device_copies.json): {', '.join(copying)}")


if __name__ == "__main__":
    main()
