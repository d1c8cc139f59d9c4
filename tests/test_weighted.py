"""Weighted objectives: however unequally tokens are spread, the gradient is that of the mean over all of them."""

import re
from functools import partial

import pytest
import torch

import fshard as fs
from fshard.testing import assert_trees_close
from tests.ranks import on_ranks
from tests.trees import one_axis
from tests.unequal_tokens import (
    ATOL,
    FORMS,
    IGNORED,
    LENGTHS,
    STRATEGIES,
    in_one_process,
    setup,
    stack,
    token_sum,
)


def of_empty_batch(forward, params, pair):
    """The tokens alone, without padding: a batch of shape (0,) where there are none."""
    return token_sum(forward, params, pair[:, pair[1] != IGNORED])


def constant_where_none(forward, params, pair):
    """The model takes part, but nothing of it is in the loss."""
    found = token_sum(forward, params, pair)
    return (torch.zeros((), dtype=torch.float64), torch.tensor(0)) if found[1] == 0 else found


# A loss, how the model is called, and the forms that take it. Two losses need no padding where a rank has no tokens.
WITHOUT_PADDING = ("value_and_grad", "accumulate each", "accumulate once")
LOSSES = {
    "module": (token_sum, "module", FORMS),
    "plain": (token_sum, "plain", FORMS),
    "of an empty batch": (of_empty_batch, "module", WITHOUT_PADDING),
    "constant where there is none": (constant_where_none, "module", WITHOUT_PADDING),
}


@on_ranks(*LENGTHS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.rows(6)
def test_every_form_is_the_mean_over_all_tokens(strategy, loss, world_size):
    module, (loss_of, kind, forms) = stack(), LOSSES[loss]
    expected = in_one_process(module, world_size)
    params, forward, batches = setup(module, strategy, kind)
    for name in forms:
        value, grads = FORMS[name](partial(loss_of, forward), params, batches())
        assert_trees_close((value, fs.unshard(grads)), expected, rtol=0.0, atol=ATOL)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "torch.func"])
@on_ranks(2)
def test_no_tokens_at_all_are_not_a_number(form):
    """As the mean of no losses is in torch; fs.skip_nonfinite passes over such a step."""
    module = stack()
    for strategy in STRATEGIES:
        params, forward, batches = setup(module, strategy, "module")
        empty = [torch.stack([x, torch.full_like(x, IGNORED)]) for x, _ in batches()]
        value, grads = FORMS[form](partial(token_sum, forward), params, empty)
        assert value.isnan()
        assert all(leaf.isnan().all() for leaf in fs.tree_leaves(fs.unshard(grads)))


# Three of these: the sum wraps in uint8, is true in bool, rounds in bfloat16 and is infinite in float16.
NARROW = {"uint8": 200, "bool": 1, "bfloat16": 129, "float16": 40000, "float64": 3}


def test_counts_of_any_dtype_are_not_rounded_and_leave_that_of_gradients():
    params = fs.shard({"w": torch.ones(())}, fs.ddp(one_axis()))
    for dtype, number in NARROW.items():
        count = torch.tensor(number).to(getattr(torch, dtype))
        step = fs.accumulate(lambda p, _: (fs.gather(p)["w"] * 1.0, count), reduce="weighted")  # noqa: B023
        value, grads = step(params, range(3))
        assert 3 / value.item() == pytest.approx(3 * number, rel=1e-6)
        assert grads["w"].local.dtype is torch.float32


REFUSED = "{}: expected a count that requires no gradient, got one that does; pass count.detach()"


@on_ranks(2)
def test_counts_that_require_a_gradient_are_refused():
    """The division by them has a gradient that no form adds; the remedy gives every form the same bits."""
    given = torch.full((), 6.0, requires_grad=True)
    params = fs.shard({"w": torch.full((4,), 2.0)}, fs.zero3(one_axis(), min_shard_elements=0))

    def loss_of(count, params, _):
        return fs.gather(params)["w"].square().sum(), count

    for form, run in FORMS.items():
        what = {"torch.func": "objective", "four verbs": "scatter_grads"}.get(form, form.split()[0])
        with pytest.raises(ValueError, match=f"^{re.escape(REFUSED.format(what))}$"):
            run(partial(loss_of, given), params, [torch.ones(2, 1)])
    found = [run(partial(loss_of, given.detach()), params, [torch.ones(2, 1)]) for run in FORMS.values()]
    for other in found[1:]:
        assert_trees_close(other, found[0])


@on_ranks(2)
def test_counts_of_other_dtypes_on_other_ranks_are_added_up():
    """As of a rank without tokens, which counts torch.tensor(0.0)."""
    mesh = one_axis()
    params = fs.shard({"w": torch.ones(3)}, fs.ddp(mesh))
    count = torch.tensor(0.0) if mesh.get_rank() else torch.tensor(2)
    value, _ = fs.value_and_grad(lambda p: (fs.gather(p)["w"].sum(), count), reduce="weighted")(params)
    assert value.item() == 3.0


@on_ranks("2 processes")
def test_losses_of_other_dtypes_on_other_ranks_are_named():
    """Processes of gloo would abort."""
    mesh = one_axis()
    params = fs.shard({"w": torch.ones(3)}, fs.ddp(mesh))
    dtype = torch.float64 if mesh.get_rank() else torch.float32
    # The loss, and whether this rank used the leaf.
    sent = [
        rf"  rank {rank}: all_reduce number \d+ \(objective\) over 'shard' of {of} in value_and_grad\n"
        for rank, of in ((0, r"float32 \(2,\), 8 bytes"), (1, r"float64 \(2,\), 16 bytes"))
    ]
    with pytest.raises(fs.comm.CollectiveError, match=rf"^ranks differ in a collective\n{sent[0]}{sent[1]}"):
        fs.value_and_grad(lambda p: fs.gather(p)["w"].sum().to(dtype))(params)
