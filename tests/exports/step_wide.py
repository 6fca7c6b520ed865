"""Exports edited so that something of a whole step decides for each of its rows, as no exporter at hand writes it.

`step_wide_export(form, exporter)` is a Llama whose embeddings, or logits, are scaled by one of `FORMS`: other
positions, rows, lengths or tokens of the same step change a row's numbers. "dynamic" has rotary tables that follow the
length, as transformers' dynamic NTK: its source is `hf_model("llama_dynamic")`. `step_wide_encoder(form)` does so with
an encoder's rows; `edited_encoder` and `padded_features` change what an encoder returns.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.exports.cache import once, source_of
from tests.exports.genai import genai_export
from tests.exports.hf import FAMILIES
from tests.exports.media import media_export
from tests.exports.mobius import mobius_export
from tests.exports.ropes import ORIGINAL
from tests.exports.text import CONTEXT

EXPORTERS = ("mobius", "genai")
SCALE = 1.7
RARE = 77
"""A token that changes every row of its step, in one of the forms."""


class Edit:
    """A graph and what is put in front of its nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.inputs = {value.name for value in self.graph.input}
        self._added: list[onnx.NodeProto] = []

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        name = f"step_wide_{len(self._added)}"
        names = [f"{name}_{at}" for at in range(outputs)]
        self._added.append(helper.make_node(operator, inputs, names, name, **attributes))
        return names[0]

    def name(self, value: str, name: str) -> None:
        """Give a value another name as well."""
        self._added.append(helper.make_node("Identity", [value], [name], f"{name}_named"))

    def constant(self, value: object, dtype: type = np.int64) -> str:
        name = f"step_wide_constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def scale_embeddings(self, factor: str) -> None:
        node = next(node for node in self.graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
        self.scale(node.output[0], factor)

    def scale(self, ours: str, factor: str) -> None:
        """Multiply a value by a factor."""
        self.after(ours, lambda edit, before: edit.add("Mul", before, factor))

    def after(self, ours: str, build: Callable[[Edit, str], str]) -> None:
        """Replace a value by what `build` makes of it."""
        node = next(node for node in self.graph.node if ours in node.output)
        node.output[list(node.output).index(ours)] = f"{ours}_before"
        made = build(self, f"{ours}_before")
        self.name(made, ours)
        self.finish(after=node)

    def finish(self, after: onnx.NodeProto | None = None) -> None:
        """Put the nodes that were added where their inputs are known."""
        nodes = list(self.graph.node)
        place = nodes.index(after) + 1 if after else 0
        del self.graph.node[:]
        self.graph.node.extend([*nodes[:place], *self._added, *nodes[place:]])
        self._added = []


def _factor(edit: Edit, condition: str) -> str:
    return edit.add("Where", condition, edit.constant(SCALE, np.float32), edit.constant(1.0, np.float32))


def _branch(edit: Edit, condition: str) -> str:
    """The same by an `If` whose branches hold constants."""

    def branch(name: str, value: float) -> onnx.GraphProto:
        tensor = numpy_helper.from_array(np.array(value, np.float32))
        node = helper.make_node("Constant", [], [name], value=tensor)
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [])])

    branches = {"then_branch": branch("scaled", SCALE), "else_branch": branch("unscaled", 1.0)}
    return edit.add("If", condition, **branches)


def _size(edit: Edit, name: str, axis: int) -> str:
    return edit.add("Gather", edit.add("Shape", name), edit.constant(axis))


def _row_sums(edit: Edit, mask: str = "attention_mask") -> str:
    return edit.add("ReduceSum", mask, edit.constant([1]), keepdims=0)


def _largest(edit: Edit, name: str) -> str:
    return edit.add("ReduceMax", name, keepdims=0)


def _above(edit: Edit, name: str, limit: int) -> str:
    return edit.add("Greater", name, edit.constant(limit))


