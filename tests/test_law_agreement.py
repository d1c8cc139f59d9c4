"""Law 10: ranks that were told different things get one named error on every rank, and go on as before."""

import re
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.testing import spmd
from tests.ranks import my_rank, on_ranks
from tests.trees import assert_same_bits, normal, one_axis, two_axes

# A call that some rank never comes to would wait for the timeout of the process group, which is minutes.
SECONDS = 20.0

MODULE = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
MODEL = fs.functionalize(MODULE, units=nn.Linear)
# The same in every process.
FULL = {name: normal()(*parameter.shape) for name, parameter in MODULE.named_parameters()}
X = normal()(2, 4)


def zero3(mesh, **options):
    return fs.zero3(mesh, **{"min_shard_elements": 0, **options})


def params_of(strategy, **keywords):
    return fs.shard(FULL, strategy, **keywords)


def loss_of(model, params, x=X):
    return model.apply(params, x).square().sum()


def train(params, *, reduce="mean", verb=fs.value_and_grad):
    if verb is fs.apply:
        return MODEL.apply(params, X)
    if verb is fs.accumulate:
        return fs.accumulate(partial(loss_of, MODEL), reduce=reduce)(params, [X])
    return fs.value_and_grad(partial(loss_of, MODEL), reduce=reduce)(params)


def accumulate(params, microbatches=2, **options):
    return fs.accumulate(partial(loss_of, MODEL), **options)(params, [X] * microbatches)


def by_units(params, units):
    model = fs.functionalize(MODULE, units=units)
    return fs.value_and_grad(partial(loss_of, model))(params)


def by_torch_func(params, reduce):
    return torch.func.grad_and_value(lambda p: fs.value_and_grad(partial(loss_of, MODEL), reduce=reduce)(p)[0])(params)


# The arguments of the last rank, those of the others, and the difference that the error must name.
CALLS = {
    "reduce": (lambda params, r: train(params, reduce=r), "sum", "mean", ["reduce", "'sum'", "'mean'"]),
    "communicate": (
        lambda params, c: accumulate(params, communicate=c),
        "once",
        "each",
        ["communicate", "'once'", "'each'"],
    ),
    "verb": (lambda params, v: train(params, verb=v), fs.apply, fs.value_and_grad, ["verb", "got apply", "grad as on"]),
    "under torch.func": (by_torch_func, "sum", "mean", ["reduce", "'sum'", "'mean'"]),
}
JITTED = CALLS | {
    "collectives of its own": (
        lambda params, n: fs.psum(X[:n].sum(0)[:n], params["0.weight"].spec.axes[0]),
        1,
        2,
        ["all_reduce (psum ) over 'shard' of 1 tensors, 8 bytes", "16 bytes"],
    ),
}


def option(name, **others):
    return lambda mesh, value: train(params_of(zero3(mesh, **{name: value}, **others)))


ZERO2 = partial(fs.zero2, min_shard_elements=0)
BIAS = "['0.bias']"


