"""Bad meshes and transforms: what everything before the first shard refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fshard as fs
from tests.bad_input import Row, assert_all_refused

SIZES = "shape to be a mapping from names of axes to positive whole sizes, one of which may be -1"
PRODUCT = "init_mesh: expected shape to have sizes whose product is {}, the number of ranks, got {}"
FLOATING = "to be a floating torch.dtype such as torch.bfloat16, or None"


def setup(name, call, error, *arguments):
    """A row whose arguments are values, or functions of the world."""
    return Row(name, lambda world: tuple(a(world) if callable(a) else a for a in arguments), call, error)


def mesh_of(shape, device="cpu"):
    return lambda _: fs.init_mesh(shape, device=device)


# Errors, and calls on the world that raise them.
REFUSED = [
    *((PRODUCT.format(2, shape), mesh_of(shape)) for shape in ({"replicate": 3, "shard": -1}, {"shard": 1})),
    *((f"init_mesh: expected {SIZES}, got {shape}", mesh_of(shape)) for shape in ({"a": 0, "b": -1}, {}, {0: 2})),
    (
        "init_mesh: expected device to be one of ['cpu'], which torch finds here, got 'tpu'",
        mesh_of({"shard": -1}, device="tpu"),
    ),
    *(
        (
            "mesh: expected axis to be one of ('shard',), got 'data'; name it in init_mesh",
            lambda w, f=f: f(w.mesh, "data"),
        )
        for f in (fs.zero2, fs.axis_of)
    ),
    *(
        (
            "mesh: expected one axis, got ('replicate', 'shard'); name one, as in mesh['shard']",
            lambda world, f=f: f(world.grid),
        )
        for f in (fs.fully_shard, fs.axis_of)
    ),
    *(
        ("mesh: expected a DeviceMesh or an Axis, got a str; make one by fs.init_mesh", lambda _, f=f: f("shard"))
        for f in (fs.fully_shard, fs.zero2)
    ),
    (
        "compose: expected one transform for each axis, got two for the axes ['shard']; drop one of the two",
        lambda world: fs.compose(
            fs.replicate(world.mesh), fs.compose(fs.cast(gather=torch.bfloat16), fs.fully_shard(world.mesh))
        ),
    ),
    (
        "compose: expected transforms to be ShardTransforms such as fs.fully_shard(mesh), got a DeviceMesh",
        lambda world: fs.compose(world.zero2, world.mesh),
    ),
    (f"cast: expected gather {FLOATING}, got torch.int8", lambda _: fs.cast(gather=torch.int8)),
]


def test_bad_setup_is_refused():
    assert_all_refused(
        [setup(f"{n}: {error}", call, error, lambda world: world) for n, (error, call) in enumerate(REFUSED)]
    )


# Calls of init_mesh that a process of its own refuses: their errors, environment and shape.
GRID = {"replicate": 2, "shard": -1}
TORCH = "Error initializing torch.distributed using env:// rendezvous: "
PROCESS = {
    "a launcher's ranks that do not divide": (PRODUCT.format(3, GRID), {"RANK": "1", "WORLD_SIZE": "3"}, GRID),
    "RANK alone": (f"{TORCH}environment variable WORLD_SIZE expected, but not set", {"RANK": "1"}, {"shard": -1}),
}


def refused_in_process():
    """Make the calls of PROCESS one after another, and a good one at the end; return each one's error."""
    errors = {}
    for name, (_, environment, shape) in PROCESS.items():
        os.environ.update(environment)
        try:
            fs.init_mesh(shape, device="cpu")
        except ValueError as error:
            errors[name] = str(error)
        assert not dist.is_initialized()
        for variable in environment:
            del os.environ[variable]
    mesh = fs.init_mesh({"shard": -1})
    assert (mesh.device_type, mesh.size(), dist.get_backend()) == ("cpu", 1, "gloo")
    assert fs.unshard(fs.shard({"w": torch.ones(3)}, fs.zero2(mesh)))["w"].tolist() == [1.0, 1.0, 1.0]
    return errors


def test_bad_calls_in_a_process_of_its_own_are_refused():
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    code = "import json; from tests.test_bad_setup import refused_in_process; print(json.dumps(refused_in_process()))"
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parents[1],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == {name: case[0] for name, case in PROCESS.items()}
