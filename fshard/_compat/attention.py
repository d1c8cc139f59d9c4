"""Torch's fused kernel of attention on processors, with the logarithms that join blocks, checked on 2.13."""

import torch

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fuses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel takes these. Checked on 2.13."""
    return q.is_cpu and q.dtype in _DTYPES and q.shape[-1] == v.shape[-1]


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and each query's log-sum-exp of scores, which is wide where the tensors are narrow. Checked on 2.13."""
    q, k, v = map(_dense, (q, k, v))
    out, logs = _FORWARD(q, k, v, 0.0, causal, scale=scale)
    return out, logs


def fused_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangents of q, k and v; `out` and `logs` may be those of all keys, of which these are some.

    Checked on 2.13.
    """
    grad, q, k, v = map(_dense, (grad, q, k, v))
    dq, dk, dv = _BACKWARD(grad, q, k, v, out, logs, 0.0, causal, scale=scale)
    return dq, dk, dv


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The kernel reads a head's numbers one after another."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
