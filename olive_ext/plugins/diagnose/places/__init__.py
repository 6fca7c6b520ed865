"""One model in two places: whether both give its numbers but for rounding, compared with measured noise (`judge`), and
where it goes wrong if not (`first_difference`). Imported only where such a pair is compared."""
