"""Where a quantized model's loss comes from, weight by weight, measured in the float model's own graph."""
