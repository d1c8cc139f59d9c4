"""Small models of architectures, with inputs that their task asks for and a loss."""

import inspect
import random as python_random
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ext.architectures import configs
from tests.ext.architectures.configs import Architecture

RANKS, STEPS, SEQUENCES, LENGTH = 2, 3, 2, 9
# Epsilon is as large as gradients are, because a smaller one would hide a gradient that is wrong by a factor.
ADAMW = dict(lr=1e-2, eps=1e-2, weight_decay=0.1)

Batch = dict[str, Any]


class UnfitError(Exception):
    """A model that this program cannot make small, or cannot give inputs."""


class Case(NamedTuple):
    """A small model of an architecture.

    Attributes:
        architecture: Which.
        config: Its configuration.
        dtype: Of its parameters: float64 where its forward takes it, float32 elsewhere.
        batches: What each rank gets in each step: batches[step][rank].
        loss: "labels" for the library's own, "outputs" for the mean square of all outputs.
        has_float32: Whether some of it computes in float32 whatever it gets.
        steady: Whether the same call twice gives the same loss.
    """

    architecture: Architecture
    config: Any
    dtype: torch.dtype
    batches: list[list[Batch]]
    loss: str
    has_float32: bool
    steady: bool

    def module(self) -> nn.Module:
        """The same random weights whoever asks, in train mode, without dropout."""
        return build(self.architecture, self.config, self.dtype)

    def loss_of(self, out: Any) -> torch.Tensor:
        return loss_of(out, self.loss)

    @property
    def tolerance(self) -> float:
        """How far gradients up to 1 may be from one process's after the last step.

        A gradient adds up at most this many terms in another order; AdamW hands on lr / eps = 1 times that, and the
        next gradient, of a loss with curvature about 1, what parameters differ by then.
        """
        terms = RANKS * SEQUENCES * LENGTH * (2**STEPS - 1)
        dtype = torch.float32 if self.has_float32 or self.dtype == torch.float32 else torch.float64
        return terms * torch.finfo(dtype).eps


