"""Opens the two models of an evaluation with a reference. Knows no task and no results."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.config import EvaluationConfig
from olive_ext.model import ResolvedModel, resolve
from olive_ext.run.opening import open_compared, open_model, resolve_candidate
from olive_ext.run.reference.known_answers import KeptGenerations
from olive_ext.run.reference.observer import Observer

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.records import Records

GENERATED = "generated.jsonl"
"""The reference's greedy generations, in the folder of its records."""


def records_root() -> Path:
    """`olive_ext/records` in the user's cache folder: $XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "olive_ext" / "records"


class Models:
    """Opens both models of `config`; the caller closes them, except `resident`, which closes with the candidate."""

    def __init__(self, config: EvaluationConfig, progress: bool = False) -> None:
        self.config = config
        self.progress = progress
        self._records: Path | None = None
        self._length: int | None = None

    @cached_property
    def own(self) -> ResolvedModel:
        """The evaluated model."""
        return resolve_candidate(self.config)

    @cached_property
    def other(self) -> ResolvedModel:
        """The reference as it is run when both models are resident; see `ModelSettings.of_reference`."""
        return resolve(self.own.settings.of_reference(self.config.reference_patch()))

    @property
    def reference_kind(self) -> str:
        """ "onnx" or "hf"."""
        return self.other.kind

    def resolved(self, lm: LM | None) -> ResolvedModel:
        """The model that `lm` runs, which a caller may have opened; without one the evaluated model."""
        if lm is None:
            return self.own
        kind = {"kind": "hf"} if hasattr(lm, "model") else {}
        return getattr(lm, "resolved", None) or resolve(self.config.opening().model_copy(update=kind))

    def reference(self, observer: Observer | None) -> LM:
        """The reference alone, with the evaluated model's engine settings but none of its adapters. With an observer
        its distributions are recorded, and its generations kept.

        It then gets the evaluated model's tokenizer, which spells alike, and windows that fit both models. Raises
        `ConfigError` where the tokenizers differ.
        """
        alone = self.other.patched({"engine": self.own.settings.engine.model_copy(update={"adapters": []})})
        if observer is None:
            is_other_kind = alone.kind != self.own.kind
            config = self.config.model_copy(update={"model_args": {}}) if is_other_kind else self.config
            return open_model(alone, config, self.progress)
        self._check_tokenizers()
        return self._recording(alone.patched({"tokenizer": self.own.files.tokenizer}), observer)

    def candidate(self, observer: Observer | None) -> LM:
        """The evaluated model. With an observer its targets are compared with the reference."""
        if observer is None:
            return open_model(self.own, self.config, self.progress)
        more = {} if self._length is None else {"max_length": self._length}
        reference = self._compared_with()
        return open_compared(self.own, self.config, self.progress, observer=observer, reference=reference, **more)

    def resident(self, candidate: Any, observer: Observer) -> Any:
        """An `OrtLM` of the reference that is resident with `candidate`, with the candidate's tokenizer."""
        return candidate.over(candidate.session.reference, observer)

    def _compared_with(self) -> ResolvedModel | Records:
        """The records where the reference ran alone; else the reference, to be resident with the candidate."""
        from olive_ext.records import Records

        return self.other if self._records is None else Records.read(self._records)

    def _recording(self, model: ResolvedModel, observer: Observer) -> LM:
        reference = self.config.reference
        assert reference is not None
        record_to = {
            "folder": reference.records_dir or str(records_root()),
            "top": reference.top,
            "drawn": reference.drawn,
            "seed": self.config.seed or 0,
        }
        own = self.own.context_length
        lm: Any = open_compared(model, self.config, self.progress, record_to=record_to)
        if own is not None and own < lm.max_length:
            lm.close()
            model = model.patched({"max_length": own})
            lm = open_compared(model, self.config, self.progress, record_to=record_to)
        if own is None or lm.max_length < own:
            self._length = lm.max_length
        self._records = lm.session.records.folder
        kept = KeptGenerations(self._records / GENERATED, {"model": lm.answers_key()}, observer)
        lm.observer, lm.known_answers = kept.observe, kept
        return lm

    def _check_tokenizers(self) -> None:
        from olive_ext.text.tokenizer import load_tokenizer
        from olive_ext.text.tokenizer_traits import refuse_other_tokenizer, tokenizer_traits

        both = self.other, self.own
        traits, own = (tokenizer_traits(load_tokenizer(model.files.tokenizer)) for model in both)
        refuse_other_tokenizer(traits, own, *(model.settings.model for model in both))
