"""The command line of `olive-ext`: its options, each of which is one configuration key with the docstring as its help;
its commands with their arguments; and the parser. The parser and docs/reference/cli.md are made from these tables.
Knows no validation, as values stay text here, and no function of a command."""

from __future__ import annotations

import json
import re
import shlex
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from olive_ext import __version__
from olive_ext.config import (
    RECIPE_SUFFIXES,
    SAME_MODEL,
    SCHEMA_KINDS,
    EngineConfig,
    EvaluationConfig,
    ReferenceConfig,
    StrictModel,
)
from olive_ext.config.base import nested_model
from olive_ext.errors import ConfigError, ContradictionError, OliveExtError, TaskError, first_line, suggest
from olive_ext.registry import Command, entries, load

Form = Literal["value", "names", "commas", "pairs", "flag", "optional", "arguments", "place"]


@dataclass(frozen=True)
class Option:
    """`form` decides how the text becomes the value of `key`.

    value: unchanged; names: several, each a word; commas: one word, A,B; pairs: NAME=VALUE, repeated; flag: true;
    optional: true, or the word after it; arguments: k=v,k=v; place: as arguments, for a reference that is the same
    model.
    """

    flag: str
    key: str
    metavar: str = ""
    form: Form = "value"
    for_check: bool = False
    owner: type[StrictModel] = EvaluationConfig

    @property
    def help(self) -> str:
        """The docstring of the configuration key, on one line."""
        if self.form == "place":
            return AGAINST_HELP
        model: Any = self.owner
        *parents, name = self.key.split(".")
        for parent in parents:
            model = nested_model(model, parent)
        return " ".join((model.model_fields[name].description or "").split())


AGAINST_HELP = (
    "Compares the model with itself in another place: provider=cpu, runtime=genai, num_threads=1 and other keys of "
    "`reference` and its `engine`. Says whether both are the same except for rounding (exit status 0), differ by "
    "rounding of the kernels (0), or differ (1), and where first; 3 if that cannot be decided."
)

OPTIONS: tuple[Option, ...] = (
    Option("--tasks", "tasks", "A,B", "commas", for_check=True),
    Option("--include-path", "include_path", "DIR", "names", for_check=True),
    Option("--limit", "limit", "N", for_check=True),
    Option("--documents", "documents", "WHICH"),
    Option("--certain", "certain", "K=V,...", "arguments"),
    Option("--num-fewshot", "num_fewshot", "K", for_check=True),
    Option("--batch-size", "batch_size", "B", for_check=True),
    Option("--max-length", "max_length", "N", for_check=True),
    Option("--provider", "execution_provider", "NAME", "names", for_check=True),
    Option("--provider-option", "provider_options", "K=V", "pairs", for_check=True),
    Option("--provider-library", "provider_libraries", "NAME=PATH", "pairs", for_check=True),
    Option("--allow-cpu-fallback", "allow_cpu_fallback", form="flag", for_check=True),
    Option("--apply-chat-template", "apply_chat_template", "NAME", "optional"),
    Option("--system-instruction", "system_instruction", "S"),
    Option("--fewshot-as-multiturn", "fewshot_as_multiturn", form="flag"),
    Option("--gen-kwargs", "gen_kwargs", "K=V,...", "arguments"),
    Option("--use-cache", "use_cache", "PATH"),
    Option("--isolation", "isolation", "HOW"),
    Option("--workers", "workers", "N"),
    Option("--on-error", "on_error", "WHAT"),
    Option("--against", "reference", "K=V,...", "place"),
    Option("--reference", "reference.path", "PATH"),
    Option("--reference-mode", "reference.mode", "MODE"),
    Option("--fail-on-loss", "fail_on_loss", "POINTS"),
    Option("--require", "require", "METRIC<=N", "names"),
    Option("--repro", "reference.repro", "DIR"),
    Option("--sample-log-num", "sample_log_num", "N"),
    Option("--seed", "seed", "N"),
    Option("--output", "output_dir", "DIR"),
    Option("--kind", "model.kind", "KIND", for_check=True),
    Option("--tokenizer", "tokenizer", "PATH", for_check=True),
    Option("--onnx-file-name", "model.onnx_file_name", "FILE", for_check=True),
    Option("--variant", "model.variant", "NAME", for_check=True),
    Option("--component", "model.components", "PART=FILE", "pairs", for_check=True),
)

OF_COMPARISONS = {
    *("--documents", "--certain", "--against", "--reference-mode", "--fail-on-loss", "--require", "--repro"),
    "--sample-log-num",
}
OF_WORKERS = {"--isolation", "--workers", "--on-error", "--use-cache"}
RECORD_OPTIONS = tuple(one for one in OPTIONS if one.flag not in {*OF_COMPARISONS, "--reference", "--output"})
CHECK_OPTIONS = tuple(one for one in OPTIONS if one.for_check)

