"""memory: the last two states of a run in the memory of its hosts, here and next door."""
