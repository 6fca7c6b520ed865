"""Makes olive_ext's evaluators and passes known to a plain `olive run`; recipes name this file as `user_script`."""

import olive_ext.workflow  # noqa: F401
