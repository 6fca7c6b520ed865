"""A checkpoint's weights replaced by those that a quantized graph of it holds."""

from __future__ import annotations

import numpy as np

from olive_ext.engine.runners.hf_runner import PlainPass
from olive_ext.graph.nodes import QUANTIZING
from olive_ext.model.files.constants import Constants, checkpoint_pairs, float_weights, is_one

_ROUNDED = 0.7
"""The relative error below which a weight was only rounded: with 2 bits it is 0.5 and less, with rotations 1.4."""


def reweight(plain: PlainPass, model: Constants) -> bool:
    """Writes the decoded values of a graph's quantized weights into the module of its checkpoint, of which a tied head
    becomes one of its own. Returns whether the graph should then compute what the module does: everything that is
    rounded in it is a weight that pairs and is near, its other constants, which smoothing would change, are the
    checkpoint's, and no adapter (as PEFT and onnxruntime-genai name them) adds to them."""
    import torch

    plain.untie_head()
    parameters = {name: one.detach() for name, one in plain.model.named_parameters()}
    tensors = {name: one.float().cpu().numpy() for name, one in parameters.items()}
    is_exact = not any("lora_" in name for name in float_weights(model))
    for name, array in model.floats.items():
        is_exact &= name not in tensors or tensors[name].shape != array.shape or is_one(tensors[name], array)
    names = set()
    for name, (whole, grid, first) in checkpoint_pairs(tensors, model).items() if is_exact else ():
        decoded, _ = grid.rows(first, first + len(whole))
        is_exact &= bool(np.linalg.norm(decoded - whole) < _ROUNDED * np.linalg.norm(whole))
        whole[:] = decoded
        names.add(name.split(",")[0])
    for name, one in parameters.items():
        one.copy_(torch.from_numpy(tensors[name]))
    read = (model.parts.intersection(node.input) for node in model.model.graph.node if node.op_type in QUANTIZING)
    return is_exact and bool(names) and model.grids.keys() == names and all(read)
