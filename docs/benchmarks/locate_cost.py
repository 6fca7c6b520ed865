"""What a loss map costs on a GPU, predicted: tokens, operations and bytes of models that this machine cannot hold.

    python -m docs.benchmarks locate_cost [--documents N] [--tokens N] [--passes N]

With P passes over T tokens, N weights that are multiplied with, Q quantized products and L looks at most: 2 N P T
operations; the weights are read once for each step of `--step` tokens, and each entry's numbers are put twice on the
device for each look, the quantized ones and its own again. A rate is given, not measured.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass

from harness import parser_of, table, write

from olive_ext.plugins.diagnose.remedy.locate import FIRST_SHARE, LEAST


@dataclass(frozen=True)
class Model:
    """A decoder's sizes; every product is `hidden` wide on one side, the embedding is not multiplied with."""

    hidden: int
    intermediate: int
    layers: int
    keys: int
    vocabulary: int

    @property
    def products(self) -> int:
        """Queries, keys and values in one, the output, three of the MLP; the head."""
        return 5 * self.layers + 1

    @property
    def weights(self) -> int:
        """Of all products."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.keys
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary


MODELS = {
    "1 B (Llama-3.2-1B)": Model(2048, 8192, 16, 512, 128256),
    "8 B (Llama-3.1-8B)": Model(4096, 14336, 32, 1024, 128256),
}
BYTES = 2
"""Of a float16 number."""

RECORDED = 0.02
"""Share of the logits that is recorded."""


def costs(model: Model, given: argparse.Namespace) -> dict[str, float]:
    """Tokens, operations and bytes of one loss map; the float model, the quantized one and all weights together take a
    pass each beside the race's."""
    first = max(LEAST, math.ceil(given.documents / FIRST_SHARE))
    looks = 1 + math.ceil(math.log2(given.documents / first))
    passes = given.passes + 3
    tokens = given.documents * given.tokens * passes
    steps = math.ceil(tokens / given.step) + looks * model.products
    return {
        "products": model.products,
        "weights": model.weights,
        "tokens": tokens,
        "operations": 2 * model.weights * tokens,
        "read": steps * model.weights * BYTES,
        "put": 2 * looks * model.weights * BYTES,
        "memory": model.weights * BYTES,
        "disk": RECORDED * given.documents * given.tokens * model.vocabulary * BYTES,
    }


def main() -> None:
    """Prints one line a model."""
    parser = parser_of(__doc__)
    parser.add_argument("--documents", metavar="N", type=int, default=400)
    parser.add_argument("--tokens", metavar="N", type=int, default=250, help="of a document")
    parser.add_argument("--passes", metavar="N", type=int, default=60)
    parser.add_argument("--step", metavar="N", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--rate", metavar="N", type=float, default=2e14, help="operations a second")
    given = parser.parse_args()
    results = {name: costs(model, given) for name, model in MODELS.items()}
    heads = (
        "model",
        "products",
        "tokens",
        "operations",
        "weights read",
        "weights put",
        "on the device",
        "on disk",
        "minutes",
    )
    rows = [
        (
            name,
            one["products"],
            f"{one['tokens'] / 1e6:.1f} M",
            f"{one['operations']:.1e}",
            *(f"{one[kind] / 1e9:.{0 if one[kind] > 1e10 else 1}f} GB" for kind in ("read", "put", "memory", "disk")),
            f"{one['operations'] / given.rate / 60:.1f}",
        )
        for name, one in results.items()
    ]
    print(table(heads, rows))
    print(json.dumps(results))
    write(given.output, given, models=results)


if __name__ == "__main__":
    main()
