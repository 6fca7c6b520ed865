"""Constants that should be equal are told from those that exporters and quantizers write otherwise."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from olive_ext.engine.runtimes import stated_type
from olive_ext.model.files import damage as of_files
from olive_ext.model.files.constants import Constants, apart, broken, outliers, pairs_of
from olive_ext.model.files.content import checkpoint_floats
from olive_ext.model.files.damage import (
    Damage,
    Texts,
    checkpoint_pairs,
    differing_numbers,
    differing_settings,
    numbers_against,
    rotary_tables,
)
from olive_ext.model.files.grids import Distance, distance
from olive_ext.model.types import GraphFiles, ModelFiles
from olive_ext.report.comparison import Comparison, Outcome
from olive_ext.report.verdict import verdict
from olive_ext.stats.paired_answers import compare_outcomes
from tests.exports.edited import change, weight
from tests.graph import quantized as graphs
from tests.refusals import tells

Array = np.ndarray
Edit = Callable[[Array], Array]
NUM_POSITIONS, LAYERS = 64, 4


def floats(dtype: Any = np.float32, seed: int = 0) -> dict[str, Array]:
    """A model's constants, by onnxruntime-genai's names."""
    rng = np.random.default_rng(seed)
    angles = np.arange(NUM_POSITIONS)[:, None] * 10.0 ** -np.linspace(0, 3, 8)
    arrays = {"model.embed_tokens.weight": rng.normal(size=(100, 16)), "cos_cache": np.cos(angles)}
    arrays |= {"sin_cache": np.sin(angles), "model.norm.weight": rng.uniform(0.5, 2, 16)}
    for layer in range(LAYERS):
        arrays[f"model.layers.{layer}.input_layernorm.weight"] = rng.uniform(0.5, 2, 16)
        arrays[f"model.layers.{layer}.attn.q_proj.bias"] = rng.normal(size=16)
        arrays[f"model.layers.{layer}.mlp.weight"] = rng.normal(size=(16, 16))
    return {name: array.astype(dtype) for name, array in arrays.items()}


def changed(name: str, edit: Edit, arrays: dict[str, Array] | None = None) -> dict[str, Array]:
    arrays = dict(floats() if arrays is None else arrays)
    return {**arrays, name: edit(arrays[name].copy())}


def differences(reference: dict[str, Array], model: dict[str, Array]) -> dict[str, str]:
    """The findings of `apart` and `broken`, in words by name."""
    others = apart(reference, model).found
    return {name: what.sentence(model[name]) for name, what in others.items()} | broken(reference, model)


def put(rows: Any, value: Any) -> Edit:
    def edit(array: Array) -> Array:
        array[rows] = value if not callable(value) else value(array[rows])
        return array

    return edit


NORM, TABLE = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
DAMAGE: list[tuple[str, Edit, str]] = [
    ("cos_cache", put(slice(50, None), lambda rows: 2 * rows), "rows 50 63 of 64"),
    ("sin_cache", lambda array: np.roll(array, 1, 0), "reference's"),
    (NORM, lambda array: array * np.float32(1.05), "0.05"),
    ("model.norm.weight", np.zeros_like, "reference's"),
    (TABLE, put(7, lambda row: row + 1), "row 7 of 100"),
    (TABLE, put([3, 90], np.nan), "2 rows 3 90 of 100 NaN"),
    ("model.layers.2.attn.q_proj.bias", np.zeros_like, "reference's"),
]


@pytest.mark.parametrize(("name", "edit", "what"), DAMAGE)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_damaged_constant_is_named_with_its_rows(name: str, edit: Edit, what: str, dtype: Any) -> None:
    ((found, how),) = differences(floats(), changed(name, edit, floats(dtype))).items()
    assert found == name
    assert tells(how, what)


@pytest.mark.parametrize(("name", "edit", "what"), DAMAGE)
def test_damage_is_found_whatever_texts_gave_unless_all_of_them_read_it(
    name: str, edit: Edit, what: str, tmp_path: Path
) -> None:
    files = saved(tmp_path, changed(name, edit), floats())
    assert damage(*files).findings.keys() == {name}
    near, is_vector = damage(*files, nats=1e-5), floats()[name].ndim == 1
    assert (name in near.findings, name in near.judged) == (not is_vector, is_vector)


def test_what_was_changed_on_purpose_is_no_damage() -> None:
    """Several constants differ after rotations, smoothing and folded norms, and the model computes the same."""
    rounded = {name: array.round(1) if "mlp" in name else array for name, array in floats().items()}
    exchanged = rounded | {TABLE: changed(TABLE, put([90, 91], lambda rows: rows[::-1]))[TABLE]}
    assert apart(floats(), exchanged).found.keys() == {TABLE}, "others were changed on purpose, and not all of its rows"
    assert TABLE not in apart(floats(), rounded).meant
    stacks = {f"model.layers.{layer}.mlp.experts": np.ones((4, 3, 5), np.float32) for layer in range(LAYERS)}
    spoiled = {name: np.concatenate([stack[:3], 5 - stack[3:]]) for name, stack in stacks.items()}
    assert apart(stacks, spoiled).found.keys() == stacks.keys(), "an expert of each layer, which no text need reach"
    assert apart(stacks, {name: 3 * stack for name, stack in stacks.items()}).meant.keys() == stacks.keys()


def test_channels_of_a_convolution_are_no_experts(tmp_path: Path) -> None:
    """Mamba's in another order, which each of its weights has, computes the same."""
    rng = np.random.default_rng(0)
    arrays = floats() | {
        f"layers.{layer}.conv1d.weight": rng.normal(size=(16, 1, 4)).astype(np.float32) for layer in range(LAYERS)
    }
    moved = {name: one[::-1].copy() if "conv1d" in name else one for name, one in arrays.items()}
    assert damage(*saved(tmp_path, moved, arrays), nats=1e-5).findings == {}


def test_rows_and_experts_are_damage_and_parts_of_all_rows_are_not(tmp_path: Path) -> None:
    """Every text reads some columns of all rows, as the values of a packed product; those of a head are tokens."""
    expert, product = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.weight"
    whole = floats() | {expert: floats()[product], "lm_head": floats()[TABLE].T}
    columns = put((slice(None), slice(12, None)), lambda part: 3 * part)
    own = changed(product, columns, whole)
    own = changed(expert, lambda array: array[::-1] * 5, own)
    own = changed("lm_head", put((slice(None), slice(90, None)), lambda part: 3 * part), own)
    found = damage(
        *saved(tmp_path, *({name: np.ascontiguousarray(one) for name, one in of.items()} for of in (own, whole)))
    )
    assert (found.findings.keys(), found.judged) == ({expert, "lm_head"}, (product,))


def edited(word: str, edit: Edit, arrays: dict[str, Array] | None = None) -> dict[str, Array]:
    """All constants of such a name edited."""
    return {name: edit(array) if word in name else array for name, array in (arrays or floats()).items()}


def without(*words: str) -> dict[str, Array]:
    return {name: array for name, array in floats().items() if not any(word in name for word in words)}


def rounded(array: Array) -> Array:
    """To 8 bits by rows, and stored as before."""
    steps = np.abs(array).max(-1, keepdims=True) / np.float32(127)
    return np.round(array / steps) * steps


HEALTHY = {
    "float16": floats(np.float16),
    "bfloat16": floats(ml_dtypes.bfloat16),
    "float32 of a checkpoint in bfloat16": {
        name: array.astype(np.float32) for name, array in floats(ml_dtypes.bfloat16).items()
    },
    "norms with 1 added, as Gemma's": edited("norm", lambda array: array + 1),
    "norms that AWQ has scaled": edited("norm", lambda array: array * np.linspace(0.5, 2, 16, dtype=np.float32)),
    "another exporter's names": {f"other.{name}": array for name, array in floats().items() if "norm" not in name},
    "weights of a fine-tuned checkpoint": {**floats(seed=1), **{n: a for n, a in floats().items() if "cache" in n}},
    "another model, of another rotary base": {**floats(seed=1), "cos_cache": floats()["cos_cache"] ** 2},
    "a table in integers": without("embed_tokens"),
    "a table that was in integers": edited("embed_tokens", rounded),
    "rotary tables that were in integers": edited("cos_cache", rounded),
    "a mask": {**floats(), "mask": np.triu(np.full((8, 8), -np.inf, np.float32), 1)},
    "no biases": without("bias"),
    "longer rotary tables": edited("cache", lambda array: np.concatenate([array, array[:9]])),
    "without a layer that runtimes ignore, as of several tokens at once": without("layers.3."),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_exporters_and_quantizers_change_is_no_damage(name: str) -> None:
    assert differences(floats(), HEALTHY[name]) == {}


def test_what_is_other_beside_such_changes_is_named() -> None:
    masked = np.array([0.5, -np.inf, 1.0], np.float32)
    reference = {**floats(), "lm_head.bias": masked}
    assert differences(reference, reference) == {}, "numbers that are none in both"
    assert differences(reference, {**reference, "lm_head.bias": masked.clip(-1)}).keys() == {"lm_head.bias"}
    for healthy in ("longer rotary tables", "weights of a fine-tuned checkpoint"):
        turned = changed("cos_cache", put(slice(50, None), 2), HEALTHY[healthy])
        assert differences(floats(), turned).keys() == {"cos_cache"}
    bias = "model.layers.2.attn.q_proj.bias"
    assert differences(floats(), without(bias)) == {bias: "is missing"}
    folded = without(NORM) | {name: np.ones_like(one) for name, one in without(NORM).items() if "norm" in name}
    assert broken(floats(), folded) == {}, "norms that were folded into products, and stored once"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("least", [-np.inf, -65504, -1e4])
def test_what_hides_positions_in_half_precision_is_the_infinity_of_float32(least: float) -> None:
    """onnxruntime's float16 of mobius's gemma4 and qwen3_5 was damaged beside the float32 that it was made of."""
    reference = {**floats(), "masked": np.array([np.finfo(np.float32).min, 0], np.float32)}
    half = {**floats(), "masked": np.array([least, 0], np.float16)}
    assert differences(reference, half) == {}
    assert differences(reference, {**half, "masked": -half["masked"]}).keys() == {"masked"}


def test_equal_vectors_that_are_stored_once_and_zeros_are_not_missing() -> None:
    ones = {name: np.ones_like(array) if "layernorm" in name else array for name, array in floats().items()}
    ones["model.layers.3.attn.q_proj.bias"] = np.zeros(16, np.float32)
    stored = {name: array for name, array in ones.items() if name not in (NORM, "model.layers.3.attn.q_proj.bias")}
    assert differences(ones, stored) == {}


STATED = [
    ({"dtype": "float16"}, -65600.0, f"config.json names float16, in which {NORM} overflows"),
    ({"torch_dtype": "float16"}, 65500.0, "config.json names float16"),
    ({"dtype": "bfloat16"}, 65600.0, "config.json names bfloat16"),
    ({}, 65600.0, "no file names one"),
]


def test_checkpoint_s_tensors_are_those_that_transformers_take(tmp_path: Path) -> None:
    """Sound parts of an index that was left over hid a broken whole file, and PyTorch's files were not read."""
    norm = torch.tensor(floats()[NORM]).bfloat16()
    torch.save({NORM: norm, "count": torch.ones(3, dtype=torch.int64)}, tmp_path / "pytorch_model.bin")
    assert list(differences(checkpoint_floats(tmp_path), changed(NORM, lambda array: 2 * array))) == [NORM]
    for place, name in enumerate(("part.safetensors", "other.safetensors", "model.safetensors")):
        tensors = checkpoint_floats(tmp_path)
        np.testing.assert_array_equal(tensors.pop(NORM), norm.float().numpy() * 2 ** max(0, place - 1))
        assert not tensors
        save_torch({NORM: norm * 2**place}, tmp_path / name)
        index = {"weight_map": {NORM: ("part.safetensors", "other.safetensors")[min(place, 1)]}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    np.testing.assert_array_equal(checkpoint_floats(tmp_path)[NORM], norm.float().numpy() * 4)
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "named.safetensors"}), encoding="utf-8")
    save_torch({NORM: norm.double(), TABLE: norm.to(torch.float8_e4m3fn)}, tmp_path / "named.safetensors")
    tensors = checkpoint_floats(tmp_path)
    assert list(differences(tensors, {**tensors, NORM: 2 * tensors[NORM]})) == [NORM]
    assert [one.dtype.itemsize for _, one in sorted(tensors.items())] == [1, 8]


