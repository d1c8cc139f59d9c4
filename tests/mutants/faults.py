"""One-line faults of the kind that people make, each against a law of fshard's contract.

They were chosen by reading the package, not its tests. When a line is rebuilt, plant the same fault in the new one.
"""

from typing import NamedTuple

# The tests that mirror a file: those of the first entry that its path begins with.
MIRRORS = {
    "fshard/ext/quantize.py": ("tests/ext/test_quantize.py", "tests/ext/test_quantize_state.py"),
    "fshard/tree": ("tests/test_tree.py", "tests/test_law_round_trip.py"),
    "fshard/init": ("tests/test_init.py",),
    "fshard/transforms": ("tests/transforms",),
    "fshard/comm": ("tests/comm",),
    "fshard/collectives/moves.py": ("tests/test_moves.py", "tests/test_collectives.py"),
    "fshard/collectives/objective.py": ("tests/test_weighted.py", "tests/test_reduce_over.py"),
    "fshard/collectives": ("tests/test_collectives.py", "tests/test_varying.py"),
    "fshard/engine": (
        "tests/engine",
        "tests/test_accumulate.py",
        "tests/test_tree_sums.py",
        "tests/test_units_dtypes.py",
        "tests/test_units_memory.py",
        "tests/test_units_state.py",
    ),
    "fshard/value_and_grad.py": (
        "tests/test_value_and_grad.py",
        "tests/test_accumulate.py",
        "tests/test_tree_sums.py",
    ),
    "fshard/modules.py": (
        "tests/engine",
        "tests/test_apply.py",
        "tests/test_units_state.py",
    ),
    "fshard/jit": ("tests/jit",),
    "fshard/optim": ("tests/optim",),
    "fshard/update.py": ("tests/test_update.py",),
    "fshard/shard.py": ("tests/test_law_round_trip.py",),
    "fshard/checkpoint": ("tests/checkpoint",),
    "fshard/testing": ("tests/testing", "tests/test_varying.py"),
    "fshard/ext/parallel": ("tests/ext/parallel",),
    "fshard/ext/interop": ("tests/ext/interop",),
    "fshard/ext/trace": ("tests/ext/trace",),
}


class Fault(NamedTuple):
    """A fault.

    Attributes:
        name: Its name.
        file: The file that it is planted in.
        before: The line that it takes the place of, without its indentation; the file has it once.
        after: The faulty line.
        law: The law that it breaks, by its number in the contract, and how.
    """

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
        return next(tests for start, tests in MIRRORS.items() if self.file.startswith(start))


