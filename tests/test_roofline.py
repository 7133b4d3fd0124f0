"""Counts of benchmarks/roofline.py: against the tensors a kernel is given, PyTorch's operation counter and published sizes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bench_kv_compaction, bench_kv_injection, bench_router_scoring, bench_tree_attention, roofline, shapes
from benchmarks.harness import Case
from benchmarks.random_model import random_dflash, random_eagle3, random_target
from tests.tiny import dflash, eagle3, hf_model
from whiflash_triton import ops
from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.checkpoint_schema import dflash_shapes, eagle3_shapes
from whiflash_triton.checkpoints import TargetShape, load_dflash, load_eagle3
from whiflash_triton.loading import ASSETS
from whiflash_triton.tree import chain
from whiflash_triton.weights import load_target

CPU = torch.device("cpu")
SMOL = shapes.MODELS["smollm2-135m"]


def case(module_sizes: dict[str, int]) -> Case:
    return Case("cpu", "smollm2-135m", SMOL, module_sizes, small=True)


def total(*tensors) -> int:
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def counted(call) -> tuple[object, int]:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it does not know the fused CPU kernel
        out = call()
    return out, counter.get_total_flops()


@pytest.mark.parametrize("context, tree", [(1, 1), (33, 8), (100, 64)])
def test_tree_attention(context, tree):
    small = case({"context": context, "tree": tree})
    inputs = bench_tree_attention.make(small, 0)
    out, flops = counted(lambda: ops.tree_attention(**inputs))
    cost = bench_tree_attention.cost(small)
    assert cost.bytes == total(*inputs.values(), out)
    assert cost.flops == flops


@pytest.mark.parametrize("rows, top_k, drawn", [(1, 0, False), (3, 5, True), (2, 64, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_sampling(rows, top_k, drawn, dtype):
    logits = torch.randn(rows, 307).to(dtype)
    draw = {"seed": torch.tensor([3]), "positions": torch.arange(rows)} if drawn else {}
    out = ops.block_sampling(logits, top_k, **draw)
    assert roofline.block_sampling(rows, 307, top_k, dtype.itemsize, drawn).bytes == total(logits, *draw.values(), *out)


def test_router():
    small = case({"rows": 3, "width": 33})
    inputs = bench_router_scoring.make(small, 0)
    out = ops.router_mlp(**inputs)
    cost = roofline.router_mlp(3, SMOL.target.hidden_size, 33)
    assert cost.bytes == total(*inputs.values(), *out)
    linear = bench_router_scoring.linear(inputs)
    assert cost.flops == counted(linear)[1]
    entropy = torch.rand(5)
    assert roofline.entropy_rule(5).bytes == total(entropy, ops.entropy_rule(entropy, 0.5, True))


@pytest.mark.parametrize("kept", [1, 4, 9])
def test_kv_compaction(kept):
    small = case({"context": 5, "tree": 8, "kept": kept})
    x = bench_kv_compaction.make(small, 0)
    rows = x["path"][0, :kept]
    read = total(
        x["scratch_kv"][..., rows, :], x["scratch_features"][:, :, rows], rows, x["path_len"], x["start"], x["feature_start"]
    )
    written = total(x["cache_kv"][..., 5 : 5 + kept, :], x["features"])
    assert roofline.kv_compaction(kept, *bench_kv_compaction.dims(SMOL), itemsize=4).bytes == read + written
    without = total(x["scratch_kv"][..., rows, :], rows, x["path_len"], x["start"]) + total(x["cache_kv"][..., 5 : 5 + kept, :])
    assert roofline.kv_compaction(kept, *bench_kv_compaction.dims(SMOL)[:3], itemsize=4).bytes == without


@pytest.mark.parametrize("rows", [1, 7])
def test_kv_injection(rows):
    x = bench_kv_injection.make(case({"context": 5, "rows": rows}), 0)
    written = total(x.pop("cache_kv")[..., 5:, :])
    assert roofline.kv_injection(rows, *bench_kv_injection.dims(SMOL), itemsize=4).bytes == total(*x.values()) + written
    del x["k_norm"]
    plain = roofline.kv_injection(rows, *bench_kv_injection.dims(SMOL), itemsize=4, normed=False)
    assert plain.bytes == total(*x.values()) + written


@pytest.mark.parametrize("budget", [1, 8, 63, 64, 200])
def test_trees(budget):
    ranked = torch.randn(6, 100).log_softmax(-1).topk(budget if budget <= 100 else 100)
    anchor = torch.tensor([3])
    nodes = ops.tree_build(ranked.values, ranked.indices, anchor, budget)
    taken = budget * (ranked.values.element_size() + ranked.indices.element_size())  # of each node its probability and its id
    assert roofline.tree_build(budget).bytes == total(*nodes, anchor) + taken
    inputs = (nodes.tokens, nodes.parents[None], nodes.tokens)
    assert roofline.tree_walk(budget + 1).bytes == total(*inputs, *ops.tree_walk(*inputs))


PUBLISHED = {"qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "llama-3.1-8b": 8_030_261_248, "smollm2-135m": 134_515_008}


def test_published_parameter_counts():
    assert {name: roofline.target_parameters(model.target) for name, model in shapes.MODELS.items()} == PUBLISHED
    assert roofline.dflash_parameters(shapes.MODELS["qwen3-4b"].dflash) == 537_427_200
    assert roofline.dflash_parameters(shapes.MODELS["qwen3-8b"].dflash) == 1_048_626_432


def test_shapes_of_the_shipped_drafters():
    """Dimensions are the files' own; rope and taps included."""
    folder = ASSETS / "smollm2-135m"
    t = SMOL.target
    fits = TargetShape(t.num_layers, t.hidden_size, t.vocab_size)
    for got, (want, _) in (
        (SMOL.dflash, load_dflash(folder / "dflash", target=fits)),
        (SMOL.eagle3, load_eagle3(folder / "eagle3", target=fits)),
    ):
        assert got == want


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_target_parameters(family, tied):
    model = hf_model(family, torch.float32, tie_word_embeddings=tied)
    target, _ = load_target(model, CPU, torch.float32)
    assert roofline.target_parameters(target.config) == model.num_parameters()


