"""A `user_script` for Olive's evaluators: importing it registers this package's types in the process that evaluates."""

import olive_ext.workflow  # noqa: F401
