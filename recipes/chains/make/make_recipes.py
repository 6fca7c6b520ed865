"""Writes one recipe for each quantization chain, and the calibration text that Gptq reads; the same bytes every time.

    python recipes/chains/make/make_recipes.py [--output DIR]

Knows no Olive: a pass is the block that a recipe holds.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parents[1] / "quickstart"
NUM_CALIBRATION_TEXTS = 64

FLOAT = {"type": "ModelBuilder", "precision": "fp32"}
"""Weights in fp32, and weights that an earlier pass of the same chain has quantized: the builder keeps those."""

FROM_QUANTIZED = {"type": "ModelBuilder", "precision": "int4"}
TORCH = {"bits": 4, "group_size": 32}
WHOLE = {"lm_head": True, "embeds": True}
CALIBRATION = {
    "name": "calibration",
    "type": "HuggingfaceContainer",
    "load_dataset_config": {
        "data_name": "json",
        "data_files": "recipes/chains/calibration.jsonl",
        "split": "train",
    },
    "pre_process_data_config": {
        "strategy": "line-by-line",
        "text_cols": ["text"],
        "max_samples": NUM_CALIBRATION_TEXTS,
        "max_seq_len": 256,
    },
    "dataloader_config": {"batch_size": 1},
}


COMPARED = {"path": "input_model", "mode": "recorded", "records_dir": "out/records"}
"""The model that the chain starts from. One folder of records, so that it is run once for all recipes."""

MEASURED = {
    "type": "OrtLMEvaluation",
    "tasks": ["quickstart_choice", "quickstart_perplexity"],
    "include_path": "recipes/quickstart/tasks",
    "reference": COMPARED,
    "limit": 40,
    "bootstrap_iters": 0,
}
"""The pass that measures between passes."""


def builder_int4(**options: object) -> dict:
    return {"int4": {"type": "ModelBuilder", "precision": "int4", "int4_algo_config": "rtn", **options}}


def after_float(name: str, **options: object) -> dict:
    return {"float": FLOAT, "quantize": {"type": name, **options}}


def before_builder(name: str, **options: object) -> dict:
    return {"quantize": {"type": name, **TORCH, **options}, "build": FROM_QUANTIZED}


def step_by_step() -> dict:
    """Float, then int4: measured as it came and behind each step, with bounds on the last."""
    gate = {**MEASURED, "require": [{"metric": "kl_mean", "max": 0.1}, {"metric": "size_on_disk", "max": 1_500_000}]}
    chain = after_float("OnnxKQuantQuantization", bits=4, block_size=128)
    return {
        "measured": MEASURED,
        "float": chain["float"],
        "measured_float": MEASURED,
        "quantize": chain["quantize"],
        "gate": gate,
    }


def tied(passes: dict) -> dict:
    return {**passes, "tie": {"type": "GraphSurgeries", "surgeries": [{"surgeon": "TieWordEmbeddings"}]}}


CHAINS: dict[str, dict] = {
    "float": {"float": FLOAT},
    "builder_int4_b32": builder_int4(int4_block_size=32),
    "builder_int4_b128": builder_int4(int4_block_size=128),
    **{
        f"builder_int4_accuracy_{level}": builder_int4(int4_block_size=32, extra_options={"int4_accuracy_level": level})
        for level in range(5)
    },
    "builder_int4_qdq": builder_int4(int4_block_size=32, int4_algo_config="default", use_qdq=True),
    "builder_int4_k_quant_mixed": builder_int4(int4_block_size=32, int4_algo_config="k_quant_mixed"),
    "kquant_int4_b32": after_float("OnnxKQuantQuantization", bits=4, block_size=32),
    "kquant_int4_b128": after_float("OnnxKQuantQuantization", bits=4, block_size=128),
    "kquant_int8_b32": after_float("OnnxKQuantQuantization", bits=8, block_size=32),
    "kquant_int8_b128": after_float("OnnxKQuantQuantization", bits=8, block_size=128),
    "dynamic_int8": after_float("OnnxDynamicQuantization", precision="int8"),
    "static_int8": after_float("OnnxStaticQuantization", data_config="calibration", op_types_to_quantize=["MatMul"]),
    "block_rtn_int4_b32": after_float("OnnxBlockWiseRtnQuantization", bits=4, block_size=32),
    "block_rtn_int4_b128": after_float("OnnxBlockWiseRtnQuantization", bits=4, block_size=128),
    "block_rtn_int8_b32": after_float("OnnxBlockWiseRtnQuantization", bits=8, block_size=32),
    "block_rtn_int8_b128": after_float("OnnxBlockWiseRtnQuantization", bits=8, block_size=128),
    "hqq_int4_b32": after_float("OnnxHqqQuantization", block_size=32),
    "bnb4_nf4": after_float("OnnxBnb4Quantization", precision="nf4"),
    "rtn_builder": before_builder("Rtn", **WHOLE),
    "rtn_int8_builder": before_builder("Rtn", **WHOLE, bits=8),
    "kquant_builder": before_builder("KQuant"),
    "gptq_builder": before_builder("Gptq", data_config="calibration"),
    "mixed_rtn_builder": {
        "select": {"type": "SelectiveMixedPrecision", "algorithm": "k_quant_down"},
        **before_builder("Rtn"),
    },
    "rtn_builder_tied": tied(before_builder("Rtn", **WHOLE)),
    "step_by_step": step_by_step(),
}


WITH_REFERENCE = ("kquant_int4_b32", "kquant_int8_b128", "step_by_step")
"""Recipes whose evaluator compares with the input model; a reference goes with any other, too."""


def recipe(name: str, passes: dict) -> dict:
    data = {"data_configs": [CALIBRATION]} if "calibration" in json.dumps(passes) else {}
    return {
        "input_model": {"type": "HfModel", "model_path": "recipes/quickstart/model"},
        "systems": {
            "local": {
                "type": "LocalSystem",
                "accelerators": [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}],
            }
        },
        **data,
        "passes": passes,
        "evaluators": {
            "quickstart": {
                "type": "OrtLMEvaluator",
                "user_script": "recipes/quickstart/olive_ext_plugin.py",
                "tasks": ["quickstart_choice", "quickstart_generate", "quickstart_perplexity", "size_on_disk"],
                "include_path": "recipes/quickstart/tasks",
                **({"reference": COMPARED} if name in WITH_REFERENCE else {}),
                "limit": 40,
                "bootstrap_iters": 0,
            }
        },
        "evaluator": "quickstart",
        "evaluate_input_model": False,
        "host": "local",
        "target": "local",
        "cache_dir": "out/cache",
        "output_dir": f"out/chains/{name}",
    }


def calibration_text() -> list[str]:
    """The first documents of the quickstart model's training text: none of an evaluation task."""
    sys.path.insert(0, str(QUICKSTART / "make"))
    from make_data import training_text

    return list(training_text(NUM_CALIBRATION_TEXTS))


def info() -> str:
    entries = [
        f"  - name: chains_{name}\n    file: {name}.json\n    devices: cpu\n    eps: CPUExecutionProvider\n"
        for name in CHAINS
    ]
    return "arch: llama\nrecipes:\n" + "".join(entries)


def files() -> dict[str, str]:
    """File name -> contents."""
    recipes = {f"{name}.json": json.dumps(recipe(name, passes), indent=4) + "\n" for name, passes in CHAINS.items()}
    calibration = "".join(json.dumps({"text": text}) + "\n" for text in calibration_text())
    return {**recipes, "info.yml": info(), "calibration.jsonl": calibration}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE.parent)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (args.output / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
