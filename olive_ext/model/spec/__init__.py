"""What the graphs of a model take and give, read from the graphs themselves. Knows no session and no provider."""
