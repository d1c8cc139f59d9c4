"""What reads or compiles the graphs of jit: `fs.make_graph`, and the backend "inductor"."""
