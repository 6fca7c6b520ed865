"""Why a mended model loses other than was predicted: its prediction, step by step, beside what it loses itself.

    python docs/benchmarks/predicted_losses.py QUANTIZED FLOAT --tasks A,B --include-path DIR --within 0.001

For the quantized model and the mended one, on the documents that choose: the sum that was predicted; the sum of all
weights' losses, each measured on every document (a race stops early); the loss of all of them together in the float
graph (errors meet); the model's own (its kernels round activations).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import parser_of, table, write

from olive_ext.plugins.diagnose.remedy.locate import opened_location
from olive_ext.plugins.diagnose.remedy.mend import Mender
from olive_ext.plugins.diagnose.remedy.mended_graph import alternative
from olive_ext.plugins.diagnose.remedy.pairing import Target
from olive_ext.plugins.diagnose.remedy.variants import Floats, Material
from olive_ext.plugins.diagnose.settings import MendingConfig

HEADS = ("model", "predicted", "sum, all documents", "together", "the model itself")


def main() -> None:
    parser = parser_of(__doc__, "quantized", "float")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--include-path")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--within", type=float, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rows = measured(given, Path(work))
    print(table(HEADS, [(name, *(f"{kl:.2e}" for kl in losses)) for name, losses in rows.items()]))
    write(given.output, given, losses=rows)


def measured(given: argparse.Namespace, work: Path) -> dict[str, list[float]]:
    config = MendingConfig.of(
        {
            "model": given.quantized,
            "reference": str(given.float),
            "tasks": given.tasks.split(","),
            "include_path": given.include_path,
            "limit": given.limit,
            "top": 1,
            "within": {"kl_mean": given.within},
            "output_dir": work / "mended",
        },
        {},
    )
    with (
        opened_location(config.location(), progress=True) as location,
        location.with_whole_experts().measuring() as material,
    ):
        mender = Mender(config.most_kl, None, location, material, work / "drafts", progress=True)
        _, bill = mender.run()
        part = material.part(mender.choosing)
        answers = {"as it was": mender.menu.unchanged, "mended": tuple(line.chosen for line in bill.lines)}
        own = {"as it was": bill.unchanged_loss.choosing.mean, "mended": bill.chosen_loss.choosing.mean}
        return {
            name: [mender.menu.kl(answer), *in_float_graph(mender, answer, part), own[name]]
            for name, answer in answers.items()
        }


def in_float_graph(mender: Mender, answer: Sequence[int], material: Material) -> tuple[float, float]:
    """The sum of what the weights lose alone, and what they lose together, in nats a position."""
    forms: list[Target] = []
    for target, precision in mender.menu.precisions(answer).items():
        form = target
        if precision is not None and precision.bits:
            form, weights = alternative(target, precision, mender.location.sources[target.part])
            material.variants.alternatives[form] = weights
        if precision is None or precision.bits:
            forms.append(form)

    def nats(sums: Floats) -> float:
        return float(sums.sum() / material.positions.sum())

    alone = sum(nats(material.variants.kl([form], material.documents)) for form in forms)
    return alone, nats(material.variants.kl(forms, material.documents))


if __name__ == "__main__":
    main()
