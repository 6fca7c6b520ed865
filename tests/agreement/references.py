"""What answers are held against: whole forward passes elsewhere, in which nothing is cut, kept or shared.

transformers on the weights that an export was made from, or the export's own graph in a plain session. References of
pictures and sounds are in `tests/families`. Axes: S tokens, V vocabulary.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from olive_ext.session.requests import GenerationOutput, GenerationRequest
from tests.exports import Export
from tests.exports.plain import cached_logits, plain_logits

EOS = 1
STOPS = (EOS, *range(30, 42))
"""Ids that end a search: the tiny models hardly ever say 1."""

RATE = 16000
BY_THE_TOKEN = ("dynamic", "fed_tokens", "rare_tokens", "batch_size")
"""Forms of `tests.exports.step_wide` that have no two sides."""

Found = tuple[list[tuple[int, ...]], list[float]]
"""Sequences of a search up to a stop id, the best first, and their scores where it has beams."""


class Reference(ABC):
    """One model."""

    answers_by_generate = False
    """Whether greedy answers are those of transformers' `generate`, which may not be the most likely tokens of a pass
    over the whole text."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[int], given: Any) -> Any:
        """Log-probabilities [S, V] after each token, in float64; `given` is what else the request has."""

    def given(self, request: Any) -> Any:
        """What a request has besides text: pictures, sounds or a source."""
        return ()

    def ids(self, text: Any, given: Any = ()) -> list[int]:
        """The tokens of a prompt."""
        return list(text)

    def scored(self, context: Any, target: Any, given: Any = ()) -> tuple[list[float], bool]:
        """Log-probabilities of the target's tokens, and whether each is the most likely one. The last token is not fed:
        nothing follows it, and a model whose factors depend on the length would have others."""
        before = self.ids(context, given)
        whole = self.ids(context + target, given) if isinstance(context, str) else [*before, *target]
        assert whole[: len(before)] == before
        logprobs_SV = self.logprobs(whole[:-1], given)[len(before) - 1 :]
        scores = [float(row_V[token]) for row_V, token in zip(logprobs_SV, whole[len(before) :], strict=True)]
        return scores, list(logprobs_SV.argmax(-1)) == whole[len(before) :]

    def score(self, context: Any, target: Any, given: Any = ()) -> list[float]:
        """The first of `scored`."""
        return self.scored(context, target, given)[0]

    def continues(self, ids: Sequence[int], given: Any, tokens: Sequence[int], most: int) -> bool:
        """Whether `tokens` are the greedy answer of at most `most`: each is the most likely one after those before it,
        and a shorter answer is followed by the end-of-sequence token."""
        best = [int(token) for token in self.logprobs([*ids, *tokens], given).argmax(-1)[len(ids) - 1 :]]
        return best[:-1] == list(tokens) and (len(tokens) == most or best[-1] == EOS)

    def below_the_best(self, ids: Sequence[int], given: Any, output: GenerationOutput) -> float:
        """How far an answer's tokens, and the one that ended it, are from the most likely ones, in nats."""
        tokens = [*output.tokens, *([] if output.stop_id is None else [output.stop_id])]
        rows = self.rows_after(ids, tokens[:-1], given)
        return max(float(row_V.max() - row_V[token]) for row_V, token in zip(rows, tokens, strict=True))

    def rows_after(self, ids: Sequence[int], tokens: Sequence[int], given: Any) -> Sequence[Any]:
        """Log-probabilities [V] after a prompt, and after each token of its answer."""
        rows: Sequence[Any] = self.logprobs([*ids, *tokens], given)[len(ids) - 1 :]
        return rows

    def searched(self, request: GenerationRequest, stops: Sequence[int]) -> Found:
        """What transformers' `generate` answers."""
        raise NotImplementedError


def normal(logits_SV: Any) -> Any:
    """Log-probabilities, in float64."""
    logits_SV = np.asarray(logits_SV).astype(np.float64)
    largest_S1 = logits_SV.max(-1, keepdims=True)
    return logits_SV - largest_S1 - np.log(np.exp(logits_SV - largest_S1).sum(-1, keepdims=True))


class Plain(Reference):
    """The export's own graph, untouched, filled up to whole `groups` of rows."""

    def __init__(self, export: Export, group: int = 1) -> None:
        self._export, self._group = export, group

    def logprobs(self, tokens: Sequence[int], given: Any = ()) -> Any:
        filled = [*tokens, *[5] * (-len(tokens) % self._group)]
        return normal(plain_logits(self._export, filled))[: len(tokens)]


class Alone(Plain):
    """That graph over each text by itself, up to each token of an answer; or `by_the_token`, where answers are what a
    cache says that no step computes anew, as in transformers' `generate` for dynamic NTK."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        self._passed = lru_cache(maxsize=512)(super().logprobs)
        self._by_the_token = export.name.split()[0] in BY_THE_TOKEN

    def logprobs(self, tokens: Sequence[int], given: Any = ()) -> Any:
        return self._passed(tuple(tokens))

    def rows_after(self, ids: Sequence[int], tokens: Sequence[int], given: Any) -> list[Any]:
        before = [list(tokens[:at]) for at in range(len(tokens) + 1)]
        if self._by_the_token:
            return [normal(cached_logits(self._export, list(ids), own)[None])[0] for own in before]
        return [self.logprobs([*ids, *own])[-1] for own in before]


def load(folder: Path) -> Any:
    """transformers' model of a folder, in fp32."""
    import torch
    import transformers

    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()