SET_HELP = "Any other configuration key, for instance engine.num_slots=4; VALUE is read as JSON where it is JSON."


class _Once(Action):
    """Refuses a second one, which would replace the first though both are meant."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise ArgumentError(self, f"given twice, '{values}' the second time: write all in one, K=V,K=V")
        setattr(namespace, self.dest, values)


_ARGPARSE_FORMS: dict[Form, dict[str, Any]] = {
    "arguments": {"action": _Once},
    "place": {"action": _Once},
    "flag": {"action": "store_true"},
    "names": {"nargs": "+", "action": "extend"},
    "pairs": {"action": "append"},
    "optional": {"nargs": "?", "const": True},
}


def add_options(parser: ArgumentParser, options: Sequence[Option]) -> None:
    """Adds the options and `--set`; absent ones leave no trace in the namespace."""
    for option in options:
        form = {**({"metavar": option.metavar} if option.metavar else {}), **_ARGPARSE_FORMS.get(option.form, {})}
        text = option.help.replace("%", "%%")
        parser.add_argument(option.flag, dest=option.key, help=text, default=SUPPRESS, **form)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=SUPPRESS, help=SET_HELP)


def written_values(
    arguments: Namespace, model: str | None = None, options: Sequence[Option] = OPTIONS
) -> dict[str, Any]:
    """The keys as written, nested. Raises `ConfigError` for a malformed pair and for a key's second value."""
    values: dict[str, Any] = {} if model is None else {"model": {"path": model}}
    given = vars(arguments)
    if {"reference", "reference.path"} <= given.keys():
        other = "it compares with another model, and --against with the model itself elsewhere: give one of them"
        raise ContradictionError(other, "--reference", given["reference.path"])
    for option in options:
        if option.key in given:
            _put(values, option.key, _value(option, given[option.key]), option.flag)
    for text in given.get("set", ()):
        key, value = _pair(text, "--set")
        if not value:
            raise ConfigError('give a value, null for none, "" for an empty text', "--set", text)
        _put(values, key, _json_or_text(value), "--set")
    return values


def in_options(error: OliveExtError, given: Mapping[str, Any], options: Sequence[Option]) -> OliveExtError:
    """The error with options in place of the keys that were given, are missing or are advised. Users who write keys
    (`--set`, a recipe) read keys. A key that is also a value's text is replaced before " = " alone. A key that several
    words make is replaced everywhere, except in errors of a task, whose files have such keys, too."""
    text, values = str(error), repr([error.value, *given.values()])
    is_of_keys = error.code == "unknown_key" or "unknown key" in text  # one of several mistakes
    if is_of_keys or str(given.get("target")).lower().endswith(RECIPE_SUFFIXES):
        return error
    for option in options:
        key = option.key.removesuffix(".path").removeprefix("model.")
        if option.key in given:
            text = re.sub(rf"\b{option.key}\.\d+:", f"{option.flag}:", text)
            text = text.replace(f"'{key}.count'", option.flag)  # of `workers`, which a number alone is
            text = text if option.form == "place" else re.sub(rf"\b{option.key}: '(\w+)'", rf"{option.flag} \1", text)
        if option.key in given and option.form in ("pairs", "arguments"):
            text = re.sub(rf"'{key}\.(\w+)'", rf"{option.flag} \1", text)
        if option.form == "place" and (place := given.get(option.key)):
            text = re.sub(r"('?)reference\.(?!repro')(?:engine\.)?(\w+)\1", rf"{option.flag} \2", text)
            text = text if "execution_" in place else text.replace("--against execution_", "--against ")
        is_word = "_" in key and key not in values and not isinstance(error, TaskError)
        is_advised = error.field in (option.key, key) or error.code in ("missing", "provider", "unknown_name")
        is_meant = (is_word or is_advised) and option.form != "place" and "set" not in given
        if option.key in given or is_meant:
            text = re.sub(rf"missing key '({key}(\.path)?)'", rf"missing key \1: give {option.flag}", text)
            begins = "(?= = )" if f"'{key}'" in values else ""
            text = re.sub(rf"'(model\.)?{key}'{begins}", option.flag, text)
            text = re.sub(rf"(?<![\w.'-]){key}(?![\w.':])", option.flag, text) if is_word else text
    return error.saying(text)


_WRITTEN = re.compile(r"`(\w+)(?:: ([^`]+))?`")


