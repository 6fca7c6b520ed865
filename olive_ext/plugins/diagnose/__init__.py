"""Where a loss comes from and what mends it: `remedy` (weights), `conversion` (an export against its checkpoint) and
`places` (one model on two providers, runtimes or machines)."""

from __future__ import annotations

from olive_ext.registry import Argument, Command, Pass, Plugin

_ROOM = "olive_ext.plugins.diagnose"
_MODEL: Argument = ("model", "MODEL", "An .onnx file, or a folder with one or with genai_config.json.", {})

plugin = Plugin(
    commands={
        "locate": Command(
            "Say which weights of a quantized model its loss comes from, against the float model it was made of.",
            f"{_ROOM}.commands:locate_command",
            (_MODEL,),
            f"{_ROOM}.commands:LOCATE_OPTIONS",
        ),
        "mend": Command(
            "Write a quantized model with the weights that lose most in a finer precision, within a loss or a size.",
            f"{_ROOM}.commands:mend_command",
            (_MODEL,),
            f"{_ROOM}.commands:MEND_OPTIONS",
        ),
    },
    passes={
        "OrtLossMap": Pass(
            f"{_ROOM}.passes:OrtLossMap", f"{_ROOM}.settings:LocationSettings", "says which weights the loss comes from"
        ),
        "OrtMending": Pass(
            f"{_ROOM}.passes:OrtMending",
            f"{_ROOM}.settings:MendingSettings",
            "puts the weights that lose most into a finer precision",
            changes_model=True,
        ),
    },
    functions={"locate": f"{_ROOM}.remedy.locate:locate", "mend": f"{_ROOM}.remedy.mend:mend"},
    hooks={
        "finish_report": f"{_ROOM}.findings:finish_report",
        "refuse_stages": f"{_ROOM}.findings:refuse_stages",
        "place_sample": f"{_ROOM}.places.judge:Sample",
        "recorded_facts": f"{_ROOM}.findings:recorded_facts",
        "hold_against": f"{_ROOM}.conversion:hold_against",
    },
)
