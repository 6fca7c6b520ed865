"""Runners execute steps over slots of a KV cache, each by one library (`ort`, `genai_runner`, `hf_runner`).

`trials` serve every kind. Knows no scheduler and no request.
"""
