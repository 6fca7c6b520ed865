"""A mended model beside others of as many bytes, by their loss on documents that chose nothing.

    python -m docs.benchmarks mended_models CHECKPOINT WORK --tasks A,B [--include-path DIR] [--limit N]

WORK gets the packages of onnxruntime-genai's builder: float, int4 in blocks of 128, which is mended, and the others:
int4 in smaller blocks, with the head in int8 (rtn_last), k_quant_last and k_quant_mixed. For the size of each the base
is mended to at most as many bytes. In the size of k_quant_mixed are also mixes of the same choices by the same writer:
weights in int8 as far as the size allows, in the order of their relative errors and in 20 random orders. Each is opened
by itself. `mended_page` writes what was measured into the documentation.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import parser_of, write
from train_models import exported

from olive_ext.model import ResolvedModel
from olive_ext.model.files.content import size_on_disk
from olive_ext.model.files.locate import locate as locate_files
from olive_ext.plugins.diagnose.remedy.locate import Floats, Location, estimate, opened_location
from olive_ext.plugins.diagnose.remedy.mend import Mender
from olive_ext.plugins.diagnose.remedy.mended_package import copy_of
from olive_ext.plugins.diagnose.remedy.variants import Material
from olive_ext.plugins.diagnose.settings import MendingConfig

RANDOM = 20
BASE = "int4, blocks of 128"
MIXED = "k_quant_mixed"
PEERS: dict[str, dict[str, object]] = {
    BASE: {"int4_block_size": 128},
    "int4, blocks of 64": {"int4_block_size": 64},
    "int4, blocks of 32": {"int4_block_size": 32},
    "rtn_last": {"int4_algo_config": "rtn_last"},
    "k_quant_last": {"int4_algo_config": "k_quant_last"},
    MIXED: {"int4_algo_config": MIXED},
}
BY_ERROR = "largest weight errors in int8"


Row = dict[str, Any]


class Losses:
    """What models lose on the documents that choose nothing, made and measured one after another."""

    def __init__(self, location: Location, mender: Mender, material: Material) -> None:
        self._location, self._mender, self._part = location, mender, material.part(mender.held_out)
        self._positions: Floats = self._part.positions.astype(np.float64)
        self._menu = mender.menu

    def rows(self, folders: Mapping[str, Path]) -> Iterator[tuple[str, Row]]:
        """Of each package the loss, and before it that of the base mended to as many bytes; then those of mixes."""
        mended, size = None, 0
        for name, folder in folders.items():
            model = self._location.model.patched({"model": str(folder)})
            size = size_on_disk(model.files)
            if name != BASE:
                mended, row = self._made(self._mender.best_in(size))
                yield f"mended like {name}", row
            yield name, self._row(size, self._sums(model), mended)
        for name, order in self._orders():
            yield name, self._made(self._filled(order, size), mended)[1]

    @property
    def facts(self) -> dict[str, int]:
        """How much is measured."""
        documents, positions = len(self._positions), int(self._positions.sum())
        return {"weights": len(self._menu.targets), "documents": documents, "positions": positions}

    def _orders(self) -> Iterator[tuple[str, list[int]]]:
        decoder, targets = self._location.sources[""], self._menu.targets
        pairs = [(decoder.floats.matrix(one.floats[0]), decoder.quantized.matrix(one.quantized[0])) for one in targets]
        errors = [float(np.linalg.norm(own - other) / np.linalg.norm(own)) for own, other in pairs]
        yield BY_ERROR, sorted(range(len(errors)), key=lambda number: -errors[number])
        for seed in range(RANDOM):
            yield f"random {seed}", random.Random(seed).sample(range(len(errors)), len(errors))

    def _filled(self, order: Iterable[int], size: int) -> tuple[int, ...]:
        """Weights in int8 in the largest blocks, in this order, each where it still fits."""
        menu, answer = self._menu, [0] * len(self._menu.targets)
        for number in order:
            alone = {n: one.precision for n, one in enumerate(menu.choices[number]) if one.together is None}
            finer = next(n for n, one in alone.items() if one is not None and one.bits == 8)
            grown = menu.num_bytes([*answer[:number], finer, *answer[number + 1 :]]) - menu.num_bytes([0] * len(answer))
            if self._mender.own_size + grown <= size:
                answer[number] = finer
        return tuple(answer)

    def _made(self, answer: tuple[int, ...], mended: Floats | None = None) -> tuple[Floats, Row]:
        with tempfile.TemporaryDirectory() as work:
            draft = Path(work, "draft")
            self._mender.package(answer).write(draft)
            sums = self._sums(copy_of(self._mender.model, draft))
        return sums, self._row(self._mender.num_bytes(answer), sums, mended)

    def _sums(self, model: ResolvedModel) -> Floats:
        return self._part.variants.compared(model, self._part.documents)

    def _row(self, size: int, sums: Floats, mended: Floats | None) -> Row:
        """Bytes, loss, and how much more than the mended one of as many bytes it loses, on the same documents."""
        row: Row = {"bytes": size, "kl": asdict(estimate(sums, self._positions))}
        return row if mended is None else {**row, "more": asdict(estimate(sums - mended, self._positions))}


def main() -> None:
    """Measures the models of one checkpoint; writes what there is after each."""
    parser = parser_of(__doc__, "checkpoint", "work")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--include-path")
    parser.add_argument("--limit", type=int, default=40)
    given = parser.parse_args()
    folders = {name: given.work / name.replace(" ", "_").replace(",", "") for name in PEERS}
    exported(given.checkpoint, given.work / "fp32", "fp32")
    for name, options in PEERS.items():
        exported(given.checkpoint, folders[name], "int4", **options)
    size = size_on_disk(locate_files(str(folders[MIXED])))
    goal = {"at_most": size, "output_dir": str(given.work / "mended"), "top": 3}
    work = {"tasks": given.tasks.split(","), "include_path": given.include_path, "limit": given.limit}
    models = {"model": str(folders[BASE]), "reference": str(given.work / "fp32")}
    config = MendingConfig.of({**models, **work, **goal}, {})
    rows: dict[str, Row] = {}
    with (
        opened_location(config.location(), progress=True) as location,
        location.with_whole_experts().measuring() as material,
    ):
        mender = Mender(None, None, location, material, given.work / "drafts", progress=True)
        losses = Losses(location, mender, material)
        for name, row in losses.rows(folders):
            rows[name] = row
            print(f"{name}: {row['bytes']} bytes, {row['kl']['mean']:.2e} nats", flush=True)
            write(given.output, given, **losses.facts, losses=rows)


if __name__ == "__main__":
    main()
