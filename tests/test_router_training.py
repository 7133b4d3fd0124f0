"""Router training: it learns what there is to learn, keeps prompts apart, simulates what decoding does, and files come back."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
import torch
import torch.nn.functional as F

from whiflash_triton.arms import Arm, parse_arm
from whiflash_triton.checkpoints import CheckpointError, load_router
from whiflash_triton.cli import main
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.loading import ASSETS
from whiflash_triton.replay import replay
from whiflash_triton.routers.acceptance import AcceptanceHead
from whiflash_triton.routers.neural import NeuralRouter
from whiflash_triton.routers.throughput import Costs
from whiflash_triton.training import simulation as sim
from whiflash_triton.training.router_training import (
    Recipe,
    Samples,
    auc,
    best_threshold,
    calibration_error,
    fit,
    mlp,
    r_squared,
    split_prompts,
    train_heads,
    train_router,
)
from whiflash_triton.training.traces import Trace, cost_arms, save_trace, trace

H, SLOTS = 12, 4
RECIPE = Recipe(width=16, lr=3e-3, batch=64)
PAIR = Arm("dflash", SLOTS), Arm("eagle3", SLOTS)
SETTINGS = {"arms": [str(arm) for arm in PAIR], "hidden_size": H, "lengths": {"dflash": SLOTS, "eagle3": SLOTS}}
ALL = cost_arms(list(PAIR))


def flat_costs(row: float = 1.0, draft: float = 0.0, catch_up: float = 0.0) -> Costs:
    """A verification costs 10 ms and `row` for every row after the first."""
    verify = {str(n): [10 + row * (n - 1)] for n in range(1, 10)}
    drafts = {str(arm): [draft if arm.needs else 0.0] for arm in ALL}
    return Costs([64], verify, drafts, {"dflash": catch_up, "eagle3": catch_up})


def chances(hidden: torch.Tensor) -> torch.Tensor:
    """Each arm's chance that a draft is right [n, 2]: one direction of the state favours one arm, the reverse the other."""
    return torch.stack((torch.sigmoid(3 * hidden[:, 0]), torch.sigmoid(-3 * hidden[:, 0])), 1)


