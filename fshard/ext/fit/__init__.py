"""fit: a step within a budget of memory."""
