"""Tree attention, kernel and reference, against a float64 check with an explicit mask that neither of them shares."""

import itertools
import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from whiflash_triton.autotune import lookup
from whiflash_triton.kernels import tree_attention as module
from whiflash_triton.kernels.tree_attention import split_count, tree_attention, tree_attention_torch

S = 700  # three splits; a multiple of no block
AXES = {
    "D": [64, 80, 96, 128, 256],
    "group": [1, 2, 3, 4, 5, 6, 7, 8],
    "N": [1, 15, 63, 64, 65, 256],
    "length": [0, 1, 345, S],
    "queries": ["many", "first", "last"],
    "mask": ["tree", "ones", "zero rows"],
    "window": [0, 9, 400],
    "dtype": [torch.float32, torch.float16],
    "heads": [1, 2],
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def pairwise(axes: dict[str, list], count: int) -> list[dict]:
    """``count`` cases that greedily cover as many pairs of values of two axes as they can."""
    draw, covered, cases = random.Random(0), set(), []
    for _ in range(count):
        tries = [{name: draw.choice(values) for name, values in axes.items()} for _ in range(200)]
        best = max(tries, key=lambda case: len(set(itertools.combinations(case.items(), 2)) - covered))
        covered |= set(itertools.combinations(best.items(), 2))
        cases.append(best)
    return cases


def name(case: dict) -> str:
    return "-".join(f"{axis}{value}".replace("torch.", "") for axis, value in case.items())


def random_tree(N: int, draw: random.Random) -> tuple[list[int], list[set[int]]]:
    """Depth of every node and the nodes it sees: its ancestors and itself."""
    depths, seen = [0], [{0}]
    for node in range(1, N):
        parent = draw.choice([node - 1, draw.randrange(node)])
        depths.append(depths[parent] + 1)
        seen.append(seen[parent] | {node})
    return depths, seen


def pack(seen: list[set[int]], N: int) -> torch.Tensor:
    """Bit words int64 [T, ceil(N/64)], bit 63 being the sign."""
    rows = [[sum(1 << j % 64 for j in keys if j // 64 == word) for word in range(-(-N // 64))] for keys in seen]
    return torch.tensor([[word - (1 << 64) if word >> 63 else word for word in row] for row in rows])


def build(D, group, N, length, queries, mask, window, dtype, device="cpu", lengths=None, heads=1):
    """Arguments of one call; NaN wherever nothing may be read: cache rows past the length, tree rows nobody sees."""
    draw = random.Random(f"{D}{group}{N}{length}{queries}{mask}{window}")
    torch.manual_seed(D * N + group)
    few, many = -(-N // 16), min(N, 48 // group)
    T, q0 = {"many": (many, 0), "first": (few, 0), "last": (few, N - few)}[queries]
    depths, seen = random_tree(N, draw)
    if mask == "ones":
        seen = [set(range(N))] * N
    if mask == "zero rows":
        seen = [set() if node % 3 == 1 or node == N - 1 else keys for node, keys in enumerate(seen)]
    seen = seen[q0 : q0 + T]
    lengths = lengths or [length]
    B = len(lengths)
    kv = torch.randn(2, 2, B, heads, S + 3, D, dtype=torch.float64)[..., :S, :]  # [layers, K and V, B, heads, rows, D]
    scratch = torch.randn(2, 2, B, heads, N, D, dtype=torch.float64)
    for b, rows in enumerate(lengths):
        kv[:, :, b, :, rows:] = float("nan")
    unseen = [key for key in range(N) if not any(key in keys for keys in seen)]
    scratch[..., unseen, :] = float("nan")
    wide = torch.randn(B, T, heads * group + 1, D + 16, dtype=torch.float64)
    kv, scratch, wide = (x.to(device, dtype) for x in (kv, scratch, wide))
    return dict(
        q=wide[:, :, 1:, :D],
        k_cache=kv[1, 0],
        v_cache=kv[1, 1],
        cache_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        k_tree=scratch[1, 0],
        v_tree=scratch[1, 1],
        words=pack(seen, N).to(device),
        scale=D**-0.5,
        depths=torch.tensor(depths, dtype=torch.int32, device=device),
        window=window,
        q0=q0,
    )


def expected(q, k_cache, v_cache, cache_len, k_tree, v_tree, words, scale, depths, window, q0):
    """float64 attention with a mask made bit by bit; what is hidden from all rows is zeroed first."""
    B, T, Hq, D = q.shape
    out = torch.zeros(B, T, Hq, D, dtype=torch.float64)
    bits = [[(row[j // 64] & (1 << 64) - 1) >> j % 64 & 1 for j in range(k_tree.shape[2])] for row in words.tolist()]
    depth = depths.cpu()
    for b, length in enumerate(cache_len.tolist()):
        visible = torch.cat((torch.ones(T, length), torch.tensor(bits)), 1).bool()
        if window:
            positions = torch.cat((torch.arange(length), length + depth))
            behind = length + depth[q0 : q0 + T, None] - positions
            visible &= (behind >= 0) & (behind < window)
        k, v = (
            torch.cat((cache[b, :, :length], tree[b]), 1).double().cpu().nan_to_num(0).repeat_interleave(Hq // cache.shape[1], 0)
            for cache, tree in ((k_cache, k_tree), (v_cache, v_tree))
        )
        some = visible.any(1)
        if some.any():
            out[b, some] = scaled_dot_product_attention(
                q[b, some].double().cpu().transpose(0, 1), k, v, attn_mask=visible[some], scale=scale
            ).transpose(0, 1)
    return out


def close(out, inputs):
    wanted = expected(**inputs)
    assert out.shape == wanted.shape and out.dtype == inputs["q"].dtype and out.is_contiguous()
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


CASES = pairwise(AXES, 38)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_reference(case):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        inputs = build(**case | {"dtype": dtype})
        close(tree_attention_torch(**inputs), inputs)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES, ids=name)
def test_kernel(case):
    inputs = build(**case)
    close(tree_attention(**inputs), inputs)


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("D", AXES["D"])
@pytest.mark.parametrize("group", AXES["group"])
def test_kernel_full_product(D, group):
    rest = {axis: AXES[axis] for axis in ("N", "length", "mask", "window")}
    for values in itertools.product(*rest.values()):
        case = dict(zip(rest, values, strict=True))
        inputs = build(D=D, group=group, **case, queries="last", dtype=torch.float32)
        close(tree_attention(**inputs), inputs)


BATCH = dict(D=64, group=3, N=5, length=0, queries="many", mask="tree", window=0, lengths=[530, 2], heads=2)


def test_reference_batch_of_two_lengths():
    inputs = build(**BATCH, dtype=torch.float32)
    close(tree_attention_torch(**inputs), inputs)


@pytest.mark.interpreter
def test_kernel_batch_of_two_lengths():
    inputs = build(**BATCH, dtype=torch.float32)
    close(tree_attention(**inputs), inputs)


def broken_row_reaches_only_its_viewers(attention):
    """Node 2 is a sibling of node 1: a NaN or infinity in its rows must not touch nodes 0 and 1."""
    words = pack([{0}, {0, 1}, {0, 2}, {0, 2, 3}], 4)
    for place, value in itertools.product(("k_tree", "v_tree"), (float("nan"), float("inf"))):
        inputs = build(64, 2, 4, 20, "many", "tree", 0, torch.float32) | {"words": words}
        inputs["k_tree"], inputs["v_tree"] = torch.randn(2, 1, 1, 4, 64)
        clean = attention(**inputs)
        inputs[place][:, :, 2, 7] = value
        out = attention(**inputs)
        torch.testing.assert_close(out[:, :2], clean[:, :2], rtol=1e-5, atol=1e-6)
        if place == "v_tree" or value != value:  # an infinite key is a weight of one or none
            assert out[:, 2:].isnan().all()


def test_reference_broken_row_reaches_only_its_viewers():
    broken_row_reaches_only_its_viewers(tree_attention_torch)


@pytest.mark.interpreter
def test_kernel_broken_row_reaches_only_its_viewers():
    broken_row_reaches_only_its_viewers(tree_attention)


@pytest.mark.parametrize("length", [0, 11, 40])
def test_reference_tree_in_the_tail_of_the_cache(length, monkeypatch):
    """The view that saves the copy gives the same bits as rows kept apart."""
    kv = torch.randn(1, 2, 1, 3, 45, 64)
    q, words = torch.randn(1, 5, 9, 64), pack(random_tree(5, random.Random(1))[1], 5)
    k, v = kv[0]
    tail = slice(length, length + 5)
    arguments = (q, k, v, torch.tensor([length], dtype=torch.int32))
    apart = tree_attention_torch(*arguments, k[:, :, tail].clone(), v[:, :, tail].clone(), words, scale=0.125)
    monkeypatch.setattr(torch, "cat", _no_copy_of_keys(torch.cat))
    assert tree_attention_torch(*arguments, k[:, :, tail], v[:, :, tail], words, scale=0.125).equal(apart)


def _no_copy_of_keys(cat):
    def checked(tensors, dim=0):
        assert all(x.dtype == torch.bool for x in tensors), "keys were copied"
        return cat(tensors, dim)

    return checked


@pytest.mark.parametrize(
    "change",
    [
        dict(window=4, depths=None),
        dict(words=torch.zeros(3, 1, dtype=torch.int64)),
        dict(cache_len=torch.zeros(1, dtype=torch.int64)),
        dict(q0=1),
        dict(depths=torch.zeros(3, dtype=torch.int32)),
        dict(k_tree=torch.zeros(1, 1, 64, 4).mT),
        dict(q=torch.zeros(1, 4, 3, 64), heads=2),
        dict(v_cache=torch.zeros(1, 1, S, 64, dtype=torch.float16)),
    ],
    ids=lambda change: "-".join(change),
)
def test_wrong_arguments_are_refused(change):
    inputs = build(64, 2, 4, 20, "many", "tree", 0, torch.float32, heads=change.pop("heads", 1)) | change
    for attention in (tree_attention, tree_attention_torch):
        with pytest.raises(AssertionError):
            attention(**inputs)


def test_split_count_depends_on_shapes_alone():
    assert [split_count(8, keys) for keys in (0, 255, 256, 700, 1024, 4096, 131072)] == [1, 1, 1, 3, 3, 15, 31]
    assert [split_count(programs, 131072) for programs in (1, 8, 16, 64, 400)] == [31, 31, 15, 3, 1]


@pytest.mark.parametrize(("D", "rows", "block"), [(64, 512, 64), (128, 64, 64), (256, 16, 16), (256, 512, 32)])
def test_launch_options_never_come_from_another_head_width(D, rows, block):
    for dtype in ("fp16", "bf16"):
        options = lookup.pick("tree_attention", D=D, M=rows, dtype=dtype)
        assert options in [row.config for row in lookup.shipped("tree_attention") if row.key["D"] == D]
        assert torch.cuda.is_available() or options["BLOCK_M"] == block


STRIDES = [argument for argument in module._tree_attention_split_kernel.arg_names if argument.startswith("stride_")]


def compile_split(compiles, arch, D, options, dtype, windowed=False):
    options, BLOCK_D = dict(options), max(16, 1 << (D - 1).bit_length())
    launch = {"num_warps": options.pop("num_warps"), "num_stages": options.pop("num_stages")}
    types = {f"{x}_ptr": f"*{dtype}" for x in ("q", "k", "v", "k_tree", "v_tree")}
    types |= {"len_ptr": "*i32", "words_ptr": "*i64", "part_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32"}
    types |= {stride: "i32:16" for stride in STRIDES} | {x: "i32" for x in ("stride_wt", "T", "N", "q0", "window")}
    constexprs = dict(HEADS=8, GROUP=4, D=D, BLOCK_D=BLOCK_D, SPLITS=15, WINDOWED=windowed, **options)
    (types if windowed else constexprs)["depths_ptr"] = "*i32" if windowed else None
    compiles(module._tree_attention_split_kernel, types, constexprs, arch, dtype=dtype, **launch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("row", list(lookup.shipped("tree_attention")), ids=lambda row: f"{row.device}-{row.key}")
def test_every_shipped_configuration_compiles(compiles, row, arch):
    if row.arch not in (None, arch):
        pytest.skip(f"tuned for sm_{row.arch}")
    compile_split(compiles, arch, row.key["D"], row.config, row.key["dtype"])


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("D", "windowed"), [(80, False), (128, True), (256, True)])
def test_padded_and_windowed_kernels_compile(compiles, arch, D, windowed):
    compile_split(compiles, arch, D, lookup.pick("tree_attention", D=128 if D == 80 else D, M=64, dtype="bf16"), "bf16", windowed)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("D", [64, 256])
def test_merge_compiles(compiles, arch, D):
    types = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16", "T": "i32"}
    constexprs = dict(HEADS=8, GROUP=4, D=D, BLOCK_D=D, PARTS=32)
    compiles(module._tree_attention_merge_kernel, types, constexprs, arch, dtype="bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_gpu(dtype):
    for case in CASES:
        inputs = build(**case | {"dtype": dtype}, device="cuda")
        close(tree_attention(**inputs), inputs)


@pytest.mark.gpu
def test_graph_replay_follows_the_cache_length():
    inputs = build(128, 4, 16, S, "many", "tree", 0, torch.bfloat16, device="cuda")
    tree_attention(**inputs)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(**inputs)
    for length in (0, 1, 345, S):
        inputs["cache_len"].fill_(length)
        graph.replay()
        close(out, inputs)