def advised(text: str) -> str:
    """A verdict's advice with options in place of keys: "`--set matters=4`" for "`matters: 4`"."""
    flags = {option.key: option.flag for option in OPTIONS}

    def as_option(match: re.Match[str]) -> str:
        key, value = match[1], (match[2] or "").strip('["]')
        value = value and shlex.quote(value)
        is_set = key not in flags and key in EvaluationConfig.model_fields and value
        return f"`--set {key}={value}`" if is_set else f"`{' '.join(filter(None, (flags.get(key, key), value)))}`"

    return _WRITTEN.sub(as_option, text)


def _value(option: Option, written: Any) -> Any:
    if option.form == "commas":
        return [part.strip() for part in written.split(",") if part.strip()]
    if option.form == "pairs":
        return dict(_pair(text, option.flag, option.metavar) for text in written)
    if option.form == "arguments":
        return dict(_arguments(written, option.flag, form=option.metavar))
    return place_of(written, option.flag) if option.form == "place" else written


def place_of(word: str, flag: str) -> dict[str, Any]:
    """A reference that is the same model. Keys of `engine` may be written without it, and "provider" for its key."""
    values: dict[str, Any] = {"path": SAME_MODEL, "is_same_model": True}
    known = {*ReferenceConfig.model_fields, *EngineConfig.model_fields, "provider"}
    for key, value in _arguments(word, flag, {"variant"}):
        if key.partition(".")[0] not in known:
            raise ConfigError(suggest(key, known) or f"give {', '.join(sorted(known))}", flag, key, code="unknown_key")
        name = "execution_provider" if key == "provider" else key
        _put(values, f"engine.{name}" if name in EngineConfig.model_fields else name, value, flag)
    return values


def _arguments(
    text: str, flag: str, of_text: Container[str] = (), form: str = "NAME=VALUE"
) -> Iterator[tuple[str, Any]]:
    """Keys and values, which are read as JSON where they are JSON; those of the keys `of_text` are texts."""
    if text.lstrip().startswith("{"):
        try:
            yield from json.loads(text).items()
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid JSON ({first_line(error)})", flag, text, code="damaged") from error
        return
    for part in text.split(","):
        if "=" not in part and part != text:
            raise ConfigError('give NAME=VALUE, or a value with a comma as {"NAME": "VALUE"}', flag, text)
        key, written = (one.strip() for one in _pair(part, flag, form))
        value = _json_or_text(written)
        yield key, written if key in of_text and not isinstance(value, str) else value


def _pair(text: str, flag: str, form: str = "NAME=VALUE") -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"give {form}", flag, text)
    return key, value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of more digits than Python reads, and lists in lists, too
        return text


def _put(values: dict[str, Any], key: str, value: Any, flag: str) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"'{parent}' holds no further keys", flag, key, code="unknown_key")
    if name in values:
        raise ContradictionError("this key has another value on the same command line: give one", flag, key)
    values[name] = value


ABOUT = "Evaluates ONNX language models, alone or inside Microsoft Olive."
RUN_HELP = (
    "All other arguments of `olive run` are passed on, for instance -o DIR, --list_required_packages, --tempdir DIR, "
    "--log_level N; `olive run --help` lists them."
)
_REPORTS = (
    "Folder with a report.json, the file itself, or a folder of such folders; NAME=PATH gives the report a name. Two "
    "or more, the first being the baseline."
)
_BASELINE = "Name or path of the report that the others are held against; by default the first."
_VERIFY = "Also run the model: compare log-probabilities of the scoring-head graph, the untouched graph and the CPU."
_AGAINST = (
    "Also hold the model against the Hugging Face checkpoint it was exported from, on texts of growing length: where "
    "they differ, from which length on, in which layer, and what the export left out."
)
_MODEL = "An .onnx file, a folder with one or with genai_config.json, or a Hugging Face model."
_RECORDS = "The file: distributions, answers, versions, provider, processor. Its size is printed before the model runs."
_RECIPE = "The recipe, .json or .yaml; as the first argument also without the option's name."
_NEEDED = {"required": True}
_KIND = {"nargs": "?", "choices": SCHEMA_KINDS, "default": "recipe"}

