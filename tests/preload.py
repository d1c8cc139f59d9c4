"""What ranks load in their first step, loaded once in the process that they are forked from."""

import gc

import pytest
import torch._dynamo

import fshard.testing.workers

# Modules that torch would import itself, in a second of computing.
PRELOADED = (pytest, torch._dynamo, fshard.testing.workers)

# A garbage collection of a rank would copy all pages that these objects are on.
gc.freeze()
