"""One table of mistakes: what is given through which door, and the code, the field and the value of the error; words
are names and numbers that its sentence holds, in any order. `test_mistakes.py` has the doors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.backends.local_tasks import CHOICE, GENERATE, ROLLING
from tests.mistakes.calls import CALLS, REQUESTS, SESSIONS
from tests.mistakes.place import Place, self_scored, smaller, with_token, without_text
from tests.mistakes.recipes import MEASURE, OURS, QUANTIZE, RECIPE
from tests.refusals import value_at


class Mistake(NamedTuple):
    """A value of `...` is not compared."""

    door: str
    given: Any
    code: str
    field: str = ""
    words: str = ""
    value: Any = ...
    is_long: bool = False
    """One day in seven has it: what it asks of the same code, other rows ask on every day."""


def through(door: str, rows: Iterable[Sequence[Any]]) -> list[Mistake]:
    return [Mistake(door, *row) for row in rows]


UNKNOWN, NO_NAME, WRONG, MISSING, AGAINST = "unknown_key", "unknown_name", "wrong_value", "missing", "contradiction"
NOT_FOUND, DENIED, DAMAGED, ALIEN, UNFIT = "not_found", "no_access", "damaged", "untrusted", "unsupported"
TASK = "task"

ENOUGH = {"reference": "r", "documents": "enough"}
PROVIDERS = [["cuda", {"a": [1]}], 3]
ACC = {"metric": "acc"}
KL, ACCURACY = {"metric": "kl_mean", "max": 0.05}, {"metric": "accuracy_difference", "min": -0.01}
SETTINGS: list[tuple[Any, ...]] = [
    ({"batch_size": "foo"}, WRONG, "batch_size", "1 65536 auto"),
    ({"batch_size": True}, WRONG, "batch_size", "65536"),
    ({"batch_size": 0}, WRONG, "batch_size", "65536"),
    ({"limit": -1}, WRONG, "limit", "positive 0 1"),
    ({"limit": True}, WRONG, "limit"),
    ({"limit": "x"}, WRONG, "limit"),
    ({"num_fewshot": -1}, WRONG, "num_fewshot", "0"),
    ({"seed": "x"}, WRONG, "seed", "0 4294967295"),
    ({"seed": -1}, WRONG, "seed", "0 4294967295"),
    ({"seed": 2**40}, WRONG, "seed", "4294967295"),
    ({"tasks": []}, WRONG, "tasks", "non-empty"),
    ({"tasks": "a"}, WRONG, "tasks", "list"),
    ({"apply_chat_template": []}, WRONG, "apply_chat_template", "true false string"),
    ({"model_class": "x"}, WRONG, "model_class", "hf ort ortgenai ort-multimodal"),
    ({"model_args": 3}, WRONG, "model_args", "mapping"),
    ({"include_path": 3}, WRONG, "include_path", "string list"),
    ({"provider_libraries": {"a": 3}}, WRONG, "provider_libraries", "mapping string"),
    ({"execution_provider": PROVIDERS}, WRONG, "execution_provider", "string list pair options"),
    ({"repeats": 0}, WRONG, "repeats", "1 10000"),
    ({"repeats": 10_001}, WRONG, "repeats", "10000"),
    ({"repeats": True}, WRONG, "repeats", "10000"),
    ({"repeats": "many"}, WRONG, "repeats", "10000"),
    ({"engine": 3}, WRONG, "engine", "mapping"),
    ({"engine": {"num_slots": "x"}}, WRONG, "engine.num_slots", "1 65536 auto"),
    ({"engine": {"num_slots": 10**8}}, WRONG, "engine.num_slots", "65536"),
    ({"engine": {"overlaps_steps": 3}}, WRONG, "engine.overlaps_steps", "3"),
    ({"engine": {"chunksize": 1}}, UNKNOWN, "engine.chunksize", "'chunk_size'"),
    ({"engine": {"zzz": 1}}, UNKNOWN, "engine.zzz", "adapters chunk_size compiled_dir"),
    ({"engine": {"strict_shapes": True, "scoring": "tree"}}, AGAINST, "engine", "strict_shapes scoring tree"),
    ({"engine": {"strict_shapes": True, "shapes": "any"}}, AGAINST, "engine.strict_shapes", "'shapes' any"),
    ({"engine": {"shapes": "bucketed", "scoring": "tree"}}, AGAINST, "engine", "shapes scoring"),
    ({"engine": {"overlaps_steps": True, "strict_shapes": True}}, AGAINST, "engine", "strict_shapes overlaps_steps"),
    ({"engine": {"graph": "untouched", "graph_capture": True}}, AGAINST, "engine.graph_capture", "graph"),
    ({"engine": {"scoring": "tree", "graph_capture": True}}, AGAINST, "engine.graph_capture", "scoring"),
    ({"tassks": 1}, UNKNOWN, "tassks", "'tasks'"),
    ({"num_slots": 1}, UNKNOWN, "num_slots", "'engine.num_slots'"),
    ({"batch_size": "foo", "taskss": 1}, WRONG, "batch_size", "65536 taskss 'tasks'"),
    ({"fewshot_as_multiturn": True}, MISSING, "fewshot_as_multiturn", "apply_chat_template"),
    ({"output_dir": "a" * 300}, WRONG, "output_dir"),
    ({"tokenizer": "a\x00"}, WRONG, "tokenizer"),
    ({"engine": {"adapters": ["\ud800"]}}, WRONG, "engine.adapters"),
    ({"reference": {"path": "a/" * 2500}}, WRONG, "reference.path"),
    ({"reference": 5}, WRONG, "reference", "path mapping"),
    ({"reference": {}}, MISSING, "reference.path"),
    ({"reference": {"path": "m", "modes": "resident"}}, UNKNOWN, "reference.modes", "'mode'"),
    ({"reference": {"path": "m", "mode": "disk"}}, WRONG, "reference.mode", "auto resident recorded"),
    ({"reference": {"model": "m"}}, MISSING, "reference.path", "reference.model 'path'"),
    ({"reference": {"path": "m", "top": 0}}, WRONG, "reference.top", "positive"),
    ({"reference": {"path": "m.records", "top": 3}}, AGAINST, "reference.top", "m.records"),
    ({"reference": {"path": "m.records", "mode": "resident"}}, AGAINST, "reference.mode", "m.records resident"),
    ({"reference": "input_mode"}, WRONG, "reference.path", "'input_model'"),
    ({**ENOUGH, "documents": "some"}, WRONG, "documents"),
    ({**ENOUGH, "reference": None}, MISSING, "documents", "enough reference"),
    ({**ENOUGH, "reference": "same_model"}, AGAINST, "documents", "enough"),
    ({**ENOUGH, "limit": 10}, AGAINST, "limit", "10 documents enough"),
    ({**ENOUGH, "documents": "all", "certain": {"within": 0.01}}, MISSING, "certain", "documents enough"),
    ({**ENOUGH, "certain": {}}, AGAINST, "certain", "within above below"),
    ({**ENOUGH, "certain": {"within": 0.01, "below": 1}}, AGAINST, "certain", "within below"),
    ({**ENOUGH, "certain": {"metric": "kl_mean", "below": 0}}, AGAINST, "certain.below", "0"),
    ({**ENOUGH, "certain": {"metric": "acc", "within": 0.01}}, WRONG, "certain.metric", "accuracy_difference"),
    ({**ENOUGH, "certain": {"within": 5}}, AGAINST, "certain.within", "0.01"),
    ({**ENOUGH, "certain": {"metric": "top1_agreement", "above": -1}}, AGAINST, "certain.above"),
    ({**ENOUGH, "certain": {"within": -0.01}}, WRONG, "certain.within"),
    ({**ENOUGH, "certain": {"within": 0.01, "confidence": 95}}, WRONG, "certain.confidence", "0.5 1"),
    ({"fail_on_loss": 1}, MISSING, "fail_on_loss", "reference"),
    ({"fail_on_loss": 100, "reference": "r"}, WRONG, "fail_on_loss", "100"),
    ({"fail_on_loss": 0, "reference": "r"}, WRONG, "fail_on_loss", "above 0, below 100"),
    ({"fail_on_loss": "x", "reference": "r"}, WRONG, "fail_on_loss", "x"),
    ({"require": ["kl_mean<0.01"]}, WRONG, "require.0", "kl_mean<0.01 METRIC<=NUMBER"),
    ({"require": ["kl_mean<=a"]}, WRONG, "require.0.max", "a"),
    ({"require": [ACC]}, AGAINST, "require.0", "max min acc"),
    ({"require": [{**ACC, "min": 2, "max": 1}]}, AGAINST, "require.0.min", "2 max 1 acc"),
    ({"require": [{"metrik": "acc", "max": 1}]}, MISSING, "require.0.metric", "require.0.metrik 'metric'"),
    ({"require": [{"max": 1}]}, MISSING, "require.0.metric"),
    ({"require": [{**ACC, "max": True}]}, WRONG, "require.0.max", "number"),
    ({"require": [{**ACC, "max": math.nan}]}, WRONG, "require.0.max", "nan"),
    ({"require": ["accuracy_difference>=-1"]}, AGAINST, "require.0.min", "from -1 to 1 0.01 point"),
    ({"require": ["all/top1_agreement>=99"]}, AGAINST, "require.0.min", "99 from 0 to 1"),
    ({"require": ["kl_mean<=-1"]}, AGAINST, "require.0.max", "-1 from 0 to inf"),
    ({"require": ["a/acc>=80"]}, AGAINST, "require.0.min", "80 from 0 to 1 0.01"),
    ({"require": [{"metric": "exact_match,strict", "max": -1}]}, AGAINST, "require.0.max", "from 0 to 1"),
    ({"require": [3]}, WRONG, "require.0", "mapping"),
    ({**ENOUGH, "require": [KL, ACCURACY]}, AGAINST, "certain", "enough kl_mean"),
    ({**ENOUGH, "require": [KL], "fail_on_loss": 1}, AGAINST, "certain", "enough kl_mean"),
]
"""Each through a call in Python, a command line, an evaluator and a pass: the door's place stands before the field."""

