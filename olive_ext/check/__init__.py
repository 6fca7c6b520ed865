"""What a recipe or a model resolves to, and what is wrong with it, without evaluating anything.

`recipe` says what is wrong with a recipe, to every entry; `model_check` and `recipe_check` are `olive-ext check`. Knows
the resolver, and nothing of how a model is scored.
"""

from olive_ext.check.model_check import Findings, check_model
from olive_ext.check.recipe import blocks, mistakes, read_recipe, refuse
from olive_ext.check.recipe_check import check_recipe

__all__ = ["Findings", "blocks", "check_model", "check_recipe", "mistakes", "read_recipe", "refuse"]