# The same of calls of the mesh.
TOLD = {
    **{
        name: (lambda mesh, told, call=call: call(params_of(zero3(mesh)), told), *rest)
        for name, (call, *rest) in CALLS.items()
    },
    "param_dtype": (option("param_dtype"), torch.float32, torch.bfloat16, [BIAS, "float32", "bfloat16"]),
    "reduce_dtype": (option("reduce_dtype"), torch.float32, None, [BIAS, "scatter_dtype=torch.float32"]),
    "merge_bytes": (option("merge_bytes"), 0, 4096, [BIAS, "merge_bytes=0", "merge_bytes=4096"]),
    "prefetch": (option("prefetch", merge_bytes=0), 0, 2, [BIAS, "prefetch=0", "prefetch=2"]),
    "regather": (option("regather"), False, True, [BIAS, "regather=False", "regather=True"]),
    # Functions are not compared by the call, and differ where they decide what is gathered again.
    "regather of some units": (
        option("regather", merge_bytes=0, prefetch=0),
        lambda n: n == "0",
        lambda n: n == "1",
        ["rank 0: all_gather", "(gather of 1) over 'shard' of", "(scatter of 1) over 'shard' of"],
    ),
    "weighted": (
        lambda mesh, w: fs.value_and_grad(
            lambda p: (fs.gather(p)["0.bias"].sum(), X.sum()) if w else fs.gather(p)["0.bias"].sum(),
            reduce="weighted" if w else "sum",
        )(params_of(zero3(mesh))),
        True,
        False,
        ["reduce", "'weighted'", "'sum'"],
    ),
    "strategy": (lambda mesh, s: train(params_of(s(mesh))), ZERO2, zero3, ["regather=False", "regather=True", BIAS]),
    "layout": (option("min_shard_elements"), 10, 0, [BIAS, "P()", "P('shard')"]),
    "frozen": (
        lambda mesh, names: train(params_of(zero3(mesh), frozen=names)),
        "0.bias",
        (),
        [BIAS, "frozen float64"],
    ),
    # fs.shard compares the rows above itself; these are sharded in the same way, and differ afterwards.
    "frozen afterwards": (
        lambda mesh, frozen: train(
            {
                name: replace(leaf, spec=replace(leaf.spec, frozen=frozen and name == "0.bias"))
                for name, leaf in params_of(zero3(mesh)).items()
            }
        ),
        True,
        False,
        [BIAS, "frozen True", "frozen False"],
    ),
    "dtype of a leaf": (
        lambda mesh, d: fs.value_and_grad(lambda p: fs.gather(p)["0.bias"].double().sum())(
            fs.tree_map(lambda x: x.to(d), params_of(zero3(mesh)))
        ),
        torch.float32,
        torch.float64,
        [BIAS, "torch.float32", "torch.float64"],
    ),
    "a leaf more": (
        lambda mesh, names: fs.value_and_grad(lambda p: fs.gather(p)["0.bias"].sum())(
            {name: leaf for name, leaf in params_of(zero3(mesh)).items() if name[0] in names}
        ),
        "012",
        "01",
        ["['2.bias']", "nothing"],
    ),
    "verb of accumulation": (
        lambda mesh, verb: train(params_of(zero3(mesh)), verb=verb),
        fs.accumulate,
        fs.value_and_grad,
        ["verb: ", "got accumulate on", "value_and_grad as on"],
    ),
    **{
        f"microbatches, {communicate}": (
            lambda mesh, n, communicate=communicate: accumulate(params_of(zero3(mesh)), n, communicate=communicate),
            3,
            2,
            ["accumulate: ranks were told different things\n  microbatches: expected 2 as on", "got 3 on"],
        )
        for communicate in ("each", "once")
    },
    "units": (
        lambda mesh, units: by_units(params_of(zero3(mesh, merge_bytes=0)), units),
        None,
        nn.Linear,
        ["rank 0: all_gather", "(gather of 0) over 'shard' of", "(gather of (root)) over 'shard' of"],
    ),
}


def lines_of(text, parts):
    """Read the lines behind an error's headline, the same on every rank; check the headline and the first of them."""
    headline, *lines = text.splitlines()
    if headline == "ranks differ in a collective":
        # A line for each rank, and then one for this rank.
        lines = [line for line in lines if re.match(r"  rank \d+: ", line)]
        headline = "\n".join(lines)
    else:
        assert re.match(r"\w+: (ranks were told different things|ranks hold different trees)$", headline), text
    assert all(part in f"{headline}\n{lines[0]}" for part in parts), text
    return lines


@pytest.mark.rows(100)
@pytest.mark.parametrize("name", TOLD)
@on_ranks(2, pytest.param(3, marks=pytest.mark.slow), "2 processes", timeout=4 * SECONDS)
def test_ranks_that_were_told_different_things_are_all_told(name):
    """Within seconds, and a good step goes on as before."""
    mesh, (call, other, common, parts) = one_axis(), TOLD[name]
    params, verbs = params_of(zero3(mesh)), (fs.value_and_grad, fs.accumulate)
    good = lambda: [train(params, verb=verb) for verb in verbs]  # noqa: E731
    expected, started = good(), time.monotonic()
    try:
        text = str(call(mesh, other if mesh.get_rank() == mesh.size() - 1 else common))
    except (ValueError, fs.comm.CollectiveError) as error:
        text = str(error)
    one_axis()
    assert time.monotonic() - started < SECONDS
    assert_same_bits(fs.tree_leaves(good()), fs.tree_leaves(expected))
    return lines_of(text, parts)


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", JITTED)
@on_ranks(2, "2 processes", timeout=4 * SECONDS)
def test_jitted_ranks_that_were_told_different_things_are_all_told(name):
    mesh, (call, other, common, parts) = one_axis(), JITTED[name]
    params, told = params_of(zero3(mesh)), other if mesh.get_rank() == mesh.size() - 1 else common
    same, differ = (fs.jit(lambda p, told=told: call(p, told)) for told in (common, told))
    expected = same(params)
    with pytest.raises(ValueError, match=r"^jit: ranks were told different things\n") as caught:
        differ(params)
    assert_same_bits(fs.tree_leaves(same(params)), fs.tree_leaves(expected))
    return lines_of(str(caught.value), parts)


