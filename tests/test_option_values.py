"""Where generation options come from, which of them cost a pass on the host, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from tests.letters import PROMPTS, ROWS, SAMPLED, TOKENIZER, V, plain_decoder, setting
from whiflash_triton.arms import Arm
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.routers.static import StaticRouter


def test_a_generation_config_means_what_its_fields_mean():
    fields = {"do_sample": True, "temperature": 0.7, "top_k": 12, "min_p": 0.01, "max_new_tokens": 9, "repetition_penalty": 1.1}
    for n in range(3):
        decoder = plain_decoder()
        spelled = decoder.generate(PROMPTS[n], seed=5, **fields)
        told = decoder.generate(PROMPTS[n], seed=5, generation_config=GenerationConfig(**fields))
        assert torch.equal(told.sequences, spelled.sequences) and told.stats.new_tokens == 9
        over = decoder.generate(PROMPTS[n], seed=5, generation_config=GenerationConfig(**fields), temperature=1.3, top_k=0)
        assert torch.equal(
            over.sequences, decoder.generate(PROMPTS[n], seed=5, **fields | {"temperature": 1.3, "top_k": 0}).sequences
        )


def test_the_models_own_generation_config():
    """It fills in what the call leaves open; its sampling fields wait until sampling is asked for."""
    own = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.4, "max_length": 20, "do_sample": True}
    for name, value in own.items():
        setattr(setting().model.generation_config, name, value)
    try:
        decoder = WhiFlashDecoder.from_pretrained(setting().model, max_cache_len=ROWS, tokenizer=TOKENIZER)
        setting().model.generation_config.typical_p = 0.5
        strange = WhiFlashDecoder.from_pretrained(setting().model, max_cache_len=ROWS, tokenizer=TOKENIZER)
    finally:
        setting().model.generation_config = GenerationConfig(eos_token_id=None)
    plain, prompt = plain_decoder(), PROMPTS[4]
    greedy = plain.generate(prompt, max_new_tokens=30, repetition_penalty=1.4)
    assert torch.equal(decoder.generate(prompt, max_new_tokens=30).sequences, greedy.sequences) and greedy.stats.seed is None
    fields = {name: own[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty", "do_sample")}
    for changed in ({}, {"temperature": 1.5}, {"top_k": 0, "top_p": 1.0}):
        told = decoder.generate(prompt, do_sample=True, seed=3, max_new_tokens=30, **changed)
        spelled = plain.generate(prompt, seed=3, max_new_tokens=30, **fields | changed)
        assert torch.equal(told.sequences, spelled.sequences)
    with pytest.raises(ValueError, match="generation_config sets typical_p"):
        strange.generate(prompt, max_new_tokens=3)


def test_options_that_cost_a_pass_on_the_host_are_named():
    def named(**options):
        return plain_decoder().generate(PROMPTS[0], max_new_tokens=3, **options).stats.host_options

    assert named() == named(**SAMPLED) == named(repetition_penalty=1.2, eos_token_id=[5, 6], min_p=None, top_p=None) == ()
    assert named(logits_processor=[], stopping_criteria=[], no_repeat_ngram_size=0, min_new_tokens=0) == ()
    assert named(min_new_tokens=2) == ()  # without an end token there is nothing to hold back
    assert named(no_repeat_ngram_size=3, repetition_penalty=1.2) == ("no_repeat_ngram_size", "repetition_penalty")
    assert named(min_new_tokens=2, min_length=9, eos_token_id=4) == ("min_length", "min_new_tokens")
    assert named(stop_strings="x", bad_words_ids=[[3]]) == ("bad_words_ids", "stop_strings")
    assert named(logits_processor=lambda i, x: x, stopping_criteria=lambda i, x: False) == ("logits_processor", "stopping_criteria")


BAD = [
    ({"temperature": 0, "do_sample": True}, "temperature 0"),
    ({"temperature": -1.0, "do_sample": True}, "temperature"),
    ({"temperature": float("nan"), "do_sample": True}, "temperature"),
    ({"temperature": "hot", "do_sample": True}, "temperature"),
    ({"temperature": 0.7}, "temperature.*do_sample"),
    ({"top_p": 0.9, "top_k": 5}, "top_k, top_p.*do_sample"),
    ({"top_p": 0.0, "do_sample": True}, "top_p"),
    ({"top_p": 1.5, "do_sample": True}, "top_p"),
    ({"top_k": -1, "do_sample": True}, "top_k"),
    ({"top_k": 2.5, "do_sample": True}, "top_k"),
    ({"min_p": 2, "do_sample": True}, "min_p"),
    ({"min_p": -0.1, "do_sample": True}, "min_p"),
    ({"seed": -1, "do_sample": True}, "seed"),
    ({"seed": 2**64, "do_sample": True}, "seed"),
    ({"seed": 1.5, "do_sample": True}, "seed"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": "x"}, "repetition_penalty"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": -3}, "max_new_tokens"),
    ({"max_new_tokens": 2.0}, "max_new_tokens"),
    ({"max_length": 2}, "max_length"),
    ({"max_length": ROWS + 2}, "max_cache_len"),
    ({"min_new_tokens": 6, "max_new_tokens": 5, "eos_token_id": 3}, "min_new_tokens"),
    ({"min_new_tokens": -1}, "min_new_tokens"),
    ({"min_length": "x"}, "min_length"),
    ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size"),
    ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size"),
    ({"bad_words_ids": [[V]]}, "bad_words_ids"),
    ({"bad_words_ids": [[1, -1]]}, "bad_words_ids"),
    ({"bad_words_ids": [5]}, "bad_words_ids"),
    ({"bad_words_ids": [["x"]]}, "bad_words_ids"),
    ({"bad_words_ids": [[]]}, "bad_words_ids"),
    ({"bad_words_ids": 5}, "bad_words_ids"),
    ({"stop_strings": []}, "stop_strings"),
    ({"stop_strings": ""}, "stop_strings"),
    ({"stop_strings": ["a", ""]}, "stop_strings"),
    ({"stop_strings": 5}, "stop_strings"),
    ({"stop_strings": [5]}, "stop_strings"),
    ({"logits_processor": 5}, "logits_processor"),
    ({"logits_processor": [5]}, "logits_processor"),
    ({"stopping_criteria": ["stop"]}, "stopping_criteria"),
    ({"eos_token_id": "x"}, "eos_token_id"),
    ({"eos_token_id": [1.5]}, "eos_token_id"),
    ({"num_beams": 2}, "num_beams"),
    ({"num_return_sequences": 3}, "num_return_sequences"),
    ({"use_cache": False}, "use_cache"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"top_kk": 5}, "top_kk"),
]


@pytest.mark.parametrize(("options", "named"), BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_bad_values_name_the_option(options, named):
    decoder = plain_decoder()
    with pytest.raises(ValueError, match=named):
        decoder.generate([1, 2, 3], **options)
    assert decoder.generate([1, 2, 3], max_new_tokens=2).stats.new_tokens == 2


def test_stop_strings_need_a_tokenizer():
    decoder = WhiFlashDecoder(setting().target, None, {}, StaticRouter(Arm("ar")), ROWS, [])
    with pytest.raises(ValueError, match="stop_strings: this decoder has no tokenizer"):
        decoder.generate([1, 2, 3], stop_strings="x")
