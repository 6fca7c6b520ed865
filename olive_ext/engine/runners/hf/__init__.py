"""Loads Hugging Face models and runs steps on them in torch. Knows no ONNX graph and no tokenizer."""