RUN = "run --config recipe.json"
MEND = "mend a --reference b --tasks c --output d"
BUILDS = {"int4": {"type": "ModelBuilder", "precison": "int4"}}
TWO_PASSES = {"int4": {"type": "ModelBuilder", "precision": "int4"}, "next": {"type": "ModelBuildr"}}
DIGITS = "9" * 5000  # more than Python reads
COMMANDS: list[tuple[Any, ...]] = [
    ("", WRONG, "", "COMMAND: evaluate, compare,"),
    ("evaluate m --tasks a b", WRONG, "", "b: --tasks commas A,B"),
    ("evaluate", WRONG, "", "MODEL"),
    ("evalute m", WRONG, "", "evalute' 'evaluate"),
    ("evaluate m --tasks a --limit -1", WRONG, "limit", "--limit", "-1"),
    ("evaluate m --tasks a --fail-on-loss 1", MISSING, "fail_on_loss", "--fail-on-loss --reference"),
    ("evaluate m --tasks a --require kl_mean<1", WRONG, "require.0", "--require: METRIC<=NUMBER"),
    ("evaluate m --lim 3", WRONG, "", "--lim --limit?"),
    ("check m n -o", WRONG, "", "n -o"),
    ("--odd check m", WRONG, "", "--odd"),
    ("schema foo", WRONG, "", "foo evaluator pass recipe"),
    ("check no/such/recipe.json", DENIED, "", "no/such/recipe.json"),
    ("check recipe.json --provider cpu", WRONG, "execution_provider"),
    ("evaluate m", MISSING, "tasks", "--tasks"),
    ("mend m --tasks a --reference r --at-most 1GB", MISSING, "output_dir", "--output"),
    (MEND, MISSING, "", "--within --at-most"),
    (f"{MEND} --within kl_mean=0", WRONG, "within.kl_mean", "", "0"),
    (f"{MEND} --within acc=0.1", MISSING, "within.kl_mean"),
    (f"{MEND} --at-most much", WRONG, "at_most", "", "much"),
    (f"{MEND} --at-most 1.2", WRONG, "at_most", "1.2GB", "1.2"),
    (f'{MEND} --set require=["acc>=1"]', AGAINST, "require", "acc"),
    ("evaluate m --matters 2", WRONG, "", "--matters 2 --set matters=VALUE"),
    ("mend m --matters 2", WRONG, "", "--matters 2"),
    ("check m --reference m", WRONG, "", "--reference m --against?"),
    ("evaluate m --against a=1 --against b=2", WRONG, "", "--against: 'b=2'"),
    ("evaluate m --gen-kwargs a=1 --gen-kwargs b=2", WRONG, "", "--gen-kwargs: 'b=2'"),
    ("evaluate m --tasks ,", WRONG, "tasks", "", "[]"),
    ("evaluate m --set x", WRONG, "--set", "NAME=VALUE", "x"),
    ("evaluate m --set limit", WRONG, "--set", "NAME=VALUE", "limit"),
    ("evaluate m --set reference=", WRONG, "--set", "null", "reference="),
    ("evaluate m --set =3", WRONG, "--set", "NAME=VALUE", "=3"),
    ("evaluate m --set limit=3 --set limit.x=3", UNKNOWN, "--set", "limit", "limit.x"),
    ("evaluate m --provider-option a", WRONG, "--provider-option", "K=V", "a"),
    ("evaluate m --gen-kwargs a=1,b", WRONG, "--gen-kwargs", "NAME=VALUE", "a=1,b"),
    ("evaluate m --gen-kwargs {", DAMAGED, "--gen-kwargs", "JSON", "{"),
    (f"evaluate m --tasks a --set limit={DIGITS}", WRONG, "limit"),
    (f"evaluate m --tasks a --limit {DIGITS}", WRONG, "limit"),
    (f'evaluate m --tasks a --gen-kwargs {{"max_gen_toks":{DIGITS}}}', DAMAGED, "--gen-kwargs", "JSON"),
    ("evaluate m --against threads=1", UNKNOWN, "--against", "'num_threads'"),
    ("evaluate m --against variant=a,b", WRONG, "--against", '{"NAME": "VALUE"}', "variant=a,b"),
    ("evaluate m --set limit=5 --limit 3", AGAINST, "--set", "", "limit"),
    ("evaluate m --set seed=5 --set seed=6", AGAINST, "--set", "", "seed"),
    ("evaluate m --set engine.num_slots=5 --set engine={}", AGAINST, "--set", "", "engine"),
    ("evaluate m --against provider=cpu,execution_provider=cuda", AGAINST, "--against", "", "execution_provider"),
    ("evaluate m --against provider=cpu --reference float", AGAINST, "--reference", "", "float"),
    ("evaluate nowhere TASKS", NOT_FOUND, "model", "", "nowhere"),
    ("evaluate MODEL TASKS --reference gone/it", NOT_FOUND, "reference", "--reference:", "gone/it"),
    ("evaluate MODEL --tasks hellaswagg", NO_NAME, "tasks", "'hellaswag'", ["hellaswagg"]),
    ("evaluate MODEL --tasks homes.csv", NO_NAME, "tasks", "YAML docs/", ["homes.csv"]),
    ("mend MODEL --within 0.01", WRONG, "--within", "kl_mean=NATS", "0.01"),
    ("evaluate recipe.json", WRONG, "", "`olive-ext run`"),
    ("compare gone/it gone", NOT_FOUND, "", "'gone/it'"),
    ("evalution no.yaml", NOT_FOUND, "", "'no.yaml'"),
    ("run", WRONG, "", "--config/--run-config 'olive-ext run --help'"),
    ("run --config no.json", DENIED, "", "'no.json'"),
    ("run no.json -o out", DENIED, "", "'no.json'"),
    (("check recipe.json", {"taskz": ["a"]}), UNKNOWN, "evaluators.quickstart.taskz", "'tasks'"),
    (("check recipe.json", {"host": "locl"}), NO_NAME, "host", "local", "locl"),
    ((RUN, {"taskz": ["a"]}), UNKNOWN, "evaluators.quickstart.taskz", "'tasks'"),
    ((RUN, {"passes": BUILDS}), UNKNOWN, "passes.int4.precison", "'precision'"),
    ((RUN, {"passes": TWO_PASSES}), NO_NAME, "passes.next.type", "'ModelBuilder'", "ModelBuildr"),
    ((RUN, {"output_dir": "recipe.json"}), DENIED, "output_dir", "", "recipe.json"),
    ((RUN, {"tasks": ["quickstart_choise"]}), NO_NAME, "evaluators.quickstart.tasks", "'quickstart_choice'"),
]
"""Before Olive, lm-eval, torch, transformers or ONNX Runtime is imported, which takes seconds."""

