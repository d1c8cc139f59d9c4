"""Wrong calls of the functions of extensions, generated as in tests/test_bad_calls.py."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import checkpoint, testing
from tests import test_bad_calls
from tests.test_bad_calls import EMPTY, EVERY, NUMBERS, READ, WRONG, check_calls, step


class Declares(nn.Sequential):
    """Declares its units, as models of transformers do."""

    _no_split_modules = ("Linear",)


GIVEN = {
    **dict.fromkeys(("global_norm", "leaf_norms"), lambda w: dict(tree=w.params)),
    "chunked_loss": lambda w: dict(head=w.weight),
    "sample_ids": lambda w: dict(key=1),
    "from_torch_scheduler": lambda w: dict(cls=torch.optim.lr_scheduler.StepLR, momentum=0.9, step_size=1),
    "from_dtensor": lambda w: dict(tree=fs.to_dtensor(w.params, w.mesh), strategy=fs.zero2(w.mesh)),
    "no_split": lambda w: dict(model=Declares(nn.Linear(2, 2))),
    "load_graph": lambda w: dict(directory=w.place / "graph"),
    "pipeline": lambda w: dict(stage_fn=lambda p, h: h, last=lambda p, h: h.sum(), schedule="1f1b"),
    **dict.fromkeys(("check", "plan"), lambda w: dict(step=step, mesh={"shard": 2})),
    "fit": lambda w: dict(budget="1GB"),
    "tensor_parallel": lambda w: dict(module=nn.Sequential(nn.Linear(4, 4))),
    "to_dtensor": lambda w: dict(tree=w.params),
    "checkpoint.from_optimizer_state_dict": lambda w: dict(like=w.opt_state, updates=0),
    "checkpoint.from_state_dict": lambda w: dict(state_dict=w.module.state_dict(), like=w.weights, module=w.module),
    "checkpoint.to_state_dict": lambda w: dict(params=w.weights, module=w.module),
    "checkpoint.load_dcp": lambda w: dict(directory=w.place / "dcp", like=w.weights, module=w.module, trusted=True),
    "checkpoint.load_huggingface": lambda w: dict(directory=w.place / "hf", like=w.weights, module=w.module),
    "checkpoint.save_dcp": lambda w: dict(state=w.weights, module=w.module, optimizer=w.optimizer),
    "checkpoint.save_huggingface": lambda w: dict(params=w.weights, module=w.module),
    "testing.check_pure": lambda w: dict(step=step, args=w.state),
    "testing.assert_step": lambda w: dict(step=step, mesh={"shard": 2}),
}
ACCEPTED = (
    *test_bad_calls.ACCEPTED,
    (("None",), "bytes_sent collectives divide dtype first names scale scatter_dim sequence_dim updates vocab_size"),
    (("None",), "scale_by_factored_rms.eps checkpoint.load_dcp.module"),
    (("None",), "checkpoint.load_huggingface.module checkpoint.save_dcp.module checkpoint.save_huggingface.module"),
    (NUMBERS, "block bound budget chunks collectives d max_file_bytes pipeline.microbatches scale trust_coefficient"),
    (("a huge number",), "checkpoint.load_dcp.updates"),
    (("a huge number",), "bound budget bytes_sent peak_bytes quantize.dim"),
    (("a number",), "ignore_index time updates vocab_size quantize.dim sample_ids.step"),
    (("nan",), "from_torch_scheduler.lr from_torch_scheduler.momentum"),
    (("a negative number",), "beta2_decay ignore_index quantize.dim"),
    (("a text", "an empty text"), "checkpoint.save_dcp.model_key optimizer_key"),
    (("an empty list",), "divide"),
    (("a tensor of integers",), "ids"),
    (("a tensor of another shape",), "vocab_parallel_embedding.weight"),
    (("a class", "a module"), "attention first last stage_fn"),
    (("None",), "checkpoint.from_state_dict.module checkpoint.to_state_dict.module"),
    (("an empty list", "an empty dict", "another tree", "a donated tree"), "replay.allow"),
    (EMPTY, "checkpoint.to_state_dict.params opt_state checkpoint.save_dcp.state"),
    # True or false to Python, or not used with the other arguments.
    (tuple(WRONG), "flatten_optimizer_state_dict trusted rank0_only"),
    (tuple(WRONG), "checkpoint.save_dcp.optimizer from_dtensor.tree"),
    (tuple(WRONG), "lamb.reduction_order lars.reduction_order scale_by_trust_ratio.reduction_order"),
    (READ, "to_dtensor.tree"),
    (tuple(WRONG), "testing.assert_trees_close.exact"),
)
THEIRS = {
    *("check.step", "plan.step", "replay.step", "replay.watch", "verify.step", "diff.step_a", "diff.step_b"),
    *("testing.assert_step.step", "testing.check_pure.args", "testing.check_pure.step"),
}
UNCALLED = {
    *("moe", "publish", "receive", "save_graph", "schedules", "testing.assert_same_bits", "testing.check_optimizer"),
    *("testing.TransformReport", "testing.assert_matches_ddp"),
}


class World(test_bad_calls.World):
    """With what other formats and parallel layers need."""

    extensions, refused = True, 2900
    given, accepted, theirs, uncalled = GIVEN, ACCEPTED, THEIRS, UNCALLED

    q = k = v = torch.ones(1, 1, 4, 4)
    h, weight, targets, ids = torch.ones(3, 2), torch.ones(5, 2), torch.tensor([0, 1, 4]), torch.tensor([0, 1, 4])
    time, microbatches, attention, plan = 4, 2, torch.add, {"0": "column"}

    def __init__(self, directory):
        super().__init__(directory)
        self.optimizer = torch.optim.Adam(self.module.parameters())
        adam = fs.from_torch(torch.optim.Adam, lr=0.1)
        used = fs.TrainState.create(self.weights, adam)
        self.opt_state = fs.update(adam, used, fs.tree_map(torch.ones_like, self.weights)).opt_state
        self.state_dict = checkpoint.to_optimizer_state_dict(self.opt_state, self.module, self.optimizer)
        checkpoint.save_dcp(self.place / "dcp", self.weights)
        checkpoint.save_huggingface(self.place / "hf", self.weights)
        fs.save_graph(self.place / "graph", fs.jit(torch.sin), torch.ones(2))

    def named(w):  # noqa: N805
        return {
            "testing.check_pure": lambda step, args: testing.check_pure(step, args),
            "replay": lambda step=step, watch="nonfinite", allow=(): fs.replay(step, w.state, watch=watch, allow=allow),
            "verify": lambda step=step: fs.verify(step, w.state),
            "diff": lambda step_a=step, step_b=step, bound=1e-5: fs.diff(
                step_a, step_b, w.state, args_b=(w.state,), bound=bound
            ),
        }


@pytest.mark.timeout(600)
@EVERY
def test_wrong_calls_are_refused_in_clear_words_and_right_ones_accepted(every, tmp_path):
    check_calls(World, every, tmp_path / "rows")
