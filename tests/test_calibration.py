"""Calibration: what it does to a step, how it is fitted, and the file between the two."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from tests.trees import random_proposal
from whiflash_triton.cli import main
from whiflash_triton.drafters.calibration import Calibration, read_calibration
from whiflash_triton.loading import ASSETS, load_drafters
from whiflash_triton.training import tiny
from whiflash_triton.training.calibrate import add_samples, fit, target_path
from whiflash_triton.tree import Proposal
from whiflash_triton.weights import load_target

TINY = ASSETS / "tiny"


def test_steps_stay_log_probabilities():
    """Slope 1 and offset 0 change nothing; any other keeps the order, the ends, and everything at most 0."""
    steps = torch.tensor([[0.0, -1e-7, -0.01, -0.7, -5.0, -40.0, -math.inf]]).repeat(3, 1)
    same = Calibration((1.0,), (0.0,)).apply(steps, 1)
    torch.testing.assert_close(same, steps, rtol=1e-5, atol=1e-6)
    for slope, offset in ((0.3, 2.0), (2.5, -3.0), (1.0, 60.0)):
        out = Calibration((slope,), (offset,)).apply(steps, 1)
        assert not out.isnan().any() and (out <= 0).all() and (out.diff(dim=1) <= 0).all()
        assert (out[:, 0] == 0).all() and (out[:, -1] == -math.inf).all()


def test_every_depth_has_its_own_numbers_and_deeper_ones_the_last():
    steps, c = torch.full((4, 2), math.log(0.3)), Calibration((1.0, 2.0, 0.5), (0.5, 0.0, -1.0))
    odds = math.log(0.3 / 0.7)
    at = [1 / (1 + math.exp(-(a * odds + b))) for a, b in ((1.0, 0.5), (2.0, 0.0), (0.5, -1.0), (0.5, -1.0))]
    torch.testing.assert_close(c.apply(steps, 1, 3).exp(), torch.tensor(at)[:, None].expand(4, 2))
    for depth, expected in ((1, at[0]), (3, at[2]), (9, at[3])):
        torch.testing.assert_close(c.apply(steps, depth).exp(), torch.full((4, 2), expected))


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.6, 1.2), (1.7, -0.8)])
def test_fit_finds_the_numbers_the_samples_were_drawn_with(slope, offset):
    g = torch.Generator().manual_seed(1)
    steps = (torch.rand(40000, generator=g, dtype=torch.float64) * 0.98 + 0.01).log()
    right = Calibration((slope,), (offset,)).apply(steps[None], 1)[0].exp()
    hits = (torch.rand(40000, generator=g) < right).tolist()
    a, b, before, after = fit(list(zip(steps.tolist(), hits, strict=True)))
    assert abs(a - slope) < 0.05 and abs(b - offset) < 0.05
    assert after <= before + 1e-9 and (slope == 1.0 or after < before - 0.005)


@pytest.mark.parametrize("hit", [True, False])
def test_few_samples_change_little_and_certain_ones_do_not_break_it(hit):
    slope, offset, before, after = fit([(0.0, hit), (-1e-9, hit), (-50.0, hit)])
    assert all(map(math.isfinite, (slope, offset, before, after))) and 0 < slope < 10 and abs(offset) < 10


def test_the_targets_path_goes_as_far_as_the_text_tells():
    tokens, choices = [5, 6, 7, 8, 9], [6, 7, 1, 9, 2]  # after 5 6 7 the target wants 1, the text has 8
    assert target_path(tokens, choices, 0) == [6, 7, 1]
    assert target_path(tokens, choices, 2) == [1]
    assert target_path(tokens, choices, 3) == [9, 2]
    assert target_path(tokens, choices, 4) == [2]


@pytest.mark.parametrize("seed", range(20))
def test_samples_are_the_children_of_the_path(seed):
    rng = random.Random(seed)
    nodes, path = random_proposal(rng, 20, 4, 5, pads=2), [rng.randrange(5) for _ in range(rng.randint(1, 4))]
    samples: dict = {}
    add_samples(samples, nodes, path)
    tokens, parents = nodes.tokens.tolist(), nodes.parents.tolist()
    expected: dict = {}
    for node in range(1, 21):
        above, up = [], parents[node]
        while up > 0:
            above.insert(0, tokens[up])
            up = parents[up]
        if above == path[: len(above)] and len(above) < len(path):
            step = float(nodes.scores[node] - nodes.scores[parents[node]])
            expected.setdefault(len(above) + 1, []).append((step, tokens[node] == path[len(above)]))
    assert samples == expected


def test_pads_alone_are_no_samples():
    samples: dict = {}
    pads = Proposal(torch.tensor([3, 0]), torch.tensor([-1, -1]), torch.tensor([0, 0]), torch.tensor([0.0, -math.inf]))
    add_samples(samples, pads, [0])
    assert samples == {}


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "3", '{"dflash": 3}', '{"dflash": {"slope": [1]}}', '{"dflash": {"slope": [], "offset": []}}',
        '{"dflash": {"slope": [1, 1], "offset": [0]}}', '{"dflash": {"slope": [0], "offset": [0]}}',
        '{"dflash": {"slope": [NaN], "offset": [0]}}', '{"dflash": {"slope": ["1"], "offset": [0]}}',
    ],
)  # fmt: skip
def test_bad_files(tmp_path, content):
    file = tmp_path / "calibration.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{file} is no calibration .*whiflash train calibrate"):
        read_calibration(file)


def test_command_and_the_file_beside_the_drafters(tmp_path, capsys):
    """The tiny trio, end to end: fitted on held-out rows, written, and read by whoever loads the drafters beside it."""
    rng = random.Random(5)
    text = "".join(json.dumps(dict(zip(("prompt", "response"), tiny.sentence(rng), strict=True))) + "\n" for _ in range(30))
    (tmp_path / "text.jsonl").write_text(text)
    for kind in ("dflash", "eagle3"):
        (tmp_path / kind).symlink_to(TINY / kind)
    out, target = tmp_path / "calibration.json", load_target(str(TINY / "target"), torch.device("cpu"), torch.float32)[0]
    paths = {kind: tmp_path / kind for kind in ("dflash", "eagle3")}
    assert all(d.calibration is None for d in load_drafters(target, paths, {}, 64).values())
    argv = ["train", "calibrate", "--target", str(TINY / "target"), "--data", str(tmp_path / "text.jsonl"), "--out", str(out)]
    argv += ["--max-len", "96", "--tokens", "64", "--positions", "6", "--nodes", "12"]
    assert main(argv) != 0 and "no shipped drafters: give --dflash or --eagle3" in capsys.readouterr().err
    assert main([*argv, *(f"--{kind}={path}" for kind, path in paths.items())]) == 0
    assert "dflash depth 1: slope" in capsys.readouterr().out
    found = json.loads(out.read_text())
    for kind, drafter in load_drafters(target, paths, {}, 64).items():
        assert drafter.calibration == Calibration(tuple(found[kind]["slope"]), tuple(found[kind]["offset"]))
        assert len(found[kind]["slope"]) >= 5 and found[kind]["samples"][0] > 100
        assert all(a <= b for a, b in zip(found[kind]["log_loss_calibrated"], found[kind]["log_loss"], strict=True))
    for kind in paths:  # drafters elsewhere stay as they are
        assert load_drafters(target, {kind: TINY / kind}, {}, 64)[kind].calibration is None
