"""Evaluations on an MLflow server, where MLFLOW_TRACKING_URI is set."""

from olive_ext.registry import Plugin

_LOG = "olive_ext.plugins.mlflow.mlflow_log"

plugin = Plugin(hooks={"logged_run": f"{_LOG}:logged_run", "log_cached": f"{_LOG}:log_cached"})
