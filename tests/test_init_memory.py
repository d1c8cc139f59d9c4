"""What init holds: the shards, and the outermost submodule that draws; or only a chunk, where elements are counted."""

import pytest
import torch
from torch import nn

import fshard as fs
from tests.ranks import on_ranks
from tests.test_init import GPT
from tests.trees import one_axis

WIDTH, LAYERS = 256, 6
MODES = ("replay", "counter")


def peak_bytes(make):
    """The most bytes of tensors there are at once while something is made, and what is made."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        made = make()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, made


class Layer(nn.Module):
    """Draws what its submodules have drawn again, as layers of GPTs do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def reset_parameters(self):
        nn.init.normal_(self.up.weight, std=0.1)
        with torch.no_grad():
            self.down.weight.mul_(0.1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("layers", "torch's"))
def test_the_peak_is_the_outermost_submodule_that_draws_and_the_shards(name, mode):
    with torch.device("meta"):
        layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        half = LAYERS // 2
        module = layers if name == "layers" else nn.Transformer(WIDTH, 2, half, half, 4 * WIDTH, batch_first=True)
    sizes = [parameter.nbytes for parameter in module.parameters()]
    layer = sum(parameter.nbytes for parameter in layers[0].parameters())
    strategy = fs.zero3(one_axis(), min_shard_elements=0)
    model = fs.functionalize(module)
    # What is imported and remembered at first is not counted.
    model.init(strategy, seed=0, mode=mode)
    peak, _ = peak_bytes(lambda: model.init(strategy, seed=0, mode=mode))
    # A chunk has at most a dozen numbers of eight bytes for each of its elements at once. Replay has that submodule,
    # and of its largest matrix what drawing numbers again that lie too far out takes: two more, with their flags.
    replayed = (layer if name == "layers" else sum(sizes)) + 3 * max(sizes)
    extra = 12 * 8 * 2**15 if mode == "counter" else replayed
    assert sum(sizes) <= peak <= sum(sizes) + extra + 2**14
    assert extra < sum(sizes) / 2 or name != "layers"


@on_ranks(4)
def test_a_rank_holds_its_part():
    """Of several ranks, each stores its shards; what it draws does not add up."""
    with torch.device("meta"):
        module = GPT()
    total = sum(parameter.numel() for parameter in module.parameters())
    params = fs.functionalize(module).init(fs.zero3(one_axis(), min_shard_elements=0), seed=0)
    sizes = [leaf.local.untyped_storage().nbytes() for leaf in params.values()]
    assert sum(sizes) <= total + 4 * 4 * 8 * len(sizes)
