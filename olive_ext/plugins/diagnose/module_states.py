"""What the modules of a Hugging Face model return for a text, and the same model with rotary positions of the other
kind. Knows no ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.hf_runner import PlainPass
from olive_ext.model.files.constants import Constants
from olive_ext.model.files.damage import replace_weights

EMBEDDED, NORMED = "embeddings", "last hidden states"
"""Names in `states_of` of the inputs of the first layer and of the head."""

_TURNED = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Modules whose outputs rotary positions rotate, or that are scaled before."""

Rotated = Literal["halves", "neighbours"]
States = dict[str, npt.NDArray[np.float32]]


def layers_of(plain: PlainPass) -> str:
    """The name of the module that holds the decoder's layers; empty where there is none of their number."""
    import torch

    model = plain.model
    number = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    modules = model.get_decoder().modules() if hasattr(model, "get_decoder") else ()
    lists = {id(part) for part in modules if isinstance(part, torch.nn.ModuleList) and len(part) == number}
    return next((name for name, part in model.named_modules() if id(part) in lists), "")


def states_of(plain: PlainPass, tokens: Sequence[int]) -> States:
    """What each module returns for S `tokens` [S, size], by its name, in the order of the computation; by the names
    `EMBEDDED` and `NORMED` what the first layer and the head are given. Modules whose output has no row for each
    token are left out."""
    states: States = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: object, inputs: Any, output: Any = None, result: Any = None) -> None:
            value = result if result is not None else output
            _keep(states, name, len(tokens), value if value is not None else inputs)

        return hook

    modules = dict(plain.model.named_modules())
    hooks = [part.register_forward_hook(keep(name)) for name, part in modules.items() if name]
    hooked = {EMBEDDED: modules.get(f"{layers_of(plain)}.0"), NORMED: plain.model.get_output_embeddings()}
    hooks += [part.register_forward_pre_hook(keep(name)) for name, part in hooked.items() if part is not None]
    try:
        plain.run(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def reweight(plain: PlainPass, model: Constants) -> bool:
    """What `replace_weights` returns for a graph and the module's parameters. A head that is its table becomes one of
    its own."""
    import torch

    plain.untie_head()
    tensors = {name: one.detach() for name, one in plain.model.named_parameters()}
    arrays = {name: one.float().cpu().numpy() for name, one in tensors.items()}
    result = replace_weights(arrays, model)
    for name, one in tensors.items():
        one.copy_(torch.from_numpy(arrays[name]))
    return result


def regroup(plain: PlainPass, rotated: Rotated) -> None:
    """Makes rotary positions rotate `rotated` where the model rotates the other: the first r numbers of each head in
    halves (i with i + r / 2), or neighbours (2 i with 2 i + 1). The weights of queries and keys are reordered."""
    config = plain.config
    share = {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor") or 1.0
    size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    turned = np.arange(int(size * share))
    halves = turned.reshape(2, -1).T if rotated == "halves" else turned.reshape(-1, 2).T
    order = [*halves.reshape(-1).tolist(), *range(len(turned), size)]
    for name, part in plain.model.named_modules():
        for tensor in part.parameters(recurse=False) if name.rpartition(".")[2] in _TURNED else ():
            tensor.data = tensor.data.view(-1, size, *tensor.shape[1:])[:, order].reshape(tensor.shape)


def _keep(states: States, name: str, num_tokens: int, value: Any) -> None:
    """Keeps a module's first output, or its input, where that has a row for each token."""
    import torch

    value = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2 or name in states:
        return
    rows = value[0] if value.ndim > 2 and len(value) == 1 else value
    if len(rows) == num_tokens:
        kept = rows.detach().clone()  # what comes after may write into it, as OLMo's clipping does
        states[name] = kept.reshape(num_tokens, -1).float().cpu().numpy()
