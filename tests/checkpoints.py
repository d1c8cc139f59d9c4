"""torch's own activation checkpoints, as a user of fshard writes them on any version of torch."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def selective_checkpoint(operators: Sequence[Any]) -> Callable[..., Any]:
    """A checkpoint that keeps the results of some operators and computes the rest again.

    From torch 2.14 on, a checkpoint inside `value_and_grad` has to say that what it keeps is saved as autograd's own.
    """
    contexts = partial(create_selective_checkpoint_contexts, list(operators))
    keyword = "respect_saved_tensors_hooks"
    options = {keyword: True} if keyword in inspect.signature(checkpoint).parameters else {}
    return partial(checkpoint, use_reentrant=False, context_fn=contexts, **options)
