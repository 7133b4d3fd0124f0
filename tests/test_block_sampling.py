"""Block sampling, kernel and reference, against float64: first index of the maximum, torch.logsumexp, a stable sort."""

import itertools
import math

import pytest
import torch

from whiflash_triton.autotune import lookup
from whiflash_triton.kernels import block_sampling as module
from whiflash_triton.kernels.block_sampling import BlockSample, block_sampling, block_sampling_torch

INF, NAN = float("inf"), float("nan")
WIDTHS = [1, 63, 1000, 49152, 151936]
KINDS = ["normal", "ties", "peaked", "masked", "constant", "one", "large", "zeros"]
# width, top_k, kinds of rows, block (None: as shipped; many small splits or a few wide ones otherwise)
CASES = [
    (1, 0, KINDS, None),
    (1, 1, KINDS, None),
    (63, 1, KINDS, 64),
    (63, 8, KINDS, None),
    (63, 63, ["normal", "ties", "masked", "one"], 64),
    (1000, 0, KINDS, None),
    (1000, 0, KINDS, 64),
    (1000, 2, KINDS, 64),
    (1000, 5, KINDS, None),
    (1000, 64, ["normal", "ties", "masked", "one", "zeros"], 64),
    (1025, 3, ["ties", "constant"], 1024),  # one column past the end of a block
    (1024, 3, ["ties", "constant"], 1024),
    (49152, 0, ["normal", "ties", "masked"], None),
    (49152, 4, ["large", "peaked"], 16384),
    (151936, 0, ["normal"], None),
    (151936, 0, ["constant", "peaked", "one"], 32768),
    (151936, 8, ["masked", "ties"], 32768),
    (151936, 64, ["normal", "constant"], 32768),
]


def make_row(kind: str, width: int, draw: torch.Generator) -> torch.Tensor:
    x = torch.randn(width, generator=draw) * 4
    at = int(torch.randint(width, (1,), generator=draw))
    if kind == "ties":
        return x.div(4).round()
    if kind == "peaked":
        return x.index_fill(0, torch.tensor(at), 60.0)
    if kind == "masked":
        return x.masked_fill(torch.rand(width, generator=draw) < 0.9, -INF).index_fill(0, torch.tensor(at), 1.0)
    if kind == "constant":
        return torch.full((width,), -7.25)
    if kind == "one":
        return torch.full((width,), -INF).index_fill(0, torch.tensor(at), 3.5)
    if kind == "large":
        return x.mul(1e4).clamp(-60000, 60000)
    if kind == "zeros":  # 0.0 and -0.0 are equal
        return torch.zeros(width) * x.sign()
    return x