def _largest_position(edit: Edit) -> None:
    """The last of all rows' positions; where none are given, the longest row of the mask."""
    longest = _largest(edit, "position_ids") if "position_ids" in edit.inputs else _largest(edit, _row_sums(edit))
    limit = ORIGINAL - 1 if "position_ids" in edit.inputs else ORIGINAL
    edit.scale_embeddings(_factor(edit, _above(edit, longest, limit)))


def _mask_sum(edit: Edit) -> None:
    """An `If` on the sum over all rows."""
    total = edit.add("ReduceSum", "attention_mask", keepdims=0)
    edit.scale_embeddings(_branch(edit, _above(edit, total, ORIGINAL)))


def _mask_width(edit: Edit) -> None:
    edit.scale_embeddings(_branch(edit, _above(edit, _size(edit, "attention_mask", 1), ORIGINAL)))


def _logits_of_long_steps(edit: Edit) -> None:
    """Nothing that is kept in a cache, but every logit of the step."""
    edit.scale("logits", _factor(edit, _above(edit, _largest(edit, _row_sums(edit)), ORIGINAL)))


def _batch_size(edit: Edit) -> None:
    """By arithmetic, without a comparison."""
    rows = edit.add("Cast", _size(edit, "input_ids", 0), to=TensorProto.FLOAT)
    edit.scale_embeddings(edit.add("Sqrt", rows))


def _fed_tokens(edit: Edit) -> None:
    """How many tokens the step feeds each row, whatever is behind them."""
    edit.scale_embeddings(_factor(edit, _above(edit, _size(edit, "input_ids", 1), 20)))


def _rare_tokens(edit: Edit) -> None:
    """Whether a token is anywhere in the step."""
    found = edit.add("Cast", edit.add("Equal", "input_ids", edit.constant(RARE)), to=TensorProto.INT64)
    edit.scale_embeddings(_factor(edit, _above(edit, edit.add("ReduceSum", found, keepdims=0), 0)))


def _own_position(edit: Edit) -> None:
    """None of these: each token by its own place, so that everything may be shared."""
    far = edit.add("Unsqueeze", _above(edit, "position_ids", ORIGINAL - 1), edit.constant([-1]))
    edit.scale_embeddings(_factor(edit, far))


def _dynamic(edit: Edit) -> None:
    """Tables of rotary positions whose base grows with the longest row, from `ORIGINAL` tokens on."""
    config = FAMILIES["llama_dynamic"].values
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    scaling = config["rope_parameters"]
    if "position_ids" in edit.inputs:
        length = edit.add("Add", _largest(edit, "position_ids"), edit.constant(1))
    else:
        length = _size(edit, "attention_mask", 1)
    length = edit.add("Cast", edit.add("Max", length, edit.constant(ORIGINAL)), to=TensorProto.FLOAT)
    number = lambda value: edit.constant(value, np.float32)  # noqa: E731
    grown = edit.add(
        "Sub", edit.add("Mul", length, number(scaling["factor"] / ORIGINAL)), number(scaling["factor"] - 1)
    )
    power = edit.add("Pow", grown, number(2 * half / (2 * half - 2)))
    base = edit.add("Mul", power, number(scaling["rope_theta"]))
    frequencies = edit.add("Pow", base, number(-np.arange(half) / half))
    angles = edit.add("Mul", number(np.arange(CONTEXT)[:, None]), frequencies)
    tables = {"cos": edit.add("Cos", angles), "sin": edit.add("Sin", angles)}
    for node in edit.graph.node:
        for place, name in enumerate(node.input):
            kind = next((kind for kind in tables if name.endswith(f"{kind}_cache")), None)
            if kind:
                node.input[place] = tables[kind]
    unused = [value for value in edit.graph.initializer if value.name.endswith(("cos_cache", "sin_cache"))]
    for value in unused:
        edit.graph.initializer.remove(value)
    edit.finish()


