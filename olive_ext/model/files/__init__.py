"""What lies where in a model's folder, and what may be read there. Knows no graph's interface and no session."""
