"""Says where the JSON lines beside the task files are, so that the tasks work from any directory and need no network.

lm-eval takes what `!function local.NAME` names as it is, so these are the values of `dataset_kwargs` themselves.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent


def lines(**files: str) -> dict[str, dict[str, str]]:
    """What `datasets.load_dataset("json", ...)` reads: split -> file."""
    return {"data_files": {split: str(HERE / name) for split, name in files.items()}}


CHOICE = lines(test="choice.jsonl")
LETTERS = lines(test="letters.jsonl", dev="letters_shots.jsonl")
PERPLEXITY = lines(test="perplexity.jsonl")
GENERATE = lines(test="generate.jsonl")
