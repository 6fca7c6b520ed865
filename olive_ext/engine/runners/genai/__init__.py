"""Runs steps on generators of onnxruntime-genai, one sequence at a time.

`genai_runner` has the opener; `genai_model` holds a package. Knows no scheduler, and no graph but its rotary cache.
"""
