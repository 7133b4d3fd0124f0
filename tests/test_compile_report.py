"""Ahead-of-time compilation: what it reports, and what it refuses."""

import pytest
import triton
import triton.language as tl

from whiflash_triton.autotune.compile_report import KernelTooLarge, compile_kernel


@triton.jit
def _square_product_kernel(x_ptr, out_ptr, scale, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, tl.dot(x, x, input_precision="ieee") * scale)


TYPES = {"x_ptr": "*fp32", "out_ptr": "*fp32", "scale": "fp32"}


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_report_names_what_the_kernel_needs(arch):
    report = compile_kernel(_square_product_kernel, TYPES, {"BLOCK": 16}, arch, num_warps=1)
    assert report.arch == arch and 16 < report.registers <= 255
    assert report.stack == report.spills == 0 and report.shared >= 16 * 16 * 4


@pytest.mark.compile
def test_spills_are_refused_and_counted():
    with pytest.raises(KernelTooLarge, match="register spills.*smaller blocks"):
        compile_kernel(_square_product_kernel, TYPES, {"BLOCK": 64}, 80, num_warps=1)
    report = compile_kernel(_square_product_kernel, TYPES, {"BLOCK": 64}, 80, num_warps=1, strict=False)
    assert report.spills > 0 and report.stack > 0


@pytest.mark.compile
def test_arguments_are_checked_by_name():
    with pytest.raises(TypeError, match="no type for.*scale.*unknown arguments.*SIZE"):
        compile_kernel(_square_product_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"BLOCK": 16, "SIZE": 1}, 90)


@pytest.mark.interpreter
def test_interpreted_kernels_are_refused():
    with pytest.raises(TypeError, match="TRITON_INTERPRET"):
        compile_kernel(_square_product_kernel, TYPES, {"BLOCK": 16}, 90)


@pytest.mark.interpreter
def test_kernel_lanes_poison_empty_tensors():
    import torch

    assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2, dtype=torch.float16)).isnan().all()
    assert (torch.empty(2, dtype=torch.int32) == (2**31 - 1) // 3).all()
    assert torch.ones(1).new_empty(4).isnan().all()