@pytest.mark.parametrize(("stated", "largest", "shown"), STATED)
def test_type_that_a_checkpoint_names_is_stated_with_a_weight_that_overflows_in_it(
    stated: dict[str, str], largest: float, shown: str, tmp_path: Path
) -> None:
    """transformers take that type by themselves since 5.0, and answer NaN; comparisons run in float32."""
    save_file(changed(NORM, put(3, largest)), tmp_path / "model.safetensors")
    files = ModelFiles(tmp_path, tmp_path, {}, stated, "")
    assert stated_type(files) == shown
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    assert stated_type(files) == shown.split(",")[0], "whoever loads it reports the damage"
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert stated_type(files) == shown.split(",")[0]


def test_weights_farther_off_than_rounding_are_outliers_among_the_others() -> None:
    layers = {f"layer {n}": Distance(0.0, [], 8) for n in range(6)}
    assert outliers(layers) == ({}, set())
    far, meant = outliers({**layers, "layer 3": Distance(0.49, [], 8), "head": Distance(0.01, [2, 5], 8)})
    assert not meant
    assert [*far] == ["layer 3", "head"], "in one order, whatever the process"
    assert tells(far["layer 3"], "49 %")
    assert tells(far["head"], "2 rows 5 of 8")
    assert outliers(dict.fromkeys(layers, Distance(0.4, [], 8))) == ({}, set()), "all are, as AWQ's"
    kind = {f"down {n}": Distance(0.5, [], 8) for n in range(4)}
    assert outliers(layers | kind) == ({}, {*kind}), "a kind, which texts judge and the verdict names"


def saved(folder: Path, *models: onnx.ModelProto | dict[str, Any]) -> list[ModelFiles]:
    """The files of models, each in a folder of its own: of a graph, of a config.json, or of a checkpoint's arrays."""
    files = []
    for number, one in enumerate(models):
        at = file = folder / str(number)
        at.mkdir(parents=True, exist_ok=True)
        if isinstance(one, onnx.ModelProto):
            onnx.save(one, file := at / "model.onnx")
        elif TABLE in one:
            save_file(one, at / "model.safetensors")
        else:
            (file := at / "config.json").write_text(json.dumps(one), encoding="utf-8")
        files.append(ModelFiles(file, at, {}, {}, ""))
    return files


def forms() -> dict[str, tuple[onnx.ModelProto, onnx.ModelProto, str]]:
    """Graphs with a quantized weight, the float ones, and the names of what is stored for a number's block."""
    made = {f"{bits} bits, {z}": graphs.nbits(bits, 32, has_zero_points=z) for bits in (2, 4, 8) for z in (True, False)}
    made |= {"channels": graphs.qdq(None), "turned": graphs.qdq(None, transposed=True)}
    made |= {"blocks": graphs.qdq(32), "int4": graphs.qdq(32, int4=True), "blocks of outputs": graphs.qdq(8, axis=1)}
    pairs = {name: (one.model, graphs.plain(one.matrix.astype(np.float32)), "scale") for name, one in made.items()}
    for bits in (4, 8):
        table = graphs.table(bits, 16)
        pairs[f"table, {bits} bits"] = table.model, graphs.plain(table.matrix), "scale"
        pairs[f"table, {bits} bits"][1].graph.node[0].op_type = "Gather"
        del pairs[f"table, {bits} bits"][1].graph.node[0].input[0]
    return pairs


@pytest.mark.parametrize("form", forms())
def test_quantized_weight_is_compared_with_its_float_one_and_with_the_same_content(form: str, tmp_path: Path) -> None:
    """Its scales are no constants without a counterpart. An int4 model against itself had all of them "not
    compared"."""
    model, reference, name = forms()[form]
    other = copy.deepcopy(model)
    change(weight(other, name), lambda numbers: 2 * numbers)
    files = saved(tmp_path, model, reference, model, other)
    assert damage(files[0], files[1]) == damage(files[0], files[2]) == ({}, (), 0, math.inf)
    assert damage(*files[:2], vocab_sizes={graphs.NUM_INPUTS}, num_tokens=9).findings == {}, "inputs are no tokens"
    assert damage(files[0], files[3]).uncompared == 1


def distances(reference: Constants, model: Constants) -> dict[str, Distance]:
    return {name: distance(*pair) for name, pair in pairs_of(reference, model).items()}


@pytest.mark.parametrize("form", forms())
def test_damaged_weight_and_a_damaged_row_are_found_in_every_stored_form(form: str) -> None:
    row = (slice(None), 0) if form in ("blocks", "int4", "blocks of outputs") else 0
    assert_damage_is_found(*forms()[form], row)


def assert_damage_is_found(model: onnx.ModelProto, reference: onnx.ModelProto, name: str, row: Any) -> None:
    """Damage of all scales, whose tensor's name has `name`, and of those of one row of the weight."""
    own, usual = Constants(reference, Path()), distances(Constants(reference, Path()), Constants(model, Path()))
    assert usual
    assert all(one.share == 0 and not one.rows for one in usual.values())
    scales = weight(model, name)
    numbers = numpy_helper.to_array(scales)

    def damaged(edit: Edit) -> Distance:
        change(scales, lambda _: edit(numbers.copy()))
        return max(distances(own, Constants(model, Path())).values(), key=lambda one: (len(one.rows), one.share))

    assert damaged(lambda a: a * -3).share > 0.2
    assert damaged(put(row, lambda of_row: of_row * -3)).rows in ([0], [*range(8)])


@pytest.mark.parametrize(("part", "num_named"), [(slice(0), 0), (slice(40, 44), 1)])
@pytest.mark.parametrize("options", [{}, {"per_channel": True}])
@pytest.mark.parametrize("operator", ["Gather", "MatMul"])
@pytest.mark.parametrize(
    ("name", "known"),
    [("/lm_head/MatMul", ""), ("node_linear_28", ""), ("/output/MatMul", "/lm_head/MatMul")],
)
def test_what_is_quantized_in_each_step_is_compared(
    name: str, known: str, operator: str, options: dict[str, bool], part: slice, num_named: int, tmp_path: Path
) -> None:
    """ONNX Runtime's dynamic quantization of a table and a head: exchanged rows of rare tokens passed, later those of a
    head that its node's name did not tell, or that had another name in the reference."""
    table = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    reference = graphs.plain(table if operator == "Gather" else table.T.copy(), name)
    if operator == "Gather":
        reference.graph.node[0].op_type, reference.graph.node[0].input[:] = "Gather", ["w", "x"]
        reference.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    quantize_dynamic(reference, tmp_path / "int8.onnx", op_types_to_quantize=[operator], **options)
    own = onnx.load(tmp_path / "int8.onnx")
    reference.graph.node[0].name = known or name
    assert {node.op_type for node in own.graph.node} >= {operator + "Integer" * (operator == "MatMul")}
    axis = int(operator == "MatMul")
    change(weight(own, "w_quantized"), lambda rows: np.moveaxis(exchanged(np.moveaxis(rows, axis, 0), part), 0, axis))
    files = saved(tmp_path, own, reference)
    found = damage(*files, nats=1e-5, num_tokens=64)
    assert (len(found.findings), found.uncompared) == (num_named, 0)
    assert not damage(*files, num_tokens=40, vocab_sizes={64}).findings, "rows for no token"


@pytest.mark.parametrize("cut", ["alike", "by other names", "not"])
def test_every_graph_of_a_pipeline_is_compared(cut: str, tmp_path: Path) -> None:
    """The first alone was: an exchanged head, wrong tables and a window in the others passed; a window also where the
    reference's graphs had other names."""
    table, windowed = floats()[TABLE], decoder(setting("Attention", local_window_size=4))
    heads = [graphs.plain(rows.T.copy(), "/head/MatMul") for rows in (table, exchanged(table, slice(40, 44)))]
    stages = [with_arrays(decoder(), **{NORM: floats()[NORM]}), decoder(), heads[0]]
    damaged = [stages[0], windowed, heads[1]]
    whole = copy.deepcopy(stages[0])
    whole.graph.MergeFrom(stages[2].graph)
    model, *references = (
        replace(files[0], pipeline=("a", "b", "c"), weights=tuple(one.decoder for one in files[1:]))
        for files in (saved(tmp_path / str(place), *own) for place, own in enumerate((damaged, stages)))
    )
    reference = saved(tmp_path / "whole", whole)[0] if cut == "not" else references[0]
    if cut == "by other names":
        moved = [one.rename(one.with_name("stage.onnx")) for one in (reference.decoder, *reference.weights)]
        reference = replace(reference, decoder=moved[0], weights=tuple(moved[1:]))
    found = damage(model, reference, nats=1e-5, num_tokens=100)
    assert {name.rpartition(", ")[2] for name in found.findings} == {"../1/model.onnx", "../2/model.onnx"}, found
    assert damage(reference, reference, nats=1e-5).findings == {}
    assert damage(saved(tmp_path / "other", whole)[0], reference, nats=1e-5).findings == {}


def exchanged(rows: Array, part: slice) -> Array:
    return put(part, rows[part][::-1])(rows.copy())


@pytest.mark.parametrize("transposed", [False, True])
def test_scales_along_a_square_weight_s_other_axis_are_found(transposed: bool) -> None:
    """It was left out as a form that is not known, and a model whose one weight was so was green."""
    stored = graphs.qdq(None, transposed=transposed, num_outputs=graphs.NUM_INPUTS)
    (node,) = (node for node in stored.model.graph.node if node.op_type == "DequantizeLinear")
    found = []
    for axis in (int(not transposed), int(transposed)):
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("axis", axis))
        own, made = (Constants(model, Path()) for model in (graphs.plain(stored.matrix), stored.model))
        found += distances(own, made).values()
    assert found[0] == Distance(0.0, [], graphs.NUM_INPUTS)
    assert found[1].share > 0.2


