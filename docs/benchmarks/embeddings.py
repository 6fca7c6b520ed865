"""Embeddings of a package beside sentence-transformers and the encoder of Olive's evaluator, by turns in one process.

    python docs/benchmarks/make_models.py models/smollm2 --shape smollm2-135m --precision fp32 \\
        --extra include_hidden_states=1
    python -m docs.benchmarks embeddings models/smollm2/hf models/smollm2/fp32

Needs mteb. Texts are distinct pieces of English of 4 to 64 words, once alone and once behind an instruction. All three
take the last token's hidden state and `--num-threads`. A turn encodes texts that no other turn has; what ours keeps
of a turn is dropped before the next one. Prints seconds of the processor, and the peers' by ours; raises where vectors
of one turn are not alike.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import parser_of, spread, table, timed, turns, write
from make_models import corpus

from olive_ext.config import ModelSettings
from olive_ext.config.embeddings import EmbeddingSettings
from olive_ext.model import resolve
from olive_ext.plugins.suites.mteb import TextEncoder

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
Encode = Callable[[Sequence[str]], Any]


def pieces(count: int) -> list[str]:
    """Distinct texts."""
    words, found, drawn = " ".join(corpus(())).split(), dict[str, None](), random.Random(7)
    at = 0
    while len(found) < count:
        length = drawn.randint(4, 64)
        found[" ".join(words[at : at + length])] = None
        at += length
    return list(found)


def sentence_transformers(folder: Path, threads: int) -> Encode:
    """The Hugging Face model with last-token pooling."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as models

    torch.set_num_threads(threads)
    body = models.Transformer(str(folder), model_kwargs={"dtype": torch.float32})
    pooling = models.Pooling(body.get_embedding_dimension(), pooling_mode="lasttoken")
    model = SentenceTransformer(modules=[body, pooling, models.Normalize()], device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=32, show_progress_bar=False)


def olives(package: Path, threads: int, copy: Path) -> Encode:
    """Olive's encoder, on a copy of the package (links) that asks for `threads`."""
    import onnxruntime as ort
    from olive.evaluator.mteb_ort import MTEBORTEvaluator, MTEBORTGenAIEvaluator

    for file in package.iterdir():
        (copy / file.name).symlink_to(file.resolve())
    encoder: Any
    if (config := copy / "genai_config.json").exists():
        content = json.loads(config.read_text(encoding="utf-8"))
        content["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = threads
        config.unlink()
        config.write_text(json.dumps(content), encoding="utf-8")
        encoder = MTEBORTGenAIEvaluator(str(copy))
    else:
        encoder = MTEBORTEvaluator(str(copy / "model.onnx"))
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        encoder.session = ort.InferenceSession(str(copy / "model.onnx"), options, ["CPUExecutionProvider"])
    if encoder.tokenizer.pad_token is None:
        encoder.tokenizer.pad_token = encoder.tokenizer.eos_token
    return lambda texts: encoder.encode([{"text": list(texts)}])


def main() -> None:
    """Prints a line for each round, and a table of medians."""
    parser = parser_of(__doc__, "hf", "package")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--texts", type=int, default=32, help="texts of a turn")
    given = parser.parse_args()
    texts = pieces(2 * given.texts * (given.rounds + 1))
    settings = ModelSettings.of({"model": str(given.package), "engine": {"num_threads": given.num_threads}})
    ours = TextEncoder(resolve(settings), EmbeddingSettings(pooling="last"))
    with tempfile.TemporaryDirectory() as copy:
        sides: dict[str, Encode] = {
            "ours": ours.encode,
            "sentence-transformers": sentence_transformers(given.hf, given.num_threads),
            "Olive": olives(given.package, given.num_threads, Path(copy)),
        }
        kinds = {"alone": "", "with an instruction": INSTRUCTION}
        seconds: dict[str, dict[str, list[float]]] = {kind: {side: [] for side in sides} for kind in kinds}
        for number, order in turns(sides, given.rounds):
            for kind, prompt in kinds.items():
                own, texts = [prompt + text for text in texts[: given.texts]], texts[given.texts :]
                ours.gc()
                runs = {side: timed(lambda side=side, own=own: sides[side](own)) for side in order}
                for side, (vectors, _, processor) in runs.items():
                    np.testing.assert_allclose(vectors, runs["ours"][0], atol=1e-4, err_msg=side)
                    if number:
                        seconds[kind][side].append(processor)
                told = ", ".join(f"{side} {processor:.2f} s" for side, (_, _, processor) in runs.items())
                print(f"round {number}, {kind}: {told}", flush=True)
    ours.close()
    rows = [
        (kind, spread(own["ours"]), *(f"{median(own[side]) / median(own['ours']):.2f}" for side in list(sides)[1:]))
        for kind, own in seconds.items()
    ]
    print(table(("texts", "ours, processor seconds", "sentence-transformers / ours", "Olive / ours"), rows))
    write(given.output, given, seconds=seconds)


if __name__ == "__main__":
    main()
