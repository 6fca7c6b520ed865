"""One recipe for each quantization chain: as generated, valid, documented, and three of them run through Olive."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "chains"
QUICKSTART = ROOT / "recipes" / "quickstart"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.json"))
TOLERANCE = 1e-4
METRICS = {
    "quickstart_choice-acc",
    "quickstart_choice-acc_norm",
    "quickstart_perplexity-word_perplexity",
    "quickstart_perplexity-byte_perplexity",
    "quickstart_perplexity-bits_per_byte",
    "size_on_disk-bytes",
}


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, str]]:
    """What the committed script writes now."""
    sys.path.insert(0, str(FOLDER / "make"))
    try:
        import make_recipes

        yield make_recipes.files()
    finally:
        sys.path.remove(str(FOLDER / "make"))


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def test_files_when_made_again_are_the_committed_bytes(made: dict[str, str]) -> None:
    assert sorted(name for name in made if name.endswith(".json")) == [f"{name}.json" for name in RECIPES]
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, name


def test_every_recipe_is_listed_and_documented() -> None:
    listed = (FOLDER / "info.yml").read_text(encoding="utf-8")
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")

    assert [name for name in RECIPES if f"    file: {name}.json\n" not in listed] == []
    assert [name for name in RECIPES if f"| [`{name}`]({name}.json) |" not in readme] == []


def test_calibration_text_holds_no_evaluation_document() -> None:
    lines = (FOLDER / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n\n".join(json.loads(line)["text"] for line in lines)
    tasks = {"choice.jsonl": "context", "generate.jsonl": "question", "perplexity.jsonl": "page"}
    for name, key in tasks.items():
        rows = (QUICKSTART / "tasks" / name).read_text(encoding="utf-8").splitlines()
        held_out = [json.loads(row)[key] for row in rows]
        assert [document for document in held_out if document in text] == []


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model with its embedding table as its LM head: no good model, but a tied one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tied")
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(folder)
    return folder


def run_chain(name: str, folder: Path, model: Path = QUICKSTART / "model") -> dict[str, float]:
    """The metrics of a recipe run in this process on two documents of each task; all it writes goes to `folder`."""
    from olive.workflows import run

    import olive_ext.workflow  # noqa: F401

    recipe = read(name)
    evaluator = recipe["evaluators"]["quickstart"]
    tasks = ["quickstart_choice", "quickstart_perplexity", "size_on_disk"]
    evaluator.update(limit=2, tasks=tasks, engine={"num_threads": 1})
    recipe.update(output_dir=str(folder / "out"), cache_dir=str(folder / "cache"))
    recipe["input_model"]["model_path"] = str(model)
    assert run(recipe).has_output_model()
    return {key: value["value"] for key, value in json.loads((folder / "out" / "metrics.json").read_text()).items()}


def differences(model: Path) -> list[float]:
    """Our log-probabilities against one plain pass of the file as it is for each request, the largest for each."""
    import olive_ext
    from tests.agreement.references import Plain
    from tests.exports import Export

    rng = np.random.default_rng(5)
    stem = [0, *rng.integers(9, 900, 30).tolist()]
    requests = [(stem, rng.integers(9, 900, 1 + index % 5).tolist()) for index in range(10)]
    with olive_ext.open(model, engine={"num_threads": 1}) as opened:
        found = [output.token_logprobs for output in opened.loglikelihood(requests)]
    plain = Plain(Export("chain", model, QUICKSTART / "model", "quickstart"))
    expected = [plain.score(context, target) for context, target in requests]
    return [max(map(abs, np.subtract(ours, theirs))) for ours, theirs in zip(found, expected, strict=True)]


Check = Callable[[Any, Any], bool]
CHAINS: dict[str, Check] = {
    # The pass has renamed the logits.
    "block_rtn_int4_b32": lambda graph, _: (
        "logits_Q4" in {output.name for output in graph.output}
        and "GatherBlockQuantized" in {node.op_type for node in graph.node}
    ),
    # Embeddings and head share a quantized table.
    "rtn_builder_tied": lambda graph, _: (
        sorted(node.op_type for node in graph.node if "model.embed_tokens.qweight" in node.input)
        == ["GatherBlockQuantized", "Reshape"]
    ),
    "dynamic_int8": lambda _, facts: (
        facts["scoring_head"] == "logits" and any("quantized with one scale" in note for note in facts["notes"])
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_is_scored_like_the_untouched_graph(
    name: str, tmp_path: Path, tied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import olive_ext
    from olive_ext.model.files.content import load_graph

    monkeypatch.chdir(ROOT)
    assert set(run_chain(name, tmp_path, tied if name.endswith("tied") else QUICKSTART / "model")) == METRICS
    with olive_ext.open(tmp_path / "out") as opened:
        facts = opened.describe_execution()
    assert CHAINS[name](load_graph(tmp_path / "out" / "model.onnx").graph, facts), facts
    assert max(differences(tmp_path / "out")) < TOLERANCE


def in_folder(folder: Path, *, max_kl: float) -> dict[str, Any]:
    """The recipe with measuring passes, on six documents of each task; all it writes goes to `folder`."""
    recipe = read("step_by_step")
    (evaluator,) = recipe["evaluators"].values()
    blocks = [evaluator, *(entry for entry in recipe["passes"].values() if entry["type"] == "OrtLMEvaluation")]
    for block in blocks:
        block.update(limit=6, engine={"num_threads": 1})
        block["reference"]["records_dir"] = str(folder / "records")
    evaluator["tasks"] = ["quickstart_choice"]
    recipe["passes"]["gate"]["require"][0] = {"metric": "kl_mean", "max": max_kl}
    recipe.update(output_dir=str(folder / "out"), cache_dir=str(folder / "cache"))
    return recipe


@pytest.mark.long
@pytest.mark.usefixtures("forked_exports")
def test_chain_measured_step_by_step_passes_its_gate_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from olive.workflows import run

    import olive_ext.workflow  # noqa: F401
    from olive_ext.errors import RequirementError

    monkeypatch.chdir(ROOT)

    assert run(in_folder(tmp_path, max_kl=0.1)).has_output_model()

    steps = json.loads((tmp_path / "out" / "chain.json").read_text())["steps"]
    assert [step["name"] for step in steps] == ["input model", "float", "float -> quantize"]
    first, built, quantized = (step["values"] for step in steps)
    assert "kl_mean" not in first  # the reference itself
    assert abs(built["kl_mean"]) < 1e-6 < 1e-4 < quantized["kl_mean"] < 0.1
    assert quantized["size_on_disk"] < built["size_on_disk"] / 3
    assert built["tokens_per_second"] > 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["all-kl_mean"]["value"] > 1e-4

    (tmp_path / "out" / "model.onnx").unlink()
    with refused(RequirementError, "bound_broken", holds=("passes.gate", "all/kl_mean", "0")):
        run(in_folder(tmp_path, max_kl=1e-4))
    assert (tmp_path / "out" / "model.onnx").exists()
