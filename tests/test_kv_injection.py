"""KV injection, kernel and reference, against transformers' Qwen3RMSNorm and apply_rotary_pos_emb."""

import itertools

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from whiflash_triton.autotune import lookup
from whiflash_triton.kernels import kv_injection as module
from whiflash_triton.kernels.kv_injection import kv_injection, kv_injection_torch

S, GUARD, EPS = 20, 3, 1e-6
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# context rows, layers, heads, head_dim, start, norm
CASES = [
    (1, 1, 1, 64, 0, True),
    (3, 5, 3, 64, 4, False),
    (17, 2, 2, 128, 1, True),
    (4, 1, 8, 128, 16, True),  # ends at the last row
    (4, 3, 5, 80, 17, True),  # one past the end
    (2, 2, 7, 80, 0, False),
    (5, 5, 1, 96, 19, True),
    (1, 3, 4, 96, 20, True),  # nothing fits
    (3, 1, 6, 256, 7, False),
    (7, 2, 3, 256, 13, True),
    (20, 1, 2, 64, 0, True),  # fills an empty cache
    (2, 1, 1, 2, 3, True),
    (0, 2, 3, 64, 5, True),
]


def make(rows, layers, heads, dim, start, norm, dtype, device="cpu") -> tuple[list, torch.Tensor]:
    """Arguments for a batch of two (the second starts at row 2), and the buffer that the cache is a view of."""
    draw = torch.Generator().manual_seed(rows + dim)
    flat = torch.randn(2, rows, layers * 2 * heads * dim + 5, generator=draw).to(device, dtype) * 3
    projected = flat[..., : layers * 2 * heads * dim].view(2, rows, layers, 2, heads, dim)
    k_norm = 1 + torch.randn(layers, dim, generator=draw).to(device, dtype) / 4 if norm else None
    angles = torch.rand(rows, dim // 2, generator=draw).repeat(1, 2).to(device) * 1000
    buffer = torch.randn(layers, 2, 2, heads, S + GUARD, dim, generator=draw).to(device, dtype)
    starts = torch.tensor([start, 2], dtype=torch.int32, device=device)
    return [projected, k_norm, angles.cos(), angles.sin(), buffer[..., :S, :], starts, EPS], buffer


def expected_buffer(args: list, buffer: torch.Tensor) -> torch.Tensor:
    projected, k_norm, cos, sin, _, start, eps = (x.cpu() if isinstance(x, torch.Tensor) else x for x in args)
    out = buffer.cpu().clone()
    for layer in range(out.shape[0]):
        k, v = projected[:, :, layer].float().unbind(2)  # [B, C, Hkv, D]
        if k_norm is not None:
            norm = Qwen3RMSNorm(k.shape[-1], eps)
            norm.weight.data = k_norm[layer].float()
            k = norm(k).detach()
        k, _ = apply_rotary_pos_emb(k.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])
        for b in range(2):
            for i in range(min(k.shape[2], max(0, S - int(start[b])))):
                out[layer, 0, b, :, start[b] + i] = k[b, :, i].to(out.dtype)
                out[layer, 1, b, :, start[b] + i] = v[b, i].to(out.dtype)
    return out


def check(fn, args: list, buffer: torch.Tensor) -> None:
    wanted, before = expected_buffer(args, buffer), buffer.cpu().clone()
    assert fn(*args) is None
    mine, dtype = buffer.cpu(), buffer.dtype
    torch.testing.assert_close(mine[:, 0], wanted[:, 0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(mine[:, 1], wanted[:, 1])  # V is copied
    assert torch.equal(mine[:, 0] != before[:, 0], wanted[:, 0] != before[:, 0])  # K is written where it should be


def check_special_values(fn, dtype: torch.dtype, device: str = "cpu") -> None:
    """A NaN stays in its own row and head; a zero row has no scale to blow up; V keeps its bits."""
    args, buffer = make(3, 2, 2, 64, 4, True, dtype, device)
    args[0][0, 1, 0, 0, 1, 7] = float("nan")
    args[0][0, 2, 1, 0] = 0
    args[0][0, 0, 1, 1, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")], device=device)
    fn(*args)
    nan = buffer.isnan()
    assert nan[0, 0, 0, 1, 5].all() and nan.sum() == 64 + 1
    assert (buffer[1, 0, 0, :, 6] == 0).all()
    assert buffer[1, 1, 0, 0, 4, 1:3].tolist() == [float("inf"), float("-inf")]


def test_rejections():
    args, _ = make(3, 2, 2, 64, 0, True, torch.float32)
    for fn in (kv_injection, kv_injection_torch):
        with pytest.raises(AssertionError, match="one dtype"):
            fn(args[0].half(), *args[1:])
        with pytest.raises(AssertionError, match="layers"):
            fn(args[0][:, :, :1], *args[1:])
        with pytest.raises(AssertionError, match="even"):
            fn(args[0][..., :63], args[1], args[2], args[3], args[4][..., :63], *args[5:])
        with pytest.raises(AssertionError, match="cos"):
            fn(*args[:2], args[2][:2], *args[3:])
        with pytest.raises(AssertionError, match="start"):
            fn(*args[:5], args[5].long(), EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case, dtype):
    check(kv_injection_torch, *make(*case, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_special_values(dtype):
    check_special_values(kv_injection_torch, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, dtype):
    check(kv_injection, *make(*case, dtype))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_special_values(dtype):
    check_special_values(kv_injection, dtype)


PRODUCT = list(itertools.product([1, 3, 8], [1, 5], range(1, 9), [64, 80, 96, 128, 256], [0, 15, 20], [True, False]))


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_full_product(dtype):
    for case in PRODUCT:
        check(kv_injection, *make(*case, dtype))


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("entry", list(lookup.shipped("kv_injection")), ids=lambda entry: f"{entry.device}-{entry.key}")
def test_compiles(compiles, entry, arch, dtype):
    if entry.arch not in (None, arch):
        pytest.skip(f"meant for sm_{entry.arch}")
    signature = {name: f"*{dtype}" for name in ("projected_ptr", "k_norm_ptr", "cache_ptr")}
    signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "start_ptr": "*i32", "eps": "fp32"}
    signature |= {f"stride_p{axis}": "i32:16" for axis in "bclkh"} | {f"stride_c{axis}": "i32:16" for axis in "lkbhn"}
    signature |= {name: "i32:16" for name in ("stride_norm", "stride_cos", "stride_sin", "n_cache", "half")}
    signature |= {"n_rows": "i32", "heads": "i32"}
    constants = {"HAS_NORM": True, "BLOCK_HALF": entry.key["D"] // 2, **entry.config}
    compiles(module._kv_injection_kernel, signature, constants, arch, dtype=dtype, num_warps=constants.pop("num_warps"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_gpu(dtype):
    check_special_values(kv_injection, dtype, "cuda")
    for case in CASES + PRODUCT:
        check(kv_injection, *make(*case, dtype, "cuda"))


@pytest.mark.gpu
def test_graph_replay_follows_the_start():
    args, buffer = make(8, 5, 8, 128, 0, True, torch.bfloat16, "cuda")
    kv_injection(*args)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_injection(*args)
    for start in (0, 7, 12, 15, 20):
        args[5].fill_(start)
        check(lambda *_: graph.replay(), args, buffer)
