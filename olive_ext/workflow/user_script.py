"""A `user_script` for Olive's evaluators: importing it makes this package's types known in that process."""

import olive_ext.workflow  # noqa: F401
