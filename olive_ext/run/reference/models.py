"""Opens the two models of an evaluation with a reference."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.config import EvaluationConfig, ModelConfig
from olive_ext.model import locate
from olive_ext.run.opening import context_length, kind_of, open_compared, open_model
from olive_ext.run.reference.observer import Listener

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM

GENERATED = "generated.jsonl"
"""The reference's greedy answers, beside its records."""


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
    """Both models of `config`. Every model that is given is the caller's to close, but for `beside`."""

    def __init__(self, config: EvaluationConfig, progress: bool = False) -> None:
        self._config = config
        self._progress = progress
        self._records: Path | None = None
        self._length = config.max_length

    def reference(self, listener: Listener | None) -> LM:
        """The reference alone. With a listener what it says is recorded, and its generations are told.

        It then gets the evaluated model's tokenizer, which spells alike, and windows that fit both models. Raises
        `ConfigError` where the tokenizers differ.
        """
        config = reference_config(self._config)
        if listener is None:
            is_other_kind = kind_of(config) != kind_of(self._config)
            return open_model(config.model_copy(update={"model_args": {}}) if is_other_kind else config, self._progress)
        self._check_tokenizers(config)
        return self._recording(config.model_copy(update={"tokenizer": self._tokenizer()}), listener)

    def candidate(self, listener: Listener | None) -> LM:
        """The evaluated model. With a listener its targets are compared with the reference, and told."""
        if listener is None:
            return open_model(self._config, self._progress)
        config = self._config.model_copy(update={"max_length": self._length})
        return open_compared(config, self._progress, observer=listener, reference=self._compared_with())

    def beside(self, candidate: Any, listener: Listener) -> LM:
        """The reference that is resident beside `candidate`, for generations, which are told; closed with it."""
        return candidate.over(candidate.session.reference, listener)

    def _compared_with(self) -> Any:
        """The records where there are any; else what opens the reference beside the candidate."""
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

    def _recording(self, config: EvaluationConfig, listener: Listener) -> LM:
        from olive_ext.backends.kept_generations import Generations, Overheard, RememberingLM

        overheard, reference = Overheard(listener), self._config.reference
        assert reference is not None
        record_to = {
            "folder": reference.records_dir or str(records_root()),
            "top": reference.top,
            "drawn": reference.drawn,
            "seed": config.seed or 0,
        }
        own = context_length(self._config)
        lm: Any = open_compared(config, self._progress, observer=overheard, record_to=record_to)
        if own is not None and own < lm.max_length:
            lm.close()
            config = config.model_copy(update={"max_length": own})
            lm = open_compared(config, self._progress, observer=overheard, record_to=record_to)
        if own is None or lm.max_length < own:
            self._length = lm.max_length
        self._records = lm.session.records.folder
        generations = Generations(self._records / GENERATED, {"model": lm.answers_key()})
        return RememberingLM(lm, overheard, generations, listener)

    def _tokenizer(self) -> str:
        return locate(self._config.model.path, self._config.model.onnx_file_name, self._config.tokenizer).tokenizer

    def _check_tokenizers(self, config: EvaluationConfig) -> None:
        from olive_ext.text.tokenizer import load_tokenizer
        from olive_ext.text.tokenizer_traits import refuse_other_tokenizer, tokenizer_traits

        path = config.model.path
        where = path if kind_of(config) == "hf" else locate(path, config.model.onnx_file_name).tokenizer
        traits, own = (tokenizer_traits(load_tokenizer(each)) for each in (where, self._tokenizer()))
        refuse_other_tokenizer(traits, own, path, self._config.model.path)
