"""Generation options: transformers' own texts, scores and calls, whatever the drafts."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import GenerationConfig

from tests.letters import LETTERS, NEW, PROMPTS, SAMPLED, TOKENIZER, V, free_text, oracle_decoder, plain_decoder, setting, unstopped
from tests.oracle import CPU, Recorder, hf_generate
from whiflash_triton.scheduler import NaNLogits

BRANCHING = pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])


class Processor:
    """Favours another letter at every call, by the number of calls so far; remembers what it was shown."""

    def __init__(self):
        self.calls = []

    def __call__(self, ids, scores):
        self.calls.append(ids.tolist())
        scores = scores.clone()
        scores[:, LETTERS[7 * len(self.calls) % len(LETTERS)]] += 4.0
        return scores


class Criterion:
    """Ends the text at its `after`-th call; remembers what it was shown."""

    def __init__(self, after: int):
        self.after, self.calls = after, []

    def __call__(self, ids, scores, **_):
        self.calls.append((ids.tolist(), None if scores is None else len(scores)))
        return torch.full((1,), len(self.calls) >= self.after, dtype=torch.bool)


def first(text: list[int], least: int) -> int:
    """A token of the text that first comes at index `least` or later."""
    return next(t for i, t in enumerate(text) if i >= least and t not in text[:i])


# name -> options after a prompt of length p, whose text without them would be `text`
CASES = {
    "repetition_penalty": lambda text, p: {"repetition_penalty": 1.5},
    "repetition_reward": lambda text, p: {"repetition_penalty": 0.8},
    "no_repeat_ngram_size": lambda text, p: {"no_repeat_ngram_size": 1},
    "bad_words_ids": lambda text, p: {"bad_words_ids": [text[1:3], text[4:7], [text[8]]]},
    "eos_token_id": lambda text, p: {"eos_token_id": [first(text, 6), first(text, 4)]},
    "min_new_tokens": lambda text, p: {"eos_token_id": first(text, 3), "min_new_tokens": 8},
    "min_length": lambda text, p: {"eos_token_id": [first(text, 3), first(text, 5)], "min_length": p + 7},
    "stop_strings": lambda text, p: {"stop_strings": [TOKENIZER.decode(text[4:6]), TOKENIZER.decode(text[6:9])]},
    "logits_processor": lambda text, p: {"logits_processor": [Processor()]},
    "stopping_criteria": lambda text, p: {"stopping_criteria": [Criterion(99), Criterion(9)]},
    "generation_config": lambda text, p: {
        "generation_config": GenerationConfig(repetition_penalty=1.3, bad_words_ids=[[text[2]]], pad_token_id=0)
    },
    "together": lambda text, p: {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[text[0]]], "min_new_tokens": 6,
        "eos_token_id": [text[1], LETTERS[3]], "logits_processor": [Processor()], "stop_strings": ["zq", "A"],
        "stopping_criteria": [Criterion(12)],
    },
}  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_texts(name, sampled):
    """Greedy ids are transformers', sampled ones plain decoding's, token for token, and nothing comes after a stop."""
    changed = accepted = 0
    for n, prompt in enumerate(PROMPTS[: 6 if sampled else 10]):
        text = free_text(n, sampled)

        def options(text=text, prompt=prompt):
            return CASES[name](text, len(prompt)) | (SAMPLED if sampled else {}) | {"max_new_tokens": NEW}

        if sampled:
            expected = plain_decoder().generate(prompt, **options()).sequences[0].tolist()
        else:
            needed = {"tokenizer": TOKENIZER} if "stop_strings" in options() else {}
            expected = hf_generate(setting().model, prompt, **options(), **needed)
        long = unstopped(prompt, options())
        assert long[: len(expected)] == expected
        changed += expected != prompt + text[:NEW]
        decoder, recorder = oracle_decoder(long, n % 2 == 0, seed=n), Recorder()
        out = decoder.generate(prompt, streamer=recorder, **options())
        new = expected[len(prompt) :]
        assert out.sequences.tolist() == [expected] and recorder.tokens == new and recorder.ends == 1
        assert out.stats.new_tokens == len(out.arms) == len(new) == 1 + sum(r.committed for r in out.rounds)
        assert out.finish == "stop" or len(new) == NEW
        accepted += sum(r.accepted for r in out.rounds)
        if n < 3:
            pieces = list(decoder.stream(prompt, **options()))
            assert [t for piece in pieces for t in piece.tokens] == new
            assert "".join(piece.text for piece in pieces) == out.text == TOKENIZER.decode(new)
    assert changed >= 5 and accepted >= 15


@BRANCHING
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_stateful_callables_see_the_calls_of_plain_decoding(sampled, branching):
    """Same texts in the same order, one call a token, none after the stop; scores are there only when asked for."""
    for n, scored in itertools.product(range(4), (False, True)):
        prompt = PROMPTS[n]
        own = dict(SAMPLED if sampled else {}, max_new_tokens=NEW, output_scores=scored)

        def watch():
            return [Processor()], [Criterion(40), Criterion(10)]

        long = unstopped(prompt, own | {"logits_processor": [Processor()]})
        processors, criteria = watch()
        if sampled:
            plain_decoder().generate(prompt, logits_processor=processors, stopping_criteria=criteria, **own)
        else:
            watched = {"logits_processor": processors, "stopping_criteria": criteria}
            hf_generate_dict(prompt, return_dict_in_generate=True, **watched, **own)
        seen = [x.calls for x in (*processors, *criteria)]
        processors, criteria = watch()
        decoder = oracle_decoder(long, branching, itertools.cycle((5, 2, 4)))
        out = decoder.generate(prompt, logits_processor=processors, stopping_criteria=criteria, **own)
        assert [x.calls for x in (*processors, *criteria)] == seen
        assert len(processors[0].calls) == len(criteria[0].calls) == out.stats.new_tokens == 10 and out.finish == "stop"
        assert [len(ids[0]) for ids in processors[0].calls] == list(range(len(prompt), len(prompt) + 10))
        assert [r.accepted for r in out.rounds] == [5, 2]  # 1 + (5 + 1) + (2 + 1)
        assert [count for _, count in criteria[0].calls] == [i + 1 if scored else None for i in range(10)]


@BRANCHING
def test_criteria_see_only_the_tokens_up_to_the_stop(branching):
    """Without a processor the block is chosen at once; the criteria still end inside it."""
    prompt, long = PROMPTS[0], unstopped(PROMPTS[0], {})
    for after in range(1, 14):
        criterion = Criterion(after)
        decoder = oracle_decoder(long, branching, itertools.repeat(5))
        out = decoder.generate(prompt, stopping_criteria=[criterion], max_new_tokens=20)
        assert out.sequences[0].tolist() == long[: len(prompt) + after] and out.finish == "stop"
        assert [ids[0] for ids, _ in criterion.calls] == [long[: len(prompt) + i + 1] for i in range(after)]
        assert out.stats.host_options == ("stopping_criteria",)


def hf_generate_dict(prompt: list[int], **options):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return setting().model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options)


# Stop strings


@BRANCHING
def test_stop_strings_across_rounds_and_inside_a_block(branching):
    """Rounds commit 6 tokens: 1..6, 7..12. A string may begin in the prompt's token, in one round, and end in the next."""
    for begin, end in ((0, 3), (5, 9), (6, 7), (4, 7), (5, 13), (11, 14)):
        n = next(n for n in range(10) if TOKENIZER.decode(free_text(n)[begin:end]) not in TOKENIZER.decode(free_text(n)[: end - 1]))
        prompt, text = PROMPTS[n], free_text(n)
        word = TOKENIZER.decode(text[begin:end])
        decoder, recorder = oracle_decoder(prompt + text, branching, itertools.repeat(5)), Recorder()
        out = decoder.generate(prompt, max_new_tokens=20, stop_strings=word, streamer=recorder, output_scores=True)
        assert out.sequences[0].tolist() == prompt + text[:end] and out.finish == "stop" and out.text.endswith(word)
        assert recorder.tokens == text[:end] and len(out.scores) == len(out.arms) == out.stats.new_tokens == end
        full, rest = divmod(end - 1, 6)
        assert [r.committed for r in out.rounds] == [6] * full + [rest] * bool(rest)
        theirs = hf_generate(setting().model, prompt, max_new_tokens=20, stop_strings=[word], tokenizer=TOKENIZER)
        assert theirs == out.sequences[0].tolist()


