"""Leaves this folder out where transformers is not installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["*.py"]
