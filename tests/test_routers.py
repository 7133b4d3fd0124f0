"""Routers and their spellings."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.oracle import build, hf_generate, models, prompt_ids
from whiflash_triton.arms import Arm
from whiflash_triton.checkpoint_export import save_router
from whiflash_triton.checkpoints import CheckpointError, RouterConfig, load_router
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.drafters.draft import check_arm
from whiflash_triton.loading import build_router, default_lengths
from whiflash_triton.routers.base import RoundState
from whiflash_triton.routers.entropy import EntropyRouter
from whiflash_triton.routers.neural import NeuralRouter
from whiflash_triton.routers.static import StaticRouter

DF, E3 = Arm("dflash", 3), Arm("eagle3", 2)
CPU = torch.device("cpu")
H, M = 48, 20


def state(entropy: float = 0.0, hidden: torch.Tensor | None = None) -> RoundState:
    hidden = torch.zeros(H, dtype=torch.float64) if hidden is None else hidden
    return RoundState(hidden, torch.tensor(entropy), 5, {"dflash": 2, "eagle3": 0})


# Routers


def test_static_router():
    router = StaticRouter(DF)
    assert router.arms == (DF,) and router.choose(state(3.0)) == DF


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("entropy", [0.0, 0.4999, 0.5, 0.5001, 9.0])
def test_entropy_router(entropy, above):
    """A tie with the threshold lies on neither side: the autoregressive arm runs."""
    router = EntropyRouter(DF, E3, threshold=0.5, above=above)
    assert router.choose(state(entropy)) == (DF if entropy != 0.5 and (entropy > 0.5) == above else E3)
    assert set(router.arms) == {DF, E3}


def test_entropy_threshold_must_be_one():
    for threshold in (-0.1, math.nan):
        with pytest.raises(ValueError, match="entropy threshold"):
            EntropyRouter(DF, E3, threshold=threshold)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        "w1": torch.randn(M, H, generator=g),
        "b1": torch.randn(M, generator=g),
        "w2": torch.randn(M, generator=g),
        "b2": torch.randn(1, generator=g),
    }


def score(w: dict[str, torch.Tensor], hidden: torch.Tensor) -> float:
    """w2 . gelu(w1 h + b1) + b2 in float64, gelu by its definition."""
    x = w["w1"].double() @ hidden.double() + w["b1"].double()
    gelu = 0.5 * x * (1 + torch.special.erf(x / math.sqrt(2)))
    return float(w["w2"].double() @ gelu + w["b2"].double())


def config(threshold: float = 0.0, positive: str = "diffusion", normed: bool = True) -> RouterConfig:
    return RouterConfig(hidden_size=H, width=M, threshold=threshold, positive=positive, hidden_is_normed=normed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positive", ["diffusion", "autoregressive"])
def test_neural_router_follows_its_score(weights, positive, dtype):
    g, sides = torch.Generator().manual_seed(4), set()
    for _ in range(12):
        hidden = torch.randn(H, generator=g, dtype=torch.float64).to(dtype)
        gain = score(weights, hidden)
        for threshold, gains in ((gain - 1e-3, True), (gain + 1e-3, False), (0.0, gain > 0)):
            router = NeuralRouter(config(threshold, positive), weights, DF, E3, CPU)
            expected = DF if gains == (positive == "diffusion") else E3
            assert router.choose(state(hidden=hidden)) == expected
            sides.add(expected)
            override = NeuralRouter(config(1e9, positive), weights, DF, E3, CPU, threshold=threshold)
            assert override.choose(state(hidden=hidden)) == expected
    assert sides == {DF, E3}


def test_a_score_at_the_threshold_does_not_pass():
    flat = {"w1": torch.zeros(M, H), "b1": torch.zeros(M), "w2": torch.zeros(M), "b2": torch.tensor([0.25])}
    assert NeuralRouter(config(0.25), flat, DF, E3, CPU).choose(state()) == E3
    assert NeuralRouter(config(0.2499), flat, DF, E3, CPU).choose(state()) == DF


def test_states_before_the_final_norm_are_refused(weights):
    with pytest.raises(ValueError, match="before the final norm"):
        NeuralRouter(config(normed=False), weights, DF, E3, CPU)


@pytest.mark.parametrize("whole_folder", [True, False], ids=["folder", "file"])
def test_router_files(tmp_path, weights, whole_folder):
    """Folder: weights, threshold and direction come back. One bare file: weights, and the published defaults."""
    save_router(tmp_path, config(0.125, "autoregressive"), weights)
    if not whole_folder:
        (tmp_path / "config.json").unlink()
    loaded, tensors = load_router(tmp_path if whole_folder else tmp_path / "model.safetensors", hidden_size=H)
    assert (loaded.threshold, loaded.positive) == ((0.125, "autoregressive") if whole_folder else (1.0, "diffusion"))
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    hidden = torch.randn(H, generator=torch.Generator().manual_seed(9))
    gains = score(weights, hidden) > loaded.threshold
    assert NeuralRouter(loaded, tensors, DF, E3, CPU).choose(state(hidden=hidden)) == (DF if gains == (not whole_folder) else E3)


# Spellings


@pytest.fixture(scope="module")
def target():
    return models("qwen3")[1]


@pytest.fixture(scope="module")
def drafters(target):
    return {kind: build(kind, target, 64, False) for kind in ("dflash", "eagle3")}


def test_specs(target, drafters, tmp_path, weights):
    only = {kind: {kind: drafter} for kind, drafter in drafters.items()}
    assert build_router("static:ar", {}, target).arms == (Arm("ar"),)
    assert build_router("static:dflash:5", drafters, target).arms == (Arm("dflash", 5),)
    assert build_router("static:dflash", drafters, target).arms == (DF,)  # the CPU's default lengths
    assert build_router("static:eagle3", only["eagle3"], target).arms == (E3,)
    assert build_router("static:ddtree:16", only["dflash"], target).arms == (Arm("ddtree", 16),)
    assert build_router("static:eagle3-tree", only["eagle3"], target).arms == (Arm("eagle3-tree", 7),)
    assert build_router("static:mixed:9:2:3", drafters, target).arms == (Arm("mixed", 9, 2, 3),)
    assert build_router("auto", {}, target).arms == (Arm("ar"),)
    assert build_router("auto", only["dflash"], target).arms == (DF,)
    assert isinstance(build_router("auto", drafters, target), EntropyRouter)
    assert build_router("entropy", drafters, target).threshold == EntropyRouter(DF, E3).threshold
    assert build_router("entropy", drafters, target, threshold=0.0).threshold == 0.0
    save_router(tmp_path / "r", config(0.5), weights)
    for spec in (tmp_path / "r", str(tmp_path / "r"), tmp_path / "r" / "model.safetensors"):
        router = build_router(spec, drafters, target)
        assert isinstance(router, NeuralRouter) and router.config.width == M
        assert router.arms == (DF, E3)
    assert build_router(tmp_path / "r", drafters, target, threshold=-2.0).threshold == -2.0
    mine = SimpleNamespace(arms=(DF,), choose=lambda state: DF)
    assert build_router(mine, drafters, target) is mine


def test_default_lengths_fit_the_drafter(target, drafters):
    trees = ("ddtree", "eagle3-tree", "mixed")
    assert default_lengths(drafters, CPU) == {"lookup": 7, "dflash": 3, "eagle3": 2} | dict.fromkeys(trees, 7)
    cuda = {"lookup": 16, "dflash": 5, "eagle3": 7, "ddtree": 64, "eagle3-tree": 32, "mixed": 64}
    assert default_lengths(drafters, torch.device("cuda")) == cuda
    for lengths in (default_lengths(drafters, CPU), cuda):
        for kind, size in lengths.items():
            check_arm(drafters, Arm(kind, size))
    assert default_lengths({"eagle3": drafters["eagle3"]}, CPU) == {"lookup": 7, "eagle3": 2, "eagle3-tree": 7}
    short = {"dflash": SimpleNamespace(max_draft=1), "eagle3": SimpleNamespace(max_draft=1)}
    assert default_lengths(short, CPU) == {"lookup": 7, "dflash": 1, "eagle3": 1} | dict.fromkeys(trees, 7)


@pytest.mark.parametrize(
    ("spec", "have", "error", "message"),
    [
        ("static:dflash", [], ValueError, "none is loaded: give dflash="),
        ("static:ddtree:4", ["eagle3"], ValueError, "needs a dflash drafter"),
        ("static:eagle3-tree", ["dflash"], ValueError, "needs a eagle3 drafter"),
        ("static:mixed:8:4:3", ["dflash"], ValueError, "none is loaded: give eagle3="),
        ("static:", ["dflash"], ValueError, "unknown arm ''"),
        ("static:ddflash:3", ["dflash"], ValueError, "unknown arm 'ddflash:3'"),
        ("static:dflash:x", ["dflash"], ValueError, "whole number"),
        ("static", ["dflash"], ValueError, "unknown router 'static'"),
        ("", ["dflash", "eagle3"], ValueError, "unknown router ''"),
        ("Entropy", [], ValueError, "unknown router 'Entropy'"),
        ("entropy", ["dflash"], ValueError, "missing: eagle3"),
        ("entropy", [], ValueError, "missing: dflash, eagle3"),
        (None, ["dflash", "eagle3"], TypeError, "NoneType"),
        (SimpleNamespace(choose=lambda state: DF), ["dflash"], TypeError, "`arms`"),
    ],
    ids=str,
)
def test_bad_specs(target, drafters, spec, have, error, message):
    with pytest.raises(error, match=message):
        build_router(spec, {kind: drafters[kind] for kind in have}, target)


def test_bad_router_files(target, drafters, tmp_path, weights):
    narrow = {"w1": torch.zeros(M, 8), "b1": torch.zeros(M), "w2": torch.zeros(M), "b2": torch.zeros(1)}
    save_router(tmp_path / "narrow", RouterConfig(8, M, 0.0, "diffusion", True), narrow)
    (tmp_path / "broken.safetensors").write_bytes(b"\0" * 40)
    (tmp_path / "empty").mkdir()
    for spec in (tmp_path / "narrow", tmp_path / "broken.safetensors", tmp_path / "empty"):
        with pytest.raises(CheckpointError, match=str(spec)):
            build_router(spec, drafters, target)
    save_router(tmp_path / "fine", config(), weights)
    with pytest.raises(ValueError, match="missing: eagle3"):
        build_router(tmp_path / "fine", {"dflash": drafters["dflash"]}, target)


# In a decoder


class Alternate:
    """A router of one's own: two kinds in turn, and a look at everything the state offers."""

    arms = (Arm("dflash", 2), Arm("eagle3", 3), Arm("ar"))

    def __init__(self) -> None:
        self.seen: list[RoundState] = []

    def choose(self, state: RoundState) -> Arm:
        copy = RoundState(state.hidden.clone(), state.entropy.clone(), state.position, dict(state.pending), state.history.copy())
        self.seen.append(copy)
        return self.arms[len(self.seen) % 3]


