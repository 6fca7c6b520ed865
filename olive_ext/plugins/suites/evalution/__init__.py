"""Evalution's engine contract on our sessions: `OrtEngine` for its Python interface, `run_spec` for its YAML.

Other rooms may import these names and `register`, inside functions only: importing this room imports Evalution, which
is an extra, takes seconds and prints a banner on stderr. It knows the public session, and nothing below it.
"""

from olive_ext.plugins.suites.evalution.ort_engine import OrtEngine, OrtInferenceSession, register, run_spec

__all__ = ["OrtEngine", "OrtInferenceSession", "register", "run_spec"]
