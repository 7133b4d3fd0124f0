"""`whiflash train data`: rows that hang on seed and number alone, resumption, and answers that are the target's own."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from tests.tiny_folder import character_tokenizer
from whiflash_triton.cli import main
from whiflash_triton.loading import ASSETS
from whiflash_triton.training import selfgen, tiny
from whiflash_triton.training.data import encode_chat, read_rows

TARGET = str(ASSETS / "tiny" / "target")


def write(path, rows: int, *options: str) -> int:
    argv = ["train", "data", "--target", TARGET, "--out", str(path), "--rows", str(rows), "--domains", "mt_bench,qa", "--seed", "3"]
    return main([*argv, "--question-tokens", "24", "--max-new-tokens", "30", *options])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    assert write(path, 14, "--batch", "8") == 0
    return path


def test_rows_are_what_training_reads(written):
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert len(rows) == 14 == len({selfgen._key(r["prompt"]) for r in rows})
    assert {r["domain"] for r in rows} == {"mt_bench", "qa"} and {r["temperature"] for r in rows} == {0.0, 0.8}
    assert [r["row"] for r in rows] == sorted(r["row"] for r in rows) and all(r["seed"] == 3 for r in rows)
    assert all(r["domain"] == ("mt_bench", "qa")[r["row"] % 2] for r in rows)
    assert len(read_rows(written, tiny.tokenizer(), 0, 96)) == 14


def test_greedy_answers_equal_transformers_one_by_one(written):
    model, tokenizer = selfgen.load_model(TARGET, torch.device("cpu"))
    for row in [r for r in map(json.loads, written.read_text().splitlines()) if r["temperature"] == 0][:4]:
        ids = torch.tensor([encode_chat(tokenizer, row["prompt"])])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, pad_token_id=0)
        new = out[0, ids.shape[1] :].tolist()
        assert row["finished"] == (0 in new)
        assert row["response"] == tokenizer.decode(new[: new.index(0)] if 0 in new else new)


def test_an_interrupted_run_goes_on_with_the_same_rows(written, tmp_path):
    """Cut in the middle of a line, and gone on with at another batch size."""
    path = tmp_path / "text.jsonl"
    path.write_bytes(written.read_bytes()[: written.read_bytes().index(b"\n", 900) + 20])
    assert path.read_bytes()[-1:] != b"\n"
    assert write(path, 14, "--batch", "5") == 0
    assert path.read_text() == written.read_text()
    assert write(path, 14, "--batch", "5") == 0  # nothing left to do
    assert path.read_text() == written.read_text()


def test_known_questions_are_left_out_and_a_source_run_dry_is_an_error(tmp_path):
    path = tmp_path / "text.jsonl"
    calls = []

    def make(numbers: range) -> list[dict]:
        calls.append(numbers)
        return [{"prompt": f"Why  is {n // 3}?".swapcase() if n % 2 else f"why is {n // 3}?", "seed": 1, "row": n} for n in numbers]

    news = []
    assert selfgen.write_text(path, 3, float("inf"), 1, 4, make, news.append) == 3
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [0, 3, 6]
    assert calls == [range(0, 4), range(4, 8)] and news == [0, 2, 1]
    assert selfgen.write_text(path, 5, float("inf"), 1, 4, make) == 5 and calls[2] == range(7, 11)
    with pytest.raises(RuntimeError, match="80 tries gave no question that is new"):
        selfgen.write_text(path, 9, float("inf"), 2, 4, lambda numbers: make(range(4)))
    assert selfgen.write_text(path, 99, 0.0, 1, 4, make) == 5  # the time is over
    path.write_text('{"question": 1}\n')
    with pytest.raises(ValueError, match="did not write"):
        selfgen.write_text(path, 9, float("inf"), 1, 4, make)


def test_sampler_draws_by_row():
    """Shares as the softmax says; a row's draws are its own, whoever shares its batch; the nucleus holds; 0 is greedy."""
    logits = torch.tensor([0.5, 0.3, 0.17, 0.03]).log()
    scores = logits[None].repeat(3, 1)
    draws: dict[str, list[int]] = {}
    for name, temperatures, seeds in (("three", [1.0, 1.0, 0.0], ["a", "b", "c"]), ("one", [1.0], ["b"])):
        sampler = selfgen.RowSampler(temperatures, seeds, torch.device("cpu"))
        found = [sampler(None, scores[: len(seeds)]) for _ in range(600)]
        assert all(((f == 0).sum(-1) == 1).all() and ((f == float("-inf")).sum(-1) == 3).all() for f in found)
        for i, seed in enumerate(seeds):
            draws[f"{name}-{seed}"] = [int(f[i].argmax()) for f in found]
    assert draws["three-b"] == draws["one-b"] != draws["three-a"]
    assert set(draws["three-c"]) == {0}
    counts = Counter(draws["three-a"] + draws["three-b"])
    assert counts[3] == 0  # 0.5 + 0.3 + 0.17 reach 0.95
    for token, share in enumerate((0.5, 0.3, 0.17)):
        expected = 1200 * share / 0.97
        assert abs(counts[token] - expected) < 5 * (expected * (1 - share / 0.97)) ** 0.5


def test_the_user_turn_of_a_template():
    tokenizer = tiny.tokenizer()
    head, end = selfgen.user_turn(tokenizer)
    assert head == "<user> " and end == tiny.VOCABULARY.index("<assistant>")
    with pytest.raises(ValueError, match="no chat template"):
        selfgen.user_turn(character_tokenizer(211))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--domains", "qa,cooking"], "--domains"), (["--temperature", "hot"], "--temperature"), (["--batch", "0"], "--batch"),
        (["--temperature", "-1"], "--temperature"), (["--minutes", "nan"], "--minutes"),
    ],
)  # fmt: skip
def test_bad_options(tmp_path, capsys, options, message):
    assert write(tmp_path / "x.jsonl", 1, *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "x.jsonl").exists()