FORMS: dict[str, Callable[[Edit], None]] = {
    "largest_position": _largest_position,
    "mask_sum": _mask_sum,
    "mask_width": _mask_width,
    "logits_of_long_steps": _logits_of_long_steps,
    "batch_size": _batch_size,
    "fed_tokens": _fed_tokens,
    "rare_tokens": _rare_tokens,
    "dynamic": _dynamic,
    "own_position": _own_position,
}

ALIKE = ("own_position",)
"""Forms in which no row depends on another: mobius only, which has positions."""


def _largest_picture(edit: Edit) -> None:
    edit.scale("image_features", _factor(edit, _above(edit, _largest(edit, "image_grid_thw"), 6)))


def _number_of_pictures(edit: Edit) -> None:
    count = edit.add("Cast", _size(edit, "image_grid_thw", 0), to=TensorProto.FLOAT)
    edit.scale("image_features", edit.add("Sqrt", count))


def _longest_sound(edit: Edit) -> None:
    frames = _largest(edit, _row_sums(edit, "feature_attention_mask"))
    edit.scale("audio_features", _factor(edit, _above(edit, frames, 100)))


ENCODER_FORMS: dict[str, tuple[str, Callable[[Edit], None]]] = {
    "largest_picture": ("qwen2_5_vl", _largest_picture),
    "number_of_pictures": ("qwen2_5_vl", _number_of_pictures),
    "longest_sound": ("qwen3_asr", _longest_sound),
}
"""Families, and how their encoder's rows come to depend on what else it is given."""


def _flag(condition: Callable[[Edit], str]) -> Callable[[Edit, str], str]:
    """A number of one item is added to all features of a run where a condition is true of it."""

    def build(edit: Edit, own: str) -> str:
        factor = edit.add("Cast", condition(edit), to=TensorProto.FLOAT)
        return edit.add("Add", own, edit.add("Mul", edit.add("ReduceMax", own, keepdims=0), factor))

    return build


def _by_the_largest(edit: Edit, own: str) -> str:
    largest = _largest(edit, edit.add("Abs", "pixel_values"))
    return edit.add("Div", own, edit.add("Max", largest, edit.constant(1e-3, np.float32)))


def _quantized(edit: Edit, own: str) -> str:
    name = edit.add("DynamicQuantizeLinear", own, outputs=3)
    return edit.add("DequantizeLinear", name, name.removesuffix("0") + "1", name.removesuffix("0") + "2")


def _sixth(edit: Edit, own: str) -> str:
    """The fifth item gets the sum of the sixth."""
    zero, five, six = (edit.constant([value]) for value in (0, 5, 6))
    total = edit.add("ReduceSum", edit.add("Slice", own, five, six, zero), keepdims=0)
    places = edit.constant((np.arange(128) == 4)[:, None, None], np.float32)
    count = edit.add("Shape", "pixel_values", start=0, end=1)
    return edit.add("Add", own, edit.add("Mul", total, edit.add("Slice", places, zero, count, zero)))


LEAKS: dict[str, Callable[[Edit, str], str]] = {
    "from four items on": _flag(
        lambda edit: edit.add("GreaterOrEqual", _size(edit, "pixel_values", 0), edit.constant(4))
    ),
    "for eight items only": _flag(lambda edit: edit.add("Equal", _size(edit, "pixel_values", 0), edit.constant(8))),
    "scale by the largest value of a run": _by_the_largest,
    "dynamic quantization": _quantized,
    "the fifth item gets the sixth": _sixth,
}
"""What one item of a run does to the features of another, for some numbers of items, sizes or contents only."""