@on_ranks(4, timeout=4 * SECONDS)
def test_ranks_of_two_axes_are_told_that_one_of_them_jits_something_else():
    """Two ranks agree along each axis with all that they meet there, but for the one that differs."""
    mesh = two_axes(4)
    params = params_of(fs.hsdp(mesh, min_shard_elements=0))
    step = fs.jit(lambda p, reduce: train(p, reduce=reduce), static_argnums=1)
    expected = step(params, "mean")
    with pytest.raises(ValueError, match=r"^jit: ranks were told different things\n  reduce: ") as caught:
        step(params, "sum" if my_rank() == 1 else "mean")
    assert_same_bits(fs.tree_leaves(step(params, "mean")), fs.tree_leaves(expected))
    return lines_of(str(caught.value), ["'sum' on rank replicate=0, shard=1", "'mean' as on rank replicate=0, shard=0"])


@on_ranks(3, timeout=6 * SECONDS)
def test_a_rank_that_traces_again_keeps_the_others_waiting_and_no_more():
    """Batches of other lengths on other ranks decide no collective: each rank has the bits of its eager step."""
    params = params_of(zero3(one_axis(), merge_bytes=0))

    def step(params, x):
        return fs.value_and_grad(lambda p: loss_of(MODEL, p, x))(params)

    jitted = fs.jit(step)
    for lengths in ((2, 2), (2, 3), (5, 2), (5, 3), (2, 2)):
        x = normal(my_rank())(lengths[min(my_rank(), 1)], 4)
        assert_same_bits(fs.tree_leaves(jitted(params, x)), fs.tree_leaves(step(params, x)))
    assert len(jitted.traces) == 2


@on_ranks(3, timeout=4 * SECONDS)
def test_a_rank_whose_trace_fails_tells_the_others():
    params = params_of(zero3(one_axis()))

    @fs.jit
    def step(params):
        if my_rank() == 1:
            raise KeyError("at 1")
        return train(params)

    with pytest.raises(KeyError if my_rank() == 1 else RuntimeError) as caught:
        step(params)
    told = "rank 1 failed in jit: KeyError: 'at 1'\nTo fix: mend it; jit has sent nothing yet."
    assert str(caught.value) == ("'at 1'" if my_rank() == 1 else told)
    assert fs.jit(train)(params)


def updated(params, tx):
    grads = fs.tree_map(torch.ones_like, params)
    return fs.update(tx, fs.TrainState.create(params, tx), grads)


SGD = fs.from_torch(torch.optim.SGD, lr=0.1)
# What the first rank does alone, while the others train.
ALONE = {
    "gather": lambda params: fs.gather(params),
    "gather of a leaf": lambda params: fs.gather(params["0.weight"]),
    "unshard": lambda params: fs.unshard(params),
    "unshard of another leaf": lambda params: fs.unshard(params["0.bias"]),
    "scatter_grads": lambda params: fs.scatter_grads(FULL, like=params),
    "objective": lambda params: fs.objective(X.sum(), like=params),
    "reshard": lambda params: fs.reshard(params, fs.ddp(params["0.weight"].spec.axes[0])),
    "apply": lambda params: MODEL.apply(params, X),
    "update that clips": lambda params: updated(params, fs.chain(fs.clip_by_global_norm(1.0), SGD)),
    "update that skips": lambda params: updated(params, fs.skip_nonfinite(SGD)),
    "jit": lambda params: fs.jit(lambda p: fs.tree_map(torch.square, p))(params),
    "gather under torch.func": lambda params: torch.func.grad(lambda p: fs.gather(p)["0.weight"].sum())(params),
}
TRAINING = {
    "value_and_grad": train,
    "unshard of all": lambda params: fs.unshard(params),
    "gather of all": lambda params: fs.gather({"all": params}),
}


