"""Logits of an export without the package under test: one forward pass, nothing cached, a plain session, on the CPU
or where the export says.

And the same of the Hugging Face model it was made from. What both hear or read first, where the family is an
encoder-decoder, is fixed: `SOURCE` or `FEATURES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.exports.catalog import Export
from tests.exports.text import VOCAB

SOURCE = [40, 77, 300, 41, 512, 7, 99]
"""Tokens that an encoder-decoder translates."""
FEATURES = (1, 80, 3000)
"""Shape of what Whisper hears: batch, mel bins, frames."""
_TYPES = {"int64": np.int64, "int32": np.int32, "float": np.float32, "float16": np.float16, "bool": np.bool_}
_TYPES |= {"int8": np.int8, "uint8": np.uint8}
_STEMS = ("past_states", "past_key_values")
_CAPACITY = 32
"""Places in caches that must have a size before the first token: windowed and static ones have at least the window."""


def features() -> np.ndarray:
    return np.random.default_rng(3).standard_normal(FEATURES, dtype=np.float32)


def plain_logits(export: Export, tokens: list[int], given: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
    """[S, V] in fp32, or [1, V] where the graph computes the last position only. `given`: inputs of its graphs that do
    not follow from the tokens, as features of pictures and positions that have a grid."""
    known: dict[str, np.ndarray] = {"input_ids": np.array([tokens]), **(given or {})}
    encoder = _find(export.path, "encoder/model.onnx", "encoder.onnx", "encoder_model.onnx")
    if encoder:
        source = {"input_ids": np.array([SOURCE]), "attention_mask": np.ones((1, len(SOURCE)))}
        outputs = _run(encoder, source | {"input_features": features(), "audio_features": features()}, export)
        known |= {name.replace("present", "past"): value for name, value in outputs.items()}
        known["encoder_hidden_states"] = outputs.get("last_hidden_state", outputs.get("encoder_hidden_states"))
        known["encoder_attention_mask"] = np.ones((1, len(SOURCE)))
    embedding = _find(export.path, "embedding/model.onnx", "embedding.onnx")
    if embedding:
        known |= _run(embedding, known, export)
    else:
        known["inputs_embeds"] = _embeddings(export.hf)[tokens][None]
    names = ("decoder/model.onnx", "decoder_model_merged.onnx", "decoder.onnx", "model.onnx")
    graph = _find(export.path, *names)
    assert graph, f"no decoder in {export.path}"
    if export.one_token:
        return np.stack(list(_step_by_step(graph, tokens, export)))
    outputs = _run(graph, _lengths(len(tokens)) | known, export)
    (logits,) = (value for name, value in outputs.items() if name.startswith("logits"))  # Olive's passes rename them
    return logits[0].astype(np.float32)


def cached_logits(export: Export, prompt: list[int], answer: list[int]) -> np.ndarray:
    """[V] in fp32 behind the answer: the prompt is fed whole, the answer by the token behind returned caches."""
    graph, cache, outputs = export.path / "model.onnx", dict[str, np.ndarray](), dict[str, np.ndarray]()
    num_fed = 0
    for tokens in (prompt, *([token] for token in answer)):
        num_fed += len(tokens)
        known = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, num_fed))}
        known["position_ids"] = np.arange(num_fed - len(tokens), num_fed)[None]
        outputs = _run(graph, known | cache, export)
        cache = {
            name.replace("present", "past_key_values"): value for name, value in outputs.items() if name != "logits"
        }
    return outputs["logits"][0, -1].astype(np.float32)


def _step_by_step(graph: Path, tokens: list[int], export: Export) -> Iterator[np.ndarray]:
    """[V] after each token."""
    cache: dict[str, np.ndarray] = {}
    for at, token in enumerate(tokens):
        one = {"input_ids": np.array([[token]]), "position_ids": np.array([[at]])}
        outputs = _run(graph, one | {"attention_mask": np.ones((1, at + 1))} | cache, export)
        yield outputs["logits"][0, -1]
        renamed = {name.replace("present", stem): value for name, value in outputs.items() for stem in _STEMS}
        cache = {name: value for name, value in renamed.items() if name.startswith("past")}


def hf_logits(export: Export, tokens: list[int]) -> np.ndarray:
    """[S, V] in fp32."""
    import torch

    from tests.agreement.references import causal

    model = causal(export.hf).model
    inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
    if export.family == "whisper":
        inputs = {"input_features": torch.from_numpy(features()), "decoder_input_ids": torch.tensor([tokens])}
    elif model.config.is_encoder_decoder:
        inputs = {"input_ids": torch.tensor([SOURCE]), "decoder_input_ids": torch.tensor([tokens])}
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits[0].float().numpy()


@lru_cache(maxsize=8)
def _session(graph: Path, names: tuple[str, ...]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    providers = [(name, {"use_tf32": "0"} if name.startswith("CUDA") else {}) for name in names]
    return onnxruntime.InferenceSession(graph, options, providers=providers)


def _find(package: Path, *names: str) -> Path | None:
    return next((package / name for name in names if (package / name).is_file()), None)


@lru_cache(maxsize=2)
def _embeddings(hf: Path) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(hf / "model.safetensors", "np") as weights:
        names = [name for name in weights.keys() if name.endswith("embed_tokens.weight")]  # noqa: SIM118 (not a dict)
        return weights.get_tensor(names[0]) if names else np.zeros((VOCAB, 1))


def _lengths(count: int) -> dict[str, np.ndarray]:
    """Every way of saying that `count` tokens stand behind nothing."""
    return {
        "attention_mask": np.ones((1, count)),
        "position_ids": np.arange(count)[None],
        "past_seq_len": np.array([[count - 1]]),
        "total_seq_len": np.array(count),
        "write_indices": np.array([0]),
        "nonpad_kv_seqlen": np.array([count]),
        "use_cache_branch": np.array([False]),
    }


def _run(graph: Path, known: dict[str, np.ndarray], export: Export) -> dict[str, np.ndarray]:
    """The graph's outputs by name; an input that is not known is an empty or a zero cache."""
    session = _session(graph, export.providers)
    feeds = {}
    for wanted in session.get_inputs():
        dtype = _TYPES[wanted.type.removeprefix("tensor(").removesuffix(")")]
        value = known.get(wanted.name.removeprefix("decoder_"))
        if value is None:
            value = np.zeros([_size(dimension, at, wanted.name, export) for at, dimension in enumerate(wanted.shape)])
        if wanted.name == "position_ids" and len(wanted.shape) == value.ndim + 1:  # text, height and width of mRoPE
            value = np.broadcast_to(value, (3, *value.shape))
        feeds[wanted.name] = np.ascontiguousarray(value.astype(dtype))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _size(dimension: int | str, at: int, name: str, export: Export) -> int:
    """What stands for a symbolic dimension of a cache or of absent pictures and sounds."""
    if isinstance(dimension, int):
        return dimension
    if dimension == "kv_cache_dim":
        config = json.loads((export.path / "genai_config.json").read_text(encoding="utf-8"))
        return int(config["model"]["decoder"]["head_size"])
    if at == 0:
        return 0 if name.endswith("_features") else 1
    return _CAPACITY if dimension in ("past_sliding_length", "max_seq_len") else 0