SCORE = {"name": "elsewhere", "type": "accuracy", "sub_types": [{"name": "accuracy_score"}]}
TIME = {"name": "time", "type": "latency", "sub_types": [{"name": "avg"}]}
QUANTIZER = "OnnxKQuantQuantization"
ALGORITHMS = {"int4_algo_config": "rtn", "algo_config": "k_quant"}
RENAMING = {"surgeon": "RenameInputs", "old_names": [], "new_name": []}


def ort(**arguments: Any) -> dict[str, Any]:
    return {**RECIPE["evaluators"]["ours"], "model_class": "ort", "model_args": arguments}


def surgery(*steps: Any) -> dict[str, Any]:
    return {"type": "GraphSurgeries", "surgeries": list(steps)}


BLOCKS: list[tuple[Any, ...]] = [  # a field is below the path
    ((f"{OURS}.tassks", 1), UNKNOWN, "", "'tasks'"),
    ((f"{OURS}.task", 1), UNKNOWN, "", "'tasks'"),
    ((f"{OURS}.batch_size", "foo"), WRONG, "", "1 65536"),
    ((f"{OURS}.type", "OrtLmEvaluator"), NO_NAME, "", "'OrtLMEvaluator'"),
    ((f"{OURS}.type", "OrtLMEvaluatr"), NO_NAME, "", "'OrtLMEvaluator'"),
    ((OURS, {"tasks": ["arc_easy"]}), MISSING, ".type", "'OrtLMEvaluator'"),
    ((MEASURE, {"tasks": ["arc_easy"]}), MISSING, ".type", "'ModelBuilder'"),
    ((f"{OURS}.tasks", ["no/such.yaml"]), NOT_FOUND, "", "no/such.yaml"),
    ((f"{OURS}.tasks", ["arc_esy_"]), NO_NAME, "", "arc_esy_"),
    ((f"{OURS}.user_script", "no.py"), NOT_FOUND),
    ((f"{OURS}.reference", "input_mode"), WRONG, ".path", "input_model"),
    ((f"{OURS}.reference", "no/such/model"), NOT_FOUND),
    ((f"{OURS}.require", [{"metric": "kl_mean", "max": 0.02}]), MISSING, "", "kl_mean reference"),
    ((f"{OURS}.require", [{"metric": "acc_nrm", "min": 0.5}]), NO_NAME, "", "acc_nrm acc_norm"),
    ((f"{OURS}.require", [{"metric": "acc", "task": "piqa", "min": 0.5}]), NO_NAME, "", "piqa arc_easy"),
    ((f"{OURS}.metrics", [SCORE]), NO_NAME, "", "elsewhere"),
    ((f"{OURS}.metrics", [TIME]), WRONG, "", "latency"),
    ((OURS, ort(ep="cuda")), AGAINST, ".model_args", "ep execution_provider"),
    ((OURS, ort(add_bos_tokn=True)), UNKNOWN, ".model_args.add_bos_tokn", "add_bos_token"),
    ((OURS, ort(enable_thinking=True)), MISSING, ".model_args.enable_thinking", "think_end_token"),
    ((f"{MEASURE}.limt", 1), UNKNOWN, "", "'limit'"),
    ((f"{MEASURE}.require", [{"metric": "acc"}]), AGAINST, ".0", "max min"),
    ((MEASURE, {"type": "OrtLMEvaluation", "config": {}}), MISSING, ".tasks"),
    ((QUANTIZE, {"type": "OrtLossMap", "tasks": ["arc_easy"], "reference": "input_model"}), UNFIT),
    (
        (QUANTIZE, {"type": "ModelBuilder", "extra_options": ALGORITHMS}),
        UNKNOWN,
        ".extra_options.algo_config",
        "int4_algo",
    ),
    ((QUANTIZE, {"type": QUANTIZER, "block_sise": 32}), UNKNOWN, ".block_sise", "block_size"),
    ((QUANTIZE, {"type": "ModelBuilder", "precision": "fp8"}), NO_NAME, ".precision", "bf16 fp16 fp32 int4 int8"),
    ((QUANTIZE, {"type": "ModelBuildr", "precision": "int4"}), NO_NAME, ".type", "'ModelBuilder'"),
    ((QUANTIZE, {"type": "OrtLMEvaluatoin"}), NO_NAME, ".type", "'OrtLMEvaluation'"),
    (
        (QUANTIZE, {"type": "OrtTransformersOptimization", "optimization_options": {"enable_gelo": False}}),
        UNKNOWN,
        ".optimization_options.enable_gelo",
        "enable_gelu",
    ),
    (
        (QUANTIZE, {"type": "OnnxStaticQuantization", "config": {"extra_options": {"SmoothQuantAlfa": 0.4}}}),
        UNKNOWN,
        ".extra_options.SmoothQuantAlfa",
        "SmoothQuantAlpha",
    ),
    (
        (QUANTIZE, {"type": "OnnxKQuantQuantization", "customized_weight_config": {"/head": {"bits": 8, "bitz": 8}}}),
        UNKNOWN,
        ".customized_weight_config./head.bitz",
        "bits group_size",
    ),
    (
        (QUANTIZE, {"type": "IncQuantization", "weight_only_config": {"bits": 8, "groupsize": 32}}),
        UNKNOWN,
        ".weight_only_config.groupsize",
        "group_size",
    ),
    ((QUANTIZE, surgery(RENAMING)), UNKNOWN, ".surgeries.0.new_name", "new_names"),
    ((QUANTIZE, surgery({"surgeon": "RenameInput"})), NO_NAME, ".surgeries.0.surgeon", "renameinputs"),
]
"""Of recipes: Olive's engine says the same before its first pass (tests/workflow/test_registration.py)."""

