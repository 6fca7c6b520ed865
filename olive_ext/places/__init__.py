"""One model in two places: whether it is the same there, and if not, where it goes wrong."""
