"""Runs steps on generators of onnxruntime-genai, one sequence at a time.

`genai_model` opens a package. Knows no scheduler, and no graph but its rotary cache.
"""
