"""The front door: what goes in, what comes out, in what order, and what is refused."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer

from tests.oracle import RandomRouter, Recorder, build, byte_tokenizer, decoder_parts, hf_generate, load_decoder, prompt_ids
from whiflash_triton import Output, WhiFlashDecoder
from whiflash_triton.arms import Arm
from whiflash_triton.decoder import _warn_of_thinking

ARMS = [Arm("ar"), Arm("dflash", 4), Arm("eagle3", 3), Arm("dflash", 1)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return decoder_parts(tmp_path_factory.mktemp("parts"))


def load(parts, **changes) -> WhiFlashDecoder:
    return load_decoder(parts, **({"router": RandomRouter(ARMS)} | changes))


@pytest.fixture
def decoder(parts) -> WhiFlashDecoder:
    return load(parts)


# What goes in


def test_live_model_lends_its_weights(parts, decoder):
    lent = {p.data_ptr() for p in parts.model.parameters()}
    layer = decoder.target.layers[0]
    used = [decoder.target.embed, decoder.target.head, decoder.target.norm, *layer.qkv.weights, *layer.o.weights]
    assert {t.data_ptr() for t in used} <= lent
    assert decoder.eos_token_ids == [256, 257]
    ids = prompt_ids(9, vocab=250)
    out = decoder.generate(ids, max_new_tokens=40)
    assert isinstance(out, Output) and out.sequences[0].tolist() == hf_generate(parts.model, ids, max_new_tokens=40)


def test_folder_equals_live_model(parts, decoder):
    loaded = load(parts, tokenizer=None)
    assert loaded.tokenizer is None  # a model made in memory says nothing of a tokenizer
    options = dict(dflash=parts.root / "dflash", eagle3=parts.root / "eagle3", device="cpu", dtype="float32", max_cache_len=128)
    loaded = WhiFlashDecoder.from_pretrained(str(parts.root / "target"), router="entropy", **options)
    assert loaded.eos_token_ids == [256, 257] and loaded.tokenizer.decode([65, 66]) == parts.tokenizer.decode([65, 66])
    for prompt in ("Hello", [{"role": "user", "content": "Hello"}], prompt_ids(vocab=250)):
        ours, live = (d.generate(prompt, max_new_tokens=20) for d in (loaded, decoder))
        assert ours.text == live.text and torch.equal(ours.sequences, live.sequences)


def test_every_spelling_of_a_prompt(parts, decoder):
    chat = [{"role": "user", "content": "Café"}]
    ids = parts.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert parts.tokenizer.decode(ids) == "user: Café\nassistant: "
    expected = hf_generate(parts.model, ids, max_new_tokens=12)
    for prompt in ("Café", chat, tuple(chat), ids, tuple(ids), torch.tensor(ids), torch.tensor([ids]), torch.tensor(ids).int()):
        out = decoder.generate(prompt, max_new_tokens=12)
        assert out.sequences.tolist() == [expected] and out.sequences.dtype == torch.int64
        assert out.stats.prompt_tokens == len(ids)
        assert out.text == parts.tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)
    loud = decoder.generate("Café", max_new_tokens=1, chat_template_kwargs={"loud": True}).sequences[0, :-1]
    assert parts.tokenizer.decode(loud) == "user: Café\nLOUD assistant: "
    opened = decoder.generate(chat, max_new_tokens=1, chat_template_kwargs={"add_generation_prompt": False}).sequences[0, :-1]
    assert parts.tokenizer.decode(opened) == "user: Café\n"


def test_thinking_mode_is_warned_of_once(parts, decoder, monkeypatch, caplog):
    template = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(decoder.tokenizer, "chat_template", template)
    _warn_of_thinking.cache_clear()
    decoder.generate("Hi", max_new_tokens=1, chat_template_kwargs={"enable_thinking": False})
    assert not caplog.records
    for _ in range(2):
        decoder.generate("Hi", max_new_tokens=1)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "enable_thinking" in caplog.text


def test_text_without_a_chat_template(parts):
    decoder = load(parts, tokenizer=byte_tokenizer(None))
    out = decoder.generate("Café", max_new_tokens=3)
    assert decoder.tokenizer.decode(out.sequences[0, :-3]) == "Café" and out.stats.prompt_tokens == 5
    with pytest.raises(ValueError, match="no chat template"):
        decoder.generate([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        decoder.generate("x", chat_template_kwargs={"loud": True})


# What comes out, and when


def test_stream_equals_generate(parts, decoder):
    """Same tokens, arms and text; no piece ends inside a character, and nothing is said twice."""
    for seed in range(4):
        ids = prompt_ids(6, seed, 250)
        decoder.use_router(RandomRouter(ARMS, seed))
        out = decoder.generate(ids, max_new_tokens=60)
        decoder.use_router(RandomRouter(ARMS, seed))
        pieces = list(decoder.stream(ids, max_new_tokens=60))
        assert "".join(p.text for p in pieces) == out.text
        assert [t for p in pieces for t in p.tokens] == out.sequences[0, 6:].tolist()
        assert [a for p in pieces for a in p.arms] == out.arms
        rounds = [p.round for p in pieces if p.round]
        assert [(r.arm, r.drafted, r.accepted, r.committed) for r in rounds] == [
            (r.arm, r.drafted, r.accepted, r.committed) for r in out.rounds
        ]
        for r in rounds:
            assert set(r.ms) == {"route", "draft", "verify", "accept", "commit"} and min(r.ms.values()) >= 0


def test_stream_holds_back_half_a_character(parts):
    """Two bytes of one character in two rounds come out together; an unfinished last character comes out at the end."""
    decoder = load(parts, router="static:ar")
    euro = parts.tokenizer("a€b€")["input_ids"]
    assert len(euro) == 8
    decoder._steps = lambda *_: (SimpleNamespace(tokens=[t], arms=[Arm("ar")], round=None) for t in euro[:-1])
    pieces = [p.text for p in decoder.stream([1], max_new_tokens=7)]
    assert pieces[:5] == ["a", "", "", "€", "b"] and "".join(pieces) == parts.tokenizer.decode(euro[:-1])


def test_streamer_order(decoder):
    recorder, ids = Recorder(), prompt_ids(6, vocab=250)
    out = decoder.generate(torch.tensor([ids]), max_new_tokens=30, streamer=recorder)
    assert recorder.values[0].tolist() == [ids] and recorder.ends == 1
    assert recorder.tokens == out.sequences[0, 6:].tolist()
    assert [len(v) for v in recorder.values[1:]] == [1] + [r.committed for r in out.rounds]
    with pytest.raises(ValueError, match="streamer"):
        decoder.stream(ids, streamer=recorder)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_transformers_streamers(parts, decoder, capsys, skip_prompt):
    ids = parts.tokenizer("Tell me")["input_ids"]
    options = dict(skip_prompt=skip_prompt, skip_special_tokens=True)
    hf_generate(parts.model, ids, max_new_tokens=40, streamer=TextStreamer(parts.tokenizer, **options))
    expected = capsys.readouterr().out
    decoder.generate(ids, max_new_tokens=40, streamer=TextStreamer(parts.tokenizer, **options))
    printed = capsys.readouterr().out
    assert printed.replace("\ufffd", "") == expected.replace("\ufffd", "")  # it prints broken bytes as they come
    assert printed.startswith("Tell me") != skip_prompt
    iterator = TextIteratorStreamer(parts.tokenizer, timeout=60, **options)
    worker = threading.Thread(target=decoder.generate, args=(ids,), kwargs=dict(max_new_tokens=40, streamer=iterator))
    worker.start()
    assert "".join(iterator) + "\n" == printed
    worker.join()


def test_output_numbers(decoder):
    out = decoder.generate(prompt_ids(6, vocab=250), max_new_tokens=30, eos_token_id=[])
    s = out.stats
    assert s.new_tokens == 30 and s.target_forwards == len(out.rounds) and 0 < s.prefill_seconds < s.seconds
    assert s.tau == 29 / len(out.rounds) and s.tokens_per_second == 30 / s.seconds
    assert {str(a) for a in out.arms} <= {str(a) for a in ARMS}
    assert decoder.generate([5], max_new_tokens=1).stats.tau == 1.0


# Options


def test_generation_config(parts, decoder):
    ids = prompt_ids(6, vocab=250)
    free = decoder.generate(ids, max_new_tokens=20, eos_token_id=[]).sequences[0].tolist()
    sampling = dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    config = GenerationConfig(max_new_tokens=9, pad_token_id=0, bos_token_id=1, **sampling)
    assert decoder.generate(ids, generation_config=config).stats.seed is not None
    out = decoder.generate(ids, generation_config=config, do_sample=False)  # what is given wins; sampling fields lie idle
    assert out.sequences[0].tolist() == free[:15]
    assert decoder.generate(ids, generation_config=config, do_sample=False, max_new_tokens=4).stats.new_tokens == 4
    stop = GenerationConfig(max_length=20, eos_token_id=free[9])
    expected = free[: 6 + 1 + free[6:].index(free[9])]
    assert decoder.generate(ids, generation_config=stop).sequences[0].tolist() == expected
    assert decoder.generate(ids, generation_config=parts.model.generation_config, max_new_tokens=5).stats.new_tokens == 5
    with pytest.raises(ValueError, match="not supported: guidance_scale"):
        decoder.generate(ids, generation_config=GenerationConfig(guidance_scale=1.5))
    with pytest.raises(TypeError, match="GenerationConfig, not dict"):
        decoder.generate(ids, generation_config={"max_new_tokens": 3})


def test_token_budget_by_default_and_by_two_options(decoder):
    assert decoder.generate([1, 2, 3], eos_token_id=[]).stats.new_tokens == 126  # 256, or what the cache still takes
    assert decoder.generate([1, 2, 3], max_length=50, max_new_tokens=5).stats.new_tokens == 5  # as in transformers


def test_prompt_that_fills_the_cache(parts):
    decoder, ids = load(parts, max_cache_len=24), prompt_ids(24, vocab=250)
    out = decoder.generate(ids)
    assert out.sequences[0].tolist() == hf_generate(parts.model, ids, max_new_tokens=1) and not out.rounds
    with pytest.raises(ValueError, match="max_cache_len 24"):
        decoder.generate(ids, max_new_tokens=2)
    out = decoder.generate(ids[:-1], max_new_tokens=2)
    assert out.sequences[0].tolist() == hf_generate(parts.model, ids[:-1], max_new_tokens=2)


# One decoder, many calls


def test_calls_do_not_remember(parts):
    """Long, then short, then long: as from fresh decoders."""
    decoder, prompts = load(parts, router="entropy"), [prompt_ids(n, n, 250) for n in (60, 1, 30)]
    for ids in prompts + prompts:
        out, fresh = (d.generate(ids, max_new_tokens=25) for d in (decoder, load(parts, router="entropy")))
        assert torch.equal(out.sequences, fresh.sequences)
        assert [(r.arm, r.accepted, r.caught_up) for r in out.rounds] == [(r.arm, r.accepted, r.caught_up) for r in fresh.rounds]


def test_interleaved_streams_give_what_fresh_decoders_give(parts, decoder):
    """Each takes the caches back when its turn comes, whatever ran in between."""
    prompts = [prompt_ids(n, n, 250) for n in (6, 8, 5)]
    prompts.append(prompts[0][:4] + prompts[1])  # shares a prefix with the first
    expected = [load(parts, router="static:ar").generate(p, max_new_tokens=24).sequences[0, len(p) :].tolist() for p in prompts]
    streams = [decoder.stream(p, max_new_tokens=24) for p in prompts]
    got, rng = [[] for _ in streams], random.Random(3)
    open_ = list(range(len(streams)))
    while open_:
        i = rng.choice(open_)
        piece = next(streams[i], None)
        if piece is None:
            open_.remove(i)
        else:
            got[i] += piece.tokens
        if rng.random() < 0.2:
            decoder.generate(prompts[rng.randrange(4)], max_new_tokens=3)
    assert got == expected


def test_threads_on_one_decoder(parts):
    decoder, outcome = load(parts), {}
    prompts = [prompt_ids(6 + n, n, 250) for n in range(4)]
    expected = [hf_generate(parts.model, ids, max_new_tokens=30) for ids in prompts]

    def work(n: int) -> None:
        if n % 2:
            outcome[n] = decoder.generate(prompts[n], max_new_tokens=30).sequences[0].tolist()
        else:
            outcome[n] = prompts[n] + [t for piece in decoder.stream(prompts[n], max_new_tokens=30) for t in piece.tokens]

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [outcome[n] for n in range(4)] == expected


def test_a_generation_inside_a_generation(parts):
    """From a streamer or a router: both texts are right; from within a drafter the outer one is refused."""
    decoder, ids, outer = load(parts, router="entropy"), prompt_ids(6, vocab=250), prompt_ids(20, 3, 250)
    expected = decoder.generate(ids, max_new_tokens=8).sequences
    whole = decoder.generate(outer, max_new_tokens=30, eos_token_id=[]).sequences
    inner = []

    class Nested(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) % 3 == 0:
                inner.append(decoder.generate(ids, max_new_tokens=8).sequences)

    assert torch.equal(decoder.generate(outer, max_new_tokens=30, streamer=Nested(), eos_token_id=[]).sequences, whole)
    assert len(inner) > 3
    entropy, depth = decoder.router, []

    def choose(state):
        if not depth:
            depth.append(1)
            inner.append(decoder.generate(ids, max_new_tokens=8).sequences)
            depth.pop()
        return entropy.choose(state)

    decoder.router = SimpleNamespace(arms=entropy.arms, choose=choose)
    assert torch.equal(decoder.generate(outer, max_new_tokens=30, eos_token_id=[]).sequences, whole)
    assert all(torch.equal(sequences, expected) for sequences in inner)
    decoder.use_router("static:eagle3:2")
    drafter, plain = decoder.drafters["eagle3"], decoder.drafters["eagle3"].draft

    def draft(*args):
        drafter.draft = plain
        decoder.generate(ids, max_new_tokens=8)
        return plain(*args)

    drafter.draft = draft
    with pytest.raises(RuntimeError, match="load a second decoder"):
        decoder.generate(outer, max_new_tokens=30, eos_token_id=[])
    assert torch.equal(decoder.generate(ids, max_new_tokens=8).sequences, expected)


@pytest.mark.parametrize("router", ["static:ar", "static:dflash", "entropy"])
def test_prompt_of_several_chunks(parts, router):
    """More rows than one prefill chunk, and features in as many parts."""
    decoder, ids = load(parts, router=router, max_cache_len=640), prompt_ids(600, 8, 250)
    out = decoder.generate(ids, max_new_tokens=15)
    assert out.sequences[0].tolist() == hf_generate(parts.model, ids, max_new_tokens=15)
    assert out.rounds[0].caught_up == (0 if router == "static:ar" else 600)


def test_a_closed_stream_leaves_nothing_behind(decoder):
    ids = prompt_ids(6, vocab=250)
    expected = decoder.generate(ids, max_new_tokens=20).sequences
    for pieces in range(4):
        stream = decoder.stream(prompt_ids(40, 3, 250), max_new_tokens=30)
        for _ in range(pieces):
            next(stream)
        stream.close()
        assert torch.equal(decoder.generate(ids, max_new_tokens=20).sequences, expected)


def test_a_failure_in_mid_round_leaves_the_decoder_usable(parts, monkeypatch):
    decoder, ids = load(parts), prompt_ids(6, vocab=250)
    expected = decoder.generate(ids, max_new_tokens=20).sequences

    class Broken(Exception):
        pass

    def breaks(owner, name: str, after: int):
        calls, inner = iter(range(after)), getattr(owner, name)

        def broken(*args, **kwargs):
            if next(calls, None) is None:
                raise Broken
            return inner(*args, **kwargs)

        return owner, name, broken

    places = [(d, n) for d in decoder.drafters.values() for n in ("draft", "ingest")]
    places += [(decoder.drafters["eagle3"], "_fuse"), (decoder.drafters["dflash"].cache, "attend")]
    places += [
        (decoder.router, "choose"),
        (decoder.work.cache, "commit"),
        (decoder.target, "logits"),
        (decoder.work.cache, "attend"),
    ]
    for owner, name in places:
        with monkeypatch.context() as patch, pytest.raises(Broken):
            patch.setattr(*breaks(owner, name, 3))
            decoder.generate(prompt_ids(30, 5, 250), max_new_tokens=60)
        assert torch.equal(decoder.generate(ids, max_new_tokens=20).sequences, expected), name
    for after in (0, 1, 3):
        recorder = Recorder()
        with monkeypatch.context() as patch, pytest.raises(Broken):
            patch.setattr(*breaks(recorder, "put", after))
            decoder.generate(prompt_ids(30, 5, 250), max_new_tokens=60, streamer=recorder)
        assert torch.equal(decoder.generate(ids, max_new_tokens=20).sequences, expected)


def test_use_router(parts, decoder):
    ids = prompt_ids(6, vocab=250)
    expected = hf_generate(parts.model, ids, max_new_tokens=15)
    for spec, kinds in (("static:ar", {"ar"}), ("static:eagle3:4", {"eagle3"}), ("entropy", {"dflash", "eagle3"})):
        decoder.use_router(spec)
        out = decoder.generate(ids, max_new_tokens=15)
        assert out.sequences[0].tolist() == expected
        assert {r.arm.kind for r in out.rounds if r.drafted} <= kinds
    with pytest.raises(ValueError, match="dflash:1 to dflash:5"):
        decoder.use_router("static:dflash:6")
    assert decoder.generate(ids, max_new_tokens=15).sequences[0].tolist() == expected  # the old router stays


def test_without_drafters(parts):
    decoder = load(parts, dflash=None, eagle3=None, router="auto")
    ids = prompt_ids(6, vocab=250)
    out = decoder.generate(ids, max_new_tokens=10)
    assert out.sequences[0].tolist() == hf_generate(parts.model, ids, max_new_tokens=10)
    assert {str(r.arm) for r in out.rounds} == {"ar"} and out.stats.tau == 1.0


def test_one_drafter_is_static_by_default(parts):
    for kind, arm in (("dflash", "dflash:3"), ("eagle3", "eagle3:2")):
        decoder = load(parts, **({"dflash": None, "eagle3": None, "router": "auto"} | {kind: parts.root / kind}))
        assert [str(a) for a in decoder.router.arms] == [arm]
        assert arm in {str(r.arm) for r in decoder.generate([5, 6], max_new_tokens=12).rounds}


def test_scratch_mode_through_the_front_door(parts):
    """The caches of a GPU on a CPU: draft rows apart from committed ones, committed by kv_compaction."""
    target, ids = parts.target, prompt_ids(6, vocab=250)
    drafters = {kind: build(kind, target, 64, True) for kind in ("dflash", "eagle3")}
    decoder = WhiFlashDecoder(target, parts.tokenizer, drafters, RandomRouter(ARMS), 64, [256])
    decoder.work.replace_cache(target.new_cache(64, 17, True))
    expected = hf_generate(parts.model, ids, max_new_tokens=30)
    assert decoder.generate(ids, max_new_tokens=30).sequences[0].tolist() == expected
