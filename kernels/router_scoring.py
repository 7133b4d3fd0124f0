"""The router's two device rules: a threshold on the entropy, and a two-layer MLP on the last hidden row."""

import torch.nn.functional as F
from torch import Tensor


def entropy_rule_torch(entropy: Tensor, threshold: float, above: bool) -> Tensor:
    """PyTorch reference of `entropy_rule`."""
    assert entropy.ndim == 1, f"entropy must be [R], got {tuple(entropy.shape)}"
    entropy = entropy.float()
    return (entropy > threshold if above else entropy < threshold).int()


def _check(hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> None:
    assert hidden.ndim == 2 and w1.ndim == 2 and hidden.shape[1] == w1.shape[1], (
        "hidden [R, H] and w1 [M, H] must agree"
    )
    assert b1.shape == w2.shape == w1.shape[:1] and b2.shape == (1,), "b1 and w2 must be [M], b2 [1]"
    assert hidden.stride(1) == w1.stride(1) == 1, "rows of hidden and w1 must be contiguous"


def router_mlp_torch(
    hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """PyTorch reference of `router_mlp`."""
    _check(hidden, w1, b1, w2, b2)
    inner = F.gelu(F.linear(hidden.float(), w1.float(), b1.float()))  # [R, M]
    score = inner @ w2.float() + b2.float()  # [R]
    return score, (score > threshold).int()
