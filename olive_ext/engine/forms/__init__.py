"""Ways of sharing a step, one folder each: which rows a step has (`steps`, without arrays or onnxruntime), and what
that needs of a graph, of memory and of trials at opening.
"""
