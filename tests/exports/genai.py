"""Exports by onnxruntime-genai's builder: the release installed, or another one from the package index."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tests.exports.cache import once, packages, run_python
from tests.exports.hf import hf_model


def genai_export(
    family: str,
    release: str | None = None,
    precision: str = "fp32",
    provider: str = "cpu",
    options: tuple[str, ...] = (),
) -> Path:
    """`hf_model(family)` as the builder's release (None: the one installed) exports it for a provider.

    `options` are the builder's extra options, KEY=VALUE.
    """
    hf = hf_model(family)
    installed = version("onnxruntime-genai")
    wanted = release or installed
    path = [] if wanted == installed else [packages(f"onnxruntime-genai=={wanted}")]

    def build(folder: Path) -> None:
        arguments = ["-m", "onnxruntime_genai.models.builder", "-i", hf, "-o", folder, "-p", precision]
        arguments += ["-e", provider, "-c", folder / "builder-cache"]
        if options:
            arguments += ["--extra_options", *options]
        run_python(arguments, path=path)
        assert list(folder.glob("*.onnx")), "the builder wrote no graph"

    return once(f"genai-{wanted}-{family}-{precision}-{provider}", [hf.name, wanted, options], build)
