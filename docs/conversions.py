"""Exports compared with their checkpoints, for docs/comparison.md. `python -m docs.conversions` prints it.

Tiny models with random weights, made by the tests' exporters and kept (tests/exports)."""

from __future__ import annotations

from tests.exports import export, hf_model
from tests.plugins.diagnose.conversion.test_exports import DIFFERING, GOOD, held

EXPORTERS = {
    "genai_export": "builder 0.14",
    "mobius_export": "mobius 0.1.0",
    "optimum_export": "optimum-onnx 0.1.0",
}


def main() -> None:
    print("| export | largest difference, nats | equal up to | what was left out, and the proof | first difference |")
    print("|---|--:|--:|---|---|")
    for family, make, *_ in DIFFERING:
        found = held(make(family), hf_model(family))
        state_difference = found.state_difference
        place = (
            f"{state_difference.place}, `{state_difference.part}`, from token {state_difference.token} on"
            if state_difference
            else ""
        )
        cause = found.omission.sentence() if found.omission else ""
        equal = f"{found.equal_up_to} tokens" if found.equal_up_to else "nothing"
        print(f"| {family}, {EXPORTERS[make.__name__]} | {found.nats:.2g} | {equal} | {cause} | {place} |", flush=True)
    for name in GOOD:
        package = export(name)
        found = held(package.path, package.hf)
        print(f"| {name} | {found.nats:.1e} | {'all' if found.is_equal else 'DIFFERS'} | | |", flush=True)


if __name__ == "__main__":
    main()
