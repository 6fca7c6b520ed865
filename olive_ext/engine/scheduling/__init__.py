"""From requests to steps, which a step loop runs. Knows a runner only by its traits."""