def test_stop_strings_of_the_prompt_and_at_the_limit():
    """What the prompt holds stops nothing by itself; at the limit the string counts."""
    prompt, text = PROMPTS[2], free_text(2)
    word = TOKENIZER.decode(text[3:5])
    decoder = oracle_decoder(prompt + text, True, itertools.repeat(5))
    assert decoder.generate(prompt, max_new_tokens=5, stop_strings=[word]).finish == "stop"
    assert decoder.generate(prompt, max_new_tokens=4, stop_strings=[word]).finish == "length"
    prompt = TOKENIZER("stop here")["input_ids"]
    text = unstopped(prompt, {})
    out = oracle_decoder(text, True).generate(prompt, max_new_tokens=12, stop_strings=["stop"])
    assert "stop" not in out.text and out.finish == "length"
    assert out.sequences[0].tolist() == hf_generate(
        setting().model, prompt, max_new_tokens=12, stop_strings=["stop"], tokenizer=TOKENIZER
    )


@pytest.mark.parametrize("how", ["greedy", "sampled", "host"])
def test_nan_beyond_a_stop_is_never_met(monkeypatch, how):
    """Plain decoding would not compute those rows; without the stop they are an error."""
    options = {"greedy": {}, "sampled": SAMPLED, "host": {"bad_words_ids": [[3]]}}[how]
    prompt, target = PROMPTS[3], setting().target
    long, plain = unstopped(prompt, options), target.logits
    new = long[len(prompt) :]
    end = next(i for i in (4, 3, 5) if new[i] not in new[:i])
    decoder = oracle_decoder(long, rights=itertools.repeat(5))
    hurt = torch.arange(6)[:, None] >= end  # row i chooses token i + 1
    monkeypatch.setattr(target, "logits", lambda h: plain(h).masked_fill(hurt, float("nan")) if h.shape[1] == 6 else plain(h))
    out = decoder.generate(prompt, max_new_tokens=12, eos_token_id=new[end], **options)
    assert out.sequences[0].tolist() == long[: len(prompt) + end + 1] and out.finish == "stop"
    with pytest.raises(NaNLogits):
        decoder.generate(prompt, max_new_tokens=12, **options)