PACKED: dict[str, tuple[list[str], dict[str, slice], set[str]]] = {
    "by the graph": (
        ["/model/layers.0/attn/qkv_proj/MatMul"],
        {f"model.layers.0.self_attn.{part}_proj.weight": slice(8 * n, 8 * n + 8) for n, part in enumerate("qkv")},
        {"/model/layers.0/attn/qkv_proj/MatMul, v_proj"},
    ),
    "by the graph, keys as values": (
        ["/model/layers.0/attn/qkv_proj/MatMul"],
        {f"model.layers.0.self_attn.{part}_proj.weight": own for part, own in (("q", slice(16)), ("k", slice(16, 24)))},
        {"/model/layers.0/attn/qkv_proj/MatMul, k_proj"},
    ),
    "by the checkpoint": (
        ["model/layers.0/mlp/gate_proj/MatMul_node_3", "model/layers.0/mlp/up_proj/MatMul_node_4"],
        {"model.layers.0.mlp.gate_up_proj.weight": slice(0, 48)},
        {"model/layers.0/mlp/up_proj/MatMul"},
    ),
    "experts": (
        ["model/layers.0/mlp/experts.0/up_proj/MatMul_node_3", "model/layers.0/mlp/experts.1/up_proj/MatMul_node_4"],
        {
            "model.layers.0.mlp.experts.0.up_proj.weight": slice(0, 24),
            "model.layers.0.mlp.experts.1.up_proj.weight": slice(24, 48),
        },
        {"model/layers.0/mlp/experts.1/up_proj/MatMul"},
    ),
    "other words": (
        ["/model/layers.0/mlp/gate_proj/MatMul", "/model/layers.0/attn/o_proj/MatMul"],
        {
            "model.layers.0.feed_forward.w1.weight": slice(0, 24),
            "model.layers.0.self_attn.out_proj.weight": slice(24, 48),
        },
        {"/model/layers.0/attn/o_proj/MatMul"},
    ),
    "a tied head": (["/lm_head/MatMul"], {"model.embed_tokens.weight": slice(0, 24)}, {"/lm_head/MatMul"}),
}


@pytest.mark.parametrize("form", PACKED)
def test_quantized_weights_are_held_against_a_checkpoint_s_tensors(form: str) -> None:
    """`check --against` passed a quantized model whose heads of values were exchanged, 12 nats apart."""
    names, tensors, told = PACKED[form]
    rows = np.random.default_rng(1).normal(size=(48, 64)).astype(np.float32)
    model = graphs.plain(rows[:24].T)
    for number, name in enumerate(names):
        with_product(model, name, rows[24 * number : 24 * number + 24].T)
    own = Constants(graphs.to_nearest(model, 8), Path())
    others = {"visual.blocks.0.attn.q_proj.weight": rows, "model.layers.1.self_attn.v_proj.weight": rows[::-1]}

    def far_from(tensors: dict[str, np.ndarray]) -> dict[str, Distance]:
        return {name: distance(*pair) for name, pair in checkpoint_pairs(tensors, own).items()}

    checkpoint = {name: rows[part] for name, part in tensors.items()}
    assert {one.share for one in far_from(others | checkpoint).values()} == {0.0}
    last = [*checkpoint][-1]
    checkpoint[last] = np.concatenate([checkpoint[last][:-8], rows[:8]])
    far = far_from(others | checkpoint)
    assert {name for name, one in far.items() if one.rows or one.share > 0.2} == told


@pytest.mark.parametrize("bits", [4, 8])
def test_the_norm_before_the_head_may_be_folded_into_it(bits: int, tmp_path: Path) -> None:
    """The builder counts it as a layer more. Its head at 8 bits was damaged beside the checkpoint's tensors."""
    rng, last = np.random.default_rng(1), "model.layers.2.final_norm_layernorm.weight"
    rows, norm = rng.normal(size=(24, 64)).astype(np.float32), np.exp(rng.normal(size=64)).astype(np.float32)
    model = with_arrays(graphs.plain((rows * norm).T), **{last: np.ones_like(norm)})
    model.graph.node[0].name = "/lm_head/MatMul"
    model.graph.node.append(helper.make_node("Mul", ["h", last], ["n"], "/model/layers.2/final_norm_layernorm"))
    (tmp_path / "1").mkdir()
    save_file({"lm_head.weight": rows, "model.norm.weight": norm}, tmp_path / "1" / "model.safetensors")
    found = damage(*saved(tmp_path, graphs.to_nearest(model, bits), {"hidden_size": 64}))
    assert (found.findings, last in found.judged) == ({}, True)


def lose(product: int, edit: Edit) -> Callable[[list[Array]], list[Array]]:
    return lambda rows: [edit(one) if place == product else one for place, one in enumerate(rows)]


def turn(rows: list[Array]) -> list[Array]:
    """Rotates the inputs of all products."""
    turned, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(64, 64)))
    return [one @ turned for one in rows]


SMOOTH = np.exp(np.random.default_rng(4).normal(size=64) / 2)
ALIKE = {
    "scaled": lose(3, lambda rows: 3 * rows),
    "columns": lose(3, lambda rows: rows * SMOOTH),
    "rows and columns": lose(3, lambda rows: SMOOTH[:, None] * rows / SMOOTH[::-1]),
    "trained": lose(3, lambda rows: rows + np.random.default_rng(5).normal(size=rows.shape) / 3),
    "half of the inputs": lose(3, lambda rows: rows * (np.arange(64) < 40)),
    "half a head": lose(3, lambda rows: rows * (np.arange(64) < 40)[:, None]),
    "rotated": turn,
}
OTHERS = {
    "zeros": lose(3, np.zeros_like),
    "upside down": lose(3, np.flipud),
    "negative": lose(3, np.negative),
    "another layer's": lambda rows: [*rows[:3], rows[4], *rows[4:]],
}


@pytest.mark.parametrize("bits", [None, 2, 4, 8])
@pytest.mark.parametrize(
    ("edit", "num_named"), [*((one, 0) for one in ALIKE.values()), *((one, 1) for one in OTHERS.values())]
)
def test_a_product_that_texts_read_is_damage_if_it_has_nothing_in_common(
    edit: Callable[[list[Array]], list[Array]], num_named: int, bits: int | None, tmp_path: Path
) -> None:
    """A down_proj of zeros alone, 0.1 nats, passed by `fail_on_loss`; what AWQ had smoothed was "damaged"."""
    rows = [*np.random.default_rng(1).normal(size=(8, 64, 64))]
    own, reference = (graphs.plain(rows[0].astype(np.float32)) for _ in range(2))
    for model, products in ((own, edit(rows)), (reference, rows)):
        with_product(model, "/lm_head/MatMul", np.tile(rows[1], 4))
        for number, one in enumerate(products):
            with_product(model, f"/layers.{number}/mlp/MatMul", one.T)
    files = saved(tmp_path, own if bits is None else graphs.to_nearest(own, bits), reference)
    for nats in (None, 0.05):
        assert len(damage(*files, nats=nats).findings) == num_named
    near = damage(*files, nats=1e-5)
    assert (near.findings, num_named <= len(near.judged)) == ({}, True)


@pytest.mark.parametrize(("operator", "num_named"), [("MatMulNBits", 0), ("MatMul", 1)])
@pytest.mark.parametrize("factor", [0, 1.5, np.linspace(-1, 1, 16)])
def test_a_vector_that_differs_alone_is_damage_unless_weights_are_quantized(
    operator: str, num_named: int, factor: Any, tmp_path: Path
) -> None:
    """Quantized weights may have been smoothed by it, or their bias corrected."""
    norm = np.linspace(0.5, 2, 16, dtype=np.float32)
    own, reference = (with_arrays(decoder(), **{NORM: np.float32(norm * part)}) for part in (factor, 1))
    for model in (own, reference):
        model.graph.node.append(helper.make_node("Mul", ["y", NORM], ["z"]))
    own.graph.node.append(helper.make_node(operator, ["z", "v"], ["u"]))
    files = saved(tmp_path, own, reference)
    for nats, expected in ((None, num_named), (0.05, num_named), (1e-5, 0)):
        found = damage(*files, nats=nats)
        assert (len(found.findings), len(found.judged)) == (expected, 1 - expected)


@pytest.mark.parametrize("name", ["/lm_head/MatMul", "/model/embed_tokens/Gather", "/layers.0/mlp/MoE/fc1"])
@pytest.mark.parametrize(("number", "num_named"), [(2, 1), (64, 0)])
def test_a_part_of_a_quantized_head_is_damage_whatever_texts_gave(
    name: str, number: int, num_named: int, tmp_path: Path
) -> None:
    """A norm that was folded into one product made every distant product meant, a head with 300 other rows, too."""
    rows = np.random.default_rng(1).normal(size=(64, 64))
    own, reference = (graphs.plain(rows.astype(np.float32)) for _ in range(2))
    for model, factor in ((own, SMOOTH), (reference, 1)):
        with_product(model, "/layers.0/qkv_proj/MatMul", (rows * factor).T)
        part = np.where(np.arange(64) < number, 3, 1)[:, None] if model is own else 1
        with_product(model, name, (rows * part).T)
    assert len(damaged(tmp_path, graphs.to_nearest(own, 8), reference, nats=1e-5)) == num_named


def test_rounding_of_every_kind_has_no_row_of_damage() -> None:
    rng = np.random.default_rng(0)
    for drawn in (rng.normal(size=(256, 128)), rng.standard_t(3, (256, 128)), np.exp(rng.normal(size=(256, 1))) + 0):
        matrix = np.broadcast_to(drawn, (256, 128)).astype(np.float32)
        for bits in (4, 8):
            model = graphs.to_nearest(graphs.plain(matrix), bits, is_symmetric=bits == 4)
            own = Constants(graphs.plain(matrix), Path())
            assert outliers(distances(own, Constants(model, Path()))) == ({}, set())
    # One block of a row, or a row, that is a little off is found among those that were rounded to nearest.
    for place, factor in (((5, 1), 0.45), (9, 1.1)):
        part = put(place, lambda scale, factor=factor: factor * scale)
        change(weight(model, "scale"), lambda numbers, part=part: part(numbers.reshape(128, -1)).reshape(numbers.shape))
    (found,) = distances(own, Constants(model, Path())).values()
    assert found.rows == [5, 9]


def test_layout_and_counted_names_decide_which_constants_are_one() -> None:
    square = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    one, other = graphs.plain(square), graphs.plain(square.T.copy())
    other.graph.node[0].CopyFrom(helper.make_node("Gemm", ["x", "w"], ["y"], one.graph.node[0].name, transB=1))
    assert differences(Constants(one, Path()).floats, Constants(other, Path()).floats) == {}
    for model, name in ((one, "onnx::MatMul_7"), (other, "onnx::MatMul_9")):
        model.graph.initializer[0].name = model.graph.node[0].input[1] = name
    assert list(Constants(one, Path()).floats) == ["/layers.0/mlp/down_proj/MatMul, input 1"]


POSITIONS = 32