OF_RECIPES: list[tuple[Any, ...]] = [
    (("evaluator", "theirs"), NO_NAME, "", "evaluators"),
    (("evaluator", {"type": "OrtLMEvaluator"}), MISSING, ".tasks"),
    (("engine.evaluator", {"type": "OrtLMEvaluator"}), MISSING, ".tasks"),
    (("passes.other", [{"type": "OrtLMEvaluations"}]), NO_NAME, ".type"),
    (("host", "lokal"), NO_NAME, "", "systems"),
    (("engine.target", "lokal"), NO_NAME, "", "systems"),
    ((f"{MEASURE}.host", "lokal"), NO_NAME, "", "systems"),
    (("passes", [{"type": QUANTIZER}]), WRONG),
    ((QUANTIZE, QUANTIZER), WRONG),
    (("systems", "local"), WRONG),
    (("engine", ["search"]), WRONG),
    (("$schema", "x"), UNKNOWN),
    (("evalutor", "ours"), UNKNOWN, "", "'evaluator'"),
    (("fail_on_loss", 1), UNKNOWN, "", "evaluators.NAME"),
    (("engine.fail_on_loss", 1), UNKNOWN, "", "evaluators.NAME"),
    (("input_model.model_path", None), MISSING),
    (("input_model", {"type": "ONNXModel", "model_pth": "m"}), UNKNOWN, ".model_pth", "'model_path'?"),
    (("input_model", {**RECIPE["input_model"], "model_pth": "m"}), UNKNOWN, ".model_pth", "'model_path', already"),
    (("input_model.model_path", ["m"]), WRONG),
    (("input_model.model_path", {"type": "local_file"}), WRONG, "", "local_file folder"),
    (("input_model.model_path", {"type": "string_name", "config": {"path": "a/b"}}), MISSING, ".config.name"),
    (("input_model.model_path", {"type": "folder", "config": {"path": "gone"}}), NOT_FOUND, ".config.path", "gone"),
]

