"""A `user_script` for Olive's evaluators: importing it registers this package's types in the process that evaluates."""

import olive_ext.workflow  # noqa: F401
from olive_ext.workflow.environment_process import restore_run

restore_run()
