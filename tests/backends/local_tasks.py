"""Three small tasks as files: a choice, a rolling text, a generation with two filters."""

from __future__ import annotations

from pathlib import Path

LOADER = """
import datasets

WORDS = "the cat sat on the mat and the dog ran off with the hat".split()


def load(**_):
    rows = [{"question": " ".join(WORDS[:n]), "choices": [f" {w}" for w in WORDS[n:n + 3]], "answer": n % 3,
             "text": " ".join(WORDS[n:])} for n in range(1, 7)]
    return {"test": datasets.Dataset.from_list(rows)}


def explode(doc, results):
    raise KeyError("no such field")
"""
HEAD = "custom_dataset: !function local.load\ntest_split: test\n"
CHOICE = f"""task: tiny_choice
{HEAD}output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1
"""
ROLLING = f"""task: tiny_rolling
{HEAD}output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
metadata:
  version: 1
"""
GENERATE = f"""task: tiny_generate
{HEAD}output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
filter_list:
  - name: strict
    filter:
      - function: take_first
  - name: loose
    filter:
      - function: regex
        regex_pattern: "([a-z]+)"
      - function: take_first
metadata:
  version: 1
"""
GROUP = """group: tiny_group
task: [tiny_choice, tiny_rolling]
aggregate_metric_list:
  - metric: acc
metadata:
  version: 1
"""
BROKEN = CHOICE.replace("tiny_choice", "tiny_broken") + "process_results: !function local.explode\n"
FILES = {
    "tiny_choice": CHOICE,
    "tiny_rolling": ROLLING,
    "tiny_generate": GENERATE,
    "tiny_group": GROUP,
    "tiny_broken": BROKEN,
}
NAMES = ["tiny_choice", "tiny_rolling", "tiny_generate"]


def write_tasks(folder: Path) -> Path:
    """Writes the task files into `folder` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "local.py").write_text(LOADER)
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder
