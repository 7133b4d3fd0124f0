"""`whiflash train`: text to rows, resumption bit for bit, formats, and the tiny trio that ships for tests."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from whiflash_triton.checkpoints import TargetShape, load_dflash, load_eagle3
from whiflash_triton.cli import main
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.loading import ASSETS
from whiflash_triton.training import tiny
from whiflash_triton.training.data import Shard, read_rows, shard_path, write_features
from whiflash_triton.training.drafters import RECIPES, draft_vocabulary, train
from whiflash_triton.training.packs import list_shards, packs
from whiflash_triton.weights import load_target

TINY = ASSETS / "tiny"


@pytest.fixture(scope="module")
def target():
    return load_target(str(TINY / "target"), torch.device("cpu"), torch.float32)[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    import random

    rng, path = random.Random(5), tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [tiny.sentence(rng) for _ in range(150)]
    path.write_text(
        "".join(json.dumps({"prompt": p, "response": r, "finished": i % 3 > 0}) + "\n" for i, (p, r) in enumerate(rows))
    )
    return path


@pytest.fixture(scope="module")
def features(text, target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    rows = read_rows(text, tiny.tokenizer(), 0, 96)
    write_features(target, rows, folder, (2, 3), range(3))
    return folder


def test_rows_hold_prompt_answer_and_end(text):
    rows = read_rows(text, tiny.tokenizer(), 0, 96)
    assert len(rows) == 150
    finished = Counter(r.tokens[-1] == 0 for r in rows if len(r.tokens) < 96)
    assert finished[True] > 0 and finished[False] > 0
    for r in rows:
        assert r.tokens[0] == tiny.VOCABULARY.index("<user>")
        assert r.tokens[r.prompt_len - 1] == tiny.VOCABULARY.index("<assistant>")


def test_bad_text_names_its_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "count from 1 by 1", "response": "1 2"}\n{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path, tiny.tokenizer(), 0, 96)


def test_shards_equal_a_plain_forward_and_are_not_rewritten(features, text, target):
    rows = read_rows(text, tiny.tokenizer(), 0, 96)
    shard = Shard(shard_path(features, 1))
    before = shard_path(features, 1).stat().st_mtime_ns
    write_features(target, rows, features, (2, 3), range(3))
    assert shard_path(features, 1).stat().st_mtime_ns == before and len(list_shards(features)) == 3
    row = rows[64 + 5]
    first, last = shard.spans[5]
    assert shard.tokens[first:last].tolist() == row.tokens and shard.prompt_lens[5] == row.prompt_len
    from whiflash_triton.tree import chain

    with torch.no_grad():
        hidden, tapped = target.forward(chain(torch.tensor([row.tokens])), target.new_cache(96, 1), (2, 3, 4), prefill=True)
    assert torch.equal(shard.features(5, (3, 2)), tapped[[1, 0], 0].bfloat16())
    assert torch.equal(shard.choices[first:last], target.logits(hidden)[0].argmax(-1))


def test_packs_resume_where_they_stopped(features):
    whole = packs(features, (2, 3), 256, seed=3)
    first = [next(whole) for _ in range(40)]  # more than one epoch
    again = packs(features, (2, 3), 256, seed=3, start=33)
    for (i, a), (j, b) in zip(first[33:], again, strict=False):
        assert i == j and torch.equal(a.tokens, b.tokens) and torch.equal(a.features, b.features)
    assert not torch.equal(first[0][1].tokens, first[1][1].tokens)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_an_interrupted_run_resumes_bit_for_bit(kind, features, target, tmp_path):
    load = load_dflash if kind == "dflash" else load_eagle3
    t = target.config
    config, _ = load(TINY / kind, target=TargetShape(t.num_layers, t.hidden_size, t.vocab_size))
    config = type(config)(**{**vars(config), "taps": (2, 3)})
    ids = draft_vocabulary(list_shards(features)[1:], config.draft_vocab_size, t.vocab_size)
    from dataclasses import replace

    recipe = replace(RECIPES[kind], tokens=256, anchors=8)
    losses: list[float] = []

    def run(out: str, stop_after: int | None = None):
        count = 0

        def progress(done, loss, hits):
            nonlocal count
            count += 1
            losses.append(loss)
            if count == stop_after:
                raise Interrupted

        every = 0.0 if out == "cut" else 5.0
        folder = tmp_path / out
        return train(kind, target, config, ids, features, folder, 8, None, recipe, every_minutes=every, progress=progress)

    whole = run("whole")
    with pytest.raises(Interrupted):
        run("cut", stop_after=5)
    resumed = run("cut")
    assert losses[7] < losses[0], "eight steps from the target's own layers must already help"
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


def test_train_command_end_to_end(text, tmp_path):
    """The command line trains, exports what the loaders read, and an int8 copy comes back within half a step a row."""
    common = ["--target", str(TINY / "target"), "--data", str(text), "--features", str(tmp_path / "f"), "--max-len", "96"]
    run = tmp_path / "run"
    argv = [
        "train",
        "dflash",
        *common,
        "--out",
        str(run),
        "--steps",
        "3",
        "--pack-tokens",
        "256",
        "--draft-vocab",
        "60",
        "--layers",
        "1",
    ]
    assert main([*argv, "--eval-prompts", "2"]) == 0
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert log[-1]["tau"] >= 1.0
    assert json.loads((run / "drafter" / "training.json").read_text())["step"] == 3
    more = ["train", "dflash", *common, "--out", str(tmp_path / "more"), "--steps", "1", "--pack-tokens", "256"]
    assert main([*more, "--eval-prompts", "1", "--init", str(run / "drafter")]) == 0
    assert json.loads((tmp_path / "more" / "drafter" / "training.json").read_text())["step"] == 4  # it adds up over runs
    for flags, folder in ((["--dtype", "float32"], "plain"), (["--int8"], "small")):
        assert (
            main(
                [
                    "train",
                    "export",
                    "dflash",
                    str(run / "drafter"),
                    str(tmp_path / folder),
                    "--target",
                    str(TINY / "target"),
                    *flags,
                ]
            )
            == 0
        )
    shape = TargetShape(4, 64, len(tiny.VOCABULARY))
    (config, plain), (_, small) = (load_dflash(tmp_path / f, target=shape) for f in ("plain", "small"))
    assert config.mask_token_id == tiny.VOCABULARY.index("<mask>") and config.draft_vocab_size == 60
    for name, weight in plain.items():
        if weight.dim() == 2:
            step = weight.abs().amax(1, keepdim=True) / 127
            assert ((weight - small[name].float()).abs() <= 0.51 * step + 1e-6).all(), name


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_tiny_trio_drafts_well_and_meets_every_acceptance_length(kind):
    import random

    decoder = WhiFlashDecoder.from_pretrained(
        str(TINY / "target"), dflash=TINY / "dflash", eagle3=TINY / "eagle3", device="cpu", dtype="float32", max_cache_len=256
    )
    rng = random.Random(99)
    prompts = [tiny.sentence(rng)[0] for _ in range(24)]
    decoder.use_router("static:ar")
    plain = [decoder.generate(p, max_new_tokens=64).sequences.tolist() for p in prompts]
    decoder.use_router(f"static:{kind}:7")
    tokens, forwards, lengths = 0, 0, Counter()
    for prompt, expected in zip(prompts, plain, strict=True):
        out = decoder.generate(prompt, max_new_tokens=64)
        assert out.sequences.tolist() == expected
        tokens, forwards = tokens + out.stats.new_tokens - 1, forwards + out.stats.target_forwards
        lengths.update(r.accepted for r in out.rounds)
    print(f"{kind}: tau {tokens / forwards:.2f}, acceptance lengths {sorted(lengths.items())}")
    assert tokens / forwards > 3
    assert set(lengths) == set(range(8))


def test_assets_fit():
    size = sum(f.stat().st_size for f in ASSETS.rglob("*") if f.is_file())
    tiny_size = sum(f.stat().st_size for f in TINY.rglob("*") if f.is_file())
    assert size <= 30 * 2**20 and tiny_size <= 2 * 2**20


def test_features_of_another_text_are_refused(text, tmp_path):
    common = ["train", "features", "--target", str(TINY / "target"), "--features", str(tmp_path / "f"), "--max-len", "96"]
    assert main([*common, "--data", str(text), "--max-rows", "70"]) == 0
    other = tmp_path / "other.jsonl"
    other.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    assert main([*common, "--data", str(other), "--max-rows", "70"]) == 2  # other rows
    assert main([*common, "--data", str(text), "--max-rows", "80"]) == 2  # a last shard that was cut short
    assert main([*common, "--data", str(text), "--max-rows", "60"]) == 2  # more shards than rows
    assert main([*common, "--data", str(text), "--max-rows", "70"]) == 0


def test_too_little_text_is_an_error_not_a_loop(features):
    with pytest.raises(ValueError, match="less than one pack"):
        next(packs(features, (2, 3), 10**6, seed=0))


def test_a_run_with_other_settings_is_not_resumed(text, tmp_path, capsys):
    base = ["train", "dflash", "--target", str(TINY / "target"), "--data", str(text), "--features", str(tmp_path / "f")]
    base += [
        "--max-len",
        "96",
        "--out",
        str(tmp_path / "run"),
        "--pack-tokens",
        "256",
        "--draft-vocab",
        "60",
        "--eval-prompts",
        "1",
    ]
    assert main([*base, "--layers", "1", "--steps", "1"]) == 0
    assert main([*base, "--layers", "1", "--steps", "2"]) == 0
    assert main([*base, "--layers", "2", "--steps", "3"]) == 2
    assert "other settings" in capsys.readouterr().err
    assert main([*base, "--layers", "9", "--steps", "3"]) == 2
    assert "give 1 to 4" in capsys.readouterr().err
    assert main([*base, "--steps", "0"]) == 2


def test_training_refuses_drafters_it_would_compute_wrongly(target, tmp_path):
    from tests.tiny import eagle3
    from whiflash_triton.checkpoints import save_eagle3
    from whiflash_triton.training.commands import _start_from

    config, tensors = eagle3(target, draft_vocab=60, norm_before_residual=True)
    save_eagle3(tmp_path, config, tensors)
    with pytest.raises(ValueError, match="norm_before_residual"):
        _start_from("eagle3", tmp_path, target, torch.arange(60))
    config, ids, params = _start_from("dflash", TINY / "dflash", target, torch.arange(60))
    assert len(ids) == config.draft_vocab_size and all(p.requires_grad for p in params.values())


def test_tiny_never_overwrites(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="not empty"):
        tiny.make_tiny(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"