_HERE = "olive_ext.cli.commands"
CORE: dict[str, Command] = {
    "quickstart": Command(
        "Copy the quickstart (recipe, small trained model, tasks) into a new folder, ready to run.",
        f"{_HERE}:quickstart_command",
        (("folder", "DIR", "A folder that is new or empty.", {}),),
    ),
    "evaluate": Command(
        "Evaluate one model with lm-eval tasks.",
        f"{_HERE}:evaluate_command",
        (("model", "MODEL", _MODEL, {}),),
        "olive_ext.cli.options:OPTIONS",
    ),
    "record": Command(
        "Record what a model says to tasks in one file, a reference for elsewhere (--reference FILE.records).",
        f"{_HERE}:record_command",
        (("model", "MODEL", _MODEL, {}), ("--output", "FILE.records", _RECORDS, _NEEDED)),
        "olive_ext.cli.options:RECORD_OPTIONS",
    ),
    "compare": Command(
        "Put earlier reports side by side in one table and one page; refuse what was not asked in the same way.",
        f"{_HERE}:compare_command",
        (
            ("reports", "REPORT", _REPORTS, {"nargs": "+"}),
            ("--baseline", "REPORT", _BASELINE, {}),
            ("--output", "DIR", "Folder for compare.html. Without it only the table is printed.", {}),
        ),
    ),
    "run": Command(
        "Run an Olive recipe: the same arguments as `olive run`; its evaluator and passes are known.",
        f"{_HERE}:run_command",
        (
            ("--config --run-config", "RECIPE", _RECIPE, _NEEDED),
            ("-m --model_name_or_path", "MODEL", "An input model in place of the recipe's.", {"dest": "model"}),
        ),
    ),
    "check": Command(
        "Say what a recipe or a model resolves to, without running it.",
        f"{_HERE}:check_command",
        (
            ("target", "RECIPE|MODEL", "A recipe (.json, .yaml, .yml), or a model as for `evaluate`.", {}),
            ("--verify", "", _VERIFY, {"action": "store_true"}),
            ("--against", "CHECKPOINT", _AGAINST, {}),
        ),
        "olive_ext.cli.options:CHECK_OPTIONS",
    ),
    "schema": Command(
        "Print the JSON schema of an evaluator block, a pass block or a recipe.",
        f"{_HERE}:schema_command",
        (("kind", "|".join(SCHEMA_KINDS), "Which schema; recipe by default.", _KIND),),
    ),
}


def commands() -> Mapping[str, Command]:
    """All commands by name: the core's, then those of plug-ins."""
    return entries("commands", CORE)


class _Parser(ArgumentParser):
    """Raises instead of printing the usage and exiting: the caller prints one line."""

    passes_on = False
    """Whether another program reads the arguments that this one does not know."""

    def error(self, message: str) -> NoReturn:
        listed = f": {', '.join(commands())}" if message.endswith("required: COMMAND") else ""
        raise ConfigError(f"{message}{listed} (see '{self.prog} --help')")

    def _check_value(self, action: Any, value: Any) -> None:
        """As argparse's, with the nearest name."""
        if action.choices is not None and value not in action.choices and (hint := suggest(value, action.choices)):
            raise ArgumentError(action, f"invalid choice: {value!r}: {hint}")
        super()._check_value(action, value)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which leaves it to the whole parser to refuse what a command's own parser does not know."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.passes_on:
            words = [*(args or ())]
            place = words.index("--tasks") + 2 if "--tasks" in words else len(words)
            flag, known = unknown[0].partition("=")[0], self._option_string_actions
            key = flag.removeprefix("--").replace("-", "_")
            is_key = self.prog.endswith(" evaluate") and key in EvaluationConfig.model_fields
            hint = f"it is a key: --set {key}=VALUE" if is_key else suggest(flag, known)
            hint = "did you mean --against?" if flag == "--reference" and "--against" in known else hint
            hint = "--tasks takes names with commas between: A,B" if unknown[:1] == words[place : place + 1] else hint
            self.error(": ".join(filter(None, [f"unrecognized arguments: {' '.join(unknown)}", hint])))
        return arguments, unknown


def build_parser() -> _Parser:
    """The parser; `arguments.command` names the command."""
    parser = _Parser(prog="olive-ext", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"olive-ext {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands().items():
        made = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        for names, metavar, text, more in command.arguments:
            named: dict[str, Any] = {"metavar": metavar} if metavar else {}
            made.add_argument(*names.split(), help=text, **named, **more)
        if command.options:
            add_options(made, load(command.options))
        if name == "run":
            made.epilog, made.passes_on = RUN_HELP, True
    return parser


def parse(argv: list[str]) -> Namespace:
    """The arguments; raises `ConfigError`, and SystemExit after a help text. Olive reads those of `run`, too, where a
    recipe that comes first is the value of `--config`."""
    if argv[:1] == ["run"] and argv[1:] and not argv[1].startswith("-"):
        argv = ["run", "--config", *argv[1:]]
    parser = build_parser()
    parser.passes_on = argv[:1] == ["run"]
    arguments: Namespace = parser.parse_known_args(argv, Namespace(passed_on=argv[1:]))[0]
    return arguments
