"""Code that a model writes is run, each program in a process of its own: HumanEval, MBPP and their kind."""

from olive_ext.registry import Plugin

plugin = Plugin(hooks={"code_eval": "olive_ext.plugins.code.code_eval:CODE_EVAL"})
