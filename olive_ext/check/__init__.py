"""What a recipe or a model resolves to, and what is wrong with it, without evaluating anything.

The command line imports `check_recipe`, `check_model` and the `Findings` that they return, and for `olive-ext run` what
tells mistakes at once. Knows the resolver, and
nothing of how a model is scored.
"""

from olive_ext.check.model_check import Findings, check_model
from olive_ext.check.recipe import blocks, mistakes, read_recipe
from olive_ext.check.recipe_check import check_recipe

__all__ = ["Findings", "blocks", "check_model", "check_recipe", "mistakes", "read_recipe"]
