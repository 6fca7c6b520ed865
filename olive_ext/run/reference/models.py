"""Opens the two models of an evaluation with a reference. Knows no task and no results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.config import EvaluationConfig, ModelConfig
from olive_ext.model import locate
from olive_ext.run.opening import context_length, kind_of, open_compared, open_model
from olive_ext.run.reference.known_answers import KeptGenerations
from olive_ext.run.reference.observer import Observer

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM

GENERATED = "generated.jsonl"
"""The reference's greedy generations, in the folder of its records."""


def reference_config(config: EvaluationConfig) -> EvaluationConfig:
    """The evaluation of the reference: the same tasks and settings on the other model, without what is the evaluated
    model's own (adapters, provider options of another provider)."""
    reference = config.reference
    assert reference is not None
    other = reference.execution_provider
    options = config.provider_options if other is None else None
    model = ModelConfig(path=reference.path, kind=reference.kind, onnx_file_name=reference.onnx_file_name)
    return config.model_copy(
        update={
            "model": model,
            "reference": None,
            "model_class": None,
            "tokenizer": None,
            "execution_provider": config.execution_provider if other is None else other,
            "provider_options": options if reference.provider_options is None else reference.provider_options,
            "engine": config.engine.model_copy(update={"adapters": []}),
        }
    )


def records_root() -> Path:
    """`olive_ext/records` in the user's cache folder: $XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "olive_ext" / "records"


class Models:
    """Opens both models of `config`; the caller closes them, except `resident`, which closes with the candidate."""

    def __init__(self, config: EvaluationConfig, progress: bool = False) -> None:
        self._config = config
        self._progress = progress
        self._records: Path | None = None
        self._length = config.max_length

    def reference(self, observer: Observer | None) -> LM:
        """The reference alone. With an observer its distributions are recorded, and its generations kept.

        It then gets the evaluated model's tokenizer, which spells alike, and windows that fit both models. Raises
        `ConfigError` where the tokenizers differ.
        """
        config = reference_config(self._config)
        if observer is None:
            is_other_kind = kind_of(config) != kind_of(self._config)
            return open_model(config.model_copy(update={"model_args": {}}) if is_other_kind else config, self._progress)
        self._check_tokenizers(config)
        return self._recording(config.model_copy(update={"tokenizer": self._tokenizer()}), observer)

    def candidate(self, observer: Observer | None) -> LM:
        """The evaluated model. With an observer its targets are compared with the reference."""
        if observer is None:
            return open_model(self._config, self._progress)
        config = self._config.model_copy(update={"max_length": self._length})
        return open_compared(config, self._progress, observer=observer, reference=self._compared_with())

    def resident(self, candidate: Any, observer: Observer) -> Any:
        """An `OrtLM` of the reference that is resident with `candidate`, with the candidate's tokenizer."""
        return candidate.over(candidate.session.reference, observer)

    def _compared_with(self) -> Any:
        """The records where the reference ran alone; else the settings that open it resident with the candidate."""
        from olive_ext.records import Records

        if self._records is not None:
            return Records.read(self._records)
        config, reference = reference_config(self._config), self._config.reference
        assert reference is not None
        return {
            "model": config.model.path,
            "kind": config.model.kind,
            "onnx_file_name": config.model.onnx_file_name,
            "execution_provider": reference.execution_provider,
            "provider_options": reference.provider_options,
            "device": config.device,
        }

    def _recording(self, config: EvaluationConfig, observer: Observer) -> LM:
        reference = self._config.reference
        assert reference is not None
        record_to = {
            "folder": reference.records_dir or str(records_root()),
            "top": reference.top,
            "drawn": reference.drawn,
            "seed": config.seed or 0,
        }
        own = context_length(self._config)
        lm: Any = open_compared(config, self._progress, record_to=record_to)
        if own is not None and own < lm.max_length:
            lm.close()
            config = config.model_copy(update={"max_length": own})
            lm = open_compared(config, self._progress, record_to=record_to)
        if own is None or lm.max_length < own:
            self._length = lm.max_length
        self._records = lm.session.records.folder
        kept = KeptGenerations(self._records / GENERATED, {"model": lm.answers_key()}, observer)
        lm.observer, lm.known_answers = kept.observe, kept
        return lm

    def _tokenizer(self) -> str:
        return locate(self._config.model.path, self._config.model.onnx_file_name, self._config.tokenizer).tokenizer

    def _check_tokenizers(self, config: EvaluationConfig) -> None:
        from olive_ext.text.tokenizer import load_tokenizer
        from olive_ext.text.tokenizer_traits import refuse_other_tokenizer, tokenizer_traits

        path = config.model.path
        where = path if kind_of(config) == "hf" else locate(path, config.model.onnx_file_name).tokenizer
        traits, own = (tokenizer_traits(load_tokenizer(each)) for each in (where, self._tokenizer()))
        refuse_other_tokenizer(traits, own, path, self._config.model.path)
