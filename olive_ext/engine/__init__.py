"""The engine: tokens in, log-probabilities and tokens out, on one opened model.

`engine` opens a runner and makes an `Engine` on it; `requests` and `step` are what everybody reads first. Knows no
text, no tokenizer and no evaluation framework.
"""
