"""bucket: fewer and larger messages, and the same values."""

import pytest
import torch

import fshard as fs
from fshard.transforms.compose import reduction
from tests.ranks import on_ranks
from tests.transforms.laws import told
from tests.trees import assert_same_bits, normal, one_axis

# Bytes of a leaf, above what shares a buffer without a bucket.
LEAF, COUNT = 256 * 160 * 8, 6
# Leaves to a bucket, the buffers that six leaves then travel in, and the engine's reductions of them: without a bucket
# one, because together they are less than a reduction waits for.
MESSAGES = {None: (6, 1), 1: (6, 6), 2: (3, 3), 3: (2, 2), 6: (1, 1), 80: (1, 1)}


def six():
    draw = normal()
    return {f"leaf{i}": draw(256, 160) for i in range(COUNT)}


@pytest.mark.parametrize("per_bucket", MESSAGES)
@pytest.mark.parametrize("layout, ops", [(fs.fully_shard, ("all_gather", "reduce_scatter")), (fs.ddp, (None, None))])
@on_ranks(2)
def test_large_leaves_travel_in_fewer_messages(layout, ops, per_bucket):
    """As buffers of one collective where the verbs are called, and as collectives of the engine's reductions."""
    full = six()
    buffers, reductions = MESSAGES[per_bucket]
    gather, scatter = ops
    plain = layout(one_axis())
    params = fs.shard(full, plain if per_bucket is None else fs.bucket(plain, per_bucket * LEAF))
    with fs.comm.record() as record:
        fs.gather(params)
    assert told(record) == [("all_gather", "shard", "gather", buffers, COUNT * LEAF)] * bool(gather)
    with fs.comm.record() as record:
        fs.scatter_grads(full, like=params)
    assert told(record) == [(scatter or "all_reduce", "shard", "scatter", buffers, COUNT * LEAF)]
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: sum((x**2).sum() for x in fs.gather(p).values()))(params)
    found = [entry for entry in told(record) if entry[2] == "scatter"]
    assert len(found) == reductions
    assert sum(entry[-1] for entry in found) == COUNT * LEAF
    assert record.bytes_sent() == 2 * COUNT * LEAF / 2


@on_ranks(2)
def test_the_engine_fills_buckets_as_the_verbs_do():
    """Two leaves go to a bucket of two and a half."""
    full = six()
    params = fs.shard(full, fs.bucket(fs.fully_shard(one_axis()), LEAF * 5 // 2))
    with fs.comm.record() as record:
        fs.scatter_grads(full, like=params)
    assert [entry[3] for entry in told(record)] == [3]
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: sum((x**2).sum() for x in fs.gather(p).values()))(params)
    assert sum(entry[3] for entry in told(record) if entry[2] == "scatter") == 3


@on_ranks(2)
def test_small_leaves_fill_buckets_up_to_their_size():
    """Nine leaves of 96 bytes, four of them to 400; without a bucket all share one buffer. Dtypes travel apart."""
    full = {f"leaf{i}": torch.ones(4, 3, dtype=torch.float64) for i in range(9)}
    mixed = full | {f"half{i}": torch.ones(4, 3, dtype=torch.bfloat16) for i in range(9)}

    def buffers(transform, tree):
        params = fs.shard(tree, transform)
        counts = []
        for verb in (lambda: fs.gather(params), lambda: fs.scatter_grads(tree, like=params)):
            with fs.comm.record() as record:
                verb()
            counts.append([entry[3] for entry in told(record)])
        return counts

    plain = fs.fully_shard(one_axis())
    assert buffers(plain, full) == [[1], [1]]
    assert buffers(fs.bucket(plain, 400), full) == [[3], [3]]
    assert buffers(fs.bucket(plain, 95), full) == [[9], [9]]
    assert buffers(fs.bucket(plain, 400), mixed) == [[3 + 1], [3 + 1]]


@on_ranks("2 processes")
def test_ddp_by_buckets_on_processes():
    """The same bits as without, by one buffer for each bucket."""
    found = []
    for transform in (fs.ddp(one_axis()), fs.bucket(fs.ddp(one_axis()))):
        params = fs.shard(six(), transform)
        with fs.comm.record() as record:
            _, grads = fs.value_and_grad(lambda p: sum((x**2).sum() for x in fs.gather(p).values()))(params)
        found.append((grads["leaf3"].local, sum(tensors for *_, tensors, _ in told(record))))
    (plain, many), (bucketed, one) = found
    assert_same_bits(plain, bucketed)
    assert (many, one) == (COUNT, 1)


@on_ranks(2)
def test_a_bucket_in_a_bucket_has_the_outer_size():
    mesh = one_axis()
    masked = fs.masked(fs.fully_shard(mesh), "a", otherwise=fs.replicate(mesh))
    for plain in (fs.fully_shard(mesh), fs.zero3(mesh), masked):
        assert fs.bucket(fs.bucket(plain, 10), 20) == fs.bucket(plain, 20)
        assert fs.bucket(fs.bucket(plain, 20), 20) == fs.bucket(plain, 20)
        assert reduction(fs.bucket(plain, 20)).bucket_bytes == 20
    assert reduction(fs.bucket(fs.ddp(mesh))).bucket_bytes == 25 * 2**20
