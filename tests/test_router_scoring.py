"""Entropy rule and router MLP, kernels and references, against torch.nn.functional in float64."""

import itertools

import pytest
import torch
from torch.nn.functional import gelu, linear

from whiflash_triton.autotune import lookup
from whiflash_triton.kernels import router_scoring as module
from whiflash_triton.kernels.router_scoring import entropy_rule, entropy_rule_torch, router_mlp, router_mlp_torch

NAN = float("nan")
ROWS, HIDDEN, INNER = [1, 2, 5], [1, 63, 576, 4096], [1, 7, 33, 256]
CASES = [(1, 576, 256), (5, 63, 7), (5, 1, 1), (1, 4096, 33), (2, 576, 1), (2, 1, 256), (1, 63, 33), (2, 4097, 7)]


def make(rows: int, hidden: int, inner: int, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(hidden)
    h = torch.randn(rows, hidden + 3, generator=draw)[:, :hidden] * 4
    w1 = torch.randn(inner, hidden + 1, generator=draw)[:, :hidden] / hidden**0.5
    small = [torch.randn(size, generator=draw) for size in (inner, inner, 1)]
    return [x.to(device, dtype) for x in (h, w1, *small)]


def check(fn, args: list[torch.Tensor], tolerance: float = 2e-5) -> None:
    h, w1, b1, w2, b2 = (x.cpu().double() for x in args)
    expected = gelu(linear(h, w1, b1)) @ w2 + b2
    for threshold in (0.0, float(expected.median())):
        score, decision = (x.cpu() for x in fn(*args, threshold))
        assert score.dtype == torch.float32 and decision.dtype == torch.int32
        torch.testing.assert_close(score.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(decision, (score > threshold).int())


def check_edges(mlp, rule, device: str = "cpu") -> None:
    args = make(3, 63, 7, torch.float32, device)
    args[0][1, 5] = NAN
    score, decision = mlp(*args, -1e30)
    assert score.isnan().tolist() == [False, True, False] and decision.tolist() == [1, 0, 1]
    score, _ = mlp(*args, 0.0)
    _, decision = mlp(*args, float(score[0]))
    assert decision[0] == 0  # equal to the threshold
    entropy = torch.tensor([0.0, 0.5, 2.0, NAN, 1e-30, float("inf")], device=device)
    assert rule(entropy, 0.5, True).tolist() == [0, 0, 1, 0, 0, 1]
    assert rule(entropy, 0.5, False).tolist() == [1, 0, 0, 0, 1, 0]
    many = torch.arange(2049.0, device=device)
    assert torch.equal(rule(many, 1023, True), (many > 1023).int())
    assert rule(many[:0], 1.0, True).shape == (0,) and mlp(args[0][:0], *args[1:], 0.0)[0].shape == (0,)


def test_rejections():
    args = make(2, 8, 4, torch.float32)
    for fn in (router_mlp, router_mlp_torch):
        with pytest.raises(AssertionError, match="agree"):
            fn(args[0][:, :7], *args[1:], 0.0)
        with pytest.raises(AssertionError, match="b2"):
            fn(*args[:4], torch.zeros(2), 0.0)
        with pytest.raises(AssertionError, match="contiguous"):
            fn(args[0].T.contiguous().T, *args[1:], 0.0)
    for fn in (entropy_rule, entropy_rule_torch):
        with pytest.raises(AssertionError, match="entropy"):
            fn(torch.zeros(2, 2), 0.5, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, hidden, inner", CASES)
def test_reference(rows, hidden, inner, dtype):
    check(router_mlp_torch, make(rows, hidden, inner, dtype))


def test_reference_edges():
    check_edges(router_mlp_torch, entropy_rule_torch)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows, hidden, inner", CASES)
def test_kernel(rows, hidden, inner, dtype):
    check(router_mlp, make(rows, hidden, inner, dtype))


@pytest.mark.interpreter
def test_kernel_edges():
    check_edges(router_mlp, entropy_rule)


@pytest.mark.interpreter
def test_kernel_takes_a_hidden_row_of_another_dtype():
    args = make(1, 576, 33, torch.float32)
    check(router_mlp, [args[0].half(), *args[1:]])


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows, hidden, inner", list(itertools.product(ROWS, HIDDEN, INNER)))
def test_kernel_full_product(rows, hidden, inner, dtype):
    check(router_mlp, make(rows, hidden, inner, dtype))


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("entry", list(lookup.shipped("router_scoring")), ids=lambda entry: f"{entry.device}-{entry.key}")
def test_mlp_compiles(compiles, entry, arch, dtype):
    if entry.arch not in (None, arch):
        pytest.skip(f"meant for sm_{entry.arch}")
    config = dict(entry.config)
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    signature = {name: f"*{dtype}" for name in ("hidden_ptr", "w1_ptr", "b1_ptr", "w2_ptr")}
    signature |= {"partial_ptr": "*fp32", "stride_hidden": "i32:16", "stride_w1": "i32:16"}
    signature |= {"n_inner": "i32:16", "n_hidden": "i32:16", "n_tiles": "i32"}
    compiles(module._mlp_partial_kernel, signature, config, arch, dtype=dtype, **options)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_decisions_compile(compiles, arch):
    signature = {"partial_ptr": "*fp32", "b2_ptr": "*bf16", "score_ptr": "*fp32", "decision_ptr": "*i32"}
    signature |= {"threshold": "fp32", "n_tiles": "i32"}
    compiles(module._mlp_decide_kernel, signature, {"BLOCK": 128}, arch, dtype="bf16")
    signature = {"entropy_ptr": "*fp32", "decision_ptr": "*i32", "threshold": "fp32", "n_rows": "i32"}
    compiles(module._entropy_rule_kernel, signature, {"ABOVE": True, "BLOCK": 16}, arch, dtype="fp32", num_warps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_gpu(dtype):
    check_edges(router_mlp, entropy_rule, "cuda")
    for rows, hidden, inner in itertools.product(ROWS, HIDDEN, INNER):
        check(router_mlp, make(rows, hidden, inner, dtype, "cuda"))


@pytest.mark.gpu
def test_graph_replay():
    args = make(1, 4096, 256, torch.bfloat16, "cuda")
    router_mlp(*args, 0.0)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        score, decision = router_mlp(*args, 0.0)
    for _ in range(3):
        args[0].copy_(args[0].roll(1, dims=1))
        graph.replay()
        torch.testing.assert_close(score, router_mlp_torch(*args, 0.0)[0], rtol=2e-5, atol=2e-5)
        assert torch.equal(decision, (score > 0).int())