def test_drafter_parameters():
    target, _ = load_target(hf_model("llama", torch.float32), CPU, torch.float32)
    for (config, tensors), count in ((dflash(target), roofline.dflash_parameters), (eagle3(target), roofline.eagle3_parameters)):
        assert count(config) == sum(x.numel() for name, x in tensors.items() if name != "draft_ids")
    for model in shapes.MODELS.values():
        sizes = [torch.Size(shape).numel() for shape in dflash_shapes(model.dflash).values()]
        assert roofline.dflash_parameters(model.dflash) == sum(sizes)
        sizes = [torch.Size(shape).numel() for shape in eagle3_shapes(model.eagle3).values()]
        assert roofline.eagle3_parameters(model.eagle3) == sum(sizes)


@pytest.mark.parametrize("rows", [1, 9])
def test_verification(rows):
    """Weights and cache of a built target, operations of a real forward; rotation and norms are no matrix products."""
    t, context = shapes.REHEARSAL.target, 20
    target = random_target(t, CPU, torch.float32)
    cache = target.new_cache(context, rows, scratch=False)
    with torch.no_grad():
        target.prefill(torch.arange(context)[None], cache)
        tree = chain(torch.arange(rows)[None])
        _, flops = counted(lambda: target.logits(target.forward(tree, cache)[0]))
    cost = roofline.verification(t, rows, context, itemsize=4)
    assert cost.flops == flops
    norms = [x for la in target.layers for x in (la.input_norm, la.post_norm, la.q_norm, la.k_norm)] + [target.norm]
    embedded = 4 * rows * t.hidden_size
    assert cost.bytes == target.weight_bytes() + total(*norms) + embedded + cache.kv.nbytes


@pytest.mark.parametrize("pending", [1, 6])
def test_drafts(pending):
    """Operations of real drafts on 20 committed rows, `pending` of them ingested in the same call."""
    model, context = shapes.REHEARSAL, 20
    target = random_target(model.target, CPU, torch.float64)  # float32 would be packed, which the counter does not see
    anchor, tokens = torch.tensor([[1]]), torch.arange(context)[None]
    features = torch.randn(3, 1, context, model.target.hidden_size, dtype=torch.float64)
    for build, arm in ((random_dflash, "dflash:5"), (random_eagle3, "eagle3:3")):
        drafter, arm = build(model, target, 64), parse_arm(arm)
        drafter.ingest(features[:, :, : context - pending], tokens[:, : context - pending])
        with torch.no_grad():
            drafter.draft(anchor, arm, arm.size)
            drafter.ingest(features[:, :, context - pending :], tokens[:, context - pending :])
            _, flops = counted(lambda drafter=drafter, arm=arm: drafter.draft(anchor, arm, arm.size))
        assert drafter.pending == 0
        cost = roofline.draft(model, arm, context, pending, itemsize=8)
        if arm.kind == "eagle3":  # catch-up also makes K and V of the newest row, which the first step makes again
            e = model.eagle3
            flops -= 2 * 2 * e.num_kv_heads * e.head_dim * 2 * e.hidden_size
        assert cost.flops == flops


def test_rounds_add_up():
    model = shapes.MODELS["qwen3-4b"]
    h200 = roofline.Peaks(4.3e12, 780e12)
    phases = roofline.round_costs(model, parse_arm("dflash:15"), 0)
    assert phases["verify"].seconds(h200) * 1e3 == pytest.approx(1.87, abs=0.01)
    assert phases["draft"].seconds(h200) * 1e3 == pytest.approx(0.431, abs=0.001)
    assert roofline.eagle3_step(model.eagle3, 1, 0).seconds(h200) * 1e3 == pytest.approx(0.092, abs=0.001)
    costs = {text: roofline.draft(model, parse_arm(text), 500, 3) for text in ("ddtree:64", "eagle3-tree:32:4:5", "mixed:32:4:5")}
    ddtree, tree, mixed = (cost.bytes for cost in costs.values())
    assert mixed == ddtree + tree and roofline.draft(model, Arm("ar"), 500) == roofline.NOTHING
    assert roofline.draft(model, parse_arm("lookup:5"), 500) == roofline.NOTHING


def test_floor_is_the_largest_of_its_parts():
    peaks = roofline.Peaks(bandwidth=100.0, matmul=1000.0, launch=0.5)
    assert roofline.Cost(200, 0).seconds(peaks) == 2
    assert roofline.Cost(200, 5000).seconds(peaks) == 5
    assert roofline.Cost(200, 5000, 12).seconds(peaks) == 6
    assert roofline.Cost(1, 2, 3) + roofline.Cost(10, 20, 30) == roofline.Cost(11, 22, 33)


def test_measured_rates_are_of_a_machine():
    """No timing is asserted: only that both are finite and counted in the units they claim."""
    peaks = roofline.measured_peaks("cpu")
    assert 1e7 < peaks.bandwidth < 1e13 and 1e7 < peaks.matmul < 1e15 and peaks.launch == 0
