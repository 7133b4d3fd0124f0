"""Everything a round needs from each row of logits, read once: argmax, log-sum-exp, entropy and top-k.

Two launches. The first, grid (splits, R), reads one block of a row and writes its top keys and two sums; the second,
grid (R,), merges the splits. Bytes: R * V logits read; R * splits * (8 K + 8) bytes of partials written and read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from whiflash_triton.autotune.lookup import pick

MAX_TOP_K = 64
MAX_SPLITS = 128  # the merge holds MAX_SPLITS * K keys in registers


class BlockSample(NamedTuple):
    """Per row of logits: token int64 [R], logsumexp fp32 [R], entropy fp32 [R] (nats), top-k fp32 and int64 [R, k]."""

    token: Tensor
    logsumexp: Tensor
    entropy: Tensor
    topk_logits: Tensor
    topk_tokens: Tensor


# A key is an int64 that orders by (logit, -token): order-preserving bits of the fp32 logit above the inverted token.
@triton.jit
def _key_logit(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_token(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _exchange(x, LOG_RUN: tl.constexpr, LOG_STRIDE: tl.constexpr):
    """One bitonic step on int64 x [N]: order the pairs 2 ** LOG_STRIDE apart, descending in the even of the runs of
    2 ** LOG_RUN keys, ascending in the odd ones."""
    N: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = [N >> (LOG_STRIDE + 1), 2, 2**LOG_STRIDE]
    index = tl.arange(0, N)
    wants_low = tl.reshape(((index >> LOG_STRIDE) ^ (index >> LOG_RUN)) & 1, PAIRS)
    x = tl.reshape(x, PAIRS)
    other = tl.sum(x, 1, keep_dims=True) - x  # the pair's other key: exact, as int64 wraps around
    return tl.reshape(tl.where(wants_low != 0, tl.minimum(x, other), tl.maximum(x, other)), [N])


@triton.jit
def _sort_runs(x, LOG_K: tl.constexpr):
    """Sort every run of 2 ** LOG_K keys of x, the even ones descending, the odd ones ascending (Batcher 1968)."""
    for run in tl.static_range(1, LOG_K + 1):
        for step in tl.static_range(run):
            x = _exchange(x, run, run - 1 - step)
    return x


@triton.jit
def _merge_runs(x, LOG_K: tl.constexpr, LOG_N: tl.constexpr):
    """The 2 ** LOG_K largest of x [2 ** LOG_N], descending; x lies in runs as `_sort_runs` leaves them."""
    for half in tl.static_range(1, LOG_N - LOG_K + 1):
        # Pairwise maxima of a descending and an ascending run are the better half of both, and a bitonic run again.
        x = tl.max(tl.reshape(x, [2 ** (LOG_N - LOG_K - half), 2, 2**LOG_K]), 1)
        x = tl.reshape(x, [2 ** (LOG_N - half)])
        for step in tl.static_range(LOG_K):
            x = _exchange(x, LOG_K, LOG_K - 1 - step)
    return x


@triton.jit
def _partial_kernel(
    logits_ptr,  # [R, V]
    key_ptr,  # int64 [R, splits, K]
    sums_ptr,  # fp32 [R, 2, splits]: sum of e, sum of e * log e with e = exp(x - peak of the split)
    stride_row,
    n_vocab,
    n_splits,
    LOG_K: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
):
    BLOCK: tl.constexpr = 2**LOG_BLOCK
    K: tl.constexpr = 2**LOG_K
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < n_vocab
    x = tl.load(logits_ptr + row * stride_row + token, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK]
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0.0 into 0.0: equal logits, equal bits
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    key = tl.where(inside, key, -0x8000000000000000)

    best = tl.max(key, 0)
    keys_ptr = key_ptr + (row * n_splits + split) * K
    if LOG_K == 0:
        tl.store(keys_ptr, best)
    else:  # odd splits are stored ascending: the runs lie as the merge wants them
        rank = tl.arange(0, K)
        keys = _merge_runs(_sort_runs(key, LOG_K), LOG_K, LOG_BLOCK)
        tl.store(keys_ptr + tl.where(split % 2 == 0, rank, K - 1 - rank), keys)

    # Distances to the peak, 0 at a peak of +inf and finite at -inf, so that neither makes a NaN; NaN logits stay.
    peak = _key_logit(best)
    d = tl.where(x == peak, 0.0, tl.maximum(x - peak, -1e4))
    e = tl.where(x == float("-inf"), 0.0, tl.where(x == x, tl.exp(d), float("nan")))
    out_ptr = sums_ptr + row * 2 * n_splits + split
    tl.store(out_ptr, tl.sum(e, 0))
    tl.store(out_ptr + n_splits, tl.sum(e * d, 0))


@triton.jit
def _merge_kernel(
    key_ptr,  # int64 [R, splits, K]
    sums_ptr,  # fp32 [R, 2, splits]
    token_ptr,  # int64 [R]
    logsumexp_ptr,  # fp32 [R]
    entropy_ptr,  # fp32 [R]
    topk_logit_ptr,  # fp32 [R, k]
    topk_token_ptr,  # int64 [R, k]
    n_splits,
    top_k,
    LOG_K: tl.constexpr,
    LOG_SPLITS: tl.constexpr,
):
    K: tl.constexpr = 2**LOG_K
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, 2**LOG_SPLITS)
    inside = split < n_splits
    keys_ptr = key_ptr + row * n_splits * K
    best_at = split * K + tl.where(split % 2 == 0, 0, K - 1)
    first = tl.load(keys_ptr + best_at, mask=inside, other=-0x8000000000000000)  # best key of every split
    z = tl.load(sums_ptr + row * 2 * n_splits + split, mask=inside, other=0.0)
    s = tl.load(sums_ptr + (row * 2 + 1) * n_splits + split, mask=inside, other=0.0)

    best = tl.max(first, 0)
    peak = _key_logit(best)
    x = _key_logit(first)  # peaks of the splits; absent splits weigh nothing, as their z and s are 0
    d = tl.where((x == peak) | ~inside, 0.0, tl.maximum(x - peak, -1e4))
    w = tl.exp(d)
    total = tl.sum(w * z, 0)
    nan = total != total  # a NaN in any split: it makes logsumexp and entropy NaN by itself
    log_total = tl.log(total)
    entropy = log_total - tl.sum(w * (s + z * d), 0) / total  # both terms are >= 0
    tl.store(token_ptr + row, tl.where(nan | (peak == float("-inf")), -1, _key_token(best)))
    tl.store(logsumexp_ptr + row, peak + log_total)
    tl.store(entropy_ptr + row, entropy)

    if LOG_K == 0:
        keys = tl.full([1], 0, tl.int64) + best
    else:
        flat = tl.arange(0, 2 ** (LOG_SPLITS + LOG_K))
        keys = tl.load(keys_ptr + flat, mask=flat < n_splits * K, other=-0x8000000000000000)
        keys = _merge_runs(keys, LOG_K, LOG_SPLITS + LOG_K)
    rank = tl.arange(0, K)
    wanted = rank < top_k
    tl.store(topk_logit_ptr + row * top_k + rank, tl.where(nan, float("nan"), _key_logit(keys)), mask=wanted)
    tl.store(topk_token_ptr + row * top_k + rank, tl.where(nan, -1, _key_token(keys)), mask=wanted)


def block_sampling(logits: Tensor, top_k: int = 0) -> BlockSample:
    """Argmax, log-sum-exp, entropy and top-k of every row of logits [R, V] (fp16, bf16 or fp32, any row stride).

    Equal logits order by token id, lowest first, in the argmax and in the top-k (0 <= top_k <= 64; 0 gives tensors of
    width 0). Entries of -inf are allowed. A row with a NaN gives token -1, top-k tokens -1 and NaN elsewhere; a row of
    nothing but -inf gives token -1, logsumexp -inf and entropy NaN. With +inf entries logsumexp is +inf and the
    entropy that of an equal choice among them. Raises AssertionError on wrong shapes, strides or top_k.
    """
    _check(logits, top_k)
    rows, n_vocab = logits.shape
    log_k = _log2_ceil(max(top_k, 1))
    options = pick("block_sampling", k=2**log_k)
    log_block = max(_log2_ceil(options["BLOCK"]), _log2_ceil(triton.cdiv(n_vocab, MAX_SPLITS)))
    n_splits = triton.cdiv(n_vocab, 2**log_block)
    key = torch.empty(rows, n_splits, 2**log_k, dtype=torch.int64, device=logits.device)
    sums = torch.empty(rows, 2, n_splits, dtype=torch.float32, device=logits.device)
    out = BlockSample(
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
        torch.empty(rows, top_k, dtype=torch.float32, device=logits.device),
        torch.empty(rows, top_k, dtype=torch.int64, device=logits.device),
    )
    if rows == 0:
        return out
    _partial_kernel[(n_splits, rows)](
        *(logits, key, sums, logits.stride(0), n_vocab, n_splits, log_k, log_block), num_warps=options["num_warps"]
    )
    _merge_kernel[(rows,)](*(key, sums, *out, n_splits, top_k, log_k, _log2_ceil(n_splits)), num_warps=options["MERGE_WARPS"])
    return out


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def _check(logits: Tensor, top_k: int) -> None:
    assert logits.ndim == 2 and logits.shape[1] > 0, f"logits must be [R, V] with V > 0, got {tuple(logits.shape)}"
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    most = min(MAX_TOP_K, logits.shape[1])
    assert 0 <= top_k <= most, f"top_k must lie in 0..{most}, got {top_k}"


def block_sampling_torch(logits: Tensor, top_k: int = 0) -> BlockSample:
    """PyTorch reference of `block_sampling`."""
    _check(logits, top_k)
    x = logits.float()  # [R, V]; bf16 reductions are slow on CPU
    peak, token = x.max(-1)  # first index among equals; a NaN wins
    logits_k, tokens_k = _topk_torch(x, peak, top_k)
    # Shift by a finite peak: entries equal to +inf clamp to 0, -inf entries to a distance whose exp is 0.
    shift = peak.masked_fill(peak.isinf(), torch.finfo(torch.float32).max)[:, None]
    d = x - shift if x is logits else x.sub_(shift)  # a converted copy may be overwritten
    e = d.clamp_(-1e4, 0.0).exp()
    z = e.sum(-1)
    log_z = z.log()
    entropy = log_z - e.mul_(d).sum(-1) / z  # both terms are >= 0
    valid = peak > float("-inf")  # False for NaN too
    return BlockSample(token.masked_fill(~valid, -1), peak + log_z, entropy, logits_k, tokens_k)


def _topk_torch(x: Tensor, peak: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k by (-logit, token id) through the kernel's int64 keys: torch.topk alone promises no order among ties."""
    if k == 0:
        return x.new_empty(len(x), 0), x.new_empty(len(x), 0, dtype=torch.int64)
    bits = (x + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    key |= 0x7FFFFFFF - torch.arange(x.shape[1], device=x.device)
    tokens = 0x7FFFFFFF - (key.topk(k).values & 0xFFFFFFFF)
    nan = peak.isnan()[:, None]
    return x.gather(1, tokens).masked_fill(nan, float("nan")), tokens.masked_fill(nan, -1)
