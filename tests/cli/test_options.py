"""What is written on the command line becomes the keys of one configuration."""

from __future__ import annotations

from typing import Any

import pytest

from olive_ext.cli.options import OPTIONS, advised, build_parser, in_options, written_values
from olive_ext.config import SAME_MODEL, ClaimConfig, EvaluationConfig
from olive_ext.errors import (
    ConfigError,
    MissingError,
    ModelError,
    OliveExtError,
    ProviderError,
    RecordsError,
    TaskError,
)

SAME = {"path": SAME_MODEL, "is_same_model": True}


def written(*argv: str) -> dict[str, Any]:
    return written_values(build_parser().parse_args(["evaluate", "m", *argv]), "m")


def test_every_option_becomes_its_key() -> None:
    values = written(
        *("--tasks", "a,b.yaml", "--include-path", "x", "y", "--include-path", "z", "--limit", "0.5"),
        *("--num-fewshot", "2", "--batch-size", "8", "--max-length", "128"),
        *("--provider", "webgpu", "cpu", "--provider-option", "a=b=c", "--provider-option", "d=1"),
        *("--provider-library", "WebGPU=onnxruntime_ep_webgpu", "--allow-cpu-fallback"),
        *("--apply-chat-template", "tool", "--system-instruction", "Be brief.", "--fewshot-as-multiturn"),
        *("--gen-kwargs", "temperature=0.5,do_sample=true,until=END", "--use-cache", "c"),
        *("--reference", "float", "--reference-mode", "resident", "--sample-log-num", "3"),
        *("--fail-on-loss", "2", "--require", "kl_mean<=0.01"),
        *("--isolation", "process", "--workers", "2", "--on-error", "report"),
        *("--seed", "7", "--output", "out", "--documents", "all"),
        *("--kind", "onnx", "--tokenizer", "tok", "--onnx-file-name", "d.onnx", "--set", "engine.num_slots=4"),
    )
    config = EvaluationConfig.parse(values)
    assert config == EvaluationConfig.parse(
        {
            "model": {"path": "m", "kind": "onnx", "onnx_file_name": "d.onnx"},
            "tokenizer": "tok",
            "tasks": ["a", "b.yaml"],
            "include_path": ["x", "y", "z"],
            "limit": 0.5,
            "num_fewshot": 2,
            "batch_size": 8,
            "max_length": 128,
            "execution_provider": ["webgpu", "cpu"],
            "provider_options": {"a": "b=c", "d": "1"},
            "provider_libraries": {"WebGPU": "onnxruntime_ep_webgpu"},
            "allow_cpu_fallback": True,
            "apply_chat_template": "tool",
            "system_instruction": "Be brief.",
            "fewshot_as_multiturn": True,
            "gen_kwargs": {"temperature": 0.5, "do_sample": True, "until": "END"},
            "use_cache": "c",
            "isolation": "process",
            "workers": {"count": 2},
            "on_error": "report",
            "reference": {"path": "float", "mode": "resident"},
            "sample_log_num": 3,
            "fail_on_loss": 2,
            "require": [{"metric": "kl_mean", "max": 0.01}],
            "seed": 7,
            "output_dir": "out",
            "documents": "all",
            "engine": {"num_slots": 4},
        }
    )
    assert {option.key.split(".")[0] for option in OPTIONS} - {"certain"} <= config.model_fields_set


@pytest.mark.parametrize(
    ("code", "given", "told"),
    [
        ("provider", {}, "--provider --reference --allow-cpu-fallback --limit"),
        ("wrong_value", {"limit": "x"}, "--provider 'reference' --allow-cpu-fallback --limit"),
        ("wrong_value", {"execution_provider": ["cuda"]}, "--provider 'reference' --allow-cpu-fallback 'limit'"),
        ("wrong_value", {"reference": "a=1"}, "--provider --against --allow-cpu-fallback 'limit'"),
        ("task", {"execution_provider": ["cuda"]}, "--provider 'reference' 'allow_cpu_fallback' 'limit'"),
        ("provider", {"set": ["a=1"], "limit": "x"}, "'execution_provider' 'reference' 'allow_cpu_fallback' --limit"),
        ("provider", {"set": ["a=1"]}, "'execution_provider' 'reference' 'allow_cpu_fallback' 'limit'"),
        ("provider", {"target": "a.JSON"}, "'execution_provider' 'reference' 'allow_cpu_fallback' 'limit'"),
        ("unknown_key", {}, "'execution_provider' 'reference' 'allow_cpu_fallback' 'limit'"),
    ],
)
def test_message_names_the_options_of_who_wrote_options(code: str, given: dict[str, Any], told: str) -> None:
    kind = TaskError if code == "task" else ConfigError
    error = kind("'execution_provider' 'reference' 'allow_cpu_fallback' 'limit'", code=code)
    found = in_options(error.about("f", 3), given, OPTIONS)
    assert (str(found), found.code, found.field, found.value) == (told, code, "f", 3)


