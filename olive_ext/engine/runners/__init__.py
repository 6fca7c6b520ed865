"""Runners execute steps over slots of a KV cache, each by one library (`ort`, `genai`, `hf`).

`trials` serve every kind. Knows no scheduler and no request.
"""
