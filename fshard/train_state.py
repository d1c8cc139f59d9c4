"""TrainState: everything a training run is, as one value."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from fshard.checks import describe
from fshard.random import key_of
from fshard.transforms import transform_state
from fshard.tree import Tree, dcp_error, flatten, is_sharded


class _Initialises(Protocol):
    @property
    def init(self) -> Callable[[Tree], Tree]: ...


class TrainState(NamedTuple):
    """All that a train step reads and makes anew; a pytree, so that saving it saves everything.

    Attributes:
        step: Updates made so far: an int64 tensor of shape ().
        params: Parameters, with Sharded leaves.
        opt_state: The optimizer's state, sharded as the parameters are.
        buffers: The model's buffers by name.
        key: Random key of the run, or None.
        transform_state: State of the parameters' transforms, such as what a lossy scatter left out; mostly None.

    >>> import torch, fshard as fs
    >>> params = fs.shard({"w": torch.ones(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> state = fs.TrainState.create(params, fs.sgd(0.1, momentum=0.9), key=7)
    >>> state.step, state.params, state.key
    (tensor(0), {'w': Sharded(float32[2], P(), local [2])}, tensor(7))
    """

    step: torch.Tensor
    params: Tree
    opt_state: Tree
    buffers: Tree
    key: torch.Tensor | None
    transform_state: Tree = None

    @classmethod
    def create(
        cls, params: Tree, tx: _Initialises, *, buffers: Tree = None, key: torch.Tensor | int | None = None
    ) -> "TrainState":
        """Make the state before the first step.

        Args:
            params: Parameters from `model.init` or `shard`.
            tx: The optimizer, whose `init` is called on them.
            buffers: The model's buffers, such as model.buffers.
            key: Random key of the run: a whole number, which the state holds as an int64 tensor of shape (), or a
                tensor of integers.

        Returns:
            The state, at step 0.

        Raises:
            ValueError: if the optimizer refuses the parameters, or the key is no integer.

        >>> import torch, fshard as fs
        >>> params = fs.shard({"w": torch.ones(2)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
        >>> state = fs.TrainState.create(params, fs.ema(fs.sgd(0.1), 0.9), key=7)
        >>> state.opt_state.average
        {'w': Sharded(float32[2], P('shard'), local [2])}
        """
        if not callable(getattr(tx, "init", None)):
            raise ValueError(
                f"TrainState.create: expected tx to be an Optimizer, got {describe(tx)}; make one by fs.from_torch"
            )
        key = None if key is None else key_of(key, "TrainState.create")
        step = torch.zeros((), dtype=torch.int64)
        return cls(step, params, tx.init(params), buffers, key, transform_state(params))

    @property
    def __create_write_items__(self) -> Callable[[str, object], list[Any]]:
        """Asked for by torch.distributed.checkpoint, which would pickle this and keep what one rank has.

        Raises:
            AttributeError: where no leaf is Sharded, and nothing would be lost.
        """
        flat = flatten(self)
        sharded = [(path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True) if is_sharded(leaf)]
        if not sharded:
            raise AttributeError("__create_write_items__")
        path, leaf = sharded[0]

        def refuse(fqn: str, _: object) -> list[Any]:
            raise dcp_error(fqn + path, repr(leaf))

        return refuse
