"""The tuner's space: true launches recorded without a GPU, pruning, the cost model, and what the commands print."""

import re
from unittest.mock import patch

import pytest
import torch
import triton

from benchmarks import roofline, shapes
from whiflash_triton.autotune import compile_report, generate, launches, lookup
from whiflash_triton.autotune.cases import KEPT, KERNELS, MODELS, ROUTER_WIDTH, all_cases, build
from whiflash_triton.autotune.compile_report import CompileReport
from whiflash_triton.autotune.cost_model import LAUNCH, MACHINES, assumed, predicted, resident, verdict
from whiflash_triton.autotune.spaces import configurations, work

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def buckets():
    return generate.find_buckets(KERNELS)


def test_models_are_those_of_the_benchmarks():
    for name, model in MODELS.items():
        theirs = shapes.MODELS[name]
        t, d, e = theirs.target, theirs.dflash, theirs.eagle3
        sizes = (t.num_layers, t.hidden_size, t.num_heads, t.num_kv_heads, t.head_dim, t.vocab_size)
        assert model == (*sizes, d.num_layers, e.draft_vocab_size, len({*d.taps, *e.taps}))


def test_every_kernel_and_shape_has_a_bucket(buckets):
    assert {bucket.kernel for bucket in buckets} == set(KERNELS)
    assert sum(len(bucket.cases) for bucket in buckets) == len(list(all_cases()))
    assert len({(bucket.kernel, bucket.text) for bucket in buckets}) == len(buckets)
    attention = {bucket.text for bucket in buckets if bucket.kernel == "tree_attention" and bucket.key["dtype"] == "bf16"}
    assert attention == {f"D={D},M={M},dtype=bf16" for D in (64, 128) for M in (16, 32, 64, 256, 1024)}


