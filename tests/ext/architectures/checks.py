"""The checks of an architecture: each raises where fshard does otherwise than transformers, or refuses."""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import fshard as fs
from fshard.testing import assert_trees_close, spmd
from tests.ext.architectures import configs
from tests.ext.architectures.models import ADAMW, RANKS, Case, build, seeded, short
from tests.trees import assert_same_bits, one_axis

# Of one check.
SECONDS = 240.0


class NotApplicableError(Exception):
    """A check that an architecture cannot have, with the reason."""


def units_of(module: nn.Module) -> Any:
    """The classes of layers that the library says are not to be split; None where it names none."""
    names: set[str] = set()
    for submodule in module.modules():
        names.update(getattr(submodule, "_no_split_modules", None) or ())
    found = {type(m) for m in module.modules() if type(m).__name__ in names and any(True for _ in m.parameters())}
    return tuple(sorted(found, key=lambda cls: cls.__name__)) or None


def functionalize(module: nn.Module) -> fs.Model:
    return fs.functionalize(module, units=units_of(module))


def strategy() -> Any:
    """ZeRO-3; units as small as these are else gathered together."""
    return fs.zero3(one_axis(), merge_bytes=0)


class Step(NamedTuple):
    loss: torch.Tensor
    grads: dict[str, Any]
    params: dict[str, torch.Tensor]


def dense(case: Case, module: nn.Module) -> Iterator[Step]:
    """Train one process on the joint batches, whose loss is the mean of the losses of their parts."""
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    # Each rank has buffers of its own.
    kept = [{name: buffer.clone() for name, buffer in module.named_buffers()} for _ in range(RANKS)]
    for parts in case.batches:
        optimizer.zero_grad()
        losses = []
        for rank, part in enumerate(parts):
            buffers = dict(module.named_buffers())
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(kept[rank][name])
            loss = case.loss_of(module(**copy.deepcopy(part))) / RANKS
            loss.backward()
            losses.append(loss.detach())
            kept[rank] = {name: buffer.clone() for name, buffer in module.named_buffers()}
        optimizer.step()
        named = dict(module.named_parameters())
        yield Step(
            sum(losses),
            {name: None if p.grad is None else p.grad.clone() for name, p in named.items()},
            {name: parameter.detach().clone() for name, parameter in named.items()},
        )


