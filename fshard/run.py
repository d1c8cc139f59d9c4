"""python -m fshard.run: torchrun with ranks that start warm; `fshard/ext/run` has the programs."""

from importlib import import_module

if __name__ == "__main__":
    import_module("fshard.ext.run.launch").main()