def test_what_a_router_sees(target, drafters):
    """Hidden state, entropy and position are those of the last accepted row, as a fresh forward of the text has them."""
    model, ids, router = models("qwen3")[0], prompt_ids(), Alternate()
    decoder = WhiFlashDecoder(target, None, drafters, router, 64, [])
    out = decoder.generate(ids, max_new_tokens=25)
    text = out.sequences
    assert text[0].tolist() == hf_generate(model, ids, max_new_tokens=25)
    with torch.no_grad():
        whole = model(text, output_hidden_states=True)
    logp = whole.logits[0].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    pending, history = {"dflash": len(ids), "eagle3": len(ids)}, []
    for seen, ran in zip(router.seen, out.rounds, strict=True):
        row = seen.position - 1
        assert seen.position == len(ids) + sum(r.committed for r in out.rounds[: len(history)])
        torch.testing.assert_close(seen.hidden, whole.hidden_states[-1][0, row], rtol=0, atol=1e-9)
        torch.testing.assert_close(seen.entropy.double(), entropy[row], rtol=1e-4, atol=1e-5)
        assert seen.pending == pending and list(seen.history) == history
        assert ran.caught_up == pending.get(ran.arm.kind, 0)
        pending = {kind: ran.committed + (0 if kind == ran.arm.kind else rows) for kind, rows in pending.items()}
        history.append((ran.arm, ran.drafted, ran.accepted))


@pytest.mark.parametrize("above", [False, True])
def test_entropy_and_neural_routes_are_lossless(target, drafters, weights, above):
    model, ids = models("qwen3")[0], prompt_ids()
    expected = hf_generate(model, ids, max_new_tokens=40)
    watch = Alternate()
    WhiFlashDecoder(target, None, drafters, watch, 64, []).generate(ids, max_new_tokens=40)
    median = float(torch.stack([s.entropy for s in watch.seen]).median())
    gain = float(torch.tensor([score(weights, s.hidden) for s in watch.seen]).median())
    for router in (EntropyRouter(DF, E3, median, above), NeuralRouter(config(gain), weights, DF, E3, CPU)):
        out = WhiFlashDecoder(target, None, drafters, router, 64, []).generate(ids, max_new_tokens=40)
        assert out.sequences[0].tolist() == expected
        assert {r.arm for r in out.rounds} - {Arm("ar")} == {DF, E3}  # the last round may have no room for a draft