FAULTS = (
    Fault(
        "share-counted-by-the-minor-axes",
        "fshard/tree/specs.py",
        "return -(-self.full_shape[dim] // math.prod(major.size for major in axes[: axes.index(axis)]))",
        "return -(-self.full_shape[dim] // math.prod(major.size for major in axes[axes.index(axis) + 1 :]))",
        "1: round trip of a dim that several axes split unevenly",
    ),
    Fault(
        "elements-counted-from-the-shard",
        "fshard/init/counter.py",
        "index = index * size + start + at",
        "index = index * size + at",
        "9: a drawn element depends on the seed and its place, not on the rank that has it",
    ),
    Fault(
        "axes-of-a-strategy-in-order-of-names",
        "fshard/transforms/strategies.py",
        "axes = [axis_of(mesh, name) for name in reversed(names)]",
        "axes = [axis_of(mesh, name) for name in names]",
        "1: of several axes that split a dim the first is the major one",
    ),
    Fault(
        "state-of-a-piece-cut-again",
        "fshard/transforms/compose.py",
        "spec = stage.layout(spec) if _sums(stage) else spec",
        "spec = stage.layout(spec)",
        "9: a state has the shape of the gradients that its part is given",
    ),
    Fault(
        "gradient-padded-in-front",
        "fshard/transforms/axis.py",
        "grad = pad(grad, (0, 0) * (grad.dim() - dim - 1) + (0, missing)) if missing else grad",
        "grad = pad(grad, (0, 0) * (grad.dim() - dim - 1) + (missing, 0)) if missing else grad",
        "2: scatter is gather's transpose, also of uneven leaves",
    ),
    Fault(
        "number-loses-its-dim-at-the-first-axis",
        "fshard/transforms/axis.py",
        "return spec.partition.names(dim)[0] == self.axis.name",
        "return spec.partition.names(dim)[-1] == self.axis.name",
        "1: round trip of a 0-d leaf that two axes split",
    ),
    Fault(
        "dtype-of-reduction-read-in-order-of-gather",
        "fshard/transforms/compose.py",
        "for node in reversed([*nodes(transform)]):",
        "for node in nodes(transform):",
        "3: microbatches are added up in reduce_dtype",
    ),
    Fault(
        "own-transform-counted-as-new",
        "fshard/transforms/compose.py",
        "new = not foreign and any(axis.size > 1 for axis in summed_axes(transform))",
        "new = any(axis.size > 1 for axis in summed_axes(transform))",
        "4: nothing is written to tensors that a user's transform keeps",
    ),
    Fault(
        "scatter-casts-to-dtype-of-gather",
        "fshard/transforms/local.py",
        "return _to(grads, self.scatter_dtype)",
        "return _to(grads, self.gather_dtype)",
        "3: gradients are reduced, and returned, as precise as reduce_dtype says",
    ),
    Fault(
        "states-in-order-of-scatter",
        "fshard/transforms/compose.py",
        "return None if all(state is None for state in states) else tuple(reversed(states))",
        "return None if all(state is None for state in states) else tuple(states)",
        "9: each part of a composition has its own state",
    ),
    Fault(
        "lost-wait-of-all-to-all",
        "fshard/comm/collective.py",
        "whole = ops.wait(buffer)",
        "whole = buffer",
        "4: the same bits twice",
    ),
    Fault(
        "rows-filled-by-the-remainder",
        "fshard/comm/collective.py",
        "return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(size, -1)",
        "return torch.nn.functional.pad(flat, (0, flat.numel() % size)).view(size, -1)",
        "3: large leaves that the ranks do not divide are summed too",
    ),
    Fault(
        "mean-over-the-first-axis-alone",
        "fshard/collectives/objective.py",
        'return math.prod(axis.size for axis in axes) if reduce == "mean" else 1',
        'return math.prod(axis.size for axis in axes[:1]) if reduce == "mean" else 1',
        "3: the mean is over the ranks of all axes",
    ),
    Fault(
        "ppermute-is-its-own-transpose",
        "fshard/collectives/moves.py",
        "back = partial(_permute, perm=[(target, source) for source, target in pairs])",
        "back = partial(_permute, perm=pairs)",
        "2: the transpose sends back",
    ),
    Fault(
        "collectives-tied-to-the-first-token",
        "fshard/collectives/linear.py",
        "*out, token = _Tie.apply(self._passed, *tensors, self.tokens[-1])",
        "*out, token = _Tie.apply(self._passed, *tensors, self.tokens[0])",
        "10: every rank runs every transpose, in one order",
    ),
    Fault(
        "ranks-agree-where-one-does",
        "fshard/comm/agree.py",
        'differ |= {digest} != set(_gathered(digest, FIRST, axis, label._replace(parts="a digest")))',
        'differ |= digest not in _gathered(digest, FIRST, axis, label._replace(parts="a digest"))',
        "10: ranks that were told different things get a named error",
    ),
    Fault(
        "own-row-added-last",
        "fshard/comm/collective.py",
        "rows.insert(place, own)",
        "rows.append(own)",
        "3: sums are in rank order, the same bits on every rank and for every strategy",
    ),
    Fault(
        "rank-waits-for-those-that-have-come",
        "fshard/comm/failure.py",
        "return {r for r in position.groups[name][0] if started.get(r, 0) < number}",
        "return {r for r in position.groups[name][0] if started.get(r, 0) <= number}",
        "10: ranks that wait for a late one are not told that they wait for each other",
    ),
    Fault(
        "chain-counts-rows-of-an-exchange",
        "fshard/comm/recorder.py",
        "shapes = tuple((tensor.dtype, tensor.shape[len(sizes) > 0 :]) for tensor in tensors)",
        "shapes = tuple((tensor.dtype, tensor.shape) for tensor in tensors)",
        "10: ranks may send each other different numbers of rows",
    ),
    Fault(
        "handle-passes-the-step-of-its-own-node",
        "fshard/engine/backward.py",
        "def catch_up(self, behind: int = 1) -> None:",
        "def catch_up(self, behind: int = 0) -> None:",
        "8: a backward gathers each regathered unit once, frozen ones too",
    ),
    Fault(
        "checkpoint-computes-again-with-the-first-use",
        "fshard/engine/backward.py",
        "found = [use for use in reversed(self._uses) if leaves and use.places.keys() >= set(leaves)]",
        "found = [use for use in self._uses if leaves and use.places.keys() >= set(leaves)]",
        "8: of two uses of a unit the later one is due first",
    ),
    Fault(
        "reductions-in-flight-not-bounded",
        "fshard/engine/backward.py",
        "while self._flying and nbytes + sum(size for *_, size in self._flying) > leaves[0].policy.ahead_bytes:",
        "while self._flying and nbytes > leaves[0].policy.ahead_bytes:",
        "8: peak memory, because the bytes of reductions in flight are bounded",
    ),
    Fault(
        "use-in-earlier-microbatches-forgotten",
        "fshard/engine/call.py",
        "used.update(leaf for leaf in self.trained if leaf.used)",
        "used.update(())",
        "9: a leaf that any microbatch used has a gradient, also beside derived leaves",
    ),
    Fault(
        "leaf-asked-for-twice-gathered-twice",
        "fshard/engine/call.py",
        "asked = list(dict.fromkeys(found))",
        "asked = found",
        "8: a leaf that one gather names twice is sent once",
    ),
    Fault(
        "last-uses-dropped-until-the-last-one-opens",
        "fshard/engine/cursor.py",
        "return self._begun == len(self._gathers)",
        "return self._passed == len(self._gathers)",
        "8: the last uses of a forward, which its backward gathers first, are not gathered again",
    ),
    Fault(
        "table-in-a-checkpoint-gathered-on-demand",
        "fshard/engine/forward.py",
        "other.lazy = other.unit.lookup and other.checkpoint is None",
        "other.lazy = other.unit.lookup",
        "10: ranks start the same gathers, also where one has no gradient for a checkpoint",
    ),
    Fault(
        "frozen-units-in-front-gathered-again",
        "fshard/engine/forward.py",
        "if self._differentiated and differentiates:",
        "if differentiates:",
        "8: what has closed before anything is differentiated is not gathered again",
    ),
    Fault(
        "number-counts-frozen-leaves-too",
        "fshard/engine/graph.py",
        "found.add(leaf := use.trained[number])",
        "found.add(leaf := use.leaves[number])",
        "9: a leaf that was used has a gradient, also in a unit with frozen ones",
    ),
    Fault(
        "tree-adds-in-dtype-of-the-gradient",
        "fshard/engine/leaf.py",
        "self.tree.add(None if part is None else part.to(reduction(self.spec.transform).dtype or self.dtype))",
        "self.tree.add(None if part is None else part.to(self.dtype))",
        "3: microbatches are added up in reduce_dtype, with the same bits on any number of ranks",
    ),
    Fault(
        "passed-unit-takes-the-checkpoint-of-the-next",
        "fshard/engine/passes.py",
        "here = outermost_checkpoint() if number == entered else checkpoint",
        "here = outermost_checkpoint()",
        "10: a rank that skips a unit gathers what the others do, in their order",
    ),
    Fault(
        "kept-unit-merged-with-a-regathered-one",
        "fshard/engine/plan.py",
        "return len(units) == 1 or (alike and sum(unit.nbytes for unit in units) <= units[0].policy.merge_bytes)",
        "return len(units) == 1 or sum(unit.nbytes for unit in units) <= units[0].policy.merge_bytes",
        "8: the units that `regather` names are gathered again, and no others",
    ),
    Fault(
        "handle-of-a-conjugate-view",
        "fshard/engine/saved.py",
        "if kind != [tensor.dtype, type(tensor)] or tensor.is_conj() or tensor.is_neg():",
        "if kind != [tensor.dtype, type(tensor)] or tensor.is_neg():",
        "5: autograd gets back the tensor that it saved",
    ),
    Fault(
        "handle-fetches-the-leaf-in-front",
        "fshard/engine/saved.py",
        "return self._fetch(saved.use, saved.place).as_strided(saved.size, saved.stride, saved.offset)",
        "return self._fetch(saved.use, saved.place - 1).as_strided(saved.size, saved.stride, saved.offset)",
        "5: autograd gets back the tensor that it saved, not another leaf of its shape",
    ),
    Fault(
        "kept-leaf-gathered-for-each-use",
        "fshard/engine/use.py",
        "missing = [leaf if leaf.keeper is None else None for leaf in leaves]",
        "missing = list(leaves)",
        "8: a leaf that is not gathered again is gathered once a step",
    ),
    Fault(
        "one-microbatch-of-a-tree-not-accumulated",
        "fshard/value_and_grad.py",
        "several = bool(self.share) or len(self.functions) > 1",
        "several = len(self.functions) > 1",
        "3: gradients of a microbatch are complete in reduce_dtype before they enter the tree, on any number of ranks",
    ),
    Fault(
        "parameter-read-without-gradient-kept",
        "fshard/modules.py",
        "if torch.is_grad_enabled() or value.requires_grad:",
        "if value is not None:",
        "5: a parameter read under no_grad first has the gradient of its later reads",
    ),
    Fault(
        "key-without-dtype-of-autocast",
        "fshard/jit/signature.py",
        'found["autocast"] = tuple(autocast)',
        'found["autocast"] = tuple(map(torch.is_autocast_enabled, devices))',
        "9: jit's key holds all that the trace read",
    ),
    Fault(
        "static-values-compared-by-equality",
        "fshard/jit/signature.py",
        "return True if isinstance(leaf, torch.Tensor) else None if leaf is None else exact(leaf)",
        "return True if isinstance(leaf, torch.Tensor) else getattr(leaf, 'value', leaf)",
        "9: equality of Python values decides nothing, so 1 and 1.0 have a trace each",
    ),
    Fault(
        "donated-input-written-before-its-last-reader",
        "fshard/jit/writes.py",
        "place = max(outs[k], last[names[given]])",
        "place = outs[k]",
        "6: a jitted step equals the eager one",
    ),
    Fault(
        "donated-inputs-that-change-places",
        "fshard/jit/writes.py",
        "if out is not None and not overwritten.isdisjoint(storages[out]):",
        "if out is not None and not overwritten.isdisjoint(storages[out]) and k not in late.values():",
        "6: a jitted step equals the eager one, also where donated arguments change places",
    ),
    Fault(
        "key-counts-behind-its-call",
        "fshard/jit/passes.py",
        "at[node] = keyed",
        "at[node] = True",
        "9: no ambient generator decides what a graph returns",
    ),
    Fault(
        "write-does-not-wait-for-readers",
        "fshard/jit/writes.py",
        "before.update(used.pop(name, ()))",
        "used.pop(name, ())",
        "6: a jitted step equals the eager one, also where it writes in place to what the backward reads",
    ),
    Fault(
        "unused-collective-is-not-waited-for",
        "fshard/jit/passes.py",
        "if is_wait(node) or node.target in random.EFFECTS:",
        "if node.target in random.EFFECTS:",
        "6: the same collectives, and each is waited for, whatever a rank makes of its result",
    ),
    Fault(
        "trace-again-forgets-what-ranks-agreed",
        "fshard/jit/jit.py",
        "return self._uses.get(uses.used, uses.used)",
        "return uses.used",
        "9: a leaf that another rank used has a gradient, also in a later trace",
    ),
    Fault(
        "leaf-that-is-given-twice-becomes-two",
        "fshard/jit/trace.py",
        "leaves[i] = wrapped.setdefault(id(leaf), Sharded(tensor, leaf.spec)) if is_sharded(leaf) else tensor",
        "leaves[i] = Sharded(tensor, leaf.spec) if is_sharded(leaf) else tensor",
        "6: what a function asks of its arguments, such as whether one is another, is what it asks eagerly",
    ),
    Fault(
        "reshard-compares-names-of-axes",
        "fshard/shard.py",
        "if (leaf.spec.partition, leaf.spec.partition_axes()) == (spec.partition, spec.partition_axes()):",
        "if leaf.spec.partition == spec.partition:",
        "1: reshard between any two layouts, such as axes of one name and two sizes",
    ),
    Fault(
        "adam-counts-updates-that-a-leaf-missed",
        "fshard/optim/leaves.py",
        "return map_leaves(lambda n, grad: n if grad is None else (zero() if n is None else n) + 1, counts, grads)",
        "return map_leaves(lambda n, grad: n if n is None else n + 1, counts, grads)",
        "9: what the optimizer keeps for a leaf without a gradient stays, as under torch.optim",
    ),
    Fault(
        "gradient-of-the-rate-is-this-rank's",
        "fshard/optim/leaves.py",
        "return [varying(n, axes) if isinstance(n, torch.Tensor) else n for n in numbers]",
        "return list(numbers)",
        "5: derivatives through an update are those of all shards",
    ),
    Fault(
        "aliases-of-optimizer-state-not-copied",
        "fshard/update.py",
        'written = {"params": state.params, "opt_state": state.opt_state}',
        'written = {"params": state.params}',
        "4: donation changes nothing but what was donated",
    ),
    Fault(
        "donated-state-not-set-aside",
        "fshard/checkpoint/save.py",
        'own[path] = piece._replace(tensor=piece.tensor.to("cpu", copy=True)) if aside else piece',
        "own[path] = piece",
        "4: a checkpoint has the state that it was given, whatever later steps write over it",
    ),
    Fault(
        "newest-steps-kept-where-a-run-went-back",
        "fshard/checkpoint/directory.py",
        "return sorted((int(match[2]), int(match[1]), directory / match[0]) for match in matches if match)",
        "return sorted((int(match[1]), int(match[1]), directory / match[0]) for match in matches if match)",
        "4: the checkpoint that was just saved is never removed, and is the latest",
    ),
    Fault(
        "checksum-of-the-first-megabyte-alone",
        "fshard/checkpoint/files.py",
        "checksums.append(zlib.crc32(data))",
        "checksums.append(zlib.crc32(data[: 1 << 20]))",
        "1: restore undoes save, also where a part is large",
    ),
    Fault(
        "lock-follows-links",
        "fshard/checkpoint/directory.py",
        'lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)',
        'lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)',
        "4: a save changes nothing outside of its directory",
    ),
    Fault(
        "files-named-before-they-are-on-the-disk",
        "fshard/checkpoint/files.py",
        "os.fsync(file.fileno())",
        "os.stat(file.fileno())",
        "4: a checkpoint that has its name is whole, also where power fails",
    ),
    Fault(
        "padding-counts-in-norms",
        "fshard/optim/norms.py",
        "tensor = elements_of(leaf).reshape(-1)",
        "tensor = tensor_of(leaf).reshape(-1)",
        "3: a norm is that of the full tensor, whatever fills shards up",
    ),
    Fault(
        "late-leaves-begin-from-zeros",
        "fshard/optim/from_torch.py",
        "begun = [not anew or int(numbers[i]) > 1 for i in taken]",
        "begun = [True for _ in taken]",
        "9: a leaf's first update is the class's first step, whenever it comes",
    ),
    Fault(
        "skipped-where-ranks-split-a-leaf-alone",
        "fshard/optim/wrappers.py",
        "axes = dict.fromkeys(axis for leaf in leaves if is_sharded(leaf) for axis in leaf.spec.axes)",
        "axes = dict.fromkeys(axis for leaf in leaves if is_sharded(leaf) for axis in leaf.spec.partition_axes())",
        "10: all ranks skip an update, or none does",
    ),
    Fault(
        "rows-of-experts-not-sorted-back",
        "fshard/ext/parallel/moe.py",
        "back = fs.ragged_all_to_all(back[grouping.argsort()], axis, receive, send)",
        "back = fs.ragged_all_to_all(back[grouping], axis, receive, send)",
        "2: combine is dispatch's transpose",
    ),
    Fault(
        "feedback-of-the-wrong-sign",
        "fshard/ext/quantize.py",
        "after[i] = torch.nan_to_num(stack - sent, nan=0.0, posinf=0.0, neginf=0.0).to(states[i].dtype)",
        "after[i] = torch.nan_to_num(sent - stack, nan=0.0, posinf=0.0, neginf=0.0).to(states[i].dtype)",
        "3: what rounding leaves out is added to the next gradients",
    ),
    Fault(
        "padding-becomes-part-of-a-dtensor",
        "fshard/ext/interop/dtensor.py",
        "local = leaf.local[tuple(map(slice, piece_of(leaf).tensor.shape))]",
        "local = leaf.local",
        "1: round trip through DTensor, also of uneven leaves",
    ),
    Fault(
        "gradient-that-leaves-share-scaled-twice",
        "fshard/ext/parallel/pipeline.py",
        "self._sums[i] = grad.to(dtype, copy=True) if before is None else before + grad.to(dtype)",
        "self._sums[i] = grad.to(dtype) if before is None else before + grad.to(dtype)",
        "3: a pipeline's gradients are those of one process, also of leaves to which autograd gives one tensor",
    ),
    Fault(
        "keys-taken-for-those-of-the-rank-behind",
        "fshard/ext/parallel/attention.py",
        "queries, keys = self.chunks(own), self.chunks((own - step) % self.axis.size)",
        "queries, keys = self.chunks(own), self.chunks((own + step) % self.axis.size)",
        "3: attention over split sequences is that of one process, also over more ranks than two",
    ),
    Fault(
        "waits-counted-beyond-the-straggler",
        "fshard/ext/trace/events.py",
        "return sum(min(end, self.began) - begin for begin, end in waits if begin < self.began)",
        "return sum(end - begin for begin, end in waits if begin < self.began)",
        "8: a report counts as waiting for a rank no more than the time until it came",
    ),
    Fault(
        "name-in-files-taken-for-a-leaf",
        "fshard/ext/interop/huggingface.py",
        'found = {ours.get(name, f"{name} (in the files)"): entry for name, entry in found.items()}',
        "found = {ours.get(name, name): entry for name, entry in found.items()}",
        "1: weights are read under the names that the caller gave them, and under no others",
    ),
    Fault(
        "exact-comparison-passes-another-dtype",
        "fshard/testing/compare.py",
        "torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), check_dtype=exact, **options)",
        "torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), check_dtype=False, **options)",
        "6: what is compared bit for bit has one dtype",
    ),
    Fault(
        "transform-may-write-to-its-inputs",
        "fshard/testing/laws.py",
        "before = tree_map(torch.clone, given)",
        "before = given",
        "4: nothing changes its inputs, and check_transform tells a transform that does",
    ),
    Fault(
        "invariant-result-passes-for-a-varying-one",
        "fshard/testing/varying.py",
        "elif axis in found.axes and found.result is not place.varies:",
        "elif axis in found.axes and found.result and not place.varies:",
        "3: check_varying names a pvary that is missing, whose gradient would be wrong",
    ),
    Fault(
        "ranks-of-other-groups-meet",
        "fshard/testing/spmd.py",
        "calls = {rank: call for rank, call in calls.items() if call.collective.group == collective.group}",
        "calls = dict(calls.items())",
        "10: simulated ranks that call collectives of other groups get an error, never each other's values",
    ),
)
