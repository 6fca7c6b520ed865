"""The logger of this floor, a child of Olive's: what is said here stands in Olive's log, at the recipe's severity."""

from __future__ import annotations

import logging

logger = logging.getLogger("olive.olive_ext")
