"""Strings to token requests and back: tokenizer, chat templates, stop strings, windows, truncation.

The session converts every request here; any floor above may import `requests` (a session's requests and outputs) and
`tokenizer`. Of the engine this package imports data types only; it knows no engine run, no model file and no lm-eval.
"""
