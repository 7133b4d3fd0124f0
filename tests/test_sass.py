"""What the GPU executes, disassembled: every kernel as its launch wrapper launches it at the shapes of published models."""

import re
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from whiflash_triton.autotune.cases import KERNELS, Case, all_cases, build
from whiflash_triton.autotune.compile_report import _run, _tools, compile_binary
from whiflash_triton.autotune.launches import record

DOTS = {"_tree_attention_split_kernel"}
# The others move so few bytes that the launch is what they cost.
MEMORY_BOUND = {
    *("_tree_attention_split_kernel", "_tree_attention_merge_kernel", "_partial_kernel", "_kv_compaction_kernel"),
    *("_kv_injection_kernel", "_mlp_partial_kernel"),
}
TENSOR_CORES = {80: r"HMMA\.", 90: r"(HMMA|HGMMA)\.", 100: r"(HMMA\.|UTCHMMA)"}  # per warp, per warp group, tensor memory
WIDE_LOAD = r"(LDG|LDGSTS)\..*\b128\b|UBLKCP|UTMALDG"  # to registers, to shared memory asynchronously, by the copy engine
LOCAL_MEMORY = r"LDL|STL"
ARCHITECTURES = [80, 90, 100]


def opcodes(cubin: bytes) -> Counter:
    """How often each instruction stands in the binary, predicates and operands left off."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = _run(_tools("cuobjdump")[0], "-sass", str(path))
    return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", text))


def found(pattern: str, counts: Counter) -> int:
    return sum(n for name, n in counts.items() if re.match(pattern, name))


def check(case: Case, arch: int) -> None:
    for launch in record(build(case, torch.device("cpu")).run).launches:
        fn, options = getattr(import_module(launch.module), launch.name), (launch.num_warps, launch.num_stages)
        kernel = compile_binary(fn, dict(launch.signature), dict(launch.constexprs), arch, *options)
        counts = opcodes(kernel.asm["cubin"])
        label = f"{launch.name} of {case.name} for sm_{arch}: {dict(counts)}"
        assert found("EXIT", counts), label  # the binary was read
        assert not found(LOCAL_MEMORY, counts), f"local memory traffic in {label}"
        if launch.name in MEMORY_BOUND:
            assert found(WIDE_LOAD, counts), f"no 128-bit loads in {label}"
        if launch.name in DOTS and case.dtype != "fp32":
            assert found(TENSOR_CORES[arch], counts), f"no tensor cores in {label}"


CASES = list(all_cases())
FIRST = [next(case for case in CASES if case.kernel == kernel) for kernel in KERNELS]


def name(case: Case) -> str:
    return f"{case.kernel}-{case.dtype}-{case.name.replace(' ', '-')}"


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", FIRST, ids=name)
def test_instructions(case, arch):
    check(case, arch)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST], ids=name)
def test_instructions_of_every_case(case, arch):
    check(case, arch)


@triton.jit
def _product_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, tl.dot(x, x, input_precision="ieee").to(out_ptr.dtype.element_ty))


@triton.jit
def _centre_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x - tl.sum(x, 0) / BLOCK)


@pytest.mark.compile
def test_the_checks_can_fail():
    def counts(fn, dtype: str, block: int, **stride: str) -> Counter:
        types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **stride}
        return opcodes(compile_binary(fn, types, {"BLOCK": block}, 80, num_warps=1).asm["cubin"])

    half = counts(_product_kernel, "fp16", 32, stride="i32:16")
    assert found(TENSOR_CORES[80], half) and found(WIDE_LOAD, half) and not found(LOCAL_MEMORY, half)
    narrow = counts(_product_kernel, "fp16", 32, stride="i32")  # rows that begin anywhere
    assert found(r"LDG", narrow) and not found(WIDE_LOAD, narrow)
    assert not found(TENSOR_CORES[80], counts(_product_kernel, "fp32", 16, stride="i32:16"))
    assert found(LOCAL_MEMORY, counts(_centre_kernel, "fp32", 16384))  # 512 values a thread
