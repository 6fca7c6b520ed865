"""Embeddings: `text_encoder` makes vectors of texts on this package's engine, `evaluation` measures them with mteb."""
