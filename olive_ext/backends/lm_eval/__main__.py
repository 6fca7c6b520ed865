"""lm-eval's command line, to which the model `olive_ext` is known: `python -m olive_ext.backends.lm_eval --model
olive_ext --model_args pretrained=PATH --tasks NAMES`.

lm-eval 0.4.13 has a fixed list of models, and its `lm_eval` command imports no other package's. Versions that read the
entry points `lm_eval.models` find this package's there, and do not need this module.
"""

from __future__ import annotations

import lm_eval.models  # noqa: F401 - its own models; `get_model` adds them to an empty registry only
from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