def make(width: int, kinds: list[str], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Rows of all kinds, as a view whose row stride is a multiple of nothing."""
    draw = torch.Generator().manual_seed(width)
    rows = torch.stack([make_row(kind, width, draw) for kind in kinds]).to(dtype)
    wide = torch.full((len(kinds), width + 5), NAN, dtype=dtype)
    wide[:, :width] = rows
    return wide.to(device)[:, :width]


def check(out: BlockSample, logits: torch.Tensor, top_k: int) -> None:
    out, x = BlockSample(*(part.cpu() for part in out)), logits.cpu().double()
    rows, width = x.shape
    assert [part.dtype for part in out] == [torch.int64, torch.float32, torch.float32, torch.float32, torch.int64]
    at_peak = x == x.amax(1, keepdim=True)
    first = torch.where(at_peak, torch.arange(width), width).amin(1)
    p = x.softmax(1)
    torch.testing.assert_close(out.token, first, rtol=0, atol=0)
    torch.testing.assert_close(out.logsumexp.double(), x.logsumexp(1), rtol=3e-7, atol=3e-6)
    torch.testing.assert_close(out.entropy.double(), -torch.xlogy(p, p).sum(1), rtol=2e-6, atol=1e-6)
    assert (out.entropy >= 0).all()
    values, order = x.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(out.topk_tokens, order[:, :top_k], rtol=0, atol=0)
    torch.testing.assert_close(out.topk_logits.double(), values[:, :top_k], rtol=0, atol=0)


def check_odd_rows(fn, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows that have no answer, beside a row that has one."""
    negative_nan = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)
    x = torch.randn(9, 300)
    x[0, 0] = x[1, 299] = NAN
    x[2, 100] = negative_nan
    x[3] = NAN
    x[4] = -INF
    x[5, 200], x[5, 7] = INF, NAN
    x[6, [70, 64, 299]] = INF
    x[7] = -INF
    x[7, 130] = INF
    out = BlockSample(*(part.cpu() for part in fn(x.to(device, dtype), 2)))
    nan = slice(0, 4), 5
    for rows in nan:
        assert (out.token[rows] == -1).all() and (out.topk_tokens[rows] == -1).all()
        assert out.logsumexp[rows].isnan().all() and out.entropy[rows].isnan().all()
        assert out.topk_logits[rows].isnan().all()
    assert out.token[4] == -1 and out.logsumexp[4] == -INF and out.entropy[4].isnan()
    assert out.topk_tokens[4].tolist() == [0, 1] and (out.topk_logits[4] == -INF).all()
    assert out.token[6] == 64 and out.logsumexp[6] == INF and abs(out.entropy[6] - math.log(3)) < 1e-6
    assert out.topk_tokens[6].tolist() == [64, 70] and (out.topk_logits[6] == INF).all()
    assert out.token[7] == 130 and out.entropy[7] == 0 and out.topk_tokens[7].tolist() == [130, 0]
    check(BlockSample(*(part[8:] for part in out)), x.to(dtype)[8:], 2)


def check_ties_across_splits(fn, dtype: torch.dtype, device: str = "cpu") -> None:
    """Equal maxima at the edges of splits of 64: the lowest token wins, and the top-k lists them in order."""
    x = torch.zeros(3, 257)
    x[0, [256, 64, 63]] = 5.0
    x[1, [192, 128, 191]] = 5.0
    out = fn(x.to(device, dtype), 4)
    assert out.token.tolist() == [63, 128, 0]
    assert out.topk_tokens.tolist() == [[63, 64, 256, 0], [128, 191, 192, 0], [0, 1, 2, 3]]


@pytest.fixture
def block_of(monkeypatch):
    """Sets another block than the shipped one."""

    def set_block(block: int | None) -> None:
        if block:
            monkeypatch.setattr(module, "pick", lambda *_, **__: {"BLOCK": block, "MERGE_WARPS": 4, "num_warps": 4})

    return set_block


def test_rejections():
    for fn in (block_sampling, block_sampling_torch):
        with pytest.raises(AssertionError, match="top_k"):
            fn(torch.zeros(2, 5), 6)
        with pytest.raises(AssertionError, match="top_k"):
            fn(torch.zeros(2, 100), 65)
        with pytest.raises(AssertionError, match="contiguous"):
            fn(torch.zeros(5, 2).T)
        with pytest.raises(AssertionError, match="V > 0"):
            fn(torch.zeros(2, 0))
        seed, positions = torch.tensor([1]), torch.arange(2)
        for wrong in ((seed, None, 1.0), (None, positions, 1.0)):
            with pytest.raises(AssertionError, match="go together"):
                fn(torch.zeros(2, 5), 0, *wrong)
        with pytest.raises(AssertionError, match="seed must"):
            fn(torch.zeros(2, 5), 0, positions, positions, 1.0)
        for wrong in (positions[:1], positions.int()):
            with pytest.raises(AssertionError, match="positions must"):
                fn(torch.zeros(2, 5), 0, seed, wrong, 1.0)
        for temperature in (0.0, -1.0, INF, NAN):
            with pytest.raises(AssertionError, match="temperature"):
                fn(torch.zeros(2, 5), 0, seed, positions, temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width, top_k, kinds, block", [case for case in CASES if case[3] is None or case[0] > 1025])
def test_reference(width, top_k, kinds, block, dtype):
    logits = make(width, kinds, dtype)
    before = logits.clone()
    check(block_sampling_torch(logits, top_k), logits, top_k)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_odd_rows(dtype):
    check_odd_rows(block_sampling_torch, dtype)
    check_ties_across_splits(block_sampling_torch, dtype)
    assert block_sampling_torch(torch.zeros(0, 9, dtype=dtype), 2).topk_tokens.shape == (0, 2)


@pytest.mark.interpreter
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"V{CASES[i][0]}-k{CASES[i][1]}-block{CASES[i][3]}")
def test_kernel(index, block_of):
    width, top_k, kinds, block = CASES[index]
    block_of(block)
    logits = make(width, kinds, torch.float16 if index % 2 else torch.float32)
    check(block_sampling(logits, top_k), logits, top_k)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_odd_rows(dtype, block_of):
    block_of(64)
    check_odd_rows(block_sampling, dtype)
    check_ties_across_splits(block_sampling, dtype)
    assert block_sampling(torch.zeros(0, 9, dtype=dtype), 2).topk_tokens.shape == (0, 2)


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width, top_k", list(itertools.product(WIDTHS, [0, 1, 4, 33, 64])))
def test_kernel_full_product(width, top_k, dtype):
    if top_k <= width:
        logits = make(width, KINDS, dtype)
        check(block_sampling(logits, top_k), logits, top_k)


