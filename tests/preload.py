"""What ranks load in their first step, loaded once in the process that they are forked from."""

import gc

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import fshard.testing.workers  # noqa: F401

# A garbage collection of a rank would copy all pages that these objects are on.
gc.freeze()