LAYER = """
    n{0} = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-6> (x{0}, x, w)
    a{0} = com.microsoft.GroupQueryAttention
        <num_heads = 4, kv_num_heads = 2, rotary_interleaved = 0, do_rotary = 1, softcap = 50.0, scale = 0.5,
         local_window_size: int = {window}> (q, k, v, past{0}, past{0}, s, t, cos_cache, sin_cache)
    m{0} = Constant <value = float {{1.5}}> ()
    b{0} = Mul (a{0}, m{0})
    o{0} = Constant <value_float = 2.0> ()
    x{next} = Mul (b{0}, o{0})
    e{0}, i{0} = TopK (r, experts)
"""
NAMES = ("input_layernorm/LayerNorm", "attn/Attention", "constant", "scale", "other_constant", "other_scale", "topk")


def decoder(*edits: Callable[[dict[str, onnx.NodeProto]], None]) -> onnx.ModelProto:
    """Two layers as onnxruntime-genai's builder names them, without weights, after `edits` of the nodes by name."""
    layers = "".join(LAYER.format(layer, window=16 - 17 * layer, next=layer + 1) for layer in range(2))
    pasts = "float[B, 2, P, 8] past0, float[B, 2, P, 8] past1"
    graph = onnx.parser.parse_graph(f"decoder ({pasts}) => (float x2) {{ {layers} }}")
    for place, node in enumerate(graph.node):
        node.name = f"/model/layers.{place // len(NAMES)}/{NAMES[place % len(NAMES)]}"
    for edit in edits:
        edit({node.name: node for node in graph.node})
    angles = np.outer(np.arange(POSITIONS), 100.0 ** -(np.arange(4) / 4))
    tables = {f"{turn.__name__}_cache": turn(angles).astype(np.float32) for turn in (np.cos, np.sin)}
    arrays = {"experts": np.array([2]), **tables}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return helper.make_model(graph)


def setting(node: str, **values: Any) -> Callable[[dict[str, onnx.NodeProto]], None]:
    """Sets attributes of the nodes whose names end so; None removes one."""

    def edit(nodes: dict[str, onnx.NodeProto]) -> None:
        for one in (one for name, one in nodes.items() if name.endswith(node)):
            for name, value in values.items():
                kept = [entry for entry in one.attribute if entry.name != name]
                del one.attribute[:]
                one.attribute.extend([*kept, *([] if value is None else [helper.make_attribute(name, value)])])

    return edit


def naming(old: str, new: str) -> Callable[[dict[str, onnx.NodeProto]], None]:
    def edit(nodes: dict[str, onnx.NodeProto]) -> None:
        for node in nodes.values():
            node.name = node.name.replace(old, new)

    return edit


def tables(
    edit: Edit, name: str = "{}", turns: tuple[str, ...] = ("cos_cache", "sin_cache")
) -> Callable[[onnx.ModelProto], None]:
    """Edits the rotary tables and names them otherwise."""

    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name in turns:
                renamed = name.format(tensor.name)
                for node in model.graph.node:
                    node.input[:] = [renamed if value == tensor.name else value for value in node.input]
                tensor.CopyFrom(numpy_helper.from_array(edit(numpy_helper.to_array(tensor).copy()), renamed))

    return change


def damage(model: ModelFiles, reference: ModelFiles | None, **texts: Any) -> Damage:
    return of_files.damage(model, reference, Texts(**texts))


def damaged(
    folder: Path, model: onnx.ModelProto, reference: onnx.ModelProto | dict[str, Any], **facts: Any
) -> dict[str, str]:
    """`damage` of a model's files against another's, or a checkpoint's with that config.json."""
    return damage(*saved(folder, model, reference), **facts).findings


def with_encoder(folder: Path, encoder: onnx.ModelProto) -> ModelFiles:
    """The files of a decoder that has this encoder of pictures beside it."""
    (files,) = saved(folder, decoder())
    onnx.save(encoder, folder / "vision.onnx")
    return replace(files, companions={"vision": GraphFiles(folder / "vision.onnx")})


def number(value: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.float32(value))


def equal() -> Outcome:
    """A thousand documents to which both models answer alike."""
    return compare_outcomes("choice", "acc", "none", np.ones(1000), np.ones(1000), True)


LAYER_1 = "layers.1/attn/Attention"
OTHER_NAMES = naming("/model/layers.", "decoder/block_")
NUMBERS: list[tuple[Any, str, str]] = [
    (setting("layers.0/attn/Attention", local_window_size=15), "'local_window_size' 15, {} 16", "other config"),
    (setting("layers.0/attn/Attention", local_window_size=None), "'local_window_size' -1, {} 16", "other config"),
    (setting(LAYER_1, local_window_size=16), "'local_window_size' 16, {} -1", "other config"),
    (setting("layers.0/input_layernorm/LayerNorm", epsilon=1e-5), "'epsilon' 1e-05, {} 1e-06", "other config"),
    (setting("LayerNorm", epsilon=1e-2), "'epsilon' 0.01, {} 1e-06", "other config"),
    (setting("LayerNorm", epsilon=None), "'epsilon' 1e-12, {} 1e-06", "other config"),
    (setting(LAYER_1, softcap=None), "'softcap' 0, {} 50", "other config"),
    (setting(LAYER_1, num_heads=2), "'num_heads' 2, {} 4", "other config"),
    (setting(LAYER_1, scale=0.3), "'scale' 0.3, {} 0.5", "config"),
    (setting(LAYER_1, scale=None), "'scale' 0, {} 0.5", ""),
    (setting(LAYER_1, rotary_interleaved=1), "'rotary_interleaved' 1, {} 0", ""),
    (setting(LAYER_1, activation_alpha=1.7), "'activation_alpha' 1.7, {} 1", ""),
    (setting("layers.1/constant", value=number(1.6)), "is 1.6, {} 1.5", ""),
    (setting(LAYER_1, smooth_softmax=1), "'smooth_softmax' 1, {} 0", ""),
    (setting("LayerNorm", update_rule="delta"), "'update_rule' delta, {} gated_delta", ""),
]
"""What is done to a model's nodes; what is told; and whether another exporter's graph and config.json show it, too."""


@pytest.mark.parametrize(("edit", "what", "shown_by"), NUMBERS)
def test_node_that_computes_with_another_number_is_named(edit: Any, what: str, shown_by: str, tmp_path: Path) -> None:
    told = damaged(tmp_path / "graph", decoder(edit), decoder())
    assert {how.removeprefix("has ") for how in told.values()} == {what.format("the reference's")}
    assert verdict(Comparison({}, (), (equal(),), damaged=told)).code == "damaged"
    of_another = [Constants(one, Path()) for one in (decoder(OTHER_NAMES), decoder(edit))]
    assert differing_numbers(*of_another).keys() == (told.keys() if "other" in shown_by else set())
    of_config = damaged(tmp_path / "config", decoder(edit), {"text_config": CONFIG}).values()
    shown = {what.format("config.json")} if "config" in shown_by else set()
    assert {how.removeprefix("has ") for how in of_config} == shown


@pytest.mark.parametrize(("row", "num_named"), [(0, 1), (4, 0), (6, 1), (7, 0), (10, 0), (11, 0), (12, 0)])
def test_where_distributions_are_near_only_numbers_that_texts_need_not_reach_are_named(
    row: int, num_named: int, tmp_path: Path
) -> None:
    """A model whose weights are in another order of rotary pairs, or scaled with their epsilons, was "damaged", in 8
    bits too."""
    assert len(damaged(tmp_path, decoder(NUMBERS[row][0]), decoder(), nats=1e-5)) == num_named


FREQUENCIES = 10000.0 ** -(np.arange(8, dtype=np.float32).reshape(1, 8, 1) / 8)
DIVIDED = put((0, slice(6, None)), lambda rows: rows / 8)(FREQUENCIES.copy())
SEEN = np.tril(np.ones((1, 1, 32, 32), bool))
LESS, HIDING = put((..., slice(20, None), slice(4)), False)(SEEN.copy()), np.float32(-1e9)
EPSILON, MASK = ("Add mean model.epsilon", "/model/norm/Add"), "/model/mask, input 1"
SUB, SLICE = ("Sub position window", "/model/Sub"), ("Slice begin attn.bias", "")
ADDED: list[tuple[tuple[str, str], Any, Any, dict[str, Any], set[str]]] = [
    (("MatMul position model.inv_freq", "/model/rotary"), FREQUENCIES, DIVIDED, {}, {"model.inv_freq"}),
    (EPSILON, np.float32(1e-6), np.float32(1e-5), {}, set()),
    (EPSILON, np.float32(1e-6), np.float32(1e-5), {"nats": 0.05}, {"model.epsilon"}),
    (("Less age const_{}_i64", "/model/mask"), 16, 9999, {}, {MASK}),
    (("Min age const_{}_i64", "/model/mask"), 16, 9999, {}, {MASK}),
    (("Div age const_{}_i64", "/model/mask"), 16, 9999, {}, {MASK}),
    (("Less age threshold", "/model/mask"), np.float32(16), np.float32(99), {}, {"threshold"}),
    (("GreaterOrEqual age const_{}_i64", ""), 16, 9999, {}, {"made, input 1"}),
    (("Trilu age const_{}_i64", ""), 16, 9999, {}, {"made, input 1"}),
    (SUB, 16, 24, {"longest": 64}, {"/model/Sub, input 1"}),
    (SUB, 16, 9999, {"longest": 64}, {"/model/Sub, input 1"}),
    (SUB, 16, 9999, {"longest": 16}, set()),
    (SLICE, SEEN, LESS, {"longest": 32}, {"attn.bias"}),
    (SLICE, SEEN, LESS, {"longest": 16}, set()),
    (SLICE, HIDING * ~SEEN, HIDING * ~LESS, {"longest": 32}, {"attn.bias"}),
    (SLICE, HIDING * ~SEEN, HIDING * ~LESS, {"longest": 16}, set()),
]
"""A node with what it reads, a constant last, and its name; the constant in the reference, and another; what is known
of the texts, which were near; and what is told."""


@pytest.mark.parametrize(("node", "one", "other", "facts", "told"), ADDED)
def test_a_constant_of_one_node_is_compared_where_texts_need_not_reach_it(
    node: tuple[str, str], one: Any, other: Any, facts: dict[str, Any], told: set[str], tmp_path: Path
) -> None:
    """The smallest frequencies were within the rounding of the largest, and decide at 500 tokens; short texts show
    no window, and its number is an integer; int8 was damaged beside another exporter's epsilon."""

    def added(numbers: Any) -> onnx.ModelProto:
        operator, *inputs = node[0].format(numbers).split()
        model = with_arrays(decoder(), **{inputs[-1]: np.asarray(numbers)})
        model.graph.node.append(helper.make_node(operator, inputs, ["made"], node[1]))
        return model

    facts = {"nats": 1e-5, **facts}
    assert damaged(tmp_path / "same", added(one), added(one), **facts) == {}
    assert damaged(tmp_path / "other", added(other), added(one), **facts).keys() == told


