"""Mended models of other kinds than a plain decoder: experts, tied embeddings, encoders and embedding graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import ConfigError, RequirementError
from olive_ext.model.files.content import load_graph, size_on_disk
from olive_ext.model.files.locate import locate as locate_files
from olive_ext.plugins.diagnose.remedy.pages import Bill
from tests.backends import local_tasks
from tests.exports import genai_export
from tests.exports.cache import ROOT
from tests.exports.catalog import Export
from tests.exports.hf import hf_model
from tests.exports.media import media_export
from tests.exports.plain import plain_logits
from tests.plugins.diagnose.remedy.test_corruption import in_bits
from tests.plugins.diagnose.remedy.test_mended_package import assert_scored_alike
from tests.refusals import refused

TOKENS = [3, 200, 17, 511, 90, 44, 7, 900, 250]
PICTURES = {"tasks": ["shapes_colour"], "include_path": str(ROOT / "recipes" / "vision" / "tasks"), "limit": 10}


def mend(model: Path, reference: Path, output: Path, **settings: Any) -> Bill:
    work = {"tasks": ["tiny_choice", "tiny_rolling"], "include_path": str(local_tasks.write_tasks(output.parent / "t"))}
    given = {**work, "top": 1, **settings}
    return olive_ext.mend(str(model), reference=str(reference), output_dir=str(output), **given)


def assert_one_score_on_all_runtimes(folder: Path, family: str) -> None:
    """The engine's, onnxruntime-genai's, and those of a plain pass of ONNX Runtime."""
    export = Export("mended", folder, hf_model(family), family, "genai", "int4", "", "", "", one_token=False)
    assert_scored_alike(folder, TOKENS, plain_logits(export, TOKENS))


@pytest.mark.exporters
def test_experts_are_mended_and_run_everywhere(tmp_path: Path) -> None:
    """A bound that QMoE in 4 bits breaks: some become 8 bits, some MoE."""
    model, reference = (genai_export("gpt_oss", "0.14.1", precision) for precision in ("int4", "fp32"))
    bill = mend(model, reference, tmp_path / "mended", within={"kl_mean": 1e-3})
    assert bill.verdict == "ok"
    assert bill.unchanged_loss.held_out.mean > 0.1
    chosen = {line.name: line.choice.precision for line in bill.lines if line.kind == "moe"}
    operators = {node.name: node.op_type for node in load_graph(tmp_path / "mended" / "model.onnx").graph.node}
    assert len(chosen) == 2
    for name, precision in chosen.items():
        stem = name.removesuffix("MoE")
        assert operators.get(f"{stem}MoE") == "MoE" if precision == "float" else operators[f"{stem}QMoE"] == "QMoE"
        assert precision != "as it is"
    assert_one_score_on_all_runtimes(tmp_path / "mended", "gpt_oss")


@pytest.mark.long
def test_tied_model_becomes_smaller_and_better(tmp_path: Path) -> None:
    """onnxruntime-genai's builder stores the table of a tied model in float beside the head in 4 bits. Activations are
    not rounded here: a last digit that differs between runtimes makes one of 127 there."""
    model = genai_export("gemma3_text", None, "int4", options=("int4_accuracy_level=1",))
    reference = genai_export("gemma3_text")
    bill = mend(model, reference, tmp_path / "mended", at_most=500_000)
    assert size_on_disk(locate_files(model)) > 1.3 * size_on_disk(locate_files(tmp_path / "mended"))
    assert bill.chosen_loss.held_out.mean < bill.unchanged_loss.held_out.mean / 5
    (head,) = (line for line in bill.lines if line.name == "/lm_head/MatMul")
    assert head.choice.precision == "int8 in blocks of 32, one with the table"
    graph = load_graph(tmp_path / "mended" / "model.onnx").graph
    table = next(node for node in graph.node if node.op_type == "GatherBlockQuantized")
    product = next(node for node in graph.node if node.name == "/lm_head/MatMul_Q8")
    assert table.input[2] == product.input[2]
    assert_one_score_on_all_runtimes(tmp_path / "mended", "gemma3_text")


@pytest.mark.exporters
def test_bound_that_is_kept_already_still_makes_a_tied_model_smaller(tmp_path: Path) -> None:
    model, reference = (genai_export("gemma3_text", None, precision) for precision in ("int4", "fp32"))
    bill = mend(model, reference, tmp_path / "mended", within={"kl_mean": 1.0})
    assert bill.chosen.bytes < 0.75 * bill.unchanged.bytes
    assert [line.choice.precision for line in bill.changed] == ["int4 in blocks of 32, one with the table"]
    assert bill.verdict == "ok"


@pytest.mark.long
def test_size_that_not_even_one_table_reaches_is_told_with_the_least(tmp_path: Path) -> None:
    model, reference = (genai_export("gemma3_text", None, precision) for precision in ("int4", "fp32"))
    with refused(ConfigError, "wrong_value", "at_most", 300_000, holds=("65", "39")):
        mend(model, reference, tmp_path / "mended", at_most=300_000)


def test_table_stays_where_only_the_head_of_a_tied_model_is_quantized(tmp_path: Path) -> None:
    """The float graph has one constant for both: quantized, it is the head's alone."""
    model, reference = (genai_export("gemma3_text", None, precision) for precision in ("int4", "fp32"))
    work = {"tasks": ["tiny_rolling"], "include_path": str(local_tasks.write_tasks(tmp_path))}
    found = olive_ext.locate(str(model), reference=str(reference), top=1, **work)
    assert found.total.mean == pytest.approx(found.model_kl.mean, rel=0.02)


@pytest.mark.exporters
def test_encoder_and_embedding_graph_are_mended_and_the_decoder_is_copied(tmp_path: Path) -> None:
    source = media_export("llava")[0]
    package = in_bits(source, tmp_path / "vision", "vision_encoder/*.onnx", 4)
    package = in_bits(source, tmp_path / "table", "embedding/*.onnx", 4, "Gather")
    for path in (tmp_path / "vision" / "vision_encoder").iterdir():
        (package / "vision_encoder" / path.name).write_bytes(path.read_bytes())
    bill = mend(package, source, tmp_path / "mended", within={"kl_mean": 2e-3}, **PICTURES)
    assert bill.unchanged_loss.choosing.mean > 0.05
    assert bill.chosen_loss.choosing.high <= 2e-3
    assert {line.name.rpartition(", ")[2] for line in bill.changed} == {"vision", "embedding"}
    assert bill.chosen.bytes == size_on_disk(locate_files(tmp_path / "mended"))
    made = {path.relative_to(tmp_path / "mended") for path in (tmp_path / "mended").rglob("*") if path.is_file()}
    own = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert {path.name for path in made - own} == {"bill.json", "bill.md", "bill.html"}
    assert own <= made
    decoder = Path("decoder", "model.onnx")
    assert (tmp_path / "mended" / decoder).read_bytes() == (package / decoder).read_bytes()


@pytest.mark.exporters
def test_weight_that_has_no_finer_form_is_named(tmp_path: Path) -> None:
    """One product in the quantized graph and three in the float one."""
    reference = genai_export("llama", options=("disable_qkv_fusion=true",))
    package = in_bits(genai_export("llama"), tmp_path / "package")
    with pytest.raises(RequirementError, match=r"/attn/qkv_proj/MatMul', .* 0.\d+, "):
        mend(package, reference, tmp_path / "mended", within={"kl_mean": 1e-6})
