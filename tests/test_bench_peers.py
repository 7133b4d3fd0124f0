"""Others' decoders in the bench, on the trained tiny trio: their greedy texts are ours, and their DFlash takes our rounds."""

from __future__ import annotations

import shutil

import pytest

from whiflash_triton import WhiFlashDecoder
from whiflash_triton.evaluation import peers
from whiflash_triton.evaluation.peers import check_peers, make_peers
from whiflash_triton.loading import ASSETS

TARGET, NEW = ASSETS / "tiny" / "target", 64
PROMPTS = ["tell about fox", "count from 3 by 2"]
NAMES = ["hf", "prompt-lookup:4", "hf-dflash", "dflash", "dflash:2"]


def missing(name: str) -> str | None:
    try:
        check_peers([name], "folder", {})
    except ImportError as error:
        return str(error)


THERE = [name for name in NAMES if not missing(name)]


@pytest.fixture(scope="module")
def dflash(tmp_path_factory):
    """The tiny drafter with the target's whole head, which is what the peers draft over."""
    folder = tmp_path_factory.mktemp("drafter") / "dflash"
    shutil.copytree(ASSETS / "tiny" / "dflash", folder)
    (folder / "draft_vocab.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def decoder(dflash):
    return WhiFlashDecoder.from_pretrained(TARGET, dflash=dflash, eagle3=None, dtype="float32", max_cache_len=128)


@pytest.fixture(scope="module")
def sides(decoder, dflash):
    return make_peers(decoder, str(TARGET), dflash, THERE, {})


def ours(decoder, prompt: str, router: str = "static:ar", new: int = NEW) -> tuple[list[int], list[int], int]:
    """(prompt, answer, target forwards)."""
    decoder.use_router(router)
    out = decoder.generate(prompt, max_new_tokens=new, reuse_prefix=False)
    ids = out.sequences[0].tolist()
    return ids[: out.stats.prompt_tokens], ids[out.stats.prompt_tokens :], out.stats.target_forwards


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_ours(decoder, sides, name):
    if why := missing(name):
        pytest.skip(why)
    for prompt in PROMPTS:
        for new in (NEW, 9):
            ids, right, _ = ours(decoder, prompt, new=new)
            text = sides[f"peer:{name}"](ids, new)
            assert text.tokens == right and text.rounds is None
            assert text.forwards == len(right) - 1 if name == "hf" else text.forwards <= len(right) - 1
    assert right[-1] != decoder.eos_token_ids[0] and ours(decoder, prompt)[1][-1] == decoder.eos_token_ids[0]  # both ends occur


@pytest.mark.parametrize("name", ["dflash", "hf-dflash"])
def test_their_dflash_takes_our_rounds(decoder, sides, name):
    """While the limit on new tokens is far: near it, or with a size, z-lab's block is drafted shorter, and ours whole."""
    if why := missing(name):
        pytest.skip(why)
    for prompt in PROMPTS:
        ids, right, forwards = ours(decoder, prompt, "static:dflash:7")
        assert len(right) + 8 < NEW and 1.2 * forwards < len(right)  # the text ended by itself, and drafts were taken
        assert sides[f"peer:{name}"](ids, NEW).forwards == forwards


def test_what_follows_an_end_token_is_not_counted(decoder, sides, monkeypatch):
    """With another end token, one that comes in the middle of accepted drafts."""
    ids, text, _ = ours(decoder, PROMPTS[0])
    monkeypatch.setattr(decoder, "eos_token_ids", [text[9]])
    right = text[: text.index(text[9]) + 1]
    assert all(side(ids, NEW).tokens == right for side in sides.values())


def test_sampled_peers_repeat_themselves(decoder, dflash):
    options = {"do_sample": True, "temperature": 2.0, "top_k": 20, "seed": 3}
    ids, greedy, _ = ours(decoder, PROMPTS[0])
    for side in make_peers(decoder, str(TARGET), dflash, THERE, options).values():
        text = side(ids, NEW).tokens
        assert text == side(ids, NEW).tokens and text != greedy and len(text) <= NEW


def test_the_models_own_generation_defaults_hold_for_peers_too(decoder, monkeypatch):
    ids, plain, _ = ours(decoder, PROMPTS[0])
    monkeypatch.setattr(decoder, "generation_defaults", {"repetition_penalty": 3.0, "temperature": 0.3})
    (side,) = make_peers(decoder, str(TARGET), None, ["hf"], {}).values()
    penalised = ours(decoder, PROMPTS[0])[1]
    assert side(ids, NEW).tokens == penalised != plain


def test_what_is_missing_or_cannot_be_is_told_at_once(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install dflash"):
        check_peers(["hf", "dflash"], "folder", {})
    with pytest.raises(ImportError, match="transformers"):
        check_peers(["hf-dflash"], "folder", {})
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="--dflash"):
        check_peers(["dflash"], None, {})
    for name in ("eagle", "hf:2", "hf-dflash:3", "prompt-lookup:0", "prompt-lookup:x"):
        with pytest.raises(ValueError, match="unknown peer"):
            check_peers([name], "folder", {})
    with pytest.raises(ValueError, match="min_p"):
        check_peers(["dflash"], "folder", {"do_sample": True, "min_p": 0.1})
    check_peers(NAMES, "folder", {})