def test_configurations_reach_the_launch(buckets):
    """Every name of a configuration is a constexpr or an option of the launch, or one that the wrapper turns into those."""
    for bucket in buckets:
        configs = configurations(bucket.kernel, bucket.key)
        assert configs and len({str(config) for config in configs}) == len(configs)
        assert set(configs[0]) >= set(lookup.find(bucket.kernel, bucket.key, "default"))
        for config in (configs[0], configs[-1]):
            recording = launches.record(build(bucket.cases[0], CPU).run, config)
            assert (recording.kernel, recording.key) == (bucket.kernel, bucket.key)
            first = recording.launches[0]
            reached = dict(first.constexprs) | {"num_warps": first.num_warps, "num_stages": first.num_stages}
            for name in config.keys() - {"BLOCK", "MERGE_WARPS"}:
                assert reached[name] == config[name]
            if bucket.kernel == "block_sampling":
                assert 2 ** reached["LOG_BLOCK"] >= config["BLOCK"]
                assert recording.launches[1].num_warps == config["MERGE_WARPS"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_types_are_those_of_a_launch(kernel, monkeypatch):
    """Source and options hash as Triton's own launch path hashes them: what is pruned is what would run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    try:
        from triton.runtime.jit import create_function_from_signature
    except ImportError:
        pytest.skip("this Triton builds launch signatures elsewhere")
    backend, theirs, ours = make_backend(GPUTarget("cuda", 90, 32)), [], []
    translate = launches._launch

    def both(fn, args, kwargs):
        options = kwargs | {"debug": False}
        bound, specialization, rest = create_function_from_signature(fn.signature, fn.params, backend)(*args, **options)
        parsed, *source = fn._pack_args(backend, options, bound, specialization, rest)
        theirs.append((ASTSource(fn, *source).hash(), parsed.hash()))
        return translate(fn, args, kwargs)

    class Compiled(Exception):
        pass

    def compile(source, target, options):
        ours.append((source.hash(), backend.parse_options(options).hash()))
        raise Compiled

    monkeypatch.setattr(launches, "_launch", both)
    monkeypatch.setattr(triton, "compile", compile)
    for case in all_cases():
        if case.kernel == kernel:
            for launch in launches.record(build(case, CPU).run).launches:
                with pytest.raises(Compiled):
                    launches.compile_launch(launch, 90)
    assert ours == theirs and ours


def test_recording_launches_nothing_and_restores():
    case = next(case for case in all_cases() if case.kernel == "tree_walk")
    with patch.object(compile_report, "compile_binary", side_effect=AssertionError("compiled")):
        recording = launches.record(build(case, CPU).run, {"num_warps": 2})
    assert [launch.name for launch in recording.launches] == ["_tree_walk_kernel"] and recording.launches[0].num_warps == 2
    assert lookup.pick("tree_walk", N=64) == lookup.find("tree_walk", {"N": 64}, "default")


@pytest.mark.parametrize(
    "report, warps, programs, reason",
    [
        (CompileReport(90, 128, 0, 0, 0), 4, 4, ""),  # 65536 registers / (128 * 128)
        (CompileReport(90, 129, 0, 0, 0), 4, 3, ""),  # registers go out in units of 256 a warp
        (CompileReport(90, 128, 0, 0, 71680), 4, 3, ""),  # 228 KiB, 1 KiB of each program reserved
        (CompileReport(80, 128, 0, 0, 71680), 4, 2, ""),
        (CompileReport(90, 32, 0, 0, 0), 8, 8, ""),  # 64 warps
        (CompileReport(90, 16, 0, 0, 0), 1, 32, ""),  # 32 programs
        (CompileReport(100, 255, 0, 0, 232448), 4, 1, ""),
        (CompileReport(100, 255, 0, 0, 232449), 4, 0, "shared memory 232449 of 232448"),
        (CompileReport(80, 255, 0, 0, 166912), 2, 1, "occupancy: 255 registers and 166912 bytes leave an SM 2 warps"),
        (CompileReport(90, 168, 0, 0, 0), 16, 0, "occupancy.*0 warps"),
        (CompileReport(90, 255, 8, 4, 0), 4, 2, "local memory: 8 bytes of stack, 4 of spills"),
    ],
)
def test_pruning(report, warps, programs, reason):
    assert resident(report, warps) == programs
    said = verdict(report, warps)
    assert re.match(reason, said) if reason else not said


def floor(case) -> roofline.Cost:
    m, sizes = case.model, case.sizes
    nodes, rows, item = sizes.get("nodes", 0), sizes.get("rows", 0), 4 if case.dtype == "fp32" else 2
    if case.kernel == "tree_attention":
        return roofline.tree_attention(nodes, nodes, rows * 3 // 4, m.heads, m.kv_heads, m.head_dim, item)
    if case.kernel == "block_sampling":
        vocab = m.draft_vocab if sizes["top_k"] == 4 else m.vocab
        return roofline.block_sampling(rows, vocab, sizes["top_k"], item)
    if case.kernel == "router_scoring":
        return roofline.router_mlp(1, m.hidden, ROUTER_WIDTH)
    if case.kernel == "kv_compaction":
        return roofline.kv_compaction(KEPT, m.layers, m.kv_heads, m.head_dim, m.features, m.hidden)
    if case.kernel == "kv_injection":
        return roofline.kv_injection(rows, m.draft_layers, m.kv_heads, m.head_dim)
    return roofline.Cost(0, 0)


def test_the_cost_model_never_beats_the_roofline(buckets):
    """Neither in bytes nor in time, whatever a kernel compiles to."""
    for bucket in buckets:
        for case in bucket.cases:
            cost = floor(case)
            for config in configurations(bucket.kernel, bucket.key):
                assert work(case, config).traffic >= 0.9 * cost.bytes  # norms, tables and scalars are left out
                for arch, machine in MACHINES.items():
                    for registers, shared in ((32, 0), (255, 150000)):
                        microseconds = predicted(case, config, CompileReport(arch, registers, 0, 0, shared))
                        assert 1e6 * (LAUNCH + 0.8 * 0.9 * cost.bytes / machine.bandwidth) <= microseconds < 5e4


def test_the_cost_model_orders_what_is_known(buckets):
    """More bytes and less occupancy never make a kernel faster; a tile that pads rows costs more than one that fits."""
    by_text = {bucket.text: bucket for bucket in buckets if bucket.kernel == "tree_attention"}
    short, long = by_text["D=128,M=16,dtype=bf16"].cases
    tall = by_text["D=128,M=1024,dtype=bf16"].cases[0]
    config = {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    for arch in MACHINES:
        crowded = CompileReport(arch, 255, 0, 0, 150000)
        assert predicted(short, config, assumed(arch)) < predicted(long, config, assumed(arch))
        assert predicted(long, config, assumed(arch)) <= predicted(long, config, crowded)
        assert predicted(tall, config | {"BLOCK_M": 64}, assumed(arch)) < predicted(tall, config, assumed(arch))
    order = generate.ranked(by_text["D=64,M=64,dtype=bf16"], 90)
    scores = [generate.ranked(by_text["D=64,M=64,dtype=bf16"], 90, limit=n)[-1] for n in (1, 2, len(order))]
    assert scores == [order[0], order[1], order[-1]]


def test_dry_run_lists_the_whole_space(buckets, capsys):
    assert generate.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    total = sum(len(configurations(bucket.kernel, bucket.key)) for bucket in buckets)
    assert out.count("us predicted") == total > 1000 and f"{total} configurations in {len(buckets)} buckets" in out
    assert all(f"\n{bucket.kernel}  {bucket.text}  " in out for bucket in buckets)


def test_whiflash_tune_is_the_same_command(capsys):
    from whiflash_triton.cli import main

    options = ["--dry-run", "--kernels", "tree_walk,kv_injection", "--limit", "2", "--arch", "sm80"]
    assert generate.main(options) == 0
    first = capsys.readouterr().out
    assert main(["tune", *options]) == 0 and capsys.readouterr().out == first
    assert first.count("us predicted") == 2 * 2 + 1 + 2 + 2 and "A100" in first  # one bucket of one configuration


@pytest.mark.parametrize(
    "options, message",
    [
        (["--kernels", "tree_walk,nothing"], "no kernel named nothing; there are tree_attention"),
        (["--dry-run", "--limit", "0"], "must be positive"),
        (["--minutes", "-1"], "must be positive"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys):
    assert generate.main(options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert generate.main([]) == 2
    assert "no CUDA device to measure on: use --dry-run" in capsys.readouterr().err


@pytest.mark.compile
def test_compile_only_prints_a_table(capfd):
    assert generate.main(["--compile-only", "--arch", "sm80", "--kernels", "tree_walk", "--limit", "1", "--jobs", "1"]) == 0
    out = capfd.readouterr().out
    assert out.count("kept  ") == 3 and "sm_80: 3 of 3 configurations kept; 3 kernels compiled" in out


@pytest.mark.compile
def test_searched_configurations_that_spill_are_pruned():
    """128 rows of 128 sums are 128 registers a thread of four warps, and the scores as many again."""
    case = next(case for case in all_cases() if case.name.endswith("nodes=64 rows=4096"))
    config = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    assert config in configurations("tree_attention", {"D": 128, "M": 256, "dtype": "bf16"})
    report = launches.compile_launch(launches.record(build(case, CPU).run, config).launches[0], 80)
    assert report.spills > 0 and re.match("local memory: .* of spills", verdict(report, 4))
