"""What a user may say about the reference: the model that the evaluated one is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from olive_ext.config.base import PositiveInt, not_bool, word
from olive_ext.config.model import ModelConfig, ProviderOptions, ProviderRequest

INPUT_MODEL = "input_model"
"""Stands for the model that an Olive workflow started from."""


def _input_model(value: Any) -> Any:
    """Gives back the word where Olive made an absolute path of it: see `base.word`."""
    is_word = isinstance(value, str) and Path(value) == Path.cwd() / INPUT_MODEL
    return INPUT_MODEL if is_word else value


class ReferenceConfig(ModelConfig):
    """The reference model and how it is run. A text alone is its `path`."""

    path: Annotated[str, BeforeValidator(_input_model)]
    """As `model.path`: an ONNX model, a package, a Hugging Face model; or "input_model" in an Olive recipe: the model
    the workflow started from."""

    execution_provider: ProviderRequest | None = None
    """Execution provider of the reference. None takes that of the evaluated model."""

    provider_options: ProviderOptions | list[ProviderOptions] | None = None
    """Options of the reference's providers. None takes those of the evaluated model where `execution_provider` is its
    too."""

    mode: Annotated[Literal["auto", "resident", "recorded"], BeforeValidator(word)] = "auto"
    """"resident" keeps both models open and compares whole distributions. "recorded" runs the reference alone first and
    keeps a compact form of its distributions on disk, for this and later runs. "auto" is "resident" where both models
    fit in the free memory and neither speed nor memory is asked for."""

    records_dir: str | None = None
    """Folder of the records. None takes `olive_ext/records` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""

    top: PositiveInt | None = None
    """Recorded: the most likely tokens of a position that are kept with their log-probabilities. None takes a number
    by the vocabulary: all of at most 2048 tokens, else 16 to 64, so that records take 2 % of the logits."""

    drawn: Annotated[int, Field(ge=2), BeforeValidator(not_bool)] | None = None
    """Recorded: tokens drawn from the rest of a position's distribution, from which the rest of the divergence is
    estimated. None takes as many as `top`."""

    @property
    def is_input_model(self) -> bool:
        """Whether the workflow has yet to say which model this is."""
        return self.path == INPUT_MODEL


def _from_text(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Reference = Annotated[
    ReferenceConfig,
    BeforeValidator(_from_text, json_schema_input_type=str | ReferenceConfig),
    Field(description="a path or a mapping"),
]
"""What a recipe may say: a path, or the mapping."""
