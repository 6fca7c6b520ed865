"""Tree batches: many texts that are scored in one row of the graph, behind the prefix that they share."""