# Limits


@pytest.mark.parametrize("name", ["none", "repetition_penalty", "together", "sampled"])
def test_limits_are_exact(name):
    """With and without a pass on the host; max_new_tokens, max_length, and both, of which the first wins."""
    prompt = PROMPTS[3]
    text = free_text(3)

    def options():
        given = SAMPLED if name == "sampled" else CASES.get(name, lambda *_: {})(text, len(prompt))
        return {k: v for k, v in given.items() if k not in ("min_new_tokens", "stop_strings", "eos_token_id")}

    long = unstopped(prompt, options())
    for new in range(1, 12):
        limits = {"max_new_tokens": new}, {"max_length": len(prompt) + new}, {"max_new_tokens": new, "max_length": 70}
        for i, limit in enumerate(limits):
            out = oracle_decoder(long, i == 0, itertools.repeat(5)).generate(prompt, **limit, **options())
            assert out.sequences[0].tolist() == long[: len(prompt) + new] and out.finish == "length"
            assert out.stats.new_tokens == new == len(out.arms)


# Scores


@pytest.mark.parametrize("name", ["none", "repetition_penalty", "bad_words_ids", "logits_processor", "stop_strings"])
def test_scores_are_those_of_transformers(name):
    for n in range(3):
        prompt, text = PROMPTS[n], free_text(n)

        def options(prompt=prompt, text=text):
            given = CASES.get(name, lambda *_: {})(text, len(prompt))
            return given | {"max_new_tokens": NEW, "output_scores": True, "return_dict_in_generate": True}

        needed = {"tokenizer": TOKENIZER} if name == "stop_strings" else {}
        theirs = hf_generate_dict(prompt, **options(), **needed)
        out = oracle_decoder(unstopped(prompt, options()), n % 2 == 0).generate(prompt, **options())
        assert torch.equal(out.sequences, theirs.sequences)
        assert len(out.scores) == len(theirs.scores) == out.stats.new_tokens
        for ours, want in zip(out.scores, theirs.scores, strict=True):
            assert ours.shape == want.shape == (1, V)
            torch.testing.assert_close(ours.float(), want, rtol=1e-5, atol=1e-5)
    assert plain_decoder().generate(prompt, max_new_tokens=2).scores is None


def test_sampled_scores():
    """Against transformers' processors over its model's logits for the whole text."""
    options = SAMPLED | {"repetition_penalty": 1.3, "min_p": 0.02, "max_new_tokens": NEW}
    config = GenerationConfig(**{k: v for k, v in options.items() if k != "seed"})
    for n in range(4):
        prompt = PROMPTS[n]
        long = unstopped(prompt, options)
        out = oracle_decoder(long, True).generate(prompt, output_scores=True, **options)
        setting().model._prepare_special_tokens(config, device=CPU)
        processors = setting().model._get_logits_processor(config, input_ids_seq_length=len(prompt), device=CPU)
        with torch.no_grad():
            logits = setting().model(out.sequences).logits[0]
        for i, ours in enumerate(out.scores):
            end = len(prompt) + i
            want = processors(out.sequences[:, :end], logits[end - 1 : end].clone())
            torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)
            assert torch.isfinite(ours).sum() <= 20
