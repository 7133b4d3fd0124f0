"""Everything a round needs from each row of logits, read once: argmax, log-sum-exp, entropy and top-k."""

from typing import NamedTuple

import torch
from torch import Tensor


class BlockSample(NamedTuple):
    """Per row of logits: token int64 [R], logsumexp fp32 [R], entropy fp32 [R] (nats), top-k fp32 and int64 [R, k]."""

    token: Tensor
    logsumexp: Tensor
    entropy: Tensor
    topk_logits: Tensor
    topk_tokens: Tensor


def _check(logits: Tensor, top_k: int) -> None:
    assert logits.ndim == 2 and logits.shape[1] > 0, f"logits must be [R, V] with V > 0, got {tuple(logits.shape)}"
    assert logits.stride(1) == 1, "logits rows must be contiguous"
    assert 0 <= top_k <= min(64, logits.shape[1]), f"top_k must lie in 0..min(64, V), got {top_k}"


def block_sampling_torch(logits: Tensor, top_k: int = 0) -> BlockSample:
    """PyTorch reference of `block_sampling`."""
    _check(logits, top_k)
    x = logits.float()  # [R, V]; bf16 reductions are slow on CPU
    peak, token = x.max(-1)  # first index among equals; a NaN wins
    # Shift by a finite peak: entries equal to +inf clamp to 0, -inf entries to a distance whose exp is 0.
    shift = peak.masked_fill(peak.isinf(), torch.finfo(torch.float32).max)
    d = (x - shift[:, None]).clamp_(-1e4, 0.0)
    e = d.exp()
    z = e.sum(-1)
    log_z = z.log()
    entropy = log_z - torch.linalg.vecdot(e, d) / z  # both terms are >= 0
    valid = peak > float("-inf")  # False for NaN too
    tokens = token.masked_fill(~valid, -1)
    logits_k, tokens_k = _topk_torch(x, peak, top_k)
    return BlockSample(tokens, peak + log_z, entropy, logits_k, tokens_k)


def _topk_torch(x: Tensor, peak: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k by (-logit, token id): order-preserving bits of the logit above the inverted id, so no two keys tie."""
    if k == 0:
        return x.new_empty(len(x), 0), x.new_empty(len(x), 0, dtype=torch.int64)
    bits = (x + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0: equal logits, equal bits
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    key |= 0x7FFFFFFF - torch.arange(x.shape[1], device=x.device)
    tokens = 0x7FFFFFFF - (key.topk(k).values & 0xFFFFFFFF)
    nan = peak.isnan()[:, None]
    return x.gather(1, tokens).masked_fill(nan, float("nan")), tokens.masked_fill(nan, -1)
