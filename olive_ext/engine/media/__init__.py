"""Pictures and sounds as the engine sees them: items of requests, and the graphs that make features of them."""
