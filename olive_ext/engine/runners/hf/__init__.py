"""Runs steps on a Hugging Face model in torch; `hf_model` loads it. Knows no ONNX graph and no tokenizer."""