@pytest.mark.compile
@pytest.mark.parametrize(
    "dtype, drawing", [("fp16", False), ("bf16", False), ("fp32", False), ("bf16", True), ("fp32", True), ("fp64", True)]
)
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("entry", list(lookup.shipped("block_sampling")), ids=lambda entry: f"{entry.device}-{entry.key}")
def test_compiles(compiles, entry, arch, dtype, drawing):
    if entry.arch not in (None, arch):
        pytest.skip(f"meant for sm_{entry.arch}")
    log_k, config = entry.key["k"].bit_length() - 1, entry.config
    label = f"{dtype} drawing" if drawing else dtype
    drawn = {"score_ptr": "*fp64" if dtype == "fp64" else "*fp32", "drawn_ptr": "*i32"}
    keyed = {"seed_ptr": "*i64", "positions_ptr": "*i64"}
    absent = {} if drawing else dict.fromkeys(drawn | keyed)
    pointers = {"logits_ptr": f"*{dtype}", "key_ptr": "*i64", "sums_ptr": "*fp32", "temperature": "fp64"}
    sizes = {"stride_row": "i32:16", "n_vocab": "i32", "n_splits": "i32"} | (drawn | keyed if drawing else {})
    constants = {"LOG_K": log_k, "LOG_BLOCK": config["BLOCK"].bit_length() - 1} | absent
    compiles(module._partial_kernel, pointers | sizes, constants, arch, dtype=label, num_warps=config["num_warps"])
    if dtype in ("fp32", "fp64"):  # the merge reads fp32 and int64 whatever the logits are, and fp64 scores of fp64 logits
        pointers = {"key_ptr": "*i64", "sums_ptr": "*fp32", "token_ptr": "*i64", "logsumexp_ptr": "*fp32"}
        pointers |= {"entropy_ptr": "*fp32", "topk_logit_ptr": "*fp32", "topk_token_ptr": "*i64"}
        constants = {"LOG_K": log_k, "LOG_SPLITS": module.MAX_SPLITS.bit_length() - 1} | ({} if drawing else dict.fromkeys(drawn))
        sizes = {"n_splits": "i32", "top_k": "i32"} | (drawn if drawing else {})
        compiles(module._merge_kernel, pointers | sizes, constants, arch, dtype=label, num_warps=config["MERGE_WARPS"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_gpu(dtype):
    check_odd_rows(block_sampling, dtype, "cuda")
    check_ties_across_splits(block_sampling, dtype, "cuda")
    for width, top_k in itertools.product(WIDTHS, [0, 1, 4, 33, 64]):
        if top_k <= width:
            logits = make(width, KINDS, dtype, "cuda")
            check(block_sampling(logits, top_k), logits, top_k)


@pytest.mark.gpu
def test_graph_replay():
    logits = make(151936, KINDS, torch.bfloat16, "cuda")
    block_sampling(logits, 8)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sampling(logits, 8)
    for _ in range(3):
        logits.copy_(logits.roll(1, dims=0))
        graph.replay()
        check(out, logits, 8)