def made_trace(seed: int, places: int = 60, blind: bool = False) -> Trace:
    """Drafts are right independently, with the chances above, or whatever the state is with chance one half."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(places, H, generator=g)
    p = chances(hidden) if not blind else torch.full((places, 2), 0.5)
    right = torch.rand(places, 2, SLOTS, generator=g) < p[:, :, None]
    accepted = right.long().cumprod(-1).sum(-1)
    zeros = torch.zeros(places)
    return Trace(
        torch.arange(10, 10 + places), hidden, torch.rand(places, generator=g), zeros.long(), torch.full((places, 2), SLOTS),
        accepted, torch.zeros(places, 2), torch.ones(places, 2), torch.arange(places + 20), str(seed % 3),
    )  # fmt: skip


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return [made_trace(seed) for seed in range(40)]


def test_parts_share_no_prompt(traces):
    parts = split_prompts(traces, 3)
    ids = [{id(t) for t in part} for part in parts]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 40 and [len(i) for i in ids] == [24, 6, 10]
    assert [id(t) for t in split_prompts(traces, 3)[2]] == [id(t) for t in parts[2]] != [id(t) for t in split_prompts(traces, 4)[2]]
    with pytest.raises(ValueError, match="at least 8"):
        split_prompts(traces[:7], 0)


def test_numbers_of_the_report():
    g = torch.Generator().manual_seed(0)
    scores, positive = torch.randint(0, 6, (40,), generator=g).float(), torch.rand(40, generator=g) < 0.4
    pairs = list(itertools.product(scores[positive].tolist(), scores[~positive].tolist()))
    assert auc(scores, positive) == pytest.approx(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    assert math.isnan(auc(scores, torch.zeros(40, dtype=torch.bool)))
    truth = torch.tensor([1.0, 2.0, 4.0])
    assert r_squared(truth, truth) == 1 and r_squared(truth.mean().expand(3), truth) == 0
    assert r_squared(torch.tensor([2.0, 2.0, 4.0]), truth) == pytest.approx(1 - 1 / (16 / 9 + 1 / 9 + 25 / 9))
    p = torch.rand(4000, generator=g)
    hit = (torch.rand(4000, generator=g) < p).float()
    assert calibration_error(p, hit) < 0.03 < 0.2 < calibration_error(p * 0.5, hit)


def test_scale_and_offset_of_the_input_do_not_matter():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(300, 5, generator=g)
    y, ones = x[:, :2].tanh() + 3, torch.ones(300, 2)
    ones[:, 1] = (torch.rand(300, generator=g) < 0.5).float()
    outs = []
    for scale, offset in ((1.0, 0.0), (50.0, 7.0)):
        part = Samples(x * scale + offset, y.where(ones > 0, torch.tensor(1e6)), ones)  # what has no weight teaches nothing
        outs.append(mlp(fit(part, part, F.mse_loss, y.mean(0), Recipe(width=8, epochs=25, lr=2e-2, batch=100)), part.x))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-2, atol=2e-2)
    assert (outs[0] - y).square().mean() < 0.1 * y.var()


def test_training_stops_and_keeps_the_best():
    g = torch.Generator().manual_seed(2)
    train = Samples(torch.randn(64, 5, generator=g), torch.randn(64, 1, generator=g), torch.ones(64, 1))  # nothing to learn
    stop = Samples(torch.randn(64, 5, generator=g), torch.randn(64, 1, generator=g), torch.ones(64, 1))
    losses: list[float] = []
    w = fit(train, stop, F.mse_loss, torch.zeros(1), Recipe(width=64, epochs=300, lr=1e-2, patience=4), losses.append)
    assert len(losses) == losses.index(min(losses)) + 5 < 300
    assert float(F.mse_loss(mlp(w, stop.x), stop.y)) == pytest.approx(min(losses), rel=1e-4)


def test_the_router_learns_gains_and_comes_back(traces, tmp_path):
    config, tensors, report = train_router(traces, SETTINGS, flat_costs(), PAIR, RECIPE)
    assert report["r2"] > 0.5 and report["auc"] > 0.9 and config.positive == "diffusion"
    ratio = report["over the best static of the pair"]
    assert ratio["interval"][0] > 1.2 and ratio["interval"][0] <= ratio["ratio"] <= ratio["interval"][1]
    speeds = report["simulated_tokens_per_second"]
    assert speeds["ar"] == pytest.approx(100) and speeds["neural"] > max(speeds["entropy"], *(speeds[str(arm)] for arm in PAIR))
    assert speeds["oracle of the pair"] > speeds["neural"] and 0.2 < ratio["share_of_oracle_gain"] < 1
    assert report["prompts"] == {"trained_on": 24, "stopped_by": 6, "reported_on": 10}
    from whiflash_triton.checkpoint_export import save_router

    save_router(tmp_path, config, tensors)
    back, loaded = load_router(tmp_path, hidden_size=H)
    assert back == config and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    router = NeuralRouter(back, loaded, *PAIR, device=torch.device("cpu"))
    assert router.arms == PAIR and router.threshold == config.threshold


def test_states_that_say_nothing_promise_nothing():
    blind = [made_trace(seed, blind=True) for seed in range(30)]
    _, _, report = train_router(blind, SETTINGS, flat_costs(), PAIR, Recipe(width=16, epochs=8))
    assert report["r2"] < 0.02 and 0.4 < report["auc"] < 0.6 and report["over the best static of the pair"]["ratio"] < 1.05


def test_heads_learn_chances_and_come_back(traces, tmp_path):
    head, report = train_heads(traces, SETTINGS, flat_costs(), PAIR, RECIPE)
    unseen = made_trace(77, 400)
    found = head.expected(unseen.hidden)
    for column, kind in enumerate(("dflash", "eagle3")):
        truth = chances(unseen.hidden)[:, column : column + 1] ** torch.arange(1, SLOTS + 1)
        assert (found[kind] - truth).abs().mean() < 0.06
        assert (found[kind][:, 1:] <= found[kind][:, :-1]).all()
        row = report["calibration"][kind]
        assert row["r2_of_accepted"] > 0.4 and abs(row["accepted_predicted"] - row["accepted"]) < 0.2
        assert row["slots"][0]["log_loss"] < row["slots"][0]["log_loss_of_the_rate"] and row["slots"][0]["calibration_error"] < 0.1
    speeds = report["simulated_tokens_per_second"]
    assert speeds["heads"] > 1.1 * max(speeds[str(arm)] for arm in ALL)
    head.save(tmp_path)
    back = AcceptanceHead.load(tmp_path, hidden_size=H)
    assert back.slots == {"dflash": SLOTS, "eagle3": SLOTS}
    for kind, p in back.expected(unseen.hidden[3]).items():
        assert p.shape == (SLOTS,)
        torch.testing.assert_close(p, found[kind][3])


def test_expected_by_its_definition():
    g = torch.Generator().manual_seed(5)
    w1, b1, w2, b2 = (torch.randn(*shape, generator=g) for shape in ((6, H), (6,), (5, 6), (5,)))
    x = torch.randn(H, generator=g).bfloat16()
    z = w1.double() @ x.double() + b1.double()
    logits = w2.double() @ (0.5 * z * (1 + torch.special.erf(z / math.sqrt(2)))) + b2.double()
    chance = 1 / (1 + (-logits).exp())
    got = AcceptanceHead({"eagle3": 2, "dflash": 3}, w1, b1, w2, b2).expected(x)
    assert list(got) == ["eagle3", "dflash"]
    torch.testing.assert_close(got["eagle3"].double(), torch.tensor([chance[0], chance[0] * chance[1]]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["dflash"].double(), chance[2:].cumprod(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "gain"}, "kind is 'gain'"), ({"hidden_size": H + 1}, "belong together"), ({"slots": {}}, "slots"),
        ({"slots": {"dflash": 0}}, "slots"), ({"slots": {"dflash": 3}}, "asks for"), ({"width": 7}, "asks for"),
        ({"hidden_is_normed": False}, "hidden_is_normed"), ({"activation": "relu"}, "activation"), ({"scale": 3}, "unknown key"),
    ],
)  # fmt: skip
def test_bad_heads(tmp_path, change, message):
    AcceptanceHead({"dflash": 2}, torch.zeros(6, H), torch.zeros(6), torch.zeros(2, 6), torch.zeros(2)).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        AcceptanceHead.load(tmp_path, hidden_size=H)


def test_a_router_is_no_head_and_a_head_no_router(tmp_path):
    AcceptanceHead({"dflash": 2}, torch.zeros(6, H), torch.zeros(6), torch.zeros(2, 6), torch.zeros(2)).save(tmp_path)
    with pytest.raises(CheckpointError):
        load_router(tmp_path, hidden_size=H)


def test_a_walk_by_hand():
    """Places 10..15; dflash takes 2, 0, 1, ...; late rows are paid for, those of the last round are not."""
    t = made_trace(0, 6)
    t.accepted = torch.tensor([[2, 0], [0, 0], [9, 9], [0, 3], [9, 9], [9, 9]])
    t.drafted = torch.full((6, 2), 4)
    walk = sim.Walk(t, SETTINGS["arms"], flat_costs(row=1, draft=2, catch_up=0.5))
    d3, e1, ar = Arm("dflash", 3), Arm("eagle3", 1), Arm("ar")
    # 10: dflash commits 3 -> 13: eagle3:1 commits 2 -> 15: ar commits 1 and ends.
    choices = [d3, ar, ar, e1, ar, ar]
    rounds = (10 + 3 + 2 + 0.5 * 8) + (10 + 1 + 2 + 0.5 * 11) + 10
    assert walk.run(choices) == (3 + 2 + 1, rounds)
    assert walk.run([d3] * 6) == (3 + 1 + 4, (15 + 0.5 * 8) + (15 + 0.5 * 1) + 15)  # 13 -> 14, one row late -> none
    assert walk.committed[Arm("dflash", 2)] == [3, 1, 3, 1, 3, 3] and walk.ms[ar] == [10.0] * 6
    assert sim.oracle([ar, d3])(walk)[:2] == [d3, ar]


def test_most_expected_follows_its_chances():
    walk = sim.Walk(made_trace(0, 2), SETTINGS["arms"], flat_costs(row=1, draft=2))
    sure, hopeless = torch.tensor([0.99, 0.98, 0.97, 0.1]), torch.tensor([0.01, 0.0, 0.0, 0.0])
    chosen = sim.most_expected(walk, {"dflash": torch.stack((hopeless, sure)), "eagle3": torch.stack((hopeless, hopeless))})
    assert chosen == [Arm("ar"), Arm("dflash", 3)]


def test_the_threshold_is_the_fastest_of_those_tried(traces):
    walks = sim.make_walks(traces[:10], SETTINGS, flat_costs())
    scores = [t.hidden[:, 0] for t in traces[:10]]
    found = best_threshold(walks, scores, *PAIR)
    speed = sim.per_second(sim.speeds(walks, sim.split_by(scores, found, *PAIR)))
    for other in (-9.0, -1.0, 0.0, 0.5, 9.0):
        assert speed > 0.98 * sim.per_second(sim.speeds(walks, sim.split_by(scores, other, *PAIR)))
    assert abs(found) < 0.5  # the arms are worth the same at 0


def test_walks_take_the_rounds_that_decoding_takes():
    """Against a replay of real drafts along the same text, for arms of every length."""
    tiny = ASSETS / "tiny"
    decoder = WhiFlashDecoder.from_pretrained(
        str(tiny / "target"), dflash=tiny / "dflash", eagle3=tiny / "eagle3", device="cpu", dtype="float32", max_cache_len=256
    )
    ids = decoder._encode("tell about cat", {})
    text = decoder.generate(ids, max_new_tokens=60, eos_token_id=None).sequences[0].tolist()
    arms = [parse_arm(t) for t in ("dflash:7", "eagle3:5", "lookup:4")]
    walk_arms = cost_arms(arms)
    one_a_round = Costs(
        [64], {str(n): [1.0] for n in range(1, 9)}, {str(arm): [0.0] for arm in walk_arms}, {"dflash": 0.0, "eagle3": 0.0}
    )
    found = trace(decoder, text, len(ids), arms, 1)
    walk = sim.Walk(found, [str(arm) for arm in arms], one_a_round)
    for arm in walk_arms:
        tokens, rounds = walk.run([arm] * len(walk.places))
        end = len(ids) + tokens + 1  # the anchor's place after the last round walked
        assert end > walk.places[-1] + 1
        assert replay(decoder, text[:end], len(ids), [arm])[str(arm)] == pytest.approx(rounds)


def test_intervals_hold_the_ratio():
    rng = random.Random(0)
    runs = torch.tensor([[rng.uniform(50, 100), rng.uniform(900, 1100)] for _ in range(40)], dtype=torch.float64)
    faster = runs * torch.tensor([1.1, 1.0], dtype=torch.float64)
    assert sim.ratio_interval(faster, runs) == pytest.approx((1.1, 1.1))
    low, high = sim.ratio_interval(runs[torch.randperm(40, generator=torch.Generator().manual_seed(1))], runs)
    assert low < 1 < high and high - low < 0.4


def test_commands(traces, tmp_path, capsys):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "traces.json").write_text(json.dumps(SETTINGS))
    for number, each in enumerate(traces[:12]):
        save_trace(each, folder / f"trace-{number}.safetensors")
    base = ["train", "router", "--traces", str(folder), "--epochs", "4", "--width", "8"]
    assert main([*base, "--out", str(tmp_path / "x")]) == 2  # no costs yet
    flat_costs().save(folder / "costs.json")
    capsys.readouterr()
    assert main([*base, "--out", str(tmp_path / "router"), "--pair", "dflash:2,eagle3:3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "router" / "report.json").read_text()) and report["pair"] == ["dflash:2", "eagle3:3"]
    config, _ = load_router(tmp_path / "router", hidden_size=H)
    assert config.width == 8 and config.threshold == report["threshold"]
    assert main([*base, "--heads", "--out", str(tmp_path / "heads")]) == 0
    assert AcceptanceHead.load(tmp_path / "heads", hidden_size=H).slots == {"dflash": SLOTS, "eagle3": SLOTS}
    flat_costs().save(tmp_path / "other.json")
    capsys.readouterr()
    for options, message in (
        (["--pair", "eagle3,dflash"], "--pair"), (["--pair", "dflash:9,eagle3:2"], "these traces tell of"),
        (["--pair", "dflash"], "--pair"), (["--lr", "0"], "--lr"), (["--costs", str(folder / "traces.json")], "no table of costs"),
        (["--pair", "ddtree:4,eagle3:2"], "these traces tell of"),
    ):  # fmt: skip
        assert main([*base, "--out", str(tmp_path / "y"), *options]) == 2
        assert message in capsys.readouterr().err
