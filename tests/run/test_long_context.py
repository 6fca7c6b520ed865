"""A needle in a haystack: documents as long as `metadata` says, prompts that are fed in chunks, and the numbers of one
whole pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.lm_eval_run import run_tasks
from olive_ext.backends.task_loading import load_tasks
from olive_ext.config import EvaluationSettings
from tests.exports.cache import run_python
from tests.exports.genai import BUILDER
from tests.exports.text import VOCAB, save_tokenizer

LENGTHS = (1024, 4096, 16384)
TASK = """task: needle
custom_dataset: !function hay.load
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}} The number is"
doc_to_choice: [" one", " two", " three"]
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
metadata:
  version: 1
"""
HAY = """
import datasets
from transformers import AutoTokenizer

HAY = "the cat sat on the mat and the dog ran off with the hat. "


def load(max_seq_lengths=(64,), tokenizer=None, **_):
    tokens = AutoTokenizer.from_pretrained(tokenizer)
    per_sentence = len(tokens.encode(HAY * 2)) - len(tokens.encode(HAY))
    rows = []
    for number, length in enumerate(max_seq_lengths):
        hay = [HAY] * (length // per_sentence - 2)
        hay.insert(len(hay) * (number + 1) // 4, f"The number is {('one', 'two', 'three')[number % 3]}. ")
        rows.append({"text": "".join(hay), "answer": number % 3})
    return {"test": datasets.Dataset.from_list(rows)}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and room for the longest document."""
    folder = tmp_path_factory.mktemp("long") / "hf"
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCAB, **sizes, num_key_value_heads=2, max_position_embeddings=20000, initializer_range=0.2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def package(checkpoint: Path) -> Path:
    folder = checkpoint.parent / "onnx"
    run_python(
        ["-m", BUILDER, "-i", checkpoint, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", checkpoint.parent / "c"]
    )
    return folder


@pytest.mark.long
def test_needles_of_any_length_score_what_one_whole_pass_gives(checkpoint: Path, package: Path, tmp_path: Path) -> None:
    (tmp_path / "hay.py").write_text(HAY, encoding="utf-8")
    (tmp_path / "needle.yaml").write_text(TASK, encoding="utf-8")
    given = {"max_seq_lengths": list(LENGTHS), "tokenizer": str(checkpoint)}
    tasks = load_tasks(["needle"], str(tmp_path), metadata=given)
    settings = EvaluationSettings.parse({"tasks": ["needle"], "bootstrap_iters": 0})
    with OrtLM(str(package), engine={"chunk_size": 512}) as lm:
        samples = run_tasks(lm, tasks, settings)["samples"]["needle"]
        counters = lm.session.counters
    contexts = [str(sample["arguments"][0][0]) for sample in samples]
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), LlamaForCausalLM.from_pretrained(checkpoint).eval()
    ids = [tokenizer(context).input_ids for context in contexts]
    assert [0.85 < len(tokens) / length <= 1 for tokens, length in zip(ids, LENGTHS, strict=True)] == [True] * 3
    assert counters.steps >= counters.tokens_fed // 512
    assert LENGTHS[-1] < counters.tokens_fed == counters.tokens_distinct  # a document is fed once for three choices
    for context, tokens, sample in zip(contexts, ids, samples, strict=True):
        for choice, answer in zip((" one", " two", " three"), sample["resps"], strict=True):
            whole = tokenizer(context + choice).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0, len(tokens) - 1 : -1]
            targets = torch.tensor(whole[len(tokens) :])[:, None]
            expected = logits.double().log_softmax(-1).gather(1, targets).sum().item()
            assert answer[0][0] == pytest.approx(expected, abs=1e-4)
