"""The guard around interpreted launches: it catches what it must, and changes nothing for kernels that keep to their buffers."""

import ast
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests import guard_bands

KERNELS = Path(__file__).parent.parent / "kernels"


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n_read, n_written, READ_AT: tl.constexpr, WRITE_AT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + READ_AT + offs, mask=offs < n_read, other=0)
    tl.store(out_ptr + WRITE_AT + offs, x, mask=offs < n_written)


@triton.jit
def _strided_copy_kernel(x_ptr, out_ptr, n_cols, stride_x, stride_out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + rows * stride_x + cols, mask=cols < n_cols)
    tl.store(out_ptr + rows * stride_out + cols, x, mask=cols < n_cols)


@triton.jit
def _spoil_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr))
    tl.atomic_add(x_ptr, 1)  # no address check sees an atomic operation: the comparison of bytes must


def copy(read: int, written: int, read_at: int = 0, write_at: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, out = torch.arange(1, 11).to(dtype), torch.zeros(10, dtype=dtype)
    _copy_kernel[(1,)](x, out, read, written, read_at, write_at, BLOCK=16)
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int32, torch.int16])
def test_a_kernel_within_its_buffers_passes(dtype):
    assert copy(10, 10, dtype=dtype).tolist() == list(range(1, 11))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int32])
def test_one_past_the_end_is_caught(dtype):
    for wrong, said in (
        ((11, 10), "_copy_kernel reads .*x_ptr.*1 such"),
        ((10, 11), "_copy_kernel writes .*out_ptr.*1 such"),
        ((10, 10, -1), "_copy_kernel reads .*byte -.* of x_ptr"),
        ((9, 9, 0, -1), "_copy_kernel writes .*byte -.* of out_ptr"),
        ((10, 10, 10**9), "_copy_kernel reads"),
    ):
        with pytest.raises(Exception, match=said):
            copy(*wrong, dtype=dtype)


@pytest.mark.interpreter
def test_gaps_between_rows_are_guarded():
    wide, out = torch.arange(12.0).view(2, 6), torch.full((2, 6), -1.0)
    _strided_copy_kernel[(1,)](wide[:, 1:5], out[:, :4], 4, 6, 6, ROWS=2, BLOCK=8)
    assert out.tolist() == [[1, 2, 3, 4, -1, -1], [7, 8, 9, 10, -1, -1]]
    with pytest.raises(Exception, match="reads"):
        _strided_copy_kernel[(1,)](wide[:, 1:5], out, 5, 6, 6, ROWS=2, BLOCK=8)
    with pytest.raises(Exception, match="writes"):
        _strided_copy_kernel[(1,)](wide, out[:, :4], 5, 6, 6, ROWS=2, BLOCK=8)


@pytest.mark.interpreter
def test_views_of_one_storage_still_share_it():
    x = torch.arange(20.0)
    _copy_kernel[(1,)](x[:10], x[10:], 10, 10, 0, 0, BLOCK=16)
    assert x.tolist() == [*range(10), *range(10)]


@pytest.mark.interpreter
def test_inputs_that_change_are_caught(monkeypatch):
    monkeypatch.setattr(_spoil_kernel.fn, "__module__", "whiflash_triton.kernels.spoil")
    x, out = torch.tensor([5]), torch.tensor([0])
    with pytest.raises(AssertionError, match="what _spoil_kernel may write"):
        _spoil_kernel[(1,)](x, out)
    monkeypatch.setitem(guard_bands.WRITES, "_spoil_kernel", ("out_ptr",))
    with pytest.raises(AssertionError, match="_spoil_kernel changed 1 bytes"):
        _spoil_kernel[(1,)](x, out)
    monkeypatch.setitem(guard_bands.WRITES, "_spoil_kernel", ("out_ptr", "x_ptr"))
    _spoil_kernel[(1,)](x, out)
    assert (x.item(), out.item()) == (6, 5)


@pytest.mark.interpreter
def test_the_pattern_alone_shows_reads_and_writes(monkeypatch):
    monkeypatch.setattr(guard_bands.Arena, "check", lambda *_: None)
    assert copy(10, 10, read_at=1)[9].isnan()
    assert copy(10, 10, read_at=1, dtype=torch.int64)[9] > 2**60
    with pytest.raises(AssertionError, match="_copy_kernel changed"):
        copy(10, 10, write_at=1)


def test_every_kernel_declares_what_it_writes():
    for file in KERNELS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names = {argument.arg for argument in node.args.args}
                written = guard_bands.WRITES.get(node.name)
                assert written, f"{file.name}: say in {guard_bands.__name__}.WRITES what {node.name} may write"
                assert set(written) <= names, (file.name, node.name)
