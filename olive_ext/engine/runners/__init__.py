"""Runners: they execute steps over slots of a KV cache, by one library each (`ort`, `genai`, `hf`).

`trials` serve every kind. Knows no scheduler and no request.
"""
