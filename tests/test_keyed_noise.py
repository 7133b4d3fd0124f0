"""Keyed noise, device functions and reference, against integers of any size in Python, and its statistics."""

import math
import struct

import pytest
import torch
import triton
import triton.language as tl

from whiflash_triton.kernels.keyed_noise import (
    HIGHEST_NOISE,
    LOWEST_NOISE,
    keyed_bits_torch,
    keyed_noise,
    keyed_noise_torch,
    row_keys,
    token_bits,
)

SEEDS = [0, 1, 1234567, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
POSITIONS = [0, 1, 4095, 2**31, 10**12]
TOKENS = [0, 1, 2, 49151, 151935, 2**31 - 1]
GOLDEN = {  # (seed, position, token): hash; once published, texts of a seed stay what they are
    (0, 0, 0): 0x919EAA57,
    (0, 0, 1): 0x38998D39,
    (0, 1, 0): 0x16192B44,
    (1, 0, 0): 0x1ED3E243,
    (1234567, 41, 151935): 0x593F7FFB,
    (2**63, 10**12, 2**31 - 1): 0x45A45ED5,
    (2**64 - 1, 4095, 49151): 0x7CCCB151,
}


def splitmix64(seed: int, position: int) -> int:
    """Output number `position` of the published generator."""
    mask = 2**64 - 1
    z = seed + (position + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def bits(seed: int, position: int, token: int) -> int:
    mask, keys = 2**32 - 1, splitmix64(seed, position)
    x = token + keys & mask
    x = (x ^ x >> 17) * 0xED5AD4BB & mask
    x ^= keys >> 32
    x = (x ^ x >> 11) * 0xAC4C1B51 & mask
    x = (x ^ x >> 15) * 0x31848BAB & mask
    return x ^ x >> 14


def token_of(seed: int, position: int, wanted: int) -> int:
    """The token, as int32, whose hash is `wanted`: every step of the hash can be undone."""
    mask, keys = 2**32 - 1, splitmix64(seed, position)

    def unshift(y: int, n: int) -> int:
        x = y
        for _ in range(32 // n + 1):
            x = y ^ x >> n
        return x

    x = unshift(wanted, 14)
    x = unshift(x * pow(0x31848BAB, -1, 2**32) & mask, 15)
    x = unshift(x * pow(0xAC4C1B51, -1, 2**32) & mask, 11) ^ keys >> 32
    x = unshift(x * pow(0xED5AD4BB, -1, 2**32) & mask, 17) - keys & mask
    return x - 2**32 if x >= 2**31 else x


def noise_of(h: int, dtype: torch.dtype) -> float:
    """The formula in float64, from v as `dtype` holds it."""
    if dtype == torch.float64:
        v = (h + 0.5) / 2**32
    else:  # the hash, the sum and the bound are each rounded to float32
        v = min(rounded(rounded(h) + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def rounded(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def inputs(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[int]]]:
    """A row of each seed with each position: seeds [R], positions [R], tokens int32 [R, T], and the hashes in Python.

    The last tokens of a row are those whose hashes lie at the ends of their range."""
    rows = [(seed, position) for seed in SEEDS for position in POSITIONS]
    ends = [0, 1, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
    tokens = [TOKENS + [token_of(*row, h) for h in ends] for row in rows]
    expected = [[bits(*row, token) for token in listed] for row, listed in zip(rows, tokens, strict=True)]
    assert [row[-len(ends) :] for row in expected] == [ends] * len(rows)
    seeds, positions = (torch.tensor(column, device=device) for column in zip(*((signed(s), p) for s, p in rows), strict=True))
    return seeds, positions, torch.tensor(tokens, dtype=torch.int32, device=device), expected


def check_noise(noise: torch.Tensor, expected: list[list[int]], dtype: torch.dtype) -> None:
    wanted = torch.tensor([[noise_of(h, dtype) for h in row] for row in expected], dtype=torch.float64)
    assert noise.dtype == dtype and (noise > LOWEST_NOISE).all() and (noise < HIGHEST_NOISE).all()
    error = (noise.cpu().double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert error.max() < (1e-6 if dtype == torch.float32 else 1e-14)


def test_published_generator():
    # Outputs of splitmix64 from 1234567, as listed on Rosetta Code; its keys are low and high half.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [splitmix64(1234567, position) for position in range(5)] == published


def test_golden_vectors():
    for (seed, position, token), h in GOLDEN.items():
        got = keyed_bits_torch(seed, torch.tensor([position]), torch.tensor([token], dtype=torch.int32))
        assert got.item() & 0xFFFFFFFF == h == bits(seed, position, token)


def test_bits_of_the_reference():
    seeds, positions, tokens, expected = inputs()
    assert (keyed_bits_torch(seeds, positions, tokens).long() & 0xFFFFFFFF).tolist() == expected
    for seed in SEEDS:  # one seed as a Python integer or a tensor, one list of tokens for all rows
        from_int = keyed_bits_torch(seed, positions[:5], tokens[0])
        assert from_int.equal(keyed_bits_torch(torch.tensor([signed(seed)]), positions[:5], tokens[0].expand(5, -1)))
        assert from_int[1, 0].item() & 0xFFFFFFFF == bits(seed, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_the_reference(dtype):
    seeds, positions, tokens, expected = inputs()
    check_noise(keyed_noise_torch(seeds, positions, tokens, dtype), expected, dtype)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Probability of counts at least this far from what the probabilities expect; an even number of degrees of freedom.

    There the upper tail of chi-square is a Poisson sum: P(X > x) = exp(-x / 2) * sum of (x / 2)^i / i!, i < df / 2."""
    expected = probabilities.flatten() * counts.sum()
    assert expected.min() > 5
    half, df = ((counts.flatten() - expected) ** 2 / expected).sum().item() / 2, len(expected) - 1
    assert df % 2 == 0
    return sum(math.exp(i * math.log(half) - half - math.lgamma(i + 1)) for i in range(df // 2))


VOCABULARY = torch.tensor([0, 1, 2, 3, 500, 501, 8191, 8192, 49151, 100000, 151935], dtype=torch.int32)  # 11: df is even
P = torch.tensor([0.30, 0.20, 0.15, 0.10, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01], dtype=torch.float64)
DRAWS = 10**6


def draw(seeds: int | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return (P.log().float() + keyed_noise_torch(seeds, positions, VOCABULARY)).argmax(1)


def check_draws(drawn: torch.Tensor) -> None:
    """One by one, and neighbours two by two, against the exact probabilities."""
    assert chi_square(torch.bincount(drawn, minlength=11), P) > 1e-6
    pairs = drawn[0::2] * 11 + drawn[1::2]
    assert chi_square(torch.bincount(pairs, minlength=121), torch.outer(P, P)) > 1e-6


def test_test_statistic():
    assert abs(chi_square(torch.tensor([10, 20, 30]), torch.full((3,), 1 / 3)) - math.exp(-5)) < 1e-6  # tail of df 2: exp(-x/2)
    off = P + torch.tensor([0.003, -0.003] + [0.0] * 9)
    assert chi_square(off * DRAWS, P) < 1e-6  # it sees three draws in a thousand that moved


@pytest.mark.parametrize("seed", [0, 20261201])
def test_draws_over_positions(seed):
    check_draws(draw(seed, torch.arange(DRAWS)))


@pytest.mark.parametrize("position", [0, 777])
def test_draws_over_seeds(position):
    check_draws(draw(torch.arange(DRAWS), torch.full((DRAWS,), position)))


def test_draws_of_neighbouring_seeds_over_positions():
    """What two texts with seeds one apart draw at the same place is independent."""
    positions = torch.arange(DRAWS // 2)
    check_draws(torch.stack((draw(41, positions), draw(42, positions)), 1).flatten())


def test_every_input_bit_flips_half_of_the_hash():
    torch.manual_seed(0)
    n = 20000
    seeds, positions = torch.randint(2**62, (n,)), torch.randint(2**20, (n,))
    tokens = torch.randint(2**17, (n, 1), dtype=torch.int32)
    base = keyed_bits_torch(seeds, positions, tokens)
    for changed in (
        *((seeds ^ (1 << bit), positions, tokens) for bit in range(0, 63, 7)),
        *((seeds, positions ^ (1 << bit), tokens) for bit in range(0, 20, 3)),
        *((seeds, positions, tokens ^ (1 << bit)) for bit in range(0, 17, 2)),
    ):
        flipped = (keyed_bits_torch(*changed) ^ base) >> torch.arange(32, dtype=torch.int32) & 1
        # Six standard deviations of a fair coin, for each of the 32 bits.
        assert ((flipped.double().mean(0) - 0.5).abs() < 6 * 0.5 / n**0.5).all()


@triton.jit
def _noise_kernel(seed_ptr, positions_ptr, tokens_ptr, bits_ptr, noise_ptr, n_tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n_tokens
    token = tl.load(tokens_ptr + row * n_tokens + at, mask=inside, other=0)
    key0, key1 = row_keys(tl.load(seed_ptr + row), tl.load(positions_ptr + row))
    noise = keyed_noise(key0, key1, token, noise_ptr.dtype.element_ty)
    tl.store(bits_ptr + row * n_tokens + at, token_bits(key0, key1, token).to(tl.int32, bitcast=True), mask=inside)
    tl.store(noise_ptr + row * n_tokens + at, noise, mask=inside)


def check_device_functions(dtype: torch.dtype, device: str = "cpu") -> None:
    seeds, positions, tokens, expected = inputs(device)
    found, noise = torch.empty_like(tokens), torch.empty(tokens.shape, dtype=dtype, device=device)
    _noise_kernel[(len(tokens),)](seeds, positions, tokens, found, noise, tokens.shape[1], BLOCK=16)
    assert (found.cpu().long() & 0xFFFFFFFF).tolist() == expected
    check_noise(noise, expected, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_device_functions(dtype):
    check_device_functions(dtype)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_compiles(compiles, dtype, arch):
    signature = {"seed_ptr": "*i64", "positions_ptr": "*i64", "tokens_ptr": "*i32", "bits_ptr": "*i32"}
    signature |= {"noise_ptr": f"*{dtype}", "n_tokens": "i32"}
    compiles(_noise_kernel, signature, {"BLOCK": 1024}, arch, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_gpu(dtype):
    check_device_functions(dtype, "cuda")
