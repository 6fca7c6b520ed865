"""The quickstart's model as ONNX packages, float and quantized, made once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnxruntime

from olive_ext.package_versions import installed
from tests.exports.cache import ROOT, once, run_python
from tests.exports.genai import BUILDER

QUICKSTART = ROOT / "recipes" / "quickstart"
MODEL, TASKS = QUICKSTART / "model", QUICKSTART / "tasks"


def exported(precision: str = "fp32", provider: str = "cpu") -> Path:
    """By onnxruntime-genai's builder."""
    weights = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()

    def build(folder: Path) -> None:
        run_python(["-m", BUILDER, "-i", MODEL, "-o", folder, "-p", precision, "-e", provider, "-c", folder / "cache"])

    return once(f"quickstart-{precision}-{provider}", [installed("onnxruntime-genai"), weights], build)


def quantized(
    bits: int, block_size: int, *, source: Path | None = None, symmetric: bool = True, accuracy_level: int | None = None
) -> Path:
    """Round to nearest, by ONNX Runtime's own tool."""
    source = source or exported()

    def build(folder: Path) -> None:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

        config = DefaultWeightOnlyQuantConfig(
            block_size=block_size, is_symmetric=symmetric, bits=bits, accuracy_level=accuracy_level
        )
        quantizer = MatMulNBitsQuantizer(onnx.load(source / "model.onnx"), algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(str(folder / "model.onnx"), True)
        for file in source.iterdir():
            if not file.name.startswith(("model.onnx", "cache")):
                (folder / file.name).write_bytes(file.read_bytes())

    form = "" if symmetric and accuracy_level is None else f"-{'sym' if symmetric else 'zp'}-level{accuracy_level}"
    return once(f"quickstart-int{bits}-b{block_size}{form}", [source.name, onnxruntime.__version__], build)