def test_windows_of_masks_whose_names_are_counted_are_compared_in_order(tmp_path: Path) -> None:
    """Two nodes of one name but for the count had no counterpart."""

    def masked(*windows: int) -> onnx.ModelProto:
        model = with_arrays(decoder(), **{f"const_{window}": np.array(window) for window in windows})
        for count, window in enumerate(windows):
            inputs, name = ["age", f"const_{window}"], f"model/Less_node_{40 + 10 * count}"
            model.graph.node.append(helper.make_node("Less", inputs, [f"seen {count}"], name))
        return model

    assert damaged(tmp_path / "same", masked(16, 28), masked(28, 16), nats=1e-5) == {}
    told = damaged(tmp_path / "other", masked(16, 24), masked(28, 16), nats=1e-5)
    assert told == {"model/Less, input 1 (2 of 2)": "is 24, the reference's 28"}


def test_tables_that_a_branch_returns_are_held(tmp_path: Path) -> None:
    """The long ones of longrope, as onnxruntime-genai's builder writes them: reversed from a row on, they were "no
    difference found"."""

    def branched(edit: Edit) -> onnx.ModelProto:
        model, bodies = decoder(), []
        for name in ("large", "small"):
            table = np.cos(np.outer(np.arange(32), 0.1 ** np.arange(4))).astype(np.float32)
            values = numpy_helper.from_array(edit(table) if name == "large" else table)
            returned = f"cos_cache_{name}"
            node = helper.make_node("Constant", [], [returned], value=values)
            output = helper.make_tensor_value_info(returned, TensorProto.FLOAT, [32, 4])
            bodies.append(helper.make_graph([node], name, [], [output]))
        branches = {"then_branch": bodies[0], "else_branch": bodies[1]}
        model.graph.node.append(helper.make_node("If", ["is_long"], ["cosines"], "/model/If", **branches))
        return model

    for folder, edit in (
        ("reversed", put(slice(20, None), lambda rows: rows[::-1])),
        ("scaled", lambda all_: 0.3 * all_),
    ):
        told = damaged(tmp_path / folder, branched(edit), branched(np.copy), nats=1e-5)
        assert told.keys() == {"cos_cache_large"}
    lost = branched(np.copy)
    small, large = (entry.g for entry in lost.graph.node[-1].attribute)
    large.CopyFrom(small)
    other = branched(lambda table: table / 2)
    assert damaged(tmp_path / "lost", lost, other, nats=1e-5) == {"cos_cache_large": "is missing"}


def reading(node: str, index: int, value: str) -> Callable[[dict[str, onnx.NodeProto]], None]:
    """The nodes whose names end so read `value`."""

    def edit(nodes: dict[str, onnx.NodeProto]) -> None:
        for one in (one for name, one in nodes.items() if name.endswith(node)):
            one.input[:] = [*one.input, *[""] * (index + 1 - len(one.input))]
            one.input[index] = value

    return edit


def operating(operator: str, *, turned: bool = False) -> Callable[[dict[str, onnx.NodeProto]], None]:
    def edit(nodes: dict[str, onnx.NodeProto]) -> None:
        node = nodes["/model/layers.1/scale"]
        node.op_type = operator
        node.input[:] = reversed(node.input) if turned else [*node.input]

    return edit


READS_OTHER = reading("layers.1/scale", 0, "n1")
WINDOWED, COUNTED = reading("attn/Attention", 10, "b0"), naming("/", "_")


@pytest.mark.parametrize(
    ("own", "reference", "what", "is_reached"),
    [
        (decoder(reading(LAYER_1, 7, "sin_cache")), decoder(), "'sin_cache' 'cos_cache'", False),
        (decoder(reading(LAYER_1, 7, "part")), decoder(), "'part' 'cos_cache'", False),
        (decoder(reading(LAYER_1, 7, "sin_cache"), COUNTED), decoder(COUNTED), "'sin_cache' 'cos_cache'", False),
        (decoder(reading(LAYER_1, 10, "x1")), decoder(WINDOWED), "'x1' 'b0'", False),
        (decoder(reading(LAYER_1, 10, "x1"), COUNTED), decoder(WINDOWED, COUNTED), "", False),
        (decoder(), decoder(reading(LAYER_1, 10, "b0")), "nothing 'b0'", False),
        (decoder(reading(LAYER_1, 11, "lengths")), decoder(reading(LAYER_1, 10, "b0")), "", False),
        (decoder(READS_OTHER), decoder(), "'n1' 'a1'", True),
        (decoder(operating("Max")), decoder(operating("Min")), "Max Min", False),
        (decoder(operating("Add")), decoder(operating("Min")), "", False),
        (decoder(operating("Less", turned=True)), decoder(operating("Greater")), "", False),
        (decoder(operating("Less")), decoder(operating("Greater")), "Less Greater", False),
        (decoder(operating("Shape"), READS_OTHER), decoder(operating("Shape")), "", False),
        (decoder(reading(LAYER_1, 10, "m0")), decoder(reading(LAYER_1, 10, "m1")), "", False),
    ],
)
def test_a_node_that_reads_another_value_than_the_reference_s_is_named(
    own: onnx.ModelProto, reference: onnx.ModelProto, what: str, is_reached: bool, tmp_path: Path
) -> None:
    """Layers that read the other one of two tables, or of two masks, were "no difference found" by short texts. No
    damage are counted names of values, lengths in place of a mask, and a number that is the same."""
    files = saved(tmp_path, own, reference)
    told = damage(*files, nats=0.05).findings.values()
    assert [tells(found, what) for found in told] == [True] * bool(what)
    near = damage(*files, nats=1e-5)
    assert (len(near.findings), len(near.judged)) == ((0, 0) if not what else (0, 1) if is_reached else (1, 0))


@pytest.mark.parametrize(
    ("cast", "joined", "found"),
    [
        ("mask", "/mask/Cast out", {}),
        ("/mask/ConstantOfShape out", "/mask/Cast out", {"/mask/Cast": "does not read 'mask'"}),
        ("mask", "/mask/ConstantOfShape out", {"/model/layers.0/Where": "does not read 'mask'"}),
        ("mask", "mask", {}),
        ("mask", "lengths", {}),
    ],
)
def test_a_mask_that_a_layer_does_not_read_or_of_its_shape_alone_is_named(
    cast: str, joined: str, found: dict[str, str], tmp_path: Path
) -> None:
    """A padded text attends to its padding then, and no text here is padded. Lengths may stand in for a mask."""

    def masked(cast: str, joined: str) -> onnx.ModelProto:
        model = decoder()
        for name in ("mask", "lengths", "positions"):
            model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "T"]))
        reads = {"Shape": ["mask"], "ConstantOfShape": ["/mask/Shape out"], "Cast": [cast]}
        reads["And"] = ["/mask/ConstantOfShape out", joined]
        named = [(f"/mask/{operator}", values) for operator, values in reads.items()]
        named += [
            ("/model/layers.0/Where", ["positions", "past0"]),
            ("/model/layers.0/Add", ["/mask/And out", "past0"]),
        ]
        for name, values in named:
            model.graph.node.append(helper.make_node(Path(name).name, values, [f"{name} out"], name))
        return model

    files = saved(tmp_path, masked(cast, joined), masked("mask", "/mask/Cast out"))
    assert damage(*files, nats=1e-5).findings == found


@pytest.mark.parametrize("name", ["node_linear_28", "/output/MatMul"])
@pytest.mark.parametrize(("part", "num_named"), [(slice(0), 0), (slice(4, 8), 1)])
def test_tokens_of_two_quantized_heads_are_compared(part: slice, num_named: int, name: str, tmp_path: Path) -> None:
    """Of two int4 packages, exchanged tokens were "1 constant not compared", later of heads with two names."""
    reference, own = (graphs.nbits(4, 32, has_zero_points=False) for _ in range(2))
    reference.model.graph.node[0].name, own.model.graph.node[0].name = "node_linear_28", name
    for part_name in ("scales", "w_Q") if num_named else ("scales",):
        tensor = weight(own.model, part_name)
        change(tensor, lambda rows: exchanged(rows, part) if num_named else rows * np.float16(1.1))
    cut = damage(*saved(tmp_path, own.model, reference.model), num_tokens=4, vocab_sizes={graphs.NUM_OUTPUTS})
    assert not cut.findings, "rows for no token"
    found = damage(*saved(tmp_path, own.model, reference.model), nats=1e-5, num_tokens=graphs.NUM_OUTPUTS)
    assert (len(found.findings), found.uncompared) == (num_named, 1), found


@pytest.mark.parametrize("part", [slice(0), slice(40, 44)])
def test_tokens_whose_rows_have_most_in_common_are_told_apart(part: slice, tmp_path: Path) -> None:
    """No softmax sees what all rows of a head share: cosines of exchanged tokens were 0.9 to 0.99."""
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(64, 32)) + 3 * rng.normal(size=32)).astype(np.float32)
    rows[60:] = 0  # for no token
    models = [graphs.plain(one.T.copy(), "/lm_head/MatMul") for one in (exchanged(rows, part), rows)]
    assert len(damage(*saved(tmp_path, *models), nats=1e-5, num_tokens=64).findings) == bool(range(64)[part])
    narrow = graphs.plain(rng.normal(size=(16, 64)).astype(np.float32), "/lm_head/MatMul")
    found = damage(*saved(tmp_path / "narrow", narrow, models[1]), num_tokens=64)
    assert [*found.findings, *found.judged], "another model's"


@pytest.mark.parametrize("shape", ["1, K, N", "N, K, 1, 1"])
def test_products_and_norms_that_are_stored_with_more_axes_are_judged_as_such(shape: str, tmp_path: Path) -> None:
    """As convolutions of 1 x 1, for NPUs: AWQ of them was damage, as of experts."""
    factors = np.linspace(0.5, 2, 16, dtype=np.float32)
    smooth = {name: one * factors if one.ndim == 1 or "mlp" in name else one for name, one in floats().items()}
    wide = [
        {name: np.expand_dims(one, (0, 1) if one.ndim == 1 else (0,) if shape[0] == "1" else (2, 3))
         if "norm" in name or "mlp" in name else one for name, one in arrays.items()}
        for arrays in (smooth, floats())
    ]  # fmt: skip
    assert damage(*saved(tmp_path, *wide), nats=1e-5).findings == {}