OPTIONS: list[tuple[Any, ...]] = [
    ("--output FILE", DENIED, "output_dir"),
    ("--output FILE/x", DENIED, "output_dir"),
    ("--output LINK", WRONG, "output_dir", "/no/x"),
    ("--output /proc/x", DENIED, "output_dir", "", "/proc/x"),
    ("--output /dev/null", DENIED, "output_dir", "", "/dev/null"),
    ("--sample-log-num 1 --set sample_log_dir=FILE", DENIED, "sample_log_dir"),
    ("--use-cache FILE/x", DENIED, "use_cache"),
    ("--reference WHOLE --set reference.records_dir=FILE/x", DENIED, "reference.records_dir"),
    ("--reference WHOLE --set reference.records_dir=/proc/x", DENIED, "reference.records_dir", "", "/proc/x"),
    ("--set engine.num_threads=100000", WRONG, "engine.num_threads", "", "100000"),
    ('--set engine.adapters=["PIPE"]', DENIED, "", "onnx_adapter"),
    ('--set engine.session_options={"session.set_denormal_as_zer":"1"}', NO_NAME, "", "ONNX set_denormal_as_zero"),
    ("--provider cpu --provider-option bogus=1", "provider", "", "bogus"),
    ("--provider cuda", "provider", "", "CUDAExecutionProvider"),
    ("--against provider=cuda", "provider", "", "CUDAExecutionProvider reference.execution_provider"),
    ("--gen-kwargs top_k=abc,do_sample=true", WRONG, "top_k", "", "abc"),
    ("--gen-kwargs temperature=x", WRONG, "temperature", "", "x"),
    ("--gen-kwargs temprature=1", UNFIT, "temprature", "temperature", "1"),
    ("--gen-kwargs temperature=-1", WRONG, "temperature", "0", "-1"),
    ("--gen-kwargs max_gen_toks=abc", WRONG, "max_gen_toks", "", "abc"),
    ("--num-fewshot 1000", WRONG, "num_fewshot", "tiny_choice 6", "1000"),
    ("--apply-chat-template", UNFIT, "apply_chat_template"),
]

IN_OPTIONS = "model.decoder.session_options"
EVIL = {"session_options": {"provider_options": [{"openvino": {"load_config": "x"}}]}}
LOADED = "session_options.provider_options.openvino.load_config"
GENAI: list[tuple[Any, ...]] = [
    ({"context_length": 2**40}, DAMAGED, "", "model context_length 1099511627776 2147483647"),
    ({"context_length": "many"}, DAMAGED, "", "genai_config model many context_length 2147483647"),
    ({"context_length": -5}, DAMAGED, "", "model context_length -5 2147483647"),
    ({"vocab_size": 10**12}, DAMAGED, "", "model vocab_size 1000000000000 16777216"),
    ({"decoder": {"num_key_value_heads": 10**9}}, DAMAGED, "", "model num_key_value_heads 1000000000 -1048576"),
    ({"eos_token_id": 2**70}, DAMAGED, "", "model eos_token_id 1180591620717411303424 32"),
    ({"eos_token_id": {"a": 1}}, DAMAGED, "", "model eos_token_id"),
    ({"decoder": {"filename": 3}}, DAMAGED, "", "model 3"),
    ({"decoder": {"filename": "\ud800.onnx"}}, DAMAGED, "", "genai_config JSON"),
    ({"decoder": {"inputs": ["a"]}}, DAMAGED, "", "model"),
    ({"decoder": {"session_options": [1]}}, DAMAGED, "", "model session_options"),
    ({"decoder": {"sliding_window": {"window_size": "q"}}}, DAMAGED, "", "model sliding_window window_size"),
    ({"decoder": {"pipeline": "x"}}, DAMAGED, "", "model"),
    ({"decoder": {"filename": "../x.onnx"}}, ALIEN, "", "../x.onnx"),
    ({"joiner": {"filename": "../x.onnx"}}, ALIEN, "", "model.joiner.filename"),
    ({"speech": {"adapter_filename": "/x.onnx_adapter"}}, ALIEN, "", "model.speech.adapter_filename"),
    ({"vision": {"pipeline": [{"a": {"filename": "../x.onnx"}}]}}, ALIEN, "", "model.vision.pipeline.0.a.filename"),
    ({"mtp": {"shared_initializers": [{"data_file": "../x"}]}}, ALIEN, "", "model.mtp.shared_initializers.0.data_file"),
    ({"more": {"pipeline": [{"stage": EVIL}]}}, ALIEN, f"model.more.pipeline.stage.{LOADED}", "", "x"),
    ({"more": {"decoder": EVIL}}, ALIEN, f"model.more.decoder.{LOADED}", "", "x"),
    ({"more": [[{"decoder": EVIL}]]}, ALIEN, f"model.more.decoder.{LOADED}", "", "x"),
    ({"decoder": {"filename": "/etc/passwd"}}, ALIEN, "", "/etc/passwd"),
    ({"vision": {"filename": "../x.onnx"}}, ALIEN, "", "model"),
    ({"tokenizer_dir": "../.."}, ALIEN, "", "model tokenizer_dir"),
    (
        {"decoder": {"session_options": {"custom_ops_library": "evil.so"}}},
        ALIEN,
        f"{IN_OPTIONS}.custom_ops_library",
        "trust_remote_code",
        "evil.so",
    ),
    (
        {"decoder": {"session_options": {"provider_options": [{"qnn": {"backend_path": "evil.so"}}]}}},
        ALIEN,
        f"{IN_OPTIONS}.provider_options.qnn.backend_path",
        "trust_remote_code",
        "evil.so",
    ),
    (
        {"decoder": {"session_options": {"provider_options": [{"cpu": {"arena": "1"}}]}}},
        "provider",
        "",
        "arena genai_config",
    ),
]

