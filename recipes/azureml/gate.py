"""Ends with 1 where an evaluation breaks a bound: a step of a pipeline, behind which nothing is registered.

python gate.py REPORT_FOLDER '[{"task": "all", "metric": "kl_mean", "max": 0.02}]'
"""

import json
import sys
from pathlib import Path

from olive_ext.config import Bound
from olive_ext.report import from_json
from olive_ext.run.bounds import broken_bounds

report = from_json((Path(sys.argv[1]) / "report.json").read_text(encoding="utf-8"))
lines = broken_bounds([Bound.parse(bound) for bound in json.loads(sys.argv[2])], report.metrics)
print("\n".join(lines) or "all bounds are kept")
sys.exit(bool(lines))