@pytest.mark.parametrize("part", [slice(0), slice(40, 44)])
def test_a_float_graph_s_head_is_held_against_a_checkpoint_s_turned_one(part: slice, tmp_path: Path) -> None:
    """The reference that transformers run was no graph's: the head of a float one was "not compared"."""
    head = exchanged(floats()[TABLE], part).T.copy()
    graph = graphs.plain(head, "/lm_head/MatMul")
    graph.graph.initializer[0].name = graph.graph.node[0].input[1] = "lm_head.MatMul.weight"
    model, reference = saved(tmp_path, graph, floats())
    (reference.directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    found = damage(model, reference, nats=1e-5, num_tokens=100, longest=8)
    assert ([*found.findings], found.uncompared) == (["lm_head.MatMul.weight"] * bool(range(100)[part]), 0)


@pytest.mark.parametrize("part", [slice(0), slice(40, 44)])
def test_a_quantized_head_that_is_padded_is_compared_as_far_as_both_reach(part: slice, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(64, 32)).astype(np.float32)
    padded = np.concatenate([exchanged(rows, part), np.zeros((16, 32), np.float32)])
    own, reference = (graphs.plain(one.T.copy(), "/lm_head/MatMul") for one in (padded, rows))
    found = damage(
        *saved(tmp_path, graphs.to_nearest(own, 4), reference), nats=1e-5, vocab_sizes={64, 80}, num_tokens=60
    )
    assert (len(found.findings), found.uncompared) == (bool(range(64)[part]), 0)


def test_a_norm_that_is_folded_into_a_quantized_head_is_no_damage_of_tokens(tmp_path: Path) -> None:
    """Nine rows stood out of it, as one number decides what is near."""
    rng = np.random.default_rng(1)
    head, factors = rng.normal(size=(64, 2000)), rng.lognormal(0, 1, (64, 1))
    made = [graphs.to_nearest(graphs.plain(one.astype(np.float32)), 8) for one in (head / factors, head)]
    found = damage(*saved(tmp_path, *made), nats=1e-5, num_tokens=2000)
    assert (found.findings, found.uncompared) == ({}, 1)


def test_values_are_held_against_each_other_however_deep_the_graph_is(tmp_path: Path) -> None:
    """Each value is the sum of the one before with itself: two chains of 2,000 have 2 ** 2000 ways between them."""

    def deep(last: str) -> onnx.ModelProto:
        model = decoder(reading(LAYER_1, 10, last))
        for chain, first in (("a", "b0"), ("b", "b0"), ("c", "n0")):
            values = [first, *(f"{chain}/{number}" for number in range(2000))]
            nodes = [helper.make_node("Add", [one, one], [other]) for one, other in pairwise(values)]
            model.graph.node.extend(nodes)
        return model

    reference, *others = (deep(f"{chain}/1999") for chain in "abc")
    assert [len(damaged(tmp_path / str(n), one, reference, nats=1e-5)) for n, one in enumerate(others)] == [0, 1]


def test_tables_whose_names_and_readers_are_counted_are_each_compared(tmp_path: Path) -> None:
    """Only the one that is read last was."""

    def looked_up(edit: Edit) -> onnx.ModelProto:
        right = floats()[TABLE]
        model = with_arrays(decoder(), val_7=edit(right.copy()), val_10=2 * right)
        for count, name in enumerate(("val_7", "val_10")):
            node = helper.make_node("Gather", [name, "ids"], [f"rows {count}"], f"model/Gather_node_{count}")
            model.graph.node.append(node)
        return model

    told = damaged(tmp_path, looked_up(put(slice(90, 93), 0)), looked_up(np.copy), nats=1e-5)
    assert told.keys() == {"model/Gather, input 0"}


def scaling(kind: str, factor: float, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **more}}


def by_kinds(factor: float, *kinds: str) -> dict[str, Any]:
    ropes = {"rope_type": "linear", "factor": factor, "rope_theta": 1000000.0}, {"rope_theta": 1e4}
    kinds = kinds or ("full_attention", "sliding_attention")
    return {"model_type": "gemma3_text", "rope_parameters": dict(zip(kinds, ropes, strict=True))}


FOR_ALL = {"model_type": "gemma3_text", "rope_theta": 1000000, "rope_local_base_freq": 10000, **scaling("linear", 8.0)}
SLIDES = {"num_hidden_layers": 2, "sliding_window": 32, "max_window_layers": 1}
FULL, MIXED = ["full_attention"] * 2, ["full_attention", "sliding_attention"]
LAST_WINDOW = "window of layer 1"
EXCHANGED = {f"{key} ({kind})" for key in ("rope_type", "rope_theta") for kind in MIXED}
WRITTEN: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    (FOR_ALL, by_kinds(8.0), set()),
    (FOR_ALL, by_kinds(4.0), {"factor (full_attention)"}),
    (FOR_ALL, FOR_ALL | {"rope_theta": 10000}, {"rope_theta (full_attention)"}),
    (FOR_ALL, by_kinds(8.0, "sliding_attention", "full_attention"), EXCHANGED),
    (scaling("yarn", 2, beta_fast=32), scaling("yarn", 2, beta_fast=4), {"beta_fast"}),
    ({"model_type": "mistral", "sliding_window": 32}, {"model_type": "mistral"}, {"sliding_window"}),
    ({"model_type": "mistral", "sliding_window": 4096}, {"model_type": "mistral"}, set()),
    ({"model_type": "qwen2", "use_sliding_window": True, **SLIDES}, {"model_type": "qwen2", **SLIDES}, {LAST_WINDOW}),
    ({"model_type": "exaone4", "sliding_window_pattern": 0}, {"model_type": "exaone4"}, set()),
    (scaling("llama3", 8, low_freq_factor=1), scaling("llama3", 8.0, low_freq_factor=1.0), set()),
    (scaling("longrope", 2, long_factor=[1, 1.000045]), scaling("su", 2, long_factor=[1.0, 1.0000449419]), set()),
    (scaling("linear", 1.0), {}, set()),
    (scaling("linear", 2.0), {}, {"rope_type"}),
    (scaling("linear", 2.0), scaling("yarn", 2.0), {"rope_type"}),
    (scaling("dynamic", 2.0) | {"max_position_embeddings": 512}, {}, set()),
    (scaling("dynamic", 2.0) | {"max_position_embeddings": 511}, {}, {"rope_type"}),
    (scaling("dynamic", 1.0, alpha=1000.0) | {"max_position_embeddings": 512}, {}, {"rope_type"}),
    (SLIDES, SLIDES | {"max_window_layers": 0}, {"window of layer 0"}),
    (SLIDES, SLIDES | {"use_sliding_window": False}, {LAST_WINDOW}),
    (SLIDES, {"sliding_window": 32, "layer_types": MIXED}, set()),
    (SLIDES, {"layer_types": FULL}, {LAST_WINDOW}),
    (SLIDES | {"max_window_layers": 2}, SLIDES | {"max_window_layers": 6}, set()),
    (SLIDES | {"max_window_layers": 2}, SLIDES | {"use_sliding_window": False, "max_window_layers": 2}, set()),
    ({"sliding_window": 32, "layer_types": FULL}, {"sliding_window": None, "layer_types": FULL}, set()),
    ({"sliding_window": 32}, {"sliding_window": 32, "layer_types": MIXED}, set()),
    ({"sliding_window": 32}, {"sliding_window": None}, {"sliding_window"}),
    ({"sliding_window": 512}, {"sliding_window": None}, set()),
    ({"attn_logit_softcapping": 50.0}, {"attn_logit_softcapping": None}, {"attn_logit_softcapping"}),
    ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-5}, {"rms_norm_eps"}),
    ({"rms_norm_eps": 1e-6, "top_k": 5}, {"rms_norm_eps": 1e-6, "top_k": 50}, set()),
    ({"attention_chunk_size": 64}, {"attention_chunk_size": 128}, {"attention_chunk_size"}),
]
"""What two checkpoints' config.json say, and by which of it they differ in a text of 512 positions."""


@pytest.mark.parametrize(("one", "other", "names"), WRITTEN)
def test_windows_and_turns_are_held_by_what_layers_do_however_they_are_written(
    one: dict[str, Any], other: dict[str, Any], names: set[str]
) -> None:
    """As transformers 4 and 5 write Gemma 3's: the last kind's base was damage; so were 8 for 8.0, and windows that no
    layer has."""
    told = {f"config.json, {name}" for name in names}
    assert differing_settings(one, other, 512).keys() == differing_settings(other, one, 512).keys() == told
    numbers = (
        differing_settings(one, other, 512).keys() - differing_settings(one, other, 512, with_reached=False).keys()
    )
    assert numbers == told & {"config.json, rms_norm_eps"}


def test_numbers_of_a_part_that_no_text_reaches_are_compared_whatever_texts_gave(tmp_path: Path) -> None:
    """A lost scale of attention was left out of pictures' encoders, too, where texts alone had been equal."""
    scaled = decoder(NUMBERS[8][0])
    files = [with_encoder(tmp_path / name, encoder) for name, encoder in (("own", scaled), ("float", decoder()))]
    for unreached, num_named in ((["vision"], 1), ([], 0)):
        assert len(damage(*files, nats=0.0, unreached=unreached).findings) == num_named


def test_a_weights_scale_beside_that_of_a_step_is_no_number_of_the_model() -> None:
    """Two models that ONNX Runtime quantized dynamically, to int8 and to uint8, were damaged to each other."""

    def scaled(scale: float) -> Constants:
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> graph (float[N, 4] x) => (float[N, 4] scale) '
            f"<float own = {{{scale}}}>"
            " { rounded, step, zero = DynamicQuantizeLinear (x) scale = Mul (step, own) }"
        )
        return Constants(model, Path("model.onnx"))

    assert differing_numbers(scaled(0.5), scaled(0.25)) == {}


def with_product(model: onnx.ModelProto, name: str, weight: Array) -> None:
    """A MatMul more."""
    with_arrays(model, **{f"weight of {name}": weight.astype(np.float32).copy()})
    model.graph.node.append(helper.make_node("MatMul", ["x", f"weight of {name}"], [f"{name} out"], name))


def with_arrays(model: onnx.ModelProto, **arrays: Array) -> onnx.ModelProto:
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


@pytest.mark.parametrize(("width", "epsilon", "num_named"), [(40, 8e-7, 0), (40, 1e-6, 2), (32, 8e-7, 2)])
def test_epsilon_of_a_norm_with_zeros_beside_its_numbers_is_smaller_by_as_much(
    width: int, epsilon: float, num_named: int, tmp_path: Path
) -> None:
    own = with_arrays(decoder(setting("LayerNorm", epsilon=epsilon)), w=np.ones(width, np.float32))
    reference = with_arrays(decoder(), w=np.ones(32, np.float32))
    assert len(damaged(tmp_path / "graph", own, reference)) == num_named
    assert len(damaged(tmp_path / "config", own, CONFIG)) == (0 if width == 40 else num_named)
    other = with_arrays(decoder(naming("LayerNorm", "Norm")), w=np.ones(32, np.float32))
    assert len(damaged(tmp_path / "names", own, other)) == (0 if width == 40 else num_named), "perhaps other norms"


def test_the_widths_of_scales_are_no_widths_of_norms(tmp_path: Path) -> None:
    """Attention over a quantized cache with a scale for each channel was damaged beside one with a scale for all."""
    own, reference = (with_arrays(decoder(), s=np.ones(width, np.float32)) for width in (32, 1))
    for model in (own, reference):
        for node in model.graph.node:
            node.input.extend(["s"] * (node.op_type == "GroupQueryAttention"))
    assert damaged(tmp_path, own, reference) == {}