def build(architecture: Architecture, config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    with seeded(0):
        module = configs.class_of(architecture)(config).to(dtype).train()
    return without_dropout(module)


def without_dropout(module: nn.Module) -> nn.Module:
    for submodule in module.modules():
        if isinstance(submodule, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            submodule.p = 0.0
        if isinstance(submodule, nn.RReLU):
            submodule.lower = submodule.upper
    return module


@contextmanager
def seeded(seed: int):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def case_of(architecture: Architecture) -> Case:
    """Make a case.

    Raises:
        UnfitError: with the reason.
    """
    problems: list[str] = []
    for way in range(len(configs.WAYS)):
        try:
            config = configs.tiny(architecture, way)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in configs.class_of(architecture)(config).parameters())
        except Exception as error:
            problems.append(f"no model of it can be made: {short(error)}")
            continue
        if size > configs.MAX_PARAMETERS:
            problems.append(f"it has {size:,} parameters")
            continue
        for loss, dtype in product(("labels", "outputs"), (torch.float64, torch.float32)):
            try:
                return _tried(architecture, config, dtype, loss)
            except Exception as error:
                problems.append(f"its forward or backward refuses the inputs: {short(error)}")
    raise UnfitError(f"small configuration: {problems[0]}")


def _tried(architecture: Architecture, config: Any, dtype: torch.dtype, loss: str) -> Case:
    module = build(architecture, config, dtype)
    generator = torch.Generator().manual_seed(1)
    batches = [[inputs(architecture, module, generator, dtype, loss) for _ in range(RANKS)] for _ in range(STEPS)]
    losses = []
    with _Float32() as watch, seeded(1):
        for _ in range(2):
            python_random.seed(0)
            value = loss_of(module(**batches[0][0]), loss)
            value.backward()
            losses.append(value.detach())
    if not value.isfinite() or not any(p.grad is not None and p.grad.any() for p in module.parameters()):
        raise UnfitError(f"the loss is {value.item()} or has no gradient")
    return Case(architecture, config, dtype, batches, loss, watch.found, bool(losses[0] == losses[1]))


class _Float32(TorchDispatchMode):
    """Sees whether a model of float64 computes anything in float32."""

    def __init__(self):
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype in (torch.float32, torch.bfloat16, torch.float16):
            self.found = True
        return out


def loss_of(out: Any, kind: str) -> torch.Tensor:
    if kind == "labels":
        return out.loss.sum()
    found: list[torch.Tensor] = []
    _collect(out, found)
    return sum(tensor.square().mean() for tensor in found)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.requires_grad and value.numel():
            found.append(value)
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _collect(part, found)


def short(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def sizes(config: Any, *names: str) -> Any:
    """The first of some attributes that a configuration, or one inside it, has."""
    inside = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    for one in (config, *inside):
        for name in names:
            value = getattr(one, name, None)
            if value is not None and not isinstance(value, bool):
                return value
    return None


def inputs(
    architecture: Architecture, module: nn.Module, generator: torch.Generator, dtype: torch.dtype, loss: str
) -> Batch:
    """One batch for one rank, by the task."""
    config, task, B = module.config, configs.TASKS[architecture.task], SEQUENCES
    accepted = inspect.signature(module.forward).parameters
    high = min(sizes(config, "vocab_size", "text_vocab_size") or configs.VOCABULARY, 60)

    def tokens(length: int = LENGTH) -> torch.Tensor:
        return torch.randint(3, high, (B, length), generator=generator)

    def image() -> torch.Tensor:
        size = sizes(getattr(config, "vision_config", config), "image_size", "input_size", "img_size") or 64
        height, width = size[-2:] if isinstance(size, (list, tuple)) else (size, size)
        channels = sizes(getattr(config, "vision_config", config), "num_channels", "in_channels", "in_chans") or 3
        return torch.randn(B, channels, height, width, generator=generator).to(dtype)

    if task == "tokens":
        ids = tokens()
        batch = {"input_ids": ids, "labels": ids if architecture.task == "CAUSAL_LM" else tokens()}
        batch["attention_mask"] = padded(ids)
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    elif task == "tokens to tokens":
        batch = {"input_ids": tokens(), "labels": tokens()}
        batch["attention_mask"] = padded(batch["input_ids"])
        if loss == "outputs":
            batch["decoder_input_ids"] = tokens()
    elif task == "image and tokens":
        batch = image_and_tokens(config, module, image(), tokens)
    elif task in ("image", "boxes", "pixels", "image alone"):
        batch = {"pixel_values": image()}
        labels = max(1, min(int(sizes(config, "num_labels") or 2), 5))
        if task == "image":
            batch["labels"] = torch.randint(labels, (B,), generator=generator)
        elif task == "boxes":
            boxes = torch.rand(2, 4, generator=generator).to(dtype) * 0.3 + 0.2
            batch["labels"] = [{"class_labels": torch.tensor([0, 1]), "boxes": boxes.clone()} for _ in range(B)]
        elif task == "pixels":
            batch["labels"] = torch.randint(labels, (B, *batch["pixel_values"].shape[2:]), generator=generator)
    elif task in ("audio", "audio to tokens"):
        if module.main_input_name == "input_features" or "input_features" in accepted:
            bins = (
                sizes(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")
                or 16
            )
            frames = 2 * (sizes(config, "max_source_positions") or 32)
            shape = (B, bins, frames) if "whisper" in architecture.name else (B, frames, bins)
            batch = {"input_features": torch.randn(shape, generator=generator).to(dtype)}
        else:
            batch = {"input_values": torch.randn(B, 4000, generator=generator).to(dtype)}
        batch["labels"] = torch.randint(2, (B,), generator=generator) if task == "audio" else tokens(4)
        if loss == "outputs" and "decoder_input_ids" in accepted:
            batch["decoder_input_ids"] = tokens(4)
    elif task == "image and text":
        batch = {"pixel_values": image(), "input_ids": tokens(), "return_loss": True}
    else:
        frames = sizes(config, "num_frames") or 2
        batch = {
            "pixel_values": torch.stack([image()] * frames, 1),
            "labels": torch.randint(2, (B,), generator=generator),
        }
        if "pixel_values_videos" in accepted:
            batch["pixel_values_videos"] = batch.pop("pixel_values")
    if loss == "outputs":
        batch.pop("labels", None)
        batch.pop("return_loss", None)
    if "use_cache" in accepted:
        batch["use_cache"] = False
    wild = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    return {key: value for key, value in batch.items() if wild or key in accepted}


def image_and_tokens(config: Any, module: nn.Module, pixels: torch.Tensor, tokens: Any) -> Batch:
    """Tokens with as many places for an image as the model makes features of one; tokens alone where that fails."""
    ids = tokens()
    token = sizes(config, "image_token_id", "image_token_index")
    try:
        with torch.no_grad():
            out = module.get_image_features(pixels.to(next(module.parameters()).dtype))
        features = getattr(out, "pooler_output", out)
        rows = sum(f.shape[-2] for f in features) if isinstance(features, (list, tuple)) else features[..., 0].numel()
        rows, uneven = divmod(rows, SEQUENCES)
        if uneven or token is None or not rows:
            raise ValueError("rows of features do not divide")
        whole = torch.cat([ids[:, :3], torch.full((SEQUENCES, rows), token), ids[:, 3:]], 1)
        batch = {"input_ids": whole, "pixel_values": pixels, "labels": whole.masked_fill(whole == token, -100)}
        with torch.no_grad():
            module(**batch)
        ids = whole
    except Exception:
        batch = {"input_ids": ids, "labels": ids}
    return batch | {"attention_mask": padded(ids)}


def padded(ids: torch.Tensor) -> torch.Tensor:
    """A mask that hides the end of one sequence: one of ones alone, transformers drops outside of traces."""
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return mask