@pytest.mark.parametrize(
    ("error", "given", "told"),
    [
        (ConfigError("give", "limit", "limit"), {"limit": "limit"}, "--limit = 'limit': give"),
        (ModelError("no 'variant'").about("reference", "variant"), {"model.variant": "a"}, "no 'variant'"),
        (ProviderError("CUDA (from execution_provider) is not here"), {}, "CUDA (from --provider) is not here"),
        (RecordsError("give another 'output_dir' or 'use_cache'"), {}, "give another --output or --use-cache"),
        (
            ConfigError("it is there", "reference.repro", "r"),
            {"reference": "threads=1", "reference.repro": "r"},
            "--repro = 'r': it is there",
        ),
        (ProviderError("(execution_provider)"), {"tasks": ["execution_provider"]}, "(execution_provider)"),
        (ModelError("none", "reference.variant", "x"), {"reference": "variant=x"}, "--against variant = 'x': none"),
        (ConfigError("no", "reference.execution_provider"), {"reference": "provider=x"}, "--against provider: no"),
        (
            ProviderError("(from reference.execution_provider)"),
            {"reference": "provider=x"},
            "(from --against provider)",
        ),
        (ConfigError("no", "reference.engine.runtime"), {"reference": "runtime=x"}, "--against runtime: no"),
        (ConfigError("no", "workers.count", "0"), {"workers": "0"}, "--workers = '0': no"),
        (ConfigError("no", "model.kind", "x"), {"model.kind": "x"}, "--kind = 'x': no"),
        (ModelError("no", "components.audio", "x"), {"model.components": ["audio=x"]}, "--component audio = 'x': no"),
        (ConfigError("certain: 'below' = 5: no").about("certain"), {"certain": "below=5"}, "--certain below = 5: no"),
        (
            MissingError("missing key 'reference.path'", "reference.path"),
            {"reference.mode": "recorded"},
            "missing key reference.path: give --reference",
        ),
        (ConfigError("no 'tasks', see 'limit'"), {"tasks": ["tasks"], "limit": 3}, "no 'tasks', see --limit"),
    ],
)
def test_value_that_is_named_as_a_key_stays(error: OliveExtError, given: dict[str, Any], told: str) -> None:
    assert str(in_options(error, given, OPTIONS)) == told


def test_advice_names_options_and_leaves_what_is_no_key() -> None:
    keys = 'leave `limit` out, `matters: 4`, `documents: "all"`, `fail_on_loss: 1`'
    keys = f'{keys}, `require: ["kl_mean<=0.1"]`, `mmlu` has'
    told = "leave `--limit` out, `--set matters=4`, `--documents all`, `--fail-on-loss 1`"
    assert advised(keys) == f"{told}, `--require 'kl_mean<=0.1'`, `mmlu` has"


def test_claim_is_a_list_of_its_keys_and_absent_options_write_nothing() -> None:
    assert written() == {"model": {"path": "m"}}
    values = written("--documents", "enough", "--certain", "metric=kl_mean,below=0.05", "--reference", "float")
    config = EvaluationConfig.parse({**values, "tasks": ["a"]})
    assert config.claim == ClaimConfig(metric="kl_mean", below=0.05)


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--apply-chat-template", "--limit", "3"], {"apply_chat_template": True, "limit": "3"}),
        (["--gen-kwargs", '{"until": ["a", "b,c"]}'], {"gen_kwargs": {"until": ["a", "b,c"]}}),
        (["--set", "bootstrap_iters=0"], {"bootstrap_iters": 0}),
        (["--set", "device=cuda:0"], {"device": "cuda:0"}),
        (["--set", 'tasks=["a"]'], {"tasks": ["a"]}),
        (["--set", "model_args.dtype=float32"], {"model_args": {"dtype": "float32"}}),
        (["--set", "model.kind=hf"], {"model": {"path": "m", "kind": "hf"}}),
        *(
            (["--against", given], {"reference": {**SAME, "variant": name}})
            for given, name in {
                "variant=1": "1",
                "variant=null": "null",
                'variant="null"': "null",
                '{"variant": "a,b"}': "a,b",
            }.items()
        ),
    ],
)
def test_options_are_read_as_json_where_they_are(argv: list[str], values: dict[str, Any]) -> None:
    assert written(*argv) == {"model": {"path": "m"}, **values}
