"""Everything a round needs from each row of logits, read once: argmax or keyed sample, log-sum-exp, entropy and top-k.

Two launches. The first, grid (splits, R), reads one block of a row and writes its top keys and two sums, and the best
noisy score where tokens are drawn; the second, grid (R,), merges the splits. Bytes: R * V logits read; R * splits *
(8 K + 8, drawing 8 K + 16) bytes of partials written and read.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from whiflash_triton.autotune.lookup import pick
from whiflash_triton.kernels.keyed_noise import HIGHEST_NOISE, LOWEST_NOISE, keyed_noise, keyed_noise_torch, row_keys

MAX_TOP_K = 64
TILE = 64  # entries that the PyTorch sampler takes or leaves together
FAINTEST = 1.7e-38  # above exp(-87), the smallest result that is a normal float32
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
    score_ptr,  # fp32 (fp64 where logits are) [R, splits]: best of logit / temperature + noise; None: nothing is drawn
    drawn_ptr,  # int32 [R, splits], its token
    seed_ptr,  # int64 [1]
    positions_ptr,  # int64 [R]
    temperature: tl.float64,
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
    logits = tl.load(logits_ptr + row * stride_row + token, mask=inside, other=float("-inf"))  # [BLOCK]
    x = logits.to(tl.float32)
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

    if score_ptr is not None:
        key0, key1 = row_keys(tl.load(seed_ptr), tl.load(positions_ptr + row))
        dtype: tl.constexpr = score_ptr.dtype.element_ty
        x = logits.to(dtype)
        t = tl.full([BLOCK], temperature, dtype)
        x = x / t if dtype == tl.float64 else tl.div_rn(x, t)  # rounded as PyTorch does
        score = x + keyed_noise(key0, key1, token, dtype)
        best_score = tl.max(score, 0)
        tl.store(score_ptr + row * n_splits + split, best_score)
        tl.store(drawn_ptr + row * n_splits + split, tl.min(tl.where(score == best_score, token, 0x7FFFFFFF), 0))


@triton.jit
def _merge_kernel(
    key_ptr,  # int64 [R, splits, K]
    sums_ptr,  # fp32 [R, 2, splits]
    score_ptr,  # fp32 or fp64 [R, splits], None: the token is the argmax
    drawn_ptr,  # int32 [R, splits]
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
    if score_ptr is None:
        tl.store(token_ptr + row, tl.where(nan | (peak == float("-inf")), -1, _key_token(best)))
    else:
        score = tl.load(score_ptr + row * n_splits + split, mask=inside, other=float("-inf"))
        drawn = tl.load(drawn_ptr + row * n_splits + split, mask=inside, other=0x7FFFFFFF)
        best_score = tl.max(score, 0)
        token = tl.min(tl.where(score == best_score, drawn, 0x7FFFFFFF), 0)
        tl.store(token_ptr + row, tl.where(nan | (best_score == float("-inf")), -1, token))
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


def block_sampling(
    logits: Tensor, top_k: int = 0, seed: Tensor | None = None, positions: Tensor | None = None, temperature: float = 1.0
) -> BlockSample:
    """Argmax or keyed sample, log-sum-exp, entropy and top-k of every row of logits [R, V] (fp16, bf16, fp32 or fp64, any row
    stride).

    With seed int64 [1] and positions int64 [R] (the absolute index of the token that a row predicts) the token is the
    argmax of logit / temperature + `keyed_noise`: an exact draw from softmax(logits / temperature) that depends on
    nothing but seed, position and the row. fp64 logits are drawn in fp64; all else is computed and ordered in fp32.
    Entries whose logit / temperature is -inf are never drawn, +inf ones before all others, the lowest id of them.
    The other outputs are those of the logits as given, at temperature 1.

    Equal logits order by token id, lowest first, in the argmax and in the top-k (0 <= top_k <= 64; 0 gives tensors of
    width 0). Entries of -inf are allowed. A row with a NaN gives token -1, top-k tokens -1 and NaN elsewhere; a row of
    nothing but -inf gives token -1, logsumexp -inf and entropy NaN. With +inf entries logsumexp is +inf and the
    entropy that of an equal choice among them. Raises AssertionError on wrong shapes, strides, dtypes, top_k or
    temperature, and where only one of seed and positions is given.
    """
    _check(logits, top_k, seed, positions, temperature)
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
    score = drawn = None
    if seed is not None:
        score_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        score = torch.empty(rows, n_splits, dtype=score_dtype, device=logits.device)
        drawn = torch.empty(rows, n_splits, dtype=torch.int32, device=logits.device)
    _partial_kernel[(n_splits, rows)](
        *(logits, key, sums, score, drawn, seed, positions, temperature, logits.stride(0), n_vocab, n_splits, log_k, log_block),
        num_warps=options["num_warps"],
    )
    _merge_kernel[(rows,)](
        *(key, sums, score, drawn, *out, n_splits, top_k, log_k, _log2_ceil(n_splits)), num_warps=options["MERGE_WARPS"]
    )
    return out


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def _check(logits: Tensor, top_k: int, seed: Tensor | None, positions: Tensor | None, temperature: float) -> None:
    assert logits.ndim == 2 and logits.shape[1] > 0, f"logits must be [R, V] with V > 0, got {tuple(logits.shape)}"
    assert logits.stride(1) == 1, "rows of logits must be contiguous"
    most = min(MAX_TOP_K, logits.shape[1])
    assert 0 <= top_k <= most, f"top_k must lie in 0..{most}, got {top_k}"
    assert (seed is None) == (positions is None), "seed and positions go together"
    if seed is not None:
        assert seed.shape == (1,) and seed.dtype == torch.int64, f"seed must be int64 [1], got {seed.dtype} {tuple(seed.shape)}"
        assert positions.shape == logits.shape[:1] and positions.dtype == torch.int64, "positions must be int64 [R]"
        assert 0 < temperature < math.inf, f"temperature must be positive and finite, got {temperature}"


def block_sampling_torch(
    logits: Tensor, top_k: int = 0, seed: Tensor | None = None, positions: Tensor | None = None, temperature: float = 1.0
) -> BlockSample:
    """PyTorch reference of `block_sampling`; float64 logits are sampled in float64, the rest is float32 throughout."""
    _check(logits, top_k, seed, positions, temperature)
    x = logits.float()  # [R, V]; bf16 reductions are slow on CPU
    tiles, tops = _tiles(x)
    peak = tops.amax(-1)
    if seed is None:
        token = _argmax_torch(tiles, tops)
    else:
        drawn_from = _tiles(logits) if logits.dtype == torch.float64 else (tiles, tops)
        token = _sample_torch(*drawn_from, seed, positions, temperature)
    logits_k, tokens_k = ordered_topk(x, top_k)
    # Shift by a finite peak: entries equal to +inf clamp to 0, -inf entries to a distance whose exp is 0.
    shift = peak.masked_fill(peak.isinf(), torch.finfo(torch.float32).max)[:, None]
    d = x - shift if x is logits else x.sub_(shift)  # a converted copy may be overwritten
    e = d.clamp_(min=-87.0, max=0.0).exp()
    e = torch.nn.functional.threshold_(e, FAINTEST, 0.0)  # a CPU takes ten times longer where exp itself gives 0
    z = e.sum(-1)
    log_z = z.log()
    entropy = log_z - e.mul_(d).sum(-1) / z  # both terms are >= 0
    return BlockSample(token, peak + log_z, entropy, logits_k, tokens_k)


def _tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, V] as [R, ceil(V / TILE), TILE], and the maxima of the tiles: on a CPU ten times faster than an argmax."""
    if x.shape[1] % TILE:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % TILE), value=-math.inf)
    tiles = x.unflatten(1, (x.shape[1] // TILE, TILE))
    return tiles, tiles.amax(-1)


def _argmax_torch(tiles: Tensor, tops: Tensor) -> Tensor:
    """First index of the maximum int64 [R], -1 in a row with a NaN or of nothing but -inf."""
    peak, tile = tops.max(-1)  # first index among equals; a NaN wins
    within_tile = tiles[torch.arange(len(tiles), device=tiles.device), tile].max(-1).indices
    return (tile * TILE + within_tile).masked_fill(~(peak > -math.inf), -1)


def _sample_torch(tiles: Tensor, tops: Tensor, seed: Tensor, positions: Tensor, temperature: float) -> Tensor:
    """Drawn token int64 [R]: noise is computed only in the tiles that hold an entry able to win."""
    rows, n_tiles = tops.shape
    peak = tops.amax(-1)
    # An entry that far below the peak loses even with the highest noise against the lowest; 1e-6 covers all roundings.
    floor = peak - ((HIGHEST_NOISE - LOWEST_NOISE + 0.5) * temperature + peak.abs() * 1e-6)
    floor = floor.nan_to_num(nan=math.inf, posinf=math.inf, neginf=torch.finfo(tops.dtype).min)
    able = (tops >= floor[:, None]).view(-1).nonzero().view(-1)  # numbers of tiles, counted over all rows
    within = torch.arange(TILE, dtype=torch.int32, device=tops.device)
    tiles = tiles.reshape(-1, TILE)
    best, token = tops.new_full((rows * n_tiles,), -math.inf), able.new_zeros(rows * n_tiles)
    for part in able.split(1024):  # few enough for the CPU's cache
        row, first = part // n_tiles, part % n_tiles * TILE
        score = keyed_noise_torch(seed, positions.index_select(0, row), first.int()[:, None] + within, tops.dtype)
        best[part], at = score.add_(tiles.index_select(0, part).div_(temperature)).max(-1)  # [TILE] -> first of the best
        token[part] = first + at
    best, tile = best.view(rows, n_tiles).max(-1)  # of the row's winning tiles the first
    token = token.view(rows, n_tiles).gather(1, tile[:, None])[:, 0]
    return token.masked_fill(~(best > -math.inf) | peak.isnan(), -1)


def ordered_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of every row of x [R, V] (fp16, bf16 or fp32): values fp32 [R, k] and their indices int64 [R, k].

    Ordered by value, largest first, and equal values by index, lowest first, which torch.topk alone does not promise.
    Any 0 <= k <= V. A row with a NaN gives values NaN and indices -1. Plain PyTorch on every device; on CUDA no host sync.
    """
    assert x.ndim == 2 and 0 <= k <= x.shape[1], f"k must lie in 0..V, got {k} for {tuple(x.shape)}"
    x = x.float()
    if k == 0:
        return x.new_empty(len(x), 0), x.new_empty(len(x), 0, dtype=torch.int64)
    nan = x.amax(-1, keepdim=True).isnan()
    tokens = _topk_of_keys(x, k) if x.is_cuda else _topk_of_values(x, k)
    return x.gather(1, tokens).masked_fill(nan, float("nan")), tokens.masked_fill(nan, -1)


def _topk_of_keys(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of fp32 x through the kernel's int64 keys, which are all different."""
    bits = (x + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    key |= 0x7FFFFFFF - torch.arange(x.shape[1], device=x.device)
    return 0x7FFFFFFF - (key.topk(k).values & 0xFFFFFFFF)


def _topk_of_values(x: Tensor, k: int) -> Tensor:
    """The same several times faster on a CPU: a few more than k by value, put in order, unless equals reach beyond them."""
    spare = min(k + 8, x.shape[1])
    values, tokens = x.topk(spare)
    if spare < x.shape[1] and (values[:, k - 1] == values[:, -1]).any():
        return _topk_of_keys(x, k)
    tokens = tokens.sort(dim=-1).values
    order = x.gather(1, tokens).sort(dim=-1, descending=True, stable=True).indices
    return tokens.gather(1, order[:, :k])
