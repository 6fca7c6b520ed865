"""Forward passes of transformers over one text each, by which other runs are checked: numbers of tokens, and what every
module returns. Knows no step and no ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.hf.hf_model import (
    DEFAULT_LENGTH,
    context_length,
    forget_lengths,
    load_model,
    without_bars,
)
from olive_ext.model import ResolvedModel

EMBEDDED, NORMED = "embeddings", "last hidden states"
"""What the first layer and the head are given, in `PlainPass.states`."""

_TURNED = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Modules whose outputs rotary positions turn, or are scaled before."""

Rotated = Literal["halves", "neighbours"]

_LENGTHS = ("sliding_window", "original_max_position_embeddings")

States = dict[str, npt.NDArray[np.float32]]


class PlainPass:
    """The Hugging Face model of `model`, in its own type of numbers unless `dtype` names one, `changes` laid over the
    decoder's configuration; no cache, no batches, no trees. Raises `ModelError` where it cannot be loaded."""

    def __init__(
        self, model: ResolvedModel, dtype: str | None = None, changes: Mapping[str, Any] | None = None
    ) -> None:
        settings = model.settings
        trust = settings.trust_remote_code
        with without_bars():
            self._model: Any = load_model(
                settings.model, dtype or settings.dtype, settings.device, trust_remote_code=trust, changes=changes
            )[0]
        self._text: Any = self._model.config.get_text_config(decoder=True)
        self.context_length = context_length(self._model.config) or DEFAULT_LENGTH
        self.vocab_size = int(self._text.vocab_size)
        self.config: Mapping[str, Any] = self._text.to_dict()
        """The decoder's configuration."""

    @property
    def lengths(self) -> dict[str, int]:
        """The numbers of tokens by which the configuration tells texts or their parts apart, by their keys."""
        lengths: dict[str, int] = {}
        ropes = self.config.get("rope_parameters")
        entries = [self.config, *([ropes, *ropes.values()] if isinstance(ropes, Mapping) else [])]
        for entry in (entry for entry in entries if isinstance(entry, Mapping)):
            for name in _LENGTHS:
                if isinstance(entry.get(name), int):
                    lengths.setdefault(name, int(entry[name]))
        return lengths

    @property
    def lengths_beyond(self) -> list[int]:
        """Of texts that have several tokens beyond one of `lengths` each."""
        return [number + 2 + number // 4 for number in self.lengths.values()]

    @staticmethod
    def has_gpu() -> bool:
        """Whether a model without a device of its own would run on a GPU."""
        import torch

        return torch.cuda.is_available()

    def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """Log-probabilities in nats of all `tokens` but the first [S - 1]."""
        import torch

        with torch.inference_mode():
            logits_SV = self._run(tokens).logits[0, :-1].double()
            targets_S1 = torch.tensor(list(tokens[1:]), device=logits_SV.device)[:, None]
            found: npt.NDArray[np.float64] = logits_SV.log_softmax(-1).gather(1, targets_S1)[:, 0].cpu().numpy()
        return found

    @property
    def layers(self) -> str:
        """The name of the module that holds the decoder's layers; empty where there is none of their number."""
        import torch

        number = getattr(self._text, "num_hidden_layers", None)
        modules = self._model.get_decoder().modules() if hasattr(self._model, "get_decoder") else ()
        lists = {id(part) for part in modules if isinstance(part, torch.nn.ModuleList) and len(part) == number}
        return next((name for name, part in self._model.named_modules() if id(part) in lists), "")

    def states(self, tokens: Sequence[int]) -> States:
        """What each module returns for S `tokens` [S, size], by its name, in the order of the computation; by the names
        `EMBEDDED` and `NORMED` what the first layer and the head are given. Modules whose output has no row for each
        token are left out."""
        import torch

        states: States = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(_: object, given: Any, output: Any = None, result: Any = None) -> None:
                value = result if result is not None else output
                _keep(states, name, len(tokens), value if value is not None else given)

            return hook

        modules = dict(self._model.named_modules())
        hooks = [part.register_forward_hook(keep(name)) for name, part in modules.items() if name]
        given = {EMBEDDED: modules.get(f"{self.layers}.0"), NORMED: self._model.get_output_embeddings()}
        hooks += [part.register_forward_pre_hook(keep(name)) for name, part in given.items() if part is not None]
        try:
            with torch.inference_mode():
                self._run(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return states

    def regroup(self, rotated: Rotated) -> None:
        """Makes rotary positions turn `rotated` where the model turns the other: the first r numbers of each head in
        halves (i with i + r / 2), or neighbours (2 i with 2 i + 1). The weights of queries and keys are reordered."""
        ropes = self.config.get("rope_parameters")
        share = {**self.config, **(ropes or {})}.get("partial_rotary_factor") or 1.0
        size = int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])
        turned = np.arange(int(size * share))
        halves = turned.reshape(2, -1).T if rotated == "halves" else turned.reshape(-1, 2).T
        order = [*halves.reshape(-1).tolist(), *range(len(turned), size)]
        for name, part in self._model.named_modules():
            for tensor in part.parameters(recurse=False) if name.rpartition(".")[2] in _TURNED else ():
                tensor.data = tensor.data.view(-1, size, *tensor.shape[1:])[:, order].reshape(tensor.shape)

    def _run(self, tokens: Sequence[int]) -> Any:
        import torch

        forget_lengths(self._model)
        return self._model(input_ids=torch.tensor([list(tokens)], device=self._model.device))


def _keep(states: States, name: str, num_tokens: int, value: Any) -> None:
    """Keeps a module's first output, or what it is given, where that has a row for each token."""
    import torch

    value = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2 or name in states:
        return
    rows = value[0] if value.ndim > 2 and len(value) == 1 else value
    if len(rows) == num_tokens:
        kept = rows.detach().clone()  # what comes behind may write into it, as OLMo's clipping does
        states[name] = kept.reshape(num_tokens, -1).float().cpu().numpy()