def stepper(case: Case, model: fs.Model, tx: Any, update: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The train step that users write, for a model with buffers."""

    def train_step(state: fs.TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            out, buffers = model.apply(params, buffers=state.buffers, **batch)
            return case.loss_of(out), buffers

        (loss, buffers), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state._replace(buffers=buffers)
        state = fs.update(tx, state, grads) if update is None else update(state, grads)
        return state, loss, grads

    return train_step


def trained(case: Case, prepare: Callable[[nn.Module], None] = lambda module: None) -> str:
    module = case.module()
    prepare(module)
    steps = list(dense(case, copy.deepcopy(module)))

    def program() -> None:
        model = functionalize(module)
        tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
        state = fs.TrainState.create(model.init(strategy()), tx, buffers=model.buffers)
        train_step = stepper(case, model, tx)
        for number, (parts, expected) in enumerate(zip(case.batches, steps, strict=True)):
            part = parts[fs.comm.rank(fs.axis_of(one_axis()))]
            state, loss, grads = train_step(state, part)
            size = max([1.0, *(float(g.abs().max()) for g in expected.grads.values() if g is not None and g.numel())])
            actual = {"loss": loss.detach(), "grads": fs.unshard(grads), "params": fs.unshard(state.params)}
            try:
                assert_trees_close(actual, expected._asdict(), rtol=0, atol=case.tolerance * size)
            except AssertionError as error:
                raise AssertionError(f"step {number}: {error}") from error

    if not case.steady:
        raise NotApplicableError("its forward draws random numbers, so that two calls differ")
    spmd(program, RANKS, timeout=SECONDS)
    return ""


def checkpointed(case: Case) -> str:
    def prepare(module: nn.Module) -> None:
        if not module.supports_gradient_checkpointing:
            raise NotApplicableError("transformers has no checkpoints of activations for it")
        module.activation_checkpointing_enable()

    return trained(case, prepare)


def with_batched_experts(module: nn.Module) -> None:
    module.set_experts_implementation("batched_mm")


def with_eager_attention(module: nn.Module) -> None:
    module.set_attn_implementation("eager")


# What README and errors say to do where a step is refused, or has other bits, in a graph.
REMEDIES = {
    'set_experts_implementation("batched_mm")': with_batched_experts,
    'set_attn_implementation("eager")': with_eager_attention,
}


def jitted(case: Case) -> str:
    """Jit the step; where that fails, again after each of the remedies."""
    try:
        jitted_as_it_is(case, lambda module: None)
    except Exception as error:
        if isinstance(error, NotApplicableError):
            raise
        for name, prepare in REMEDIES.items():
            with suppress(Exception):
                jitted_as_it_is(case, prepare)
                return f"after module.{name}; without it: {short(cause_of(error))}"
        with suppress(Exception):
            jitted_as_it_is(case, lambda module: None, whole=False)
            return f"update alone, the whole step is refused: {short(cause_of(error))}"
        raise
    return ""


def jitted_as_it_is(case: Case, prepare: Callable[[nn.Module], None], whole: bool = True) -> None:
    """Compare a jitted step with the eager one; where it is not whole, the update alone is jitted."""
    module = case.module()
    prepare(module)

    def program() -> None:
        model = functionalize(module)
        tx = fs.from_torch(torch.optim.AdamW, **ADAMW)
        first = fs.TrainState.create(model.init(strategy()), tx, buffers=model.buffers)
        update = fs.jit(lambda state, grads: fs.update(tx, state, grads))
        train_step = stepper(case, model, tx)
        rank = fs.comm.rank(fs.axis_of(one_axis()))
        flags = {name: value for name, value in case.batches[0][0].items() if isinstance(value, bool)}

        def with_flags(state: Any, batch: Any) -> Any:
            return train_step(state, {**batch, **flags})

        in_parts = stepper(case, model, tx, update)
        fast = fs.jit(with_flags) if whole else lambda state, batch: in_parts(state, {**batch, **flags})
        one, two = first, first
        for parts in case.batches:
            part = {name: value for name, value in parts[rank].items() if name not in flags}
            one, loss, grads = with_flags(one, part)
            two, jitted_loss, jitted_grads = fast(two, part)
            assert_same_bits(jitted_loss.detach(), loss.detach())
            assert_trees_close(jitted_grads, grads, exact=True)
            assert_trees_close(two.params, one.params, exact=True)
            assert_same_bits(dict(two.buffers), dict(one.buffers))
        # Experts that no token goes to have no gradients: an update alone is traced for each set of those that have.
        assert not whole or len(fast.traces) == 1, f"traced {len(fast.traces)} times: {fast.traces}"

    if not case.steady:
        raise NotApplicableError("its forward draws random numbers, so that two calls differ")
    spmd(program, RANKS, timeout=SECONDS)


def from_meta(case: Case) -> str:
    """Draw on shards; returns whose bits the values have."""
    cls = configs.class_of(case.architecture)
    with torch.device("meta"):
        module = cls(copy.deepcopy(case.config))

    def program() -> Any:
        model = functionalize(fs.with_init_weights(module))
        params = model.init(fs.zero3(one_axis(), min_shard_elements=0), seed=0)
        return fs.unshard(params), model.buffers

    params, buffers = spmd(program, RANKS, timeout=SECONDS)[0]
    constructed = build(case.architecture, copy.deepcopy(case.config))
    blank = sorted(name for name, buffer in buffers.items() if buffer.is_meta)
    persistent = set(constructed.state_dict())
    notes = []
    if blank:
        kept = [name for name in blank if name in persistent]
        notes.append(f"{len(blank)} buffers stay without values ({len(kept)} of them saved), such as {blank[0]}")
    own = initialized(case)
    assert_same_bits(params, {name: p.detach() for name, p in own.named_parameters()})
    notes.insert(0, "bits of torch.manual_seed(0); model.init_weights()")
    if blank:
        raise AssertionError("; ".join(notes))
    assert_same_bits(dict(buffers), dict(constructed.named_buffers()))
    return "; ".join(notes)


def initialized(case: Case) -> nn.Module:
    """Memory for the whole model, and the library's own initializer."""
    with torch.device("meta"):
        module = configs.class_of(case.architecture)(copy.deepcopy(case.config))
    module = module.to_empty(device="cpu")
    with torch.no_grad(), seeded(0):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        torch.manual_seed(0)
        for submodule in module.modules():
            submodule.__dict__.pop("_is_hf_initialized", None)
        module.init_weights()
    return module


def read_back(module: nn.Module, directory: str) -> nn.Module:
    """What transformers itself reads of its own files."""
    module.save_pretrained(directory)
    try:
        return type(module).from_pretrained(directory, dtype=torch.float32)
    except Exception as error:
        raise NotApplicableError(f"transformers does not read back what it wrote: {short(error)}") from error


def loaded(case: Case) -> str:
    module = build(case.architecture, copy.deepcopy(case.config))
    other = build(case.architecture, copy.deepcopy(case.config))
    with tempfile.TemporaryDirectory() as directory:
        expected = read_back(module, directory)

        def program() -> Any:
            model = functionalize(other)
            like = {**model.init(strategy()), **saved_buffers(other, model)}
            return fs.unshard(fs.checkpoint.load_huggingface(directory, like, module=other))

        found = spmd(program, RANKS, timeout=SECONDS)[0]
    named = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert_same_bits(found, {name: named[name].detach() for name in found})
    return ""


def saved(case: Case) -> str:
    module = build(case.architecture, copy.deepcopy(case.config))
    with tempfile.TemporaryDirectory() as directory:
        read_back(module, directory)
    with tempfile.TemporaryDirectory() as directory:
        module.config.save_pretrained(directory)

        def program() -> None:
            model = functionalize(module)
            tree = {**model.init(strategy()), **saved_buffers(module, model)}
            fs.checkpoint.save_huggingface(directory, tree, module=module)

        spmd(program, RANKS, timeout=SECONDS)
        found = type(module).from_pretrained(directory, dtype=torch.float32)
    assert_same_bits(
        {name: p.detach() for name, p in found.named_parameters()},
        {name: p.detach() for name, p in module.named_parameters()},
    )
    return ""


def saved_buffers(module: nn.Module, model: fs.Model) -> dict[str, torch.Tensor]:
    kept = set(module.state_dict())
    return {name: buffer for name, buffer in model.buffers.items() if name in kept}


class Generate(nn.Module):
    """A module whose forward is transformers' generate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, **kwargs)


def generated(case: Case) -> str:
    module = build(case.architecture, copy.deepcopy(case.config)).eval()
    if not module.can_generate():
        raise NotApplicableError("transformers generates nothing with it")
    names = ("input_ids", "attention_mask", "pixel_values", "input_features", "input_values")
    given = {name: value for name, value in case.batches[0][0].items() if name in names}
    given = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
    wanted = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
    try:
        with torch.no_grad():
            expected = module.generate(**given, **wanted)
    except Exception as error:
        raise NotApplicableError(f"transformers' own generate refuses the small model: {short(error)}") from error

    def program() -> Any:
        model = fs.functionalize(Generate(module), units=units_of(module))
        params = model.init(strategy())
        full = fs.gather(params)
        with torch.no_grad():
            return model.apply(full, **given, **wanted), model.apply(params, **given, **wanted)

    for out in spmd(program, RANKS, timeout=SECONDS)[0]:
        assert torch.equal(out, expected), f"expected {expected.tolist()}, got {out.tolist()}"
    return ""


CHECKS: dict[str, Callable[[Case], str]] = {
    "train": trained,
    "jit": jitted,
    "meta": from_meta,
    "load": loaded,
    "save": saved,
    "generate": generated,
    "checkpointing": checkpointed,
}


def cause_of(error: BaseException) -> BaseException:
    """The error of a rank, without the one of the simulation around it."""
    while type(error).__name__ == "RankError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def check(case: Case, name: str) -> tuple[str, str]:
    """Run a check.

    Returns:
        "pass", "refused" (by an error of fshard's own), "fail" or "none", and a note or the cause.
    """
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "pass", CHECKS[name](case)
        except NotApplicableError as error:
            return "none", str(error)
        except BaseException as raised:
            error = cause_of(raised)
            text = " ".join(str(error).split())[:1500]
            frame = error.__traceback__
            while frame is not None and frame.tb_next is not None:
                frame = frame.tb_next
            file = frame.tb_frame.f_code.co_filename if frame else ""
            ours = "/fshard/" in file and isinstance(error, (ValueError, RuntimeError))
            is_named = ours and not isinstance(error, AssertionError)
            return "refused" if is_named else "fail", f"{type(error).__name__}: {text}"
