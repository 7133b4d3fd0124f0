"""Gumbel noise that is a pure function of (seed, absolute position, token id), so that every way of decoding draws the same.

Counter-based: the splitmix64 finaliser (Steele, Lea and Flood 2014) turns seed and position into two 32-bit keys; the
'triple32' permutation (Wellons 2018) turns the keys and a token into 32 bits. There is no state, and no launch of its
own: kernels call the device functions on what they hold in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Every value lies strictly between these, in float32 and in float64.
LOWEST_NOISE, HIGHEST_NOISE = -3.14, 22.88


@triton.jit
def row_keys(seed, position):
    """Two uint32 keys from an int64 seed and an int64 position: output number `position` of splitmix64."""
    z = seed.to(tl.uint64, bitcast=True) + (position.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def token_bits(key0, key1, token):
    """uint32 hash of uint32 keys and an int32 token; the second key enters midway, so that no two rows share a table."""
    x = token.to(tl.uint32, bitcast=True) + key0
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = x ^ key1
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def keyed_noise(key0, key1, token, dtype: tl.constexpr):
    """Standard Gumbel noise, tl.float32 or tl.float64, of uint32 keys and int32 tokens; see `keyed_noise_torch`."""
    BELOW_ONE: tl.constexpr = 1 - 2**-24 if dtype == tl.float32 else 1 - 2**-53
    v = tl.minimum((token_bits(key0, key1, token).to(dtype) + 0.5) * 2**-32, BELOW_ONE)
    u = 1.0 - v
    return -tl.log((u - 1.0 + v) / u - tl.log(u))  # -log1p(-v): the quotient is what rounding 1 - v took from the log


def keyed_noise_torch(seed: int | Tensor, positions: Tensor, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel noise [R, T]: -log(-log1p(-v)) with v = (h + 0.5) / 2^32, kept below 1, and h = `keyed_bits_torch`.

    seed 0..2^64-1, or int64 [1] or [R] (two's complement); positions int64 [R]; tokens int32 [T] or [R, T]; dtype float32 or
    float64.
    """
    # The unsigned value: rounding a signed one would differ from the kernels where v is close to 1.
    v = keyed_bits_torch(seed, positions, tokens).view(torch.uint32).to(dtype)
    v.add_(0.5).mul_(2.0**-32).clamp_(max=1 - torch.finfo(dtype).eps / 2)
    return v.neg_().log1p_().neg_().log_().neg_()


def keyed_bits_torch(seed: int | Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Hash [R, T] of (seed, position, token), 32 bits as int32 (two's complement); arguments as `keyed_noise_torch`."""
    keys = _row_keys_torch(seed, positions)
    x = tokens + keys[:, :1]
    shifted = torch.empty_like(x)  # one buffer: on a CPU large temporaries cost more than the arithmetic
    _xor_shift_(x, 17, shifted).mul_(0xED5AD4BB - 2**32).bitwise_xor_(keys[:, 1:])
    _xor_shift_(x, 11, shifted).mul_(0xAC4C1B51 - 2**32)
    _xor_shift_(x, 15, shifted).mul_(0x31848BAB)
    return _xor_shift_(x, 14, shifted)


def _row_keys_torch(seed: int | Tensor, positions: Tensor) -> Tensor:
    """int32 [R, 2]: low and high half of 64 bits a row (integer products wrap around)."""
    if isinstance(seed, int):
        seed = seed - 2**64 if seed >= 2**63 else seed
    z = (positions + 1).mul_(0x9E3779B97F4A7C15 - 2**64).add_(seed)
    shifted = torch.empty_like(z)
    _xor_shift_(z, 30, shifted).mul_(0xBF58476D1CE4E5B9 - 2**64)
    _xor_shift_(z, 27, shifted).mul_(0x94D049BB133111EB - 2**64)
    return _xor_shift_(z, 31, shifted).view(torch.int32).view(-1, 2)


def _xor_shift_(x: Tensor, n: int, shifted: Tensor) -> Tensor:
    """x ^= x >> n for a signed integer whose bits are meant unsigned: the shift fills with zeros."""
    torch.bitwise_right_shift(x, n, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_((1 << (torch.iinfo(x.dtype).bits - n)) - 1))