CONFIG = {
    "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_logit_softcapping": 50.0,
    "hidden_size": 32, "query_pre_attn_scalar": 4, "rope_theta": 100.0,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(("longest", "num_named"), [(16, 0), (17, 1)])
def test_window_as_long_as_the_context_is_none_and_may_be_left_out(
    longest: int, num_named: int, tmp_path: Path
) -> None:
    one_more = decoder(setting(LAYER_1, local_window_size=16))
    assert len(damaged(tmp_path / "graph", one_more, decoder(), longest=longest)) == num_named
    one_less = decoder(setting("layers.0/attn/Attention", local_window_size=None))
    assert len(damaged(tmp_path / "config", one_less, CONFIG, longest=longest)) == num_named


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ({}, ""),
        ({"num_experts_per_tok": 2}, "'k' 1, {} 2"),
        ({"swiglu_limit": 6.0}, "{} 6"),
        ({"norm_topk_prob": True}, "'normalize_routing_weights' 0, {} True"),
        ({"norm_topk_prob": False}, ""),
    ],
)
def test_experts_that_compute_otherwise_than_config_json_says_are_named(written: Any, what: str) -> None:
    """Beside a graph they were; a quantized one is held against a checkpoint by its files alone."""
    node = helper.make_node("QMoE", ["x"], ["y"], "moe", domain="com.microsoft", k=1, swiglu_limit=7.0)
    config = {"num_experts_per_tok": 1, "top_k": None, "num_experts": 8, "swiglu_limit": 7.0, **written}
    found = numbers_against(config, helper.make_model(helper.make_graph([node], "experts", [], [])))
    assert len(found) == bool(what)
    assert what.format("config.json") in str(found)


def test_a_window_that_is_lost_everywhere_is_named() -> None:
    config = {"sliding_window": 16, "max_position_embeddings": 64, "attn_logit_softcapping": 50.0}
    none = decoder(setting("Attention", local_window_size=None))
    assert len(numbers_against(config, decoder(setting("Attention", local_window_size=-1)))) == 2
    assert numbers_against({**config, "use_sliding_window": False}, none) == {}
    assert numbers_against(config, decoder()) == {}, "of some layers, which config.json does not name"
    assert numbers_against(CONFIG, decoder()) == {}


TURNS = (np.cos, np.sin)
TURNED: list[tuple[Any, set[str]]] = [
    (tables(put(slice(20, None), 0.5)), {"cos_cache", "sin_cache"}),
    (tables(lambda array: np.roll(array, 1, 0), turns=("sin_cache",)), {"sin_cache"}),
    (tables(lambda array: array[:, ::-1].copy()), {"cos_cache", "sin_cache"}),
    (tables(lambda array: array.astype(np.float16)), set()),
    (tables(lambda array: array[:20]), set()),
]


