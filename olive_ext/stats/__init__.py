"""Statistics of two models on the same documents: distances between distributions, differences between answers, and how
many of the documents are enough to be certain of a claim about all of them (`stopping`).

Pure functions on numpy arrays; knows no model, no tokenizer and no evaluation framework. Imported by module, so that
the engine, which needs `compared_fields` alone, loads no report with it.
"""
