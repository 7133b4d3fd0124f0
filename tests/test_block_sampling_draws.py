"""Keyed sampling and the ordered top-k of block sampling, kernel and reference, against float64 and a stable sort."""

import itertools

import pytest
import torch

from tests.test_block_sampling import KINDS, WIDTHS, make
from whiflash_triton.kernels import block_sampling as module
from whiflash_triton.kernels.block_sampling import block_sampling, block_sampling_torch, ordered_topk
from whiflash_triton.kernels.keyed_noise import keyed_noise_torch

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def check_draws(fn, logits: torch.Tensor, top_k: int, seed: int, temperature: float, first: int = 0) -> None:
    """The token maximises logit / temperature + noise in float64; the rest is what it is without a seed."""
    rows, width = logits.shape
    seed, positions = torch.tensor([seed], device=logits.device), torch.arange(first, first + rows, device=logits.device)
    out = fn(logits, top_k, seed, positions, temperature)
    assert out.token.dtype == torch.int64
    for part, wanted in zip(out[1:], fn(logits, top_k)[1:], strict=True):
        assert part.equal(wanted)
    x, dtype = logits.cpu().double() / temperature, torch.promote_types(logits.dtype, torch.float32)
    noise = keyed_noise_torch(seed.cpu(), positions.cpu(), torch.arange(width, dtype=torch.int32), dtype)
    score = x + noise.double()
    best, won = score.amax(1), score.gather(1, out.token.cpu()[:, None])[:, 0]
    # What rounding to `dtype` may hide: noise, quotient and sum, each to its last bit.
    hidden = 4 * torch.finfo(dtype).eps * (best.abs() + 23)
    assert (won >= best - hidden).all()
    unique = (score >= (best - hidden)[:, None]).sum(1) == 1
    assert unique.double().mean() > 0.7 and out.token.cpu()[unique].equal(score.argmax(1)[unique])


