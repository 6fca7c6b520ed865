"""Runners execute steps over slots of a KV cache, each by one library. Knows no scheduler and no request."""
