"""Ways of sharing a step, one file each: which rows a step has, and what that needs of the graph, of memory and of
trials at opening. `base` is what the planner sees; `kv_store` is what opens a model."""
