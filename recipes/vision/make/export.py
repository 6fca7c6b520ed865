"""Makes the recipe's package of a folder that `train.py` wrote, by mobius.

pip install mobius-onnx==0.1.0 onnx-shape-inference==0.4.0
python recipes/vision/make/export.py DIR [--output DIR]
"""

import argparse
import shutil
from pathlib import Path

from mobius import build
from mobius.integrations.ort_genai.auto_export import export_package

PACKAGE = Path(__file__).resolve().parents[1] / "model"
CONTEXT = 512
KEPT = (
    "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip
"""What the package has besides graphs; mobius would ask the Hub for the tokenizer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trained", type=Path)
    parser.add_argument("--output", type=Path, default=PACKAGE)
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    export_package(
        build(str(args.trained), dtype="f32"),
        str(args.output),
        ep="cpu",
        context_length=CONTEXT,
        local_config_dir=str(args.trained),
        progress_bar=False,
    )
    for name in KEPT:
        shutil.copy(args.trained / name, args.output)


if __name__ == "__main__":
    main()