def edited_encoder(name: str, source: Path, build: Callable[[Edit, str], str]) -> Path:
    """The package with the features of its pictures replaced by what `build` makes of them."""

    def made(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (graph,) = folder.glob("vision_encoder/model.onnx")
        model = onnx.load(graph)
        Edit(model).after("image_features", build)
        onnx.save(model, graph)

    return once(f"edited-{re.sub(r'[^a-z]+', '-', name)}", [source.name, source_of("step_wide.py")], made)


ROWS, SIZE = 16, 64
"""Features of a picture of LLaVA 1.5."""

PADDED = {"mask": [False, True] + [True] * (ROWS - 1) + [False], "number": [True] * ROWS + [False, False]}
"""Which rows are no padding."""


def padded_features(form: str, names: Sequence[str], taken: Sequence[str]) -> Path:
    """LLaVA 1.5, whose encoder returns `names` [1, rows, 64], which add up to its features where they are no padding,
    with a mask or their number; and whose embedding graph takes the sum of `taken` [rows, 64]."""
    source, _ = media_export("llava_clip")

    def made(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        vision, embedding = (onnx.load(folder / f"{name}.onnx") for name in ("vision", "embedding"))
        _pad(Edit(vision), form, names)
        _take(Edit(embedding), taken)
        onnx.save(vision, folder / "vision.onnx")
        onnx.save(embedding, folder / "embedding.onnx")

    digest = [source.parent.name, form, *names, "takes", *taken, source_of("step_wide.py")]
    return once(f"padded-{form}-{len(names)}-{len(taken)}", digest, made)


def _pad(edit: Edit, form: str, names: Sequence[str]) -> None:
    real = PADDED[form]
    before = real.index(True)
    nothing = [np.full((count, SIZE), np.nan) for count in (before, len(real) - ROWS - before)]
    edges = [edit.constant(value, np.float32) for value in nothing]
    told = ([real], np.bool_, TensorProto.BOOL) if form == "mask" else ([ROWS], np.int64, TensorProto.INT64)
    (output,) = edit.graph.output
    own = output.name
    node = next(node for node in edit.graph.node if own in node.output)
    node.output[:] = ["tower_features"]
    rows = edit.add("Concat", edges[0], "tower_features", edges[1], axis=0)
    share = edit.add("Mul", edit.add("Unsqueeze", rows, edit.constant([0])), edit.constant(1 / len(names), np.float32))
    name = "feature_mask" if form == "mask" else "feature_lengths"
    for result, value in [*((one, share) for one in names), (name, edit.constant(*told[:2]))]:
        edit.name(value, result)
    edit.finish(after=node)
    del edit.graph.output[:]
    shapes = {**dict.fromkeys(names, (1, len(real), SIZE)), name: np.shape(told[0])}
    kinds = {**dict.fromkeys(names, TensorProto.FLOAT), name: told[2]}
    edit.graph.output.extend(helper.make_tensor_value_info(one, kinds[one], shape) for one, shape in shapes.items())


def _take(edit: Edit, names: Sequence[str]) -> None:
    for node in edit.graph.node:
        node.input[:] = ["placed_features" if name == "image_features" else name for name in node.input]
    edit.name(edit.add("Sum", *names), "placed_features")
    edit.finish()
    kept = [value for value in edit.graph.input if value.name != "image_features"]
    del edit.graph.input[:]
    kept += [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", SIZE]) for name in names]
    edit.graph.input.extend(kept)


def step_wide_encoder(form: str) -> Path:
    """The package of the form's family with its encoder edited."""
    family, edit = ENCODER_FORMS[form]
    source = media_export(family)[0]

    def made(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (graph,) = folder.glob("*_encoder/model.onnx")
        model = onnx.load(graph)
        edit(Edit(model))
        onnx.save(model, graph)

    return once(f"step-wide-{form}", [source.parent.name, source_of("step_wide.py")], made)


def step_wide_export(form: str, exporter: str) -> Path:
    """The edited package."""
    family = "llama_dynamic" if form == "dynamic" else "llama"
    source = mobius_export(family) if exporter == "mobius" else genai_export(family, None)

    def made(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.onnx*", "builder-cache"))
        model = onnx.load(source / "model.onnx")
        FORMS[form](Edit(model))
        onnx.save(model, folder / "model.onnx")
        file = folder / "genai_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config["model"]["context_length"] = CONTEXT
        file.write_text(json.dumps(config), encoding="utf-8")

    return once(f"step-wide-{form}-{exporter}", [source.name, source_of("step_wide.py")], made)
