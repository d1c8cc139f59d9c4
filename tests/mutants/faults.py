"""One-line faults of the kind that people make, each against a law of fshard's contract: those of `faults.txt`.

They were chosen by reading the package, not its tests. When a line is rebuilt, plant the same fault in the new one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The tests that mirror a file: those of the first entry that is the file or a folder that holds it.
MIRRORS = {
    "fshard/errors.py": ("tests/ext/testing/test_checks.py",),
    "fshard/_compat/autograd.py": ("tests/test_update.py", "tests/jit/test_donation.py"),
    "fshard/_compat/tracing.py": ("tests/jit/test_bad_input.py", "tests/jit/test_steps.py"),
    "fshard/apply.py": ("tests/test_apply.py", "tests/test_law_agreement.py", "tests/test_bad_input.py"),
    "fshard/init/drawing.py": ("tests/test_init.py", "tests/test_apply.py"),
    "fshard/remat.py": ("tests/test_remat.py", "tests/ext/parallel/test_moe.py"),
    "fshard/ext/check": ("tests/ext/check/test_check_mistakes.py", "tests/ext/check/test_check_types.py"),
    "fshard/ext/chunked_loss.py": ("tests/ext/test_chunked_loss.py",),
    "fshard/ext/fit": ("tests/ext/fit",),
    "fshard/ext/publish.py": ("tests/ext/test_publish.py",),
    "fshard/ext/run": ("tests/ext/test_run.py",),
    "fshard/ext/saved_graph/cache.py": ("tests/ext/test_graph_cache.py",),
    "fshard/ext/saved_graph/identity.py": ("tests/ext/test_graph_cache.py",),
    "fshard/tree/abstract.py": ("tests/ext/test_abstract.py",),
    "fshard/ext/saved_graph": ("tests/ext/test_hostile_graphs.py", "tests/ext/test_saved_graph.py"),
    "fshard/ext/quantize.py": ("tests/ext/test_quantize.py", "tests/ext/test_quantize_state.py"),
    "fshard/tree/maps.py": ("tests/test_tree.py", "tests/jit/test_donation.py"),
    "fshard/random.py": ("tests/jit/test_donation.py",),
    "fshard/tree/flat.py": (
        *("tests/optim/test_from_torch.py", "tests/test_tree.py", "tests/test_law_round_trip.py"),
        *("tests/test_update.py", "tests/ext/optim/test_donated.py"),
    ),
    "fshard/tree": (
        *("tests/test_tree.py", "tests/test_law_round_trip.py", "tests/test_update.py"),
        *("tests/ext/optim/test_donated.py", "tests/transforms/test_bad_transforms.py"),
    ),
    "fshard/init": ("tests/test_init.py",),
    "fshard/ext/counter.py": ("tests/test_init.py",),
    "fshard/transforms/local.py": ("tests/test_launches.py", "tests/transforms"),
    "fshard/transforms/run.py": ("tests/transforms", "tests/test_accumulate.py"),
    "fshard/transforms": ("tests/transforms",),
    "fshard/comm/failure.py": ("tests/comm/test_many_ranks.py", "tests/comm/test_failure.py", "tests/test_recovery.py"),
    "fshard/comm/connect.py": (
        *("tests/comm/test_meeting.py", "tests/comm/test_many_ranks.py", "tests/comm/test_retry.py"),
    ),
    "fshard/comm/agree.py": ("tests/comm/test_cost_laws.py", "tests/comm", "tests/test_recovery.py"),
    "fshard/comm/groups.py": ("tests/comm/test_forked_children.py", "tests/comm/test_failure.py"),
    "fshard/comm/meeting.py": (
        *("tests/comm/test_meeting.py", "tests/comm/test_many_ranks.py", "tests/comm/test_retry.py"),
    ),
    "fshard/_compat/collectives.py": ("tests/test_mesh.py",),
    "fshard/mesh.py": ("tests/test_mesh.py", "tests/comm/test_retry.py"),
    "fshard/comm/recorder.py": ("tests/comm/test_profile.py", "tests/comm/test_collective.py", "tests/comm"),
    "fshard/comm": ("tests/comm",),
    "fshard/collectives/moves.py": ("tests/test_moves.py", "tests/test_collectives.py"),
    "fshard/collectives/objective.py": (
        *("tests/test_reduce_over.py", "tests/test_unused.py"),
        *("tests/jit/test_steps.py", "tests/test_varying.py", "tests/test_accumulate.py"),
    ),
    "fshard/collectives/linear.py": (
        *("tests/test_collectives.py", "tests/test_derivatives.py", "tests/test_varying.py"),
        "tests/test_law_agreement.py",
    ),
    "fshard/collectives/derived.py": ("tests/test_derived_leaves.py",),
    "fshard/collectives/varying.py": ("tests/test_varying.py", "tests/test_derived_leaves.py", "tests/ext/check"),
    "fshard/collectives": ("tests/test_collectives.py", "tests/test_varying.py"),
    "fshard/engine/saved.py": (
        *("tests/engine/test_saved.py", "tests/engine/test_gathered_units.py", "tests/test_apply.py"),
        *("tests/test_units_dtypes.py", "tests/test_units_memory.py", "tests/test_units_state.py"),
    ),
    "fshard/engine/graph.py": (
        *("tests/test_unused.py", "tests/engine", "tests/test_derived_leaves.py", "tests/test_accumulate.py"),
        "tests/test_tree_sums.py",
    ),
    "fshard/engine/started.py": ("tests/test_start_gather.py",),
    "fshard/engine": (
        *("tests/engine", "tests/test_derived_leaves.py", "tests/test_apply.py", "tests/test_accumulate.py"),
        *("tests/test_regather_axis.py", "tests/test_start_gather.py", "tests/test_tree_sums.py"),
        *("tests/test_units_dtypes.py", "tests/test_units_memory.py", "tests/test_units_policies.py"),
        *("tests/test_units_state.py", "tests/transforms/test_transform_state.py"),
    ),
    "fshard/value_and_grad.py": ("tests/test_value_and_grad.py", "tests/test_accumulate.py", "tests/test_tree_sums.py"),
    "fshard/reduction_order.py": ("tests/test_tree_sums.py", "tests/test_accumulate.py"),
    "fshard/module_template.py": (
        *("tests/engine", "tests/test_apply.py", "tests/test_units_memory.py", "tests/test_units_policies.py"),
        "tests/test_units_state.py",
    ),
    "fshard/units.py": (
        *("tests/test_unit_rules.py", "tests/test_units_policies.py", "tests/test_apply.py"),
        "tests/test_units_dtypes.py",
    ),
    "fshard/jit/jit.py": ("tests/jit", "tests/test_recovery.py"),
    "fshard/jit/nodes.py": ("tests/ext/jit/test_graph.py", "tests/jit", "tests/ext/fit/test_fit.py"),
    "fshard/jit": ("tests/ext/jit/test_graph.py", "tests/jit", "tests/ext/optim/test_donated.py"),
    "fshard/ext/optim/block_sums.py": ("tests/ext/optim/test_norm_blocks.py", "tests/ext/optim/test_clip.py"),
    "fshard/optim/from_torch.py": ("tests/optim", "tests/ext/optim"),
    "fshard/optim": ("tests/optim", "tests/ext/optim"),
    "fshard/ext/jit/uses.py": ("tests/ext/jit", "tests/ext/plan/test_plan.py"),
    "fshard/ext/jit": ("tests/ext/jit",),
    "fshard/ext/replay/operations.py": ("tests/ext/replay/test_verify.py", "tests/ext/replay/test_replay.py"),
    "fshard/ext/replay/verify.py": ("tests/ext/replay/test_verify.py",),
    "fshard/ext/replay/diff.py": ("tests/ext/replay/test_diff.py",),
    "fshard/ext/optim/native.py": ("tests/test_bad_input.py", "tests/ext/optim", "tests/optim"),
    "fshard/ext/optim/norms.py": ("tests/ext/optim", "tests/test_law_agreement.py"),
    "fshard/ext/optim": ("tests/ext/optim", "tests/optim"),
    "fshard/update.py": (
        *("tests/test_update.py", "tests/test_bad_input.py", "tests/test_offload.py", "tests/test_recovery.py"),
        *("tests/ext/optim/test_blocks.py", "tests/ext/optim/test_donated.py"),
    ),
    "fshard/shard.py": (
        *("tests/test_law_round_trip.py", "tests/test_frozen.py", "tests/test_bad_input.py"),
        "tests/checkpoint/test_round_trip.py",
    ),
    "fshard/checkpoint/restore.py": ("tests/test_law_round_trip.py", "tests/checkpoint"),
    "fshard/checkpoint/saving.py": ("tests/checkpoint/test_exits.py",),
    "fshard/checkpoint/errors.py": ("tests/checkpoint/test_failing_ranks.py",),
    "fshard/checkpoint/exchange.py": (
        *("tests/checkpoint/test_failing_ranks.py", "tests/checkpoint/test_messages.py"),
        "tests/checkpoint/test_refused.py",
    ),
    "fshard/checkpoint/save.py": (
        *("tests/checkpoint/test_failing_ranks.py", "tests/checkpoint/test_save_asynchronous.py"),
        "tests/checkpoint/test_refused.py",
    ),
    "fshard/ext/memory/neighbours.py": ("tests/ext/memory/test_neighbours.py",),
    "fshard/ext/memory/slots.py": ("tests/ext/memory/test_generations_torn.py", "tests/ext/memory/test_neighbours.py"),
    "fshard/ext/memory/job_directory.py": ("tests/ext/memory/test_generations_refused.py",),
    "fshard/ext/memory": ("tests/ext/memory/test_generations_torn.py", "tests/ext/memory/test_generations.py"),
    "fshard/checkpoint/manager.py": ("tests/ext/memory/test_generations.py",),
    "fshard/checkpoint/unfinished.py": ("tests/checkpoint/test_next_start.py", "tests/checkpoint/test_exits.py"),
    "fshard/checkpoint": ("tests/checkpoint",),
    "fshard/testing": ("tests/testing", "tests/ext/testing"),
    "fshard/ext/testing": ("tests/ext/testing", "tests/test_varying.py"),
    "fshard/ext/parallel/vocabulary.py": ("tests/ext/parallel/test_vocabulary.py",),
    "fshard/ext/parallel": ("tests/ext/parallel",),
    "fshard/ext/plan": ("tests/ext/plan/test_plan.py", "tests/ext/plan", "tests/ext/optim/test_donated.py"),
    "fshard/ext/interop": ("tests/ext/interop",),
    "fshard/ext/trace": ("tests/ext/trace",),
    "fshard/ext/replay": ("tests/ext/replay/test_replay.py", "tests/ext/replay/test_run.py"),
    "fshard/ext/_compat.py": ("tests/ext/replay/test_run.py", "tests/ext/test_hostile_graphs.py"),
}


class Fault(NamedTuple):
    """The line `before`, which a file has once, less its indentation, becomes `after`; the law has its number."""

    name: str
    file: str
    before: str
    after: str
    law: str

    def planted(self, text: str) -> str:
        """Put the fault into the text of its file."""
        lines = text.split("\n")
        (place,) = [i for i, line in enumerate(lines) if line.strip() == self.before]
        lines[place] = lines[place].replace(self.before, self.after)
        return "\n".join(lines)

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that mirror its file."""
        return next(tests for place, tests in MIRRORS.items() if Path(self.file).is_relative_to(place))


def read_faults(text: str) -> Iterator[Fault]:
    """Read the faults of `faults.txt`: below the name of a file, three lines for each."""
    file = ""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("== "):
            file = line.removeprefix("== ")
        elif line and not line.startswith("# "):
            name, law = line.split(" | ", 1)
            (before_mark, before), (after_mark, after) = (next(lines).split(" ", 1) for _ in range(2))
            if (before_mark, after_mark) != ("-", "+"):
                raise ValueError(f"{name}: expected a line after '- ' and one after '+ '")
            yield Fault(name, file, before, after, law)


FAULTS = tuple(read_faults(Path(__file__).with_name("faults.txt").read_text()))