def check_odd_draws(fn, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows without an answer, infinite entries, and quotients that overflow."""
    huge = torch.finfo(dtype).max
    x = torch.zeros(10, 300, dtype=dtype)
    x[0, 299] = x[1, 5] = NAN
    x[1, 6] = INF
    x[2] = -INF
    x[3, [257, 70, 64]] = INF  # the lowest of them, whatever the noise
    x[4] = -INF
    x[4, 130] = -3.0
    x[5], x[5, 77] = -huge, huge
    x[6] = -huge
    x[7] = -INF
    x[7, 299] = -huge
    x[8:] = -INF
    x[8:, 190:] = 0.0
    seed = torch.tensor([3], device=device)
    for temperature in (0.5, 1.0, 30.0):
        token = fn(x.to(device), 0, seed, torch.full((10,), 9, device=device), temperature).token.tolist()
        overflow = dtype != torch.float16 and temperature < 1
        assert token[:6] == [-1, -1, -1, 64, 130, 77]
        assert (token[6] == -1) == overflow and token[7] == (-1 if overflow else 299)
        assert 190 <= token[8] == token[9] < 300  # one seed, one position, one row: one token


def set_block(monkeypatch, block: int | None) -> None:
    """Another block than the shipped one, unless None."""
    if block:
        monkeypatch.setattr(module, "pick", lambda *_, **__: {"BLOCK": block, "MERGE_WARPS": 4, "num_warps": 4})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, temperature", [(1, 1.0), (63, 0.05), (64, 5.0), (1000, 0.7), (1000, 1e4), (49152, 1.0)])
def test_reference_draws(width, temperature, dtype):
    check_draws(block_sampling_torch, make(width, KINDS, dtype), min(width, 2), width, temperature, first=width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_draws_from_afar(dtype):
    """Twenty nats of spread, so that many of the drawn lie far below the peak, and entries beyond what noise bridges."""
    logits = torch.linspace(0, -20, 200, dtype=dtype).repeat(5000, 1)
    logits[:, 1::5] -= 40
    logits = logits[:, torch.randperm(200, generator=torch.Generator().manual_seed(0))].contiguous()
    check_draws(block_sampling_torch, logits, 0, 5, 1.0)
    token = block_sampling_torch(logits, 0, torch.tensor([5]), torch.arange(5000)).token
    assert logits.gather(1, token[:, None]).min() < -6


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_odd_draws(dtype):
    check_odd_draws(block_sampling_torch, dtype)
    empty = torch.zeros(0, dtype=torch.int64)
    assert block_sampling_torch(torch.zeros(0, 70, dtype=dtype), 2, torch.tensor([1]), empty).token.shape == (0,)


def test_reference_draws_row_by_row():
    """A row's token depends on its own logits and position, not on the rows beside it, its stride or its dtype's width."""
    logits, seed, positions = make(1000, KINDS, torch.float32), torch.tensor([-7]), torch.arange(5, 5 + len(KINDS))
    together = block_sampling_torch(logits, 0, seed, positions).token
    apart = [block_sampling_torch(logits[i : i + 1], 0, seed, positions[i : i + 1]).token for i in range(len(KINDS))]
    assert together.tolist() == torch.cat(apart).tolist()
    half = logits.half()
    assert block_sampling_torch(half, 0, seed, positions).token.equal(block_sampling_torch(half.float(), 0, seed, positions).token)


@pytest.mark.parametrize("top", [module._topk_of_values, module._topk_of_keys, None])
@pytest.mark.parametrize("width", [1, 63, 1000, 4096])
def test_ordered_topk(width, top, monkeypatch):
    if top:
        monkeypatch.setattr(module, "_topk_of_values", top)
    logits = make(width, KINDS, torch.float32)
    for k in {0, 1, 2, 5, 64, 65, 300, width - 1, width}:
        if k <= width:
            values, tokens = ordered_topk(logits, k)
            expected, order = logits.sort(dim=1, descending=True, stable=True)
            assert tokens.equal(order[:, :k]) and values.equal(expected[:, :k])


def test_ordered_topk_of_odd_rows():
    x = torch.tensor([[1.0, NAN, 2.0], [-INF, -INF, -INF], [INF, 3.0, INF], [-0.0, 0.0, -0.0]])
    values, tokens = ordered_topk(x, 2)
    assert tokens.tolist() == [[-1, -1], [0, 1], [0, 2], [0, 1]] and values[0].isnan().all()
    assert values[1:].tolist() == [[-INF, -INF], [INF, INF], [0.0, 0.0]]
    assert ordered_topk(x.half(), 3)[0].dtype == torch.float32 and ordered_topk(x[:0], 2)[1].shape == (0, 2)
    with pytest.raises(AssertionError, match="0..V"):
        ordered_topk(x, 4)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "width, temperature, dtype, block",
    [
        (1, 1.0, torch.float32, None),
        (63, 0.7, torch.float16, 64),
        (1000, 0.05, torch.float32, 256),
        (1000, 5.0, torch.float64, 256),
        (1025, 1.0, torch.float32, 1024),
        (49152, 1.0, torch.float16, 16384),
        (49152, 0.7, torch.float64, 32768),
        (151936, 2.0, torch.float32, 32768),
    ],
)
def test_kernel_draws(width, temperature, dtype, block, monkeypatch):
    set_block(monkeypatch, block)
    kinds = ["normal", "masked", "ties"] if width > 64 else KINDS
    check_draws(block_sampling, make(width, kinds, dtype), 2 if width == 63 else 1, width, temperature, first=width)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_kernel_odd_draws(dtype, monkeypatch):
    set_block(monkeypatch, 256)
    check_odd_draws(block_sampling, dtype)


@pytest.mark.interpreter
def test_kernel_draws_as_the_reference_whatever_the_block(monkeypatch):
    logits, seed, positions = make(1000, KINDS[:4], torch.float32), torch.tensor([11]), torch.arange(4)
    wanted = block_sampling_torch(logits, 0, seed, positions, 0.9).token
    for block in (256, 512, 1024):
        set_block(monkeypatch, block)
        assert block_sampling(logits, 0, seed, positions, 0.9).token.equal(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_on_gpu(dtype):
    check_odd_draws(block_sampling, dtype, "cuda")
    for width, temperature in itertools.product(WIDTHS, [0.05, 1.0, 5.0]):
        check_draws(block_sampling, make(width, KINDS, dtype, "cuda"), min(width, 2), width, temperature, first=width)


@pytest.mark.gpu
def test_ordered_topk_on_gpu():
    logits = make(49152, KINDS, torch.float32)
    for k in (1, 64, 1024):
        assert [x.cpu().tolist() for x in ordered_topk(logits.cuda(), k)] == [x.tolist() for x in ordered_topk(logits, k)]


@pytest.mark.gpu
def test_graph_replay():
    """Seed and positions live on the device, so that a captured graph draws anew after they change."""
    logits = make(151936, KINDS, torch.bfloat16, "cuda")
    seed, positions = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.arange(len(KINDS), device="cuda")
    block_sampling(logits, 8, seed, positions, 0.8)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sampling(logits, 8, seed, positions, 0.8)
    for turn in range(1, 4):
        logits.copy_(logits.roll(1, dims=0))
        seed.fill_(turn)
        positions.add_(100)
        graph.replay()
        assert out.token.equal(block_sampling(logits, 8, seed, positions, 0.8).token)
        check_draws(block_sampling, logits, 8, turn, 0.8, first=100 * turn)
