"""Ways of sharing a step: its rows, and what that needs of graph, memory and trials at opening."""
