"""Workers: processes of their own, on this machine or on others, each with the model open. They take chunks of requests
and send back results. A session drives a `crew.WorkerPool` as it drives an engine in its own process."""
