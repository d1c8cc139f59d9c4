"""What ranks load in their first steps, loaded once in the process that they are forked from."""

import encodings.idna  # noqa: F401
import gc

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import fshard as fs
import fshard.checkpoint
import fshard.extend
import tests.faults
import tests.unit_models  # noqa: F401

# An extension is loaded where one of its names is used.
OPTIMIZER = fs.adam
# A garbage collection of a rank would copy all pages that these objects are on.
gc.freeze()
