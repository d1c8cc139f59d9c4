"""Arguments of the exchange of formats in the wrong place: each is refused by name, with a remedy."""

import pytest
import torch

from fshard import checkpoint


def test_directories():
    x = torch.ones(2)
    for call, got in (
        (lambda: checkpoint.load_huggingface(5, {"w": x}), "5"),
        (lambda: checkpoint.save_huggingface(None, {"w": x}), "None"),
    ):
        with pytest.raises(ValueError, match=f"expected directory to be a path, got {got}"):
            call()