class Causal(Reference):
    """A decoder of transformers. One that is forgetful is loaded anew for each text: dynamic frequencies remember the
    longest."""

    def __init__(self, folder: Path, *, answers_by_generate: bool = False, is_forgetful: bool = False) -> None:
        self._folder, self.answers_by_generate, self._is_forgetful = folder, answers_by_generate, is_forgetful
        self._kept: Any = None

    @property
    def model(self) -> Any:
        if self._kept is None or self._is_forgetful:
            self._kept = load(self._folder)
        return self._kept

    def ids(self, text: Any, given: Any = ()) -> list[int]:
        if not isinstance(text, str) and isinstance(text[0], int):
            return list(text)
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self._folder)
        if isinstance(text, str):
            return list(tokenizer.encode(text))
        return list(tokenizer.apply_chat_template(list(text), add_generation_prompt=True, return_dict=False))

    def logprobs(self, tokens: Sequence[int], given: Any = ()) -> Any:
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1).numpy()

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens up to the end-of-sequence token."""
        return list(self.searched(GenerationRequest(prompt, num_tokens), (EOS,))[0][0])

    def searched(self, request: GenerationRequest, stops: Sequence[int]) -> Found:
        import torch

        prompt = torch.tensor([self.ids(request.prompt)])
        given = {"inputs": prompt, "attention_mask": torch.ones_like(prompt)}
        return searched(self.model, given, prompt.shape[1], request, stops)


def searched(model: Any, inputs: dict[str, Any], begin: int, request: Any, stops: Sequence[int], **more: Any) -> Found:
    """transformers' search for a request, without what a model's own `generate` adds; answers begin at `begin`."""
    import torch
    from transformers import GenerationConfig
    from transformers.generation import GenerationMixin

    names = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
    search = {name: getattr(request, name) for name in names} if request.num_beams > 1 else {}
    settings = GenerationConfig(
        **search,
        **more,
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=list(stops),
        pad_token_id=0,
        decoder_start_token_id=model.config.decoder_start_token_id if model.config.is_encoder_decoder else None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        found = GenerationMixin.generate(model, **inputs, generation_config=settings)
    answers = [row[begin:] for row in found.sequences.tolist()]
    ends = [next((place for place, token in enumerate(one) if token in stops), len(one)) for one in answers]
    scores = found.sequences_scores.tolist() if search else []
    return [tuple(one[:end]) for one, end in zip(answers, ends, strict=True)], scores


def noise(seed: int, seconds: float) -> Any:
    """Samples."""
    return np.random.default_rng(seed).normal(scale=0.1, size=int(RATE * seconds)).astype(np.float32)


def features(samples: Any) -> Any:
    """What transformers' extractor makes of samples for Whisper: [mels, frames]."""
    import transformers

    extractor: Any = transformers.WhisperFeatureExtractor(feature_size=80)
    return extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0]


class EncoderDecoder(Reference):
    """An encoder-decoder of transformers; `given` is what its encoder takes. `lists` are Whisper's of tokens that it
    must not say."""

    def __init__(self, folder: Path, lists: dict[str, list[int]] | None = None) -> None:
        self.model, self._lists = load(folder), lists or {}
        self.answers_by_generate = bool(lists)
        self.start: int = self.model.config.decoder_start_token_id
        self._folder = folder
        self._encoded: dict[bytes, Any] = {}

    @cached_property
    def _tokenizer(self) -> Any:
        import transformers

        return transformers.AutoTokenizer.from_pretrained(self._folder)

    def given(self, request: Any) -> Any:
        if request.audio:
            return features(request.audio[0][0])
        return self._tokenizer.encode(request.source) if isinstance(request.source, str) else request.source

    def ids(self, text: Any, given: Any = ()) -> list[int]:
        if not isinstance(text, str):
            return list(text)
        return [self.start, *self._tokenizer.encode(text, add_special_tokens=False)]

    def logprobs(self, tokens: Sequence[int], given: Any) -> Any:
        import torch

        key = np.array(given).tobytes()
        with torch.inference_mode():
            if key not in self._encoded:
                self._encoded[key] = self.model.get_encoder()(torch.tensor(given)[None])
            decoded = self.model(encoder_outputs=self._encoded[key], decoder_input_ids=torch.tensor([list(tokens)]))
        return decoded.logits[0].double().log_softmax(-1).numpy()

    def searched(self, request: GenerationRequest, stops: Sequence[int]) -> Found:
        import torch

        name = "input_features" if self.model.config.model_type == "whisper" else "inputs"
        inputs = {name: torch.tensor(self.given(request))[None]}
        if name == "inputs":
            inputs["attention_mask"] = torch.ones_like(inputs[name])
        return searched(self.model, inputs, 1, request, stops, **self._lists)


@cache
def causal(folder: Path) -> Causal:
    """Loaded once."""
    return Causal(folder)


@cache
def encoder_decoder(folder: Path) -> EncoderDecoder:
    """Loaded once."""
    return EncoderDecoder(folder)
