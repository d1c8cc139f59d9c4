"""Replay: run a step's graph node by node on real values, and name the operation that made a wrong one."""
