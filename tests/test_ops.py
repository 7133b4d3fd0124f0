"""The ops: what they route to, and that torch.library accepts their registration."""

import os
import subprocess
import sys

import pytest
import torch

from whiflash_triton import ops


def arguments() -> dict[str, tuple[tuple, dict]]:
    """One small call of every op; tensors that the op writes are marked by their position in WRITTEN."""
    torch.manual_seed(0)
    int32 = {"dtype": torch.int32}
    kv, scratch = torch.zeros(2, 2, 1, 2, 20, 16), torch.randn(2, 2, 1, 2, 3, 16)
    length = torch.tensor([7], **int32)
    return {
        "tree_attention": (
            (torch.randn(1, 3, 4, 16), kv[0, 0], kv[0, 1], length, scratch[0, 0], scratch[0, 1], torch.tensor([[1], [3], [5]])),
            {"scale": 0.25, "depths": torch.tensor([0, 1, 1], **int32), "window": 5, "q0": 0},
        ),
        "block_sampling": ((torch.randn(3, 50), 4), {}),
        "block_sampling seeded": (
            (torch.randn(3, 50), 4, torch.tensor([7]), torch.arange(5, 8)),
            {"temperature": 0.7},
        ),
        "entropy_rule": ((torch.rand(5), 0.5, True), {}),
        "router_mlp": ((torch.randn(2, 8), torch.randn(4, 8), torch.randn(4), torch.randn(4), torch.randn(1), 0.1), {}),
        "kv_compaction": (
            (scratch, kv, torch.tensor([[0, 2, -1]], **int32), torch.tensor([2], **int32), length)
            + (torch.randn(2, 1, 3, 8), torch.zeros(2, 1, 5, 8), torch.tensor([1], **int32)),
            {},
        ),
        "kv_injection": (
            (torch.randn(1, 3, 2, 2, 2, 16), torch.randn(2, 16), torch.randn(3, 16), torch.randn(3, 16), kv, length, 1e-6),
            {},
        ),
        "tree_walk": (
            (torch.tensor([[9, 4, 5]]), torch.tensor([[-1, 0, 0]], **int32), torch.tensor([[5, 1, 2]])),
            {},
        ),
        "tree_build": (
            (torch.randn(3, 4).sort(-1, descending=True).values, torch.arange(12).view(3, 4), torch.tensor([5]), 6),
            {},
        ),
        "ancestor_words": ((torch.tensor([-1, 0, 0, 2], **int32),), {}),
    }


WRITTEN = {"kv_compaction": (1, 6), "kv_injection": (4,)}
NAMES = list(arguments())  # an op, or an op and a word for its arguments


def op(case: str) -> str:
    return case.split()[0]


def outcome(name: str, run) -> list[torch.Tensor]:
    """What a call returns and what it wrote."""
    args, kwargs = arguments()[name]
    out = run(*args, **kwargs)
    returned = [out] if isinstance(out, torch.Tensor) else list(out or ())
    return returned + [args[index] for index in WRITTEN.get(op(name), ())]


def check_registration(name):
    args, kwargs = arguments()[name]
    torch.library.opcheck(getattr(torch.ops.whiflash, op(name)), args, kwargs)


def check_compiled(name):
    """One graph without breaks, the same result, and the tensors written in place."""
    compiled = torch.compile(getattr(ops, op(name)), backend="aot_eager", fullgraph=True)
    for got, wanted in zip(outcome(name, compiled), outcome(name, getattr(ops, op(name))), strict=True):
        assert got.equal(wanted) and got.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_registration_of_the_references(name):
    check_registration(name)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_references(name):
    check_compiled(name)


@pytest.fixture
def kernels():
    ops.force_triton(True)
    yield
    ops.force_triton(False)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_registration_of_the_kernels(kernels, name):
    check_registration(name)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_forced_kernels_equal_the_references(kernels, name):
    assert ops._implementation(op(name), torch.zeros(1)).__name__ == op(name)
    got = outcome(name, getattr(ops, op(name)))
    ops.force_triton(False)
    assert ops._implementation(op(name), torch.zeros(1)).__name__ == f"{op(name)}_torch"
    for result, wanted in zip(got, outcome(name, getattr(ops, op(name))), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_registration_on_gpu(name):
    def move(x):
        return x.cuda() if isinstance(x, torch.Tensor) else x

    args, kwargs = arguments()[name]
    args, kwargs = [move(x) for x in args], {key: move(x) for key, x in kwargs.items()}
    torch.library.opcheck(getattr(torch.ops.whiflash, op(name)), args, kwargs)


@pytest.mark.parametrize("forced", ["0", "1"])
def test_environment_forces_the_kernels(forced):
    code = "import torch; from whiflash_triton import ops; print(ops._implementation('tree_walk', torch.zeros(1)).__name__)"
    environment = os.environ | {"WHIFLASH_FORCE_TRITON": forced}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ("tree_walk" if forced == "1" else "tree_walk_torch")


def test_missing_triton_is_one_clear_line():
    code = (
        "import sys; sys.modules['triton'] = None; import torch\n"
        "from whiflash_triton import ops\n"
        "try: ops.entropy_rule(torch.zeros(1), 0.5, True)\n"
        "except ImportError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "whiflash_triton needs Triton (Linux), on a CPU too: pip install 'triton>=3.6'"
