"""Compile a Triton kernel for a GPU that need not be there, and report registers, stack, spills and shared memory.

Used by the compile tests on every shipped configuration and by tuning to prune configurations before they are timed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes one program may use, by compute capability


class KernelTooLarge(RuntimeError):
    """A compiled kernel uses local memory, as where registers spill, or needs more shared memory than the architecture has."""


class CompileReport(NamedTuple):
    """What one compiled kernel needs: registers per thread, the rest in bytes (stack and spills per thread)."""

    arch: int
    registers: int
    stack: int
    spills: int
    shared: int


def compile_kernel(
    fn: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    arch: int,
    num_warps: int = 4,
    num_stages: int = 2,
    *,
    strict: bool = True,
) -> CompileReport:
    """Compile the ``@triton.jit`` function ``fn`` ahead of time for ``sm_<arch>``.

    ``signature`` maps every argument that is no constexpr to its type (``"*fp16"``, ``"i32"``, ``"fp32"``);
    ``constexprs`` maps the others to their value, ``None`` for a pointer that is not passed. Pointers are taken as
    16-byte aligned, and integers written ``"i32:16"`` or ``"i64:16"`` as multiples of 16, as the launcher would.
    With ``strict``, raises ``KernelTooLarge`` on a stack frame, which lies in local memory and is where registers spill to, or
    on shared memory over the architecture's limit.
    """
    kernel = compile_binary(fn, signature, constexprs, arch, num_warps, num_stages)
    registers, stack = _resource_usage(kernel.asm["cubin"])
    spills = _spill_bytes(kernel.asm["ptx"], arch) if stack else 0  # spills live in the stack frame: no frame, no spill
    report = CompileReport(arch, registers, stack, spills, kernel.metadata.shared)
    if strict and (stack or report.shared > SHARED_LIMIT[arch]):
        options = {"num_warps": num_warps, "num_stages": num_stages}
        raise KernelTooLarge(
            f"{fn.__name__} for sm_{arch} with {constexprs}, {options}: {stack} bytes of stack and {spills} of "
            f"register spills, {report.shared} of shared memory (limit {SHARED_LIMIT[arch]}); use smaller blocks or more warps"
        )
    return report


def compile_binary(
    fn: Any, signature: dict[str, str], constexprs: dict[str, Any], arch: int, num_warps: int = 4, num_stages: int = 2
) -> Any:
    """Triton's compiled kernel for the arguments of `compile_kernel`: ``asm["cubin"]``, ``asm["ptx"]``, ``metadata``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(fn, triton.runtime.JITFunction):
        raise TypeError(f"{fn} is no JITFunction: kernels compile only in a process without TRITON_INTERPRET=1")
    missing = set(fn.arg_names) - set(signature) - set(constexprs)
    unknown = (set(signature) | set(constexprs)) - set(fn.arg_names)
    if missing or unknown:
        raise TypeError(f"{fn.__name__}: no type for {sorted(missing)}, unknown arguments {sorted(unknown)}")
    types, attrs = {}, {}
    lists_constants = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    for index, name in enumerate(fn.arg_names):
        kind, _, aligned = ("constexpr" if name in constexprs else signature[name]).partition(":")
        types[name] = kind
        if kind.startswith("*") or aligned:
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif lists_constants if kind == "constexpr" else kind[0] == "i" and not fn.params[index].do_not_specialize:
            attrs[(index,)] = []  # as a launch has it: then Triton's cache serves the launch too
    source = ASTSource(fn, types, {(fn.arg_names.index(name),): value for name, value in constexprs.items()}, attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, read by cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = _run(_tools("cuobjdump")[0], "-res-usage", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no register count: {text}")
    return int(found[1]), int(found[2])


def _spill_bytes(ptx: str, arch: int) -> int:
    """Bytes of register spill stores and loads, read from ptxas -v."""
    target = re.search(r"\.target (sm_\w+)", ptx)[1]  # sm_90a, not sm_90, where Triton uses its instructions
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        for ptxas in _tools("ptxas_blackwell", "ptxas"):  # the older of the bundled two may reject the PTX version
            try:
                text = _run(ptxas, "-v", f"--gpu-name={target}", str(path), "-o", str(Path(folder, "kernel.cubin")))
            except RuntimeError as error:
                errors.append(str(error))
                continue
            stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text).groups()
            return int(stores) + int(loads)
    raise RuntimeError("no ptxas could read the kernel: " + "; ".join(errors))


def _tools(*names: str) -> list[str]:
    """Paths of the CUDA tools that this Triton bundles, of those asked for."""
    from triton import knobs

    return [getattr(knobs.nvidia, name).path for name in names if hasattr(knobs.nvidia, name)]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}{done.stdout}")
    return done.stdout + done.stderr
