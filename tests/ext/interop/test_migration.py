"""From FSDP2 to fshard and back, by the formats of torch: rows of the same table."""

from functools import partial

import pytest
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fshard as fs
from tests.ranks import on_ranks
from tests.test_migration import (
    FULL,
    Checkpoint,
    Row,
    adamw_of,
    check_both_sides_are_equal,
    go_on_by_fsdp2,
    mesh_of_ranks,
    network,
    others,
    program,
    row,
    saved_by_fsdp2,
    sharded,
    shared_directory,
    stepped,
    train,
    train_fsdp2,
    zero3,
)

ROWS: dict[str, Row] = {}
entered = partial(row, table=ROWS)


@entered("get_model_state_dict(model), of DTensors", "fs.to_dtensor(params, mesh), fs.from_dtensor(tree, strategy)")
class ShardedStateDict:
    def fsdp2():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        state_dict = get_model_state_dict(sharded(mesh=mesh))
        taken_over = fs.from_dtensor(state_dict, zero3(mesh))
        return {name: tensor.to_local() for name, tensor in state_dict.items()}, dict(fs.unshard(taken_over))

    def fshard():
        mesh = mesh_of_ranks()
        params = fs.functionalize(network()).init(zero3(mesh))
        state_dict = fs.to_dtensor(params, mesh)
        return {name: tensor.to_local() for name, tensor in state_dict.items()}, fs.unshard(params)


@entered("get_optimizer_state_dict(model, optimizer)", "fs.checkpoint.to_optimizer_state_dict(state.opt_state, ...)")
class OptimizerStateDict:
    def fsdp2():
        model = sharded()
        train_fsdp2(model, optimizer := adamw_of(model))
        slots = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
        return [slots[name] for name, _ in model.named_parameters()]

    def fshard():
        (state, _), module = stepped(program()), network()
        slots = fs.checkpoint.to_optimizer_state_dict(state.opt_state, module, adamw_of(module))["state"]
        return list(slots.values())


@entered(
    "dcp.load of what an FSDP2 run saved", "fs.checkpoint.load_dcp(directory, like=state, module=module, trusted=True)"
)
class GoOnFromFSDP2:
    fsdp2 = Checkpoint.fsdp2

    def fshard():
        saved_by_fsdp2(directory := shared_directory())
        made, module = program(module=others()), network()
        state = fs.checkpoint.load_dcp(directory, like=made.state, module=module, trusted=True)
        return train(made._replace(state=state))


@entered(
    "dcp.save of what FSDP2 goes on from",
    "fs.checkpoint.save_dcp(directory, state, module=module, optimizer=optimizer)",
)
class GoBackToFSDP2:
    fsdp2 = Checkpoint.fsdp2

    def fshard():
        (state, _), directory, module = stepped(program()), shared_directory(), network()
        fs.checkpoint.save_dcp(directory, state, module=module, optimizer=adamw_of(module))
        return go_on_by_fsdp2(directory)


@pytest.mark.rows(2)
@pytest.mark.parametrize("call", ROWS)
@on_ranks("2 processes")
def test_both_sides_are_equal(call):
    check_both_sides_are_equal(ROWS[call])
