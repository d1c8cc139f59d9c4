"""run: torchrun, whose ranks start warm."""