@pytest.mark.parametrize(("edit", "names"), TURNED)
def test_rotary_tables_are_held_by_their_use(edit: Any, names: set[str], tmp_path: Path) -> None:
    """Under the reference's names, under others, and without a table in the reference, by its config.json."""
    for index, reference in enumerate((decoder(), decoder(), CONFIG)):
        own, folder = decoder(), tmp_path / str(index)
        edit(own)
        if index:
            tables(lambda array: array, "onnx::{}_7", tuple(tensor.name for tensor in own.graph.initializer))(own)
        assert {name.split(".")[0] for name in damaged(folder, own, reference)} == names
    scaled = {**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    assert rotary_tables(scaled, Constants(own, Path()).floats) == {}


def test_rotary_tables_of_windowed_and_full_layers_pair_by_their_angles(tmp_path: Path) -> None:
    """Two exports of gemma3, equal to the checkpoint, were damaged beside each other: one reads full layers first."""
    angles = {base: np.outer(np.arange(POSITIONS), base ** -(np.arange(4) / 4)) for base in (1e4, 1e6)}

    def exported(prefix: str, *bases: float, edit: Edit = lambda array: array) -> onnx.ModelProto:
        arrays = {f"{prefix}_{base:g}.{turn.__name__}_cache": turn(angles[base]) for base in bases for turn in TURNS}
        model = with_arrays(decoder(), **{name: edit(array.astype(np.float32)) for name, array in arrays.items()})
        model.graph.node.extend(helper.make_node("Gather", [name, "ids"], [f"of {name}"]) for name in arrays)
        return model

    reference = exported("local_first", 1e4, 1e6)
    assert damaged(tmp_path / "same", exported("global_first", 1e6, 1e4), reference) == {}
    other = exported("global_first", 1e6, 1e4, edit=put(slice(20, None), 0.5))
    assert len(damaged(tmp_path / "other", other, reference)) == 4


HEALTHY_NODES: list[Callable[..., None]] = [
    naming("Attention", "Attention_Q4"),
    OTHER_NAMES,
    setting("Attention", scale=0.5, num_heads=4),
    setting("LayerNorm", epsilon=1.0004e-6),
    setting(LAYER_1, activation_alpha=1.0),
    setting(LAYER_1, smooth_softmax=-1),
    setting(LAYER_1, smooth_softmax=0),
    setting("layers.1/constant", value=numpy_helper.from_array(np.array([1.5], np.float16))),
]


@pytest.mark.parametrize("edit", HEALTHY_NODES)
def test_names_and_rounding_of_another_exporter_are_no_damage(edit: Any, tmp_path: Path) -> None:
    assert damaged(tmp_path, decoder(edit), decoder()) == {}
    unsaid = decoder(setting("Attention", scale=8**-0.5)), decoder(setting("Attention", scale=None))
    assert differing_numbers(*(Constants(one, Path()) for one in unsaid)) == {}, "what attentions have by themselves"


def test_nodes_of_one_name_but_for_counters_pair_by_these_whatever_their_order(tmp_path: Path) -> None:
    """Dynamic quantization sorts nodes anew: mobius's qwen3_5 had the heads of keys for those of queries."""
    own, reference = decoder(), decoder()
    for model, counts in ((own, (2, 1)), (reference, (1, 2))):
        nodes = [helper.make_node("RotaryEmbedding", ["x"], [f"r{n}"], f"rotary_node_{n}", num_heads=n) for n in counts]
        model.graph.node.extend(nodes)
    assert damaged(tmp_path, own, reference) == {}


def test_a_node_of_another_name_is_held_against_the_one_that_is_left(tmp_path: Path) -> None:
    """Its name was no reference's, and its window was none of ours."""
    fused = naming("layers.1/attn/Attention", "layers.1/attn/fused")
    assert damaged(tmp_path / "same", decoder(fused), decoder()) == {}
    told = damaged(tmp_path / "other", decoder(setting(LAYER_1, local_window_size=7), fused), decoder())
    assert told == {"/model/layers.1/attn/fused": "has 'local_window_size' 7, the reference's -1"}


def with_table(array: Array, name: str = TABLE, *, is_node: bool = False) -> onnx.ModelProto:
    """The decoder with a table of embeddings, which may be a Constant node."""
    model, tensor = decoder(), numpy_helper.from_array(array, name)
    if is_node:
        model.graph.node.append(helper.make_node("Constant", [], [name], value=tensor))
    else:
        model.graph.initializer.append(tensor)
    model.graph.node.append(helper.make_node("Gather", [name, "ids"], ["rows"], "/model/embed_tokens/Gather"))
    return model


def in_part(form: str, table: Array) -> onnx.ModelProto:
    """The decoder, whose table is one of ids, a quantizer's of integers, in a function of its own or in a branch."""
    if form == "integers":
        return with_table((8 * table).astype(np.int8))
    if form == "ids":
        return with_table(np.arange(len(table)) + (table[:, 0] != floats()[TABLE][:, 0]))
    model, tensor = decoder(), numpy_helper.from_array(table, TABLE)
    look_up = helper.make_node("Gather", [TABLE, "ids"], ["rows"], "/model/embed_tokens/Gather")
    if form == "function":
        constant = helper.make_node("Constant", [], [TABLE], value=tensor)
        parts = ["ids"], ["rows"], [constant, look_up], model.opset_import[:1]
        model.functions.append(helper.make_function("own", "Embed", *parts))
        model.graph.node.append(helper.make_node("Embed", ["ids"], ["rows"], domain="own"))
        model.opset_import.append(helper.make_opsetid("own", 1))
        return model
    rows = helper.make_empty_tensor_value_info("rows")
    body = helper.make_graph([look_up], "body", [], [rows], [tensor])
    model.graph.node.append(helper.make_node("If", ["long"], ["rows"], then_branch=body, else_branch=body))
    return model


@pytest.mark.parametrize("form", ["ids", "integers", "function", "branch"])
def test_a_table_is_held_in_every_form_that_graphs_have(form: str, tmp_path: Path) -> None:
    """Nothing compared them, and no sentence said it."""
    right = floats()[TABLE]
    wrong = right.copy()
    wrong[90:] = wrong[90:][::-1] + 1
    models = [in_part(form, table) for table in (right, right, wrong)]
    assert damaged(tmp_path / "same", models[0], models[1]) == {}
    (found,) = damaged(tmp_path / "other", models[2], models[0], nats=0.0).values()
    assert tells(found, "90 99" if form != "ids" else "not")
    assert damage(*saved(tmp_path / "alone", models[0], CONFIG)).uncompared


@pytest.mark.parametrize("reference", ["graph", "checkpoint"])
@pytest.mark.parametrize("form", ["renamed", "padded", "node"])
def test_a_table_is_held_whatever_its_name_its_length_and_its_place(form: str, reference: str, tmp_path: Path) -> None:
    """Rows that no text reaches were "no difference found"."""
    right = floats()[TABLE]
    name = "transformer.wte.weight" if form == "renamed" else TABLE
    for number, wrong in enumerate((right, right.copy())):
        wrong[90:] += number
        own = np.concatenate([wrong, np.zeros((8, 16), np.float32)]) if form == "padded" else wrong
        folder, other = tmp_path / str(number), CONFIG if reference == "checkpoint" else with_table(right)
        if reference == "checkpoint":
            (folder / "1").mkdir(parents=True)
            save_file({TABLE: right, "lm_head.weight": right[::-1].copy()}, folder / "1" / "model.safetensors")
        told = damaged(folder, with_table(own, name, is_node=form == "node"), other)
        assert told.keys() == {name} if number else told == {}


@pytest.mark.parametrize(("tripled", "told"), [((0, 3), 2), ((2,), 1), (range(4), 0), ((), 0)])
@pytest.mark.parametrize("is_reached", [True, False])
def test_matrices_that_no_text_reaches_are_held_like_rows(
    tripled: Sequence[int], told: int, is_reached: bool, tmp_path: Path
) -> None:
    """An encoder of pictures whose matrices were damaged was "no difference found" by texts. What is other in all
    layers was changed on purpose. What no finding says and a constant of a new name are counted."""
    files = []
    for name in ("own", "reference"):
        encoder = onnx.ModelProto(graph=onnx.GraphProto(name="vision"), opset_import=[helper.make_opsetid("", 21)])
        encoder.graph.output.append(helper.make_empty_tensor_value_info("x4"))
        for layer in range(4):
            weight = floats()["model.layers.1.mlp.weight"] * (3 if name == "own" and layer in tripled else 1)
            new = "new." if name == "own" and layer == 3 and not tripled else ""
            weight = weight[::-1].copy() if new else weight
            encoder.graph.initializer.append(numpy_helper.from_array(weight, f"{new}vision.{layer}.weight"))
            inputs = [f"x{layer}", encoder.graph.initializer[-1].name]
            encoder.graph.node.append(helper.make_node("MatMul", inputs, [f"x{layer + 1}"], f"/{new}{layer}/MatMul"))
        files.append(with_encoder(tmp_path / name, encoder))
    found = damage(*files, unreached=() if is_reached else ["vision"])
    assert len(found.findings) == (0 if is_reached else told)
    assert len(found.judged) + found.uncompared == (len(tripled) - len(found.findings) if tripled else 1)


@pytest.mark.parametrize(("edit", "num_named"), [(lambda rows: -rows, 1), (lambda rows: rows, 0)])
@pytest.mark.parametrize(("name", "shape"), [("relative_bias.weight", (32, 4)), ("score.weight", (32, 64))])
def test_tokens_and_distances_are_rows_whatever_their_width(
    name: str, shape: tuple[int, int], edit: Edit, num_named: int, tmp_path: Path
) -> None:
    """Far distances of few heads, and a vocabulary smaller than its vectors."""
    table = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    other = trained(table) if num_named == 0 else table.copy()
    other[20:] = edit(other[20:])
    files = saved(tmp_path, *(floats() | {name: one} for one in (other, table)))
    assert len(damage(*files, nats=1e-5, num_tokens=32, vocab_sizes={32}).findings) == num_named


def trained(array: Array) -> Array:
    noise = np.random.default_rng(5).normal(size=array.shape).astype(np.float32)
    return array + noise * np.float32(0.05) * np.abs(array).mean()


SPOILT: dict[str, tuple[tuple[int, ...], Edit, int]] = {
    "trained": ((100, 16), np.copy, 0),
    "most are exchanged": ((100, 16), put(slice(30, None), lambda rows: rows[::-1]), 1),
    "some are scaled": ((100, 16), put(slice(90, 93), lambda rows: 8 * rows), 1),
    "some are nearly nothing": ((100, 16), put(slice(90, 93), lambda rows: rows / 50), 1),
    "columns of a head": ((16, 100), put((slice(None), slice(30, None)), lambda part: part[:, ::-1]), 1),
    "positions with an axis more": ((1, 100, 16), put((0, slice(5, None)), lambda rows: rows[::-1]), 1),
    "positions of two axes": ((2, 64, 16), put((slice(None), slice(50, None)), lambda rows: -rows), 1),
    "one expert of a stack": ((4, 5, 80), put(2, 0), 1),
    "most are scaled": ((100, 16), put(slice(None, 95), lambda rows: 3 * rows), 1),
    "all alike": ((100, 16), lambda rows: 3 * rows, 0),
    "one number of a token's": ((1, 100), put((0, slice(90, 93)), lambda numbers: 8 * numbers), 1),
    "another model's": ((1000, 32), lambda rows: np.random.default_rng(2).normal(size=rows.shape), 0),
}


@pytest.mark.parametrize("name", SPOILT)
def test_tokens_that_stand_out_of_a_table_are_damage_and_trained_ones_are_not(name: str, tmp_path: Path) -> None:
    """Also where every row was trained: 614 of 888 exchanged ones passed, and LoRA in a table was damaged."""
    shape, spoil, num_named = SPOILT[name]
    table = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    table[..., 0, :] = 0 if name == "trained" else table[..., 0, :]  # for no token
    spoilt = spoil(trained(table)).astype(np.float32)
    for factor in (1, 1.1):  # of the products, which were then trained, too
        own = edited("mlp", lambda array, factor=factor: array * np.float32(factor))
        files = saved(tmp_path / str(factor), own | {"wpe.weight": spoilt}, floats() | {"wpe.weight": table})
        assert len(damage(*files, nats=1e-5).findings) == num_named


FACTORS: list[tuple[Edit, tuple[str, ...], int]] = [
    (lambda table: 1.2 * table, ("cos_cache", "sin_cache"), 0),
    (lambda table: 1.2 * table, ("sin_cache",), 1),
    (put(slice(9, None), np.cbrt), ("cos_cache", "sin_cache"), 2),
]


@pytest.mark.parametrize(("edit", "turns", "num_named"), FACTORS)
def test_a_factor_of_all_positions_is_left_to_texts(
    edit: Edit, turns: tuple[str, ...], num_named: int, tmp_path: Path
) -> None:
    """YaRN's, which another exporter has in the scale of scores; of one table alone it is none of all positions."""
    own = decoder()
    tables(lambda table: edit(table).astype(np.float32), turns=turns)(own)
    found = damage(*saved(tmp_path, own, decoder()), nats=1e-5)
    assert (len(found.findings), len(found.judged)) == (num_named, len(turns) - num_named)


RANDOM = np.random.default_rng(1)
RARELY = np.where(np.arange(1000) < 500, 0.1, 1)
HEAD = RANDOM.normal(size=(64, 1)) / 2 + RARELY * RANDOM.normal(size=(64, 1000))
SOME_LARGE = np.where(np.arange(64) < 3, 10, 1)[:, None]
LAST = put((slice(None), slice(900, None)), lambda part: part[:, ::-1])
BIAS, HIDDEN = np.linspace(-1, 1, 108), put(slice(100, None), -np.inf)
WIDE, TRIPLED = RANDOM.normal(size=(16, 108)), put((slice(None), slice(90, 95)), lambda part: 3 * part)
TOKENS: dict[str, Any] = {"num_tokens": 100, "vocab_sizes": {108}}
FEW_IDS, FEWER_IDS = ({"num_tokens": few, "vocab_sizes": {size, None}} for few, size in ((50, 64), (90, 100)))
HELD: list[tuple[str, Array, Edit, dict[str, Any], bool]] = [
    ("lm_head.weight", HEAD, lambda head: head * SOME_LARGE, {}, False),
    ("lm_head.weight", HEAD, lambda head: LAST(head * SOME_LARGE), {}, True),
    ("lm_head.weight", HEAD, lambda head: head - head.mean(1, keepdims=True), {}, False),
    ("lm_head.weight", HEAD, lambda head: LAST(head - head.mean(1, keepdims=True)), {}, True),
    ("lm_head.bias", BIAS, HIDDEN, TOKENS, False),
    ("lm_head.bias", BIAS, HIDDEN, {**TOKENS, "num_tokens": 101}, True),
    ("score.weight", WIDE, TRIPLED, TOKENS, True),
    ("score.weight", WIDE[:, :104], TRIPLED, TOKENS, False),
    ("cos_cache", floats()["cos_cache"], put(slice(60, None), np.nan), FEW_IDS | {"longest": 64}, True),
    ("cos_cache", floats()["cos_cache"], put(slice(60, None), np.nan), FEW_IDS | {"longest": 60}, False),
    (TABLE, floats()[TABLE], put(95, 0), FEWER_IDS, False),
    (TABLE, floats()[TABLE], put(89, 0), FEWER_IDS, True),
    ("lm_head", floats()[TABLE].T.copy(), put((slice(None), 95), 0), FEWER_IDS, False),
    ("lm_head", floats()[TABLE].T.copy(), put((slice(None), 89), 0), FEWER_IDS, True),
]
"""A constant, what is done to it, what is known of texts, and whether it is damage."""


@pytest.mark.parametrize(("name", "array", "edit", "facts", "is_damage"), HELD)
def test_what_tokens_and_positions_may_reach_of_a_constant_is_held(
    name: str, array: Array, edit: Edit, facts: dict[str, Any], is_damage: bool, tmp_path: Path
) -> None:
    """Of a head tokens that did not change as all do: a last norm with some large factors, and the mean of all tokens
    taken off them, change all alike. It is known by its width, whatever its name. A bias may hide what is no token. A
    rotary table may be as long as the vocabulary."""
    files = saved(tmp_path, *(floats() | {name: one.astype(np.float32)} for one in (edit(array.copy()), array)))
    assert damage(*files, nats=1e-5, **facts).findings.keys() == ({name} if is_damage else set())


ROPE = {"rope_theta": 100.0, "rope_type": "longrope", "long_factor": [1.0, 4.0]}
OTHERWISE: list[tuple[dict[str, Any], set[str]]] = [
    ({"rope_parameters": ROPE}, set()),
    ({"rope_scaling": {"type": "longrope", "long_factor": [1.0, 4.0]}}, set()),
    ({"rope_parameters": ROPE | {"long_factor": [1, 4]}}, set()),
    ({"rope_parameters": ROPE, "sliding_window": 8}, {"window of layer 0"}),
    ({"rope_parameters": ROPE | {"long_factor": [1.0, 2.0]}}, {"long_factor"}),
    ({"rope_scaling": {"type": "su", "long_factor": [1.0, 4.0]}, "layer_types": FULL}, {"window of layer 0"}),
    ({"rope_parameters": ROPE, "use_sliding_window": False, "layer_types": []}, {"window of layer 0"}),
    ({"rope_scaling": None}, {"rope_type"}),
]
"""What a checkpoint's config.json says beside another with `ROPE`, and which of it is other."""


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_head_that_a_checkpoint_does_not_store_is_its_table(is_stored: bool, tmp_path: Path) -> None:
    """transformers ties none that a file has: exchanged tokens of one were "not compared" beside a tied reference."""
    arrays = floats()
    heads = [arrays | {"lm_head.weight": rows} for rows in (arrays[TABLE], exchanged(arrays[TABLE], slice(40, 44)))]
    sound, own, tied = saved(tmp_path, *heads, arrays)
    assert damage(sound, tied, nats=1e-5) == damage(tied, sound, nats=1e-5) == ({}, (), 0, math.inf)
    found = damage(*(own, tied) if is_stored else (tied, own), nats=1e-5)
    assert [*found.findings] == ["lm_head.weight"]


def test_a_checkpoint_is_held_against_its_reference_where_it_runs_as_it_is(tmp_path: Path) -> None:
    """Without an export: NaN rows, and rows of others, were "no difference found"."""
    own = changed(TABLE, put([3, 90], np.nan), changed(NORM, lambda array: 2 * array))
    files = saved(tmp_path, own, floats(np.float16), floats())
    assert damage(files[0], files[2]).findings.keys() == {TABLE, NORM}
    assert damage(files[1], files[2]) == ({}, (), 0, math.inf)
    (files[2].directory / "config.json").write_text(json.dumps(CONFIG | {"rope_parameters": ROPE}), encoding="utf-8")
    for config, names in OTHERWISE:
        (files[1].directory / "config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
        told = damage(files[1], files[2], nats=0.0, longest=64).findings
        assert told.keys() == {f"config.json, {name}" for name in names}
    alone = damage(files[0], None)
    assert (alone.findings.keys(), alone.uncompared) == ({TABLE}, len(own))


def test_a_checkpoint_s_own_code_that_is_not_the_reference_s_is_named(tmp_path: Path) -> None:
    """Equal weights whose code limits positions were "no difference found" by short texts."""
    files = saved(tmp_path, floats(), floats())
    for one in files:
        (one.directory / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "own.Model"}}))
        (one.directory / "own.py").write_text(f"MOST = {one.directory.name}")
    assert damage(*files).judged == ("own.py",)
    assert damage(files[0], files[0]).judged == ()
    (files[1].directory / "own.py").unlink()
    assert damage(*files).judged == ("own.py",)
