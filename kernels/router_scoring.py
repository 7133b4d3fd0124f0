"""The router's two device rules: a threshold on the entropy, and a two-layer MLP on the last hidden row.

`entropy_rule`: one launch, one program a block of rows. `router_mlp`: two launches; the first, grid (tiles of w1 rows,
R), spreads the weights over many programs, each of which writes one partial score; the second, grid (R,), sums them.
Bytes: the weights, M * H, once a row of hidden (later rows hit the L2 cache).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from whiflash_triton.autotune.lookup import pick


@triton.jit
def _entropy_rule_kernel(entropy_ptr, decision_ptr, threshold, n_rows, ABOVE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entropy = tl.load(entropy_ptr + row, mask=row < n_rows, other=0.0).to(tl.float32)
    decision = entropy > threshold if ABOVE else entropy < threshold
    tl.store(decision_ptr + row, decision.to(tl.int32), mask=row < n_rows)


@triton.jit
def _mlp_partial_kernel(
    hidden_ptr,  # [R, H]
    w1_ptr,  # [M, H]
    b1_ptr,  # [M]
    w2_ptr,  # [M]
    partial_ptr,  # fp32 [R, tiles]
    stride_hidden,
    stride_w1,
    n_inner,
    n_hidden,
    n_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < n_inner
    w1_rows = w1_ptr + offs_m.to(tl.int64)[:, None] * stride_w1
    products = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)  # summed once, after the loop
    for begin in range(0, n_hidden, BLOCK_H):
        offs_h = begin + tl.arange(0, BLOCK_H)
        mask_h = offs_h < n_hidden
        h = tl.load(hidden_ptr + row * stride_hidden + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        w = tl.load(w1_rows + offs_h[None, :], mask=mask_m[:, None] & mask_h[None, :], other=0.0).to(tl.float32)
        products += w * h[None, :]
    inner = tl.sum(products, 1) + tl.load(b1_ptr + offs_m, mask=mask_m, other=0.0).to(tl.float32)  # [BLOCK_M]
    inner = 0.5 * inner * (1.0 + tl.math.erf(inner * 0.7071067811865476))
    w2 = tl.load(w2_ptr + offs_m, mask=mask_m, other=0.0).to(tl.float32)
    tl.store(partial_ptr + row * n_tiles + tile, tl.sum(inner * w2, 0))


@triton.jit
def _mlp_decide_kernel(
    partial_ptr,  # fp32 [R, tiles]
    b2_ptr,  # [1]
    score_ptr,  # fp32 [R]
    decision_ptr,  # int32 [R]
    threshold,
    n_tiles,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    partial = tl.load(partial_ptr + row * n_tiles + tile, mask=tile < n_tiles, other=0.0)
    score = tl.sum(partial, 0) + tl.load(b2_ptr).to(tl.float32)
    tl.store(score_ptr + row, score)
    tl.store(decision_ptr + row, (score > threshold).to(tl.int32))


def entropy_rule(entropy: Tensor, threshold: float, above: bool) -> Tensor:
    """Decision int32 [R] from entropy [R] in nats: 1 (the diffusion arm) iff it lies above (or below) the threshold.

    A NaN or an entropy equal to the threshold decides 0. Raises AssertionError on a wrong shape or stride.
    """
    _check_entropy(entropy)
    decision = torch.empty(entropy.shape, dtype=torch.int32, device=entropy.device)
    if len(entropy):
        block = min(1024, triton.next_power_of_2(len(entropy)))
        grid = (triton.cdiv(len(entropy), block),)
        _entropy_rule_kernel[grid](entropy, decision, threshold, len(entropy), above, block, num_warps=1)
    return decision


def router_mlp(hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Score fp32 [R] = w2 . gelu_erf(w1 h + b1) + b2 and decision int32 [R] = score > threshold.

    hidden [R, H], w1 [M, H], b1 [M], w2 [M], b2 [1] in fp16, bf16 or fp32, math in fp32. The score is the predicted
    gain in acceptance length of diffusion over autoregressive drafting; a NaN decides 0. Form of the neural router of
    WhiFlash (arXiv 2606.07710). Raises AssertionError on wrong shapes or strides.
    """
    _check_mlp(hidden, w1, b1, w2, b2)
    rows, inner = len(hidden), len(w1)
    score = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    decision = torch.empty(rows, dtype=torch.int32, device=hidden.device)
    if rows == 0:
        return score, decision
    options = pick("router_scoring", H=hidden.shape[1])
    tiles = triton.cdiv(inner, options["BLOCK_M"])
    partial = torch.empty(rows, tiles, dtype=torch.float32, device=hidden.device)
    _mlp_partial_kernel[(tiles, rows)](
        *(hidden, w1, b1, w2, partial, hidden.stride(0), w1.stride(0), inner, hidden.shape[1], tiles), **options
    )
    block = triton.next_power_of_2(tiles)
    _mlp_decide_kernel[(rows,)](partial, b2, score, decision, threshold, tiles, block, num_warps=4)
    return score, decision


def _check_entropy(entropy: Tensor) -> None:
    assert entropy.ndim == 1, f"entropy must be [R], got {tuple(entropy.shape)}"
    assert entropy.is_contiguous(), "entropy must be contiguous"


def _check_mlp(hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> None:
    assert hidden.ndim == w1.ndim == 2 and hidden.shape[1] == w1.shape[1], "hidden [R, H] and w1 [M, H] must agree"
    assert b1.shape == w2.shape == w1.shape[:1] and b2.shape == (1,), "b1 and w2 must be [M], b2 [1]"
    assert hidden.stride(1) == w1.stride(1) == 1, "rows of hidden and w1 must be contiguous"
    assert b1.is_contiguous() and w2.is_contiguous(), "b1 and w2 must be contiguous"


def entropy_rule_torch(entropy: Tensor, threshold: float, above: bool) -> Tensor:
    """PyTorch reference of `entropy_rule`."""
    _check_entropy(entropy)
    entropy = entropy.float()
    return (entropy > threshold if above else entropy < threshold).int()


def router_mlp_torch(hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """PyTorch reference of `router_mlp`."""
    _check_mlp(hidden, w1, b1, w2, b2)
    inner = F.gelu(F.linear(hidden.float(), w1.float(), b1.float()))  # [R, M]
    score = inner @ w2.float() + b2.float()  # [R]
    return score, (score > threshold).int()
