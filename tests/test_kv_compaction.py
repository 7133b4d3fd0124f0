"""KV compaction, kernel and reference, bit for bit against a loop over rows; whole buffers are compared, guards too."""

import itertools

import pytest
import torch

from whiflash_triton.autotune import lookup
from whiflash_triton.kernels import kv_compaction as module
from whiflash_triton.kernels.kv_compaction import kv_compaction, kv_compaction_torch

BITS = {2: torch.int16, 4: torch.int32}
GUARD = 3  # rows behind every destination that must stay as they are
S, R = 20, 24  # rows of the cache and of the features
PATHS = {  # path over N scratch rows
    "none": lambda n: [],
    "root": lambda n: [0],
    "prefix": lambda n: list(range(max(1, n // 2))),
    "full": lambda n: list(range(n)),
    "branch": lambda n: list(range(0, n, 2)) + ([n - 1] if n % 2 == 0 else []),
    "bad": lambda n: [0, -1, n, n - 1, 2**31 - 1, -(2**31)][: n + 2],  # entries that name no row move nothing
}
# layers, heads, head_dim, scratch rows, path, start, features, width
CASES = [
    (1, 1, 64, 1, "root", 0, 0, 0),
    (3, 2, 64, 8, "branch", 0, 2, 100),
    (2, 3, 128, 5, "full", 7, 0, 0),
    (1, 8, 128, 17, "prefix", 12, 1, 1030),
    (2, 1, 80, 8, "full", 12, 3, 64),  # ends at the last row
    (2, 1, 80, 8, "full", 13, 3, 64),  # one past the end
    (3, 2, 96, 3, "branch", 19, 1, 1),
    (3, 2, 96, 3, "branch", 20, 1, 1),  # nothing fits
    (1, 4, 256, 4, "bad", 5, 2, 63),
    (5, 3, 256, 2, "none", 3, 2, 576),
    (7, 5, 64, 6, "bad", 17, 0, 0),
    (30, 3, 64, 4, "branch", 9, 5, 576),
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """Any bits at all, NaNs with every payload among them."""
    bits = BITS[torch.empty((), dtype=dtype).element_size()]
    limits = torch.iinfo(bits)
    values = torch.randint(limits.min, limits.max + 1, shape, generator=draw)
    if len(shape) > 2:
        values[..., 0] = 0x7C01 if bits is torch.int16 else 0x7F800001  # signalling NaNs
    return values.to(bits).view(dtype)


def make(layers, heads, dim, rows, path, start, features, width, dtype, device="cpu") -> tuple[list, list]:
    """Arguments for a batch of two, and the buffers that the destinations are views of."""
    draw = torch.Generator().manual_seed(dim + rows)
    scratch = random_bits((layers, 2, 2, rows, heads, dim), dtype, draw).to(device).transpose(3, 4)
    kv_buffer = random_bits((layers, 2, 2, heads, S + GUARD, dim), dtype, draw).to(device)
    taken = PATHS[path](rows)
    slots = max(len(taken), rows) + 1
    paths = [taken + [-1] * (slots - len(taken)), [rows - 1] + [0] * (slots - 1)]  # the second has length 1
    args = [scratch, kv_buffer[..., :S, :], torch.tensor(paths, dtype=torch.int32, device=device)]
    args += [torch.tensor(x, dtype=torch.int32, device=device) for x in ([len(taken), 1], [start, 2])]
    buffers = [kv_buffer]
    if features:
        args.append(random_bits((features, 2, rows, width), dtype, draw).to(device))
        buffers.append(random_bits((features, 2, R + GUARD, width), dtype, draw).to(device))
        args += [buffers[1][:, :, :R], torch.tensor([start + 2, 0], dtype=torch.int32, device=device)]
    return args, buffers


def expected_buffers(args: list, buffers: list) -> list[torch.Tensor]:
    scratch, _, path, path_len, start, *rest = (x.cpu() for x in args)
    moves = [(scratch.permute(2, 4, 0, 1, 3, 5), buffers[0].cpu().clone(), (2, 4), S, start)]
    if rest:
        moves.append((rest[0].permute(1, 2, 0, 3), buffers[1].cpu().clone(), (1, 2), R, rest[2]))
    for source, target, (batch_dim, row_dim), end, begin in moves:
        for b in range(2):
            for j, row in enumerate(path[b, : path_len[b]].tolist()):
                if 0 <= row < source.shape[1] and begin[b] + j < end:
                    target.select(batch_dim, b).select(row_dim - 1, int(begin[b]) + j).copy_(source[b, row])
    return [target for _, target, *_ in moves]


def check(fn, args: list, buffers: list) -> None:
    wanted = expected_buffers(args, buffers)
    sources = [args[0], *args[5:6]]
    before = [x.clone() for x in sources]
    assert fn(*args) is None
    for mine, correct in zip(buffers + sources, wanted + before, strict=True):
        bits = BITS[mine.element_size()]
        assert torch.equal(mine.cpu().view(bits), correct.cpu().view(bits))


def check_different_dtypes(fn, device: str = "cpu") -> None:
    """Features may have another dtype than KV."""
    args, buffers = make(2, 2, 64, 5, "branch", 3, 0, 0, torch.float16, device)
    other, more = make(2, 2, 64, 5, "branch", 3, 2, 70, torch.float32, device)
    check(fn, args + other[5:], buffers + more[1:])


def test_rejections():
    args, _ = make(1, 1, 64, 3, "full", 0, 1, 8, torch.float32)
    for fn in (kv_compaction, kv_compaction_torch):
        with pytest.raises(AssertionError, match="share storage"):
            fn(args[1][..., 5:8, :], *args[1:5])
        with pytest.raises(AssertionError, match="share storage"):
            fn(*args[:5], args[6][:, :, :3], *args[6:])
        with pytest.raises(AssertionError, match="int32"):
            fn(*args[:3], args[3].long(), args[4])
        with pytest.raises(AssertionError, match="together"):
            fn(*args[:5], None, args[6], args[7])
        with pytest.raises(AssertionError, match="layers"):
            fn(args[0][0], *args[1:5])
        with pytest.raises(AssertionError, match="one dtype"):
            fn(args[0].half(), *args[1:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case, dtype):
    check(kv_compaction_torch, *make(*case, dtype))


def test_reference_with_different_dtypes():
    check_different_dtypes(kv_compaction_torch)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case, dtype):
    check(kv_compaction, *make(*case, dtype))


@pytest.mark.interpreter
def test_kernel_with_different_dtypes():
    check_different_dtypes(kv_compaction)


@pytest.mark.interpreter
def test_kernel_with_nothing_to_move():
    args, buffers = make(1, 1, 64, 3, "full", 0, 0, 0, torch.float32)
    before = buffers[0].clone()
    kv_compaction(*args[:2], args[2][:, :0], args[3], args[4])
    assert torch.equal(buffers[0].view(torch.int32), before.view(torch.int32))


PRODUCT = list(itertools.product([1, 5], [1, 2, 3, 8], [64, 80, 96, 128, 256], [1, 2, 9], PATHS, [0, 15, 20], [0, 2], [100]))


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_full_product(dtype):
    for case in PRODUCT:
        check(kv_compaction, *make(*case, dtype))


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])  # moved as integers of 2 (fp16, bf16) and 4 bytes
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("entry", list(lookup.shipped("kv_compaction")), ids=lambda entry: f"{entry.device}-{entry.key}")
def test_compiles(compiles, entry, arch, dtype):
    if entry.arch not in (None, arch):
        pytest.skip(f"meant for sm_{entry.arch}")
    bits = {"fp16": "*i16", "fp32": "*i32"}[dtype]
    signature = {name: bits for name in ("scratch_ptr", "cache_ptr", "scratch_features_ptr", "features_ptr")}
    signature |= {name: "*i32" for name in ("path_ptr", "path_len_ptr", "start_ptr", "feature_start_ptr")}
    signature |= {f"stride_{x}{axis}": "i32:16" for x in "sc" for axis in "lkbhn"}
    signature |= {f"stride_{x}{axis}": "i32:16" for x in "xy" for axis in "fbn"}
    signature |= {name: "i32:16" for name in ("n_cache", "n_features", "dim", "width")}
    signature |= {name: "i32" for name in ("stride_path", "n_scratch", "n_kv", "heads", "kv_tiles", "tiles_per_feature")}
    config = dict(entry.config)
    constants = {"HAS_FEATURES": True, "BLOCK_D": entry.key["D"], **config}
    compiles(module._kv_compaction_kernel, signature, constants, arch, dtype=dtype, num_warps=constants.pop("num_warps"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_gpu(dtype):
    check_different_dtypes(kv_compaction, "cuda")
    for case in CASES + PRODUCT:
        check(kv_compaction, *make(*case, dtype, "cuda"))


@pytest.mark.gpu
def test_graph_replay_follows_the_lengths():
    args, buffers = make(30, 3, 64, 8, "full", 0, 2, 576, torch.bfloat16, "cuda")
    kv_compaction(*args)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_compaction(*args)
    for length, start in ((0, 0), (3, 5), (8, 11), (8, 15), (1, 20)):
        args[3].fill_(length)
        args[4].fill_(start)
        args[7].fill_(start)
        check(lambda *_: graph.replay(), args, buffers)