OWN_TOKENIZER = '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}'
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
FILES: list[tuple[Any, ...]] = [
    (("tokenizer_config.json", OWN_TOKENIZER), UNFIT, "", "auto_map trust_remote_code"),
    (
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": [64]}'),
        UNFIT,
        "",
        "list",
    ),
    (("model.onnx", LFS), DAMAGED, "", "model LFS"),
    (("genai_config.json", "[" * 100_000), DAMAGED, "", "genai_config JSON"),
    (
        ("genai_config.json", '{"model": {"decoder": {"filename": "a", "filename": "a"}}}'),
        DAMAGED,
        "",
        "'filename' JSON",
    ),
    (("generation_config.json", "{"), DAMAGED, "", "generation_config.json JSON"),
    (("tokenizer.json", "{"), UNFIT, "", "/model'"),
    (("tokenizer.json", '{"version": "1.0"}'), UNFIT, "", "/model'"),
    (("config.json", " " * (17 << 20)), "too_large", "", "17 825 792"),
    (("config.json", '{"n_positions": "x"}'), DAMAGED, "", "n_positions 2147483647"),
    (("config.json", f'{{"vocab_size": {DIGITS}}}'), DAMAGED, "", "JSON"),
    (("generation_config.json", '{"eos_token_id": "2"}'), DAMAGED, "", "generation_config eos_token_id 2"),
    (
        ("genai_config.json", '{"search": {"max_length": "x"}, "model": {"decoder": {"filename": "model.onnx"}}}'),
        DAMAGED,
        "",
        "genai_config max_length",
    ),
]

