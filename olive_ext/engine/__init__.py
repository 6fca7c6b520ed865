"""The engine: tokens in, log-probabilities and tokens out, on one opened model. Knows no text and no tokenizer."""