def errors_of_one_alone(calls):
    """Return the error of each rank where the first one alone makes a call; it must be the same on all."""
    mesh = one_axis()
    params = params_of(zero3(mesh))
    expected, found = train(params), {}
    for name, alone in calls.items():
        for other, call in TRAINING.items():
            if name.split()[0] == other.split()[0] == "unshard" and "another" not in name:
                continue
            differ = r"(ranks were told different|collective mismatch|ranks differ in a collective)"
            with pytest.raises((ValueError, fs.comm.CollectiveError), match=differ) as caught:
                alone(params) if mesh.get_rank() == 0 else call(params)
            one_axis()
            text = str(caught.value).split("\n", 1)[1]
            found[name, other] = text.splitlines()[:2]
            # Where both call one verb, as an optimizer's init does, it is the leaves that differ.
            assert name.split()[0] in text or other.split()[0] in text or "dtype" in text, text
            assert_same_bits(fs.tree_leaves(train(params)), fs.tree_leaves(expected))
    return found


@pytest.mark.rows(1)
@on_ranks(2, 3, timeout=3 * SECONDS)
def test_a_verb_that_one_rank_calls_alone_is_named_on_every_rank():
    return errors_of_one_alone(ALONE)


@on_ranks("2 processes", timeout=4 * SECONDS)
def test_a_verb_that_one_process_calls_alone_is_named_on_every_rank():
    """Where gloo would end by a signal, or return what it was not sent."""
    names = ("gather", "unshard", "scatter_grads", "reshard", "update that clips", "jit")
    return errors_of_one_alone({name: ALONE[name] for name in names})


def test_a_verb_that_another_process_never_calls_ends_within_the_timeout(workers):
    def program():
        group = torch.distributed.new_group(timeout=timedelta(seconds=2))
        torch.distributed.barrier()
        axis = fs.Axis("shard", 2, group.group_name)
        params = fs.shard(FULL, zero3(axis))
        store, text = torch.distributed.distributed_c10d._get_default_store(), ""
        if torch.distributed.get_rank() == 0:
            with pytest.raises(fs.comm.CollectiveError) as caught:
                fs.unshard(params)
            text = str(caught.value)
            store.set("a lone unshard", "")
        store.wait(["a lone unshard"])
        torch.distributed.destroy_process_group(group)
        return text

    text, _ = spmd(program, workers(2), timeout=2 * SECONDS)
    assert text.startswith("rank 1 did not come within 2 s: it is stopped, hangs or computes\n")
    assert re.search(
        r"rank 0 waits in all_gather number \d+ \(start of unshard\) over 'shard' of a digest in unshard\n", text
    ), text


# The meshes that ranks ask for, the last rank its own, and what each error must name.
MESHES = {
    "shape": ({"a": 2, "b": -1}, {"a": 1, "b": -1}, ["'a': 2", "'a': 1"]),
    "names": ({"shard": -1}, {"data": -1}, ["'shard'", "'data'"]),
    "order of axes": ({"a": -1, "b": 1}, {"b": 1, "a": -1}, ["'a'", "'b'"]),
    "one that cannot be": ({"shard": -1}, {"shard": 3}, ["'shard': 4", "'shard': 3"]),
}


@pytest.mark.rows(1)
@on_ranks(4, "4 processes", timeout=4 * SECONDS)
def test_meshes_of_other_shapes_are_refused_before_groups_are_made():
    rank, size, found = my_rank(), torch.distributed.get_world_size(), []
    for common, other, parts in MESHES.values():
        with pytest.raises(ValueError, match=r"^init_mesh: expected the same mesh on every rank, ") as caught:
            fs.init_mesh(other if rank == size - 1 else common, device="cpu")
        found.append(str(caught.value))
        assert all(part in found[-1] for part in parts), found[-1]
        # What some ask for by -1 and others by a number is the same.
        mesh = fs.init_mesh({"shard": -1 if rank else size}, device="cpu")
        assert fs.comm.all_gather([torch.ones(1)], fs.axis_of(mesh), "test")[0].sum() == size
    return found
