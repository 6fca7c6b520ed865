"""See `tests.report.golden`."""

import sys

from tests.report.golden import renew, run

if sys.argv[1:] == ["runs"]:
    run()
renew()