TEMPLATES: list[tuple[Any, ...]] = [
    ("{% for x in %}", WRONG, "", "model"),
    ("{{ 'x' * 20000000 }}", WRONG, "", "20,000,000 16,777,216 LONGEST_TEXT"),
    ("{{ raise_exception('roles must alternate') }}", WRONG, "", "roles alternate"),
    ("{{ 1 // 0 }}", WRONG, "", "model ZeroDivisionError"),
    ("a{{ '\\ud800' }}", WRONG, "", "model surrogate character 1"),
    ("{{ 1 + 'x' }}", WRONG, "", "model TypeError"),
    ("{% include 'x' %}", WRONG, "", "model TypeError loader"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", WRONG, "", "model RecursionError"),
]

MODELS: list[tuple[Any, ...]] = [
    (lambda p: p.given("/dev/null"), DENIED, "", "/dev/null"),
    (lambda p: p.pipe("x.onnx").given(p.here / "x.onnx"), DENIED, "", "x.onnx"),
    (lambda p: p.given(p.model.rename(p.here / "a\udcff")), UNFIT, "", "a UTF-8 rename"),
    (lambda p: p.pipe("model/chat_template.jinja"), DENIED, "", "chat_template model"),
    (lambda p: p.pipe("model/added_tokens.json"), DENIED, "", "added_tokens"),
    (lambda p: p.link("model/chat_template.jinja", "/etc/hostname"), UNFIT, "", "chat_template /etc/hostname"),
    (
        lambda p: p.link("model/out.onnx", p.whole / "model.onnx").genai(decoder={"filename": "out.onnx"}),
        ALIEN,
        "",
        "model",
    ),
    (lambda p: p.link("model/out", p.whole).genai(decoder={"filename": "out/model.onnx"}), ALIEN, "", "out/model"),
    (
        lambda p: p.tokenizer(lambda c: c["model"]["vocab"].update(cat=4 * 10**9)),
        UNFIT,
        "",
        "cat 4000000000 4194303 LARGEST_ID",
    ),
    (lambda p: p.tokenizer(lambda c: c["model"].update(vocab={}, merges=[])), UNFIT, "", "model"),
    (
        lambda p: p.tokenizer(lambda c: c["model"].update(continuing_subword_prefix="{{x}}")),
        UNFIT,
        "",
        "range end index",
    ),
    (lambda p: p.tasks_are("size_on_disk,tokens_per_second"), MISSING, "tasks"),
    (lambda p: p.task(GENERATE + "repeats: 4\n").option("--gen-kwargs do_sample=false"), TASK, "repeats", "mine", "4"),
    (lambda p: p.option("--sample-log-num 2"), MISSING, "", "sample_log_dir"),
    (lambda p: p.checkpoint().option("--provider cudda"), NO_NAME, "", "'cudda'"),
    (lambda p: p.checkpoint().option("--set model.variant=x"), AGAINST, "variant", "", "x"),
    *(
        (lambda p, kind=kind: with_token(p.tasks_are(kind), 320), AGAINST, "", f"{kind} cat 320")
        for kind in ("tiny_choice", "tiny_rolling", "tiny_generate")
    ),
    (lambda p: p.graph(lambda g: g.graph.node[3].ClearField("input")), UNFIT, "", "model"),
    (lambda p: p.external(Path.unlink), NOT_FOUND, "", "model/w.data"),
    (lambda p: p.external(lambda f: f.write_bytes(f.read_bytes()[:999])), DAMAGED, "", "999"),
    (lambda p: p.external(lambda f: f.write_text(LFS)), DAMAGED, "", "LFS 12345"),
    (lambda p: p.external(without_text), DAMAGED, "", "model location"),
    (lambda p: p.graph_is((p.whole / "model.onnx").read_bytes()[:999]), DAMAGED, "", "model.onnx"),
    (lambda p: p.graph(smaller), AGAINST, "", "319 100"),
    (Place.unopened, UNFIT, "", "ONNX"),
    (lambda p: p.graph(lambda g: setattr(g, "ir_version", 999)), UNFIT, "", "model 999"),
]

EOS = '{"eos_token_id": "x"}'
GONE = {"mine_yaml": "include: tiny_choice.yaml\ntask: mine\ntest_split: gone\n"}
HERE = '{"path":"same_model","engine":{"num_threads":1},"repro":"/"}'
KNOWN: list[tuple[Any, ...]] = [
    (lambda p: p.put("generation_config.json", EOS), DAMAGED, "", "'eos_token_id' 'x'"),
    (lambda p: p.put("generation_config.json", '{"suppress_tokens": 5}'), DAMAGED, "", "'suppress_tokens' 5"),
    (lambda p: p.put("generation_config.json", '{"forced_decoder_ids": [[1]]}'), DAMAGED, "", "[[1]]"),
    (lambda p: p.put("chat_template.jinja", "{% for x in %}").also("--apply-chat-template"), WRONG, "", "expression"),
    (lambda p: p.put("chat_template.jinja", "{{ a.b.c }}").also("--apply-chat-template"), WRONG, "", "'a'"),
]
"""Told by an evaluation and by a check before the model is opened, which fails here."""
UNOPENED: list[tuple[Any, ...]] = [
    (lambda p: p.option(f"--set reference={HERE}"), "exists", "reference.repro"),
    (lambda p: p.option("--apply-chat-template"), UNFIT, "apply_chat_template"),
    (lambda p: p.option("--apply-chat-template x"), WRONG, "apply_chat_template", "", "x"),
    (lambda p: p.option("--gen-kwargs bogus=1"), UNFIT, "bogus", "", "1"),
    (lambda p: p.option("--gen-kwargs num_beams=2,do_sample=true"), AGAINST, "num_beams", "", "2"),
    (lambda p: p.option("--gen-kwargs max_gen_toks=64"), TASK, "max_gen_toks", "tiny_generate", "64"),
    (lambda p: p.tasks_are("tiny_group").option("--require ac<=1"), NO_NAME, "require", "'ac' 'acc'"),
    (lambda p: p.task("", **GONE).option("--require ac>=0.5"), NO_NAME, "require", "'acc'"),
    (lambda p: p.task("", **GONE).option("--require acc>=0.5"), TASK, "", "mine gone"),
    (lambda p: p.put("generation_config.json", EOS).option("--reference WHOLE"), DAMAGED, "", "model/ 'eos_token_id'"),
    (lambda p: p.put("tokenizer.json", EOS).option("--reference WHOLE"), UNFIT, "", "/model'"),
    (
        lambda p: p.option("--reference WHOLE --documents enough --tasks tiny_rolling"),
        TASK,
        "documents",
        "tiny_rolling",
    ),
]

DEEP = "a: " + "[" * 50_000 + "]" * 50_000
NONE_LEFT = 'doc_to_choice: "{{ [] if answer == 2 else choices }}"'
TASKS: list[tuple[Any, ...]] = [
    (CHOICE + "\nfoo: [1,2", DAMAGED, "", "mine.yaml line"),
    ("- a\n", DAMAGED, "", "mine.yaml"),
    (CHOICE.replace("doc_to_text", "doc_to_txt"), UNKNOWN, "", "mine.yaml 'doc_to_txt' 'doc_to_text'?"),
    (CHOICE + "num_fewshot: 1\nnum_fewshot: 0\n", DAMAGED, "", "num_fewshot 15"),
    (CHOICE + "unsafe_code: true\n", TASK, "", "mine confirm_run_unsafe_code"),
    (CHOICE.replace("acc_norm", "nosuch"), NO_NAME, "", "mine nosuch"),
    (CHOICE.replace("acc_norm", "../.."), NO_NAME, "", "mine"),
    (CHOICE.replace("acc_norm", "-1"), TASK, "", "mine metric_list -1"),
    (CHOICE.replace("metric: acc\n", "metric: acc\n    aggregation: nosuch\n"), NO_NAME, "", "nosuch"),
    (CHOICE + "metadata: &a {a: *a}\n", TASK, "", "*a 14"),
    (CHOICE + f"metadata: {{a: 1{':1' * 999}.5}}\n", DAMAGED, "", "mine.yaml float"),
    (CHOICE + DEEP, TASK, "", "14 64 DEEPEST"),
    (CHOICE + "include: mine.yaml\n", DAMAGED, "include"),
    (CHOICE + "include: nosuch.yaml\n", NOT_FOUND, "include", "", "nosuch.yaml"),
    (GENERATE + "repeats: 100000000\n", WRONG, "repeats", "mine", "100000000"),
    (CHOICE + "num_fewshot: -3\n", WRONG, "num_fewshot", "mine 0", "-3"),
    (CHOICE + "num_fewshot: 100000000\n", WRONG, "num_fewshot", "mine 6", "100000000"),
    (CHOICE.replace("{{question}}", "{{ 'x' * 20000000 }}"), TASK, "", "mine 20,000,000 16,777,216"),
    (CHOICE.replace("{{question}}", "{{ 'x' * 20000000 if answer == 2 else 'x' }}"), TASK, "", "mine 16,777,216"),
    (CHOICE.replace("{{question}}", "{{ question.__class__.__mro__ }}"), TASK, "", "SecurityError"),
    ("group: mine\ntask: []\n", WRONG, "task", "mine", "[]"),
    (GENERATE.replace("max_gen_toks: 6", "bogus: 6"), UNFIT, "bogus", "mine", "6"),
    (GENERATE.replace("max_gen_toks: 6", "max_gen_toks: 1000000000000"), TASK, "max_gen_toks", "mine", "1000000000000"),
    (GENERATE.replace("  - name: strict\n    filter:", "  - filter:"), TASK, "", "mine filter_list name"),
    (GENERATE.replace('"([a-z]+)"', '"("'), TASK, "", "mine filter_list"),
    (CHOICE.replace("doc_to_choice: choices", NONE_LEFT), TASK, "", "mine document 1 has no"),
    (CHOICE.replace("answer", "'{{ none }}'"), TASK, "", "mine None 0"),
]

OF_OWN = "metric: !function mine.f, aggregation: mean, higher_is_better: true"
TWO = ROLLING.replace("tiny_rolling", "two")
MORE_TASKS: list[tuple[Any, ...]] = [
    (lambda p: p.tasks_are("tiny_choise"), NO_NAME, "tasks", "tiny_choice", "['tiny_choise']"),
    (lambda p: p.task(CHOICE, other_yaml=DEEP), TASK, "", "64 DEEPEST"),
    (lambda p: p.task(CHOICE).pipe("tasks/other.yaml"), TASK, "", "other.yaml"),
    (lambda p: p.task(CHOICE).link("tasks/mine.yaml", p.here / "tasks/mine.yaml"), DAMAGED),
    (lambda p: p.task(CHOICE + "include: pipe\n").pipe("tasks/pipe"), TASK, "", "pipe"),
    (lambda p: p.task(CHOICE.replace("local.load", "pipe.load")).pipe("tasks/pipe.py"), TASK, "", "pipe.py"),
    (lambda p: p.data("").pipe("tasks/data.json"), TASK, "", "data.json"),
    (lambda p: p.task("group: mine\ntask: [two]\n", two_yaml=f"{TWO}repeats: 0\n"), WRONG, "repeats", "two 10000", "0"),
    (
        lambda p: p.task("group: mine\ntask: [other, tiny_choice]\n", other_yaml="group: other\ntask: null\n"),
        WRONG,
        "task",
        "other",
    ),
    (lambda p: p.task("group: mine\ntask: [other]\n", other_yaml="group: other\ntask: [mine]\n"), TASK, "", "mine"),
    (
        lambda p: p.task(
            GENERATE.replace("metric: exact_match", f"{{{OF_OWN}}}"), mine_py="\ndef f(*_, **__):\n    return {}['x']\n"
        ),
        TASK,
        "",
        "mine 0 3",
    ),
    (self_scored, TASK, "", "mine 1 2 3"),
]

ROW = '{"question": "the cat", "choices": [" a", " b"], "answer": 0}'
NAMES = "question,choices,answer"
DATA: list[tuple[Any, ...]] = [
    (((ROW, '{"question": ', ROW), {}), TASK, "", "mine 2"),
    (((ROW, ROW.replace("cat", "c\xe4t")), {"encoding": "latin-1"}), TASK, "", "mine 2 0xe4 utf-8"),
    ((("1", ROW), {}), TASK, "", "mine 1"),
    (((ROW, ROW.replace('"answer"', '"question"')), {}), TASK, "", "mine question 2"),
    ((("",), {}), TASK, "", "mine"),
    (((ROW,), {"split": "validation"}), TASK, "", "mine validation test"),
    ((('{"other": 1}',), {}), TASK, "", "mine 0 question columns 'other'"),
    (((ROW, '{"question": "a", "choices": [" a", " b"]}'), {}), TASK, "", "mine 1"),
    (((ROW, ROW.replace("0", "7")), {}), TASK, "", "mine 1 7 2"),
    (((NAMES, "a,b,0"), {"kind": "csv"}), TASK, "", "mine 0"),
    (((NAMES, "a,b,0", "a,b,0,5"), {"kind": "csv"}), TASK, "", "mine 3 4"),
    ((("PAR1",), {"kind": "parquet"}), TASK, "", "mine 4"),
]

IN_FIRST = ", document 0"
FIELDS = {"doc_to_text": IN_FIRST, "doc_to_target": IN_FIRST, "process_docs": "", "process_results": IN_FIRST}
ENDINGS = {
    "raise SystemExit(0)": "SystemExit:",
    "__import__('os')._exit(0)": "SystemExit:",
    "return f(*values)": "RecursionError:",
}
CODED: list[tuple[Any, ...]] = [
    *(
        (
            (field, code, "!function mine.f"),
            TASK,
            "",
            f"'mine'{document}: {error} mine.py, 3)",
            ...,
            (row + column) % 3 > 0,
        )
        for row, (field, document) in enumerate(FIELDS.items())
        for column, (code, error) in enumerate(ENDINGS.items())
    ),
    (("doc_to_text", "pass\nexit(0)", "!function mine.f"), TASK, "", "tasks 'mine' SystemExit: 0 mine.py, 4)"),
    (("doc_to_text", "raise type('Stop', (BaseException,), {})('so')", "!function mine.f"), TASK, "", "mine tasks"),
    *(
        (("process_results", f"return {value}", "!function mine.f"), TASK, "", f"'mine', 0: 'process_results' {value}:")
        for value in ("None", "1.5", "{5: 1.0}")
    ),
    (("process_results", "return {'acc': 'right'}", "!function mine.f"), TASK, "", "mine"),
    (("metric_list", "exit()", "[{metric: acc, aggregation: !function mine.f}]"), TASK, "", "mine 3"),
    (("metric_list", "pass", "[{metric: !function mine.f}]"), TASK, "", "mine aggregation"),
    (("metric_list", "pass", "[{metric: acc, higher_is_better: maybe}]"), WRONG, "", "mine higher_is_better maybe"),
    (("fewshot_config", "raise KeyError('s')", "{sampler: first_n, samples: !function mine.f}"), TASK, "", "mine 3"),
    (("gen_prefix", "pass", "!function mine.f"), TASK, "", "mine"),
    (("doc_to_text", "return 'a' + chr(0xD800)", "!function mine.f"), TASK, "", "mine surrogate character 1"),
]


def at_every_door(rows: Iterable[Sequence[Any]]) -> Iterator[Mistake]:
    """All doors read settings by the same code: of rows alike, in code and depth, the first is for every run."""
    known = set[tuple[str, str, int]]()
    for given, code, field, *words in rows:
        for door, where in (("python", ""), ("options", ""), ("evaluator", "evaluators.e."), ("pass", "passes.p.")):
            is_value, kind = code in (WRONG, UNKNOWN), (door, code, field.count("."))
            named = " ".join([*words, f"{where}{field}" if is_value else where.rstrip(".")])
            value, is_long = value_at(given, field) if is_value else ..., door != "python" and kind in known
            yield Mistake(door, given, code, f"{where}{field}", named, value, is_long)
            known.add(kind)


def in_recipe(at: tuple[str, Any], code: str, below: str = "", words: str = "") -> Mistake:
    """A list of one name has the name for its value."""
    (path, value), of_lists = at, ("require", "metrics", "$schema")
    is_said = code in (UNKNOWN, NO_NAME, WRONG, NOT_FOUND) and not below and not path.endswith(of_lists)
    return Mistake("recipe", at, code, f"{path}{below}", words, value if is_said else ...)


TABLE: list[Mistake] = [
    *at_every_door(SETTINGS),
    *through("command", COMMANDS),
    *(in_recipe(*row) for row in [*BLOCKS, *OF_RECIPES]),
    *through("option", OPTIONS),
    *through("genai", GENAI),
    *through("file", FILES),
    *through("template", TEMPLATES),
    *through("place", [*MODELS, *MORE_TASKS]),
    *through("task", TASKS),
    *through("data", DATA),
    *through("coded", CODED),
    *through("known", KNOWN),
    *through("unopened", UNOPENED),
    *through("request", REQUESTS),
    *through("session", SESSIONS),
    *through("call", CALLS),
]
