"""Runners: they execute steps over slots of a KV cache, by one library each (`ort`, `genai`, `hf`).

`trials` and `step_trial` serve every kind. Knows no scheduler and no request.
"""
