"""Opens an engine on a resolved model, with the library that its runtime names. Knows no settings and no text."""

from __future__ import annotations

from pathlib import Path

from olive_ext.engine.engine import Engine
from olive_ext.model import ResolvedModel


def open_engine(model: ResolvedModel, *, profile_prefix: Path | None = None) -> Engine:
    """An engine for the decoder of `model`, which closing it releases.

    Each library is imported where it is needed. Raises `ModelError` for a model that cannot be scored or run,
    `ProviderError` for a provider that does not come up, and `ConfigError` for settings that the runtime cannot keep.
    `profile_prefix` makes ONNX Runtime write a profile.
    """
    runtime, _ = model.runtime
    if runtime == "transformers":
        from olive_ext.engine.runners.hf.hf_runner import open_hf_engine

        return open_hf_engine(model)
    if runtime == "genai":
        from olive_ext.engine.runners.genai.genai_model import open_genai_engine

        return open_genai_engine(model, profile_prefix=profile_prefix)
    from olive_ext.engine.runners.ort.opening import open_ort_engine

    return open_ort_engine(model, profile_prefix=profile_prefix)
