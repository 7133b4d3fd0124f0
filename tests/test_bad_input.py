"""What the front door refuses, and how it says so: prompts, options, files, arms, and targets that break."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.oracle import RandomRouter, decoder_parts, hf_generate, load_decoder, prompt_ids
from tests.tiny import hf_model
from whiflash_triton import WhiFlashDecoder
from whiflash_triton.arms import Arm
from whiflash_triton.checkpoints import CheckpointError
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.scheduler import NaNLogits

ARMS = [Arm("ar"), Arm("dflash", 4), Arm("eagle3", 3)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return decoder_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def decoder(parts) -> WhiFlashDecoder:
    return load_decoder(parts, router="entropy")


BAD_PROMPTS = {
    "empty text": ("", ValueError, "prompt is empty"),
    "no ids": ([], ValueError, "prompt is empty"),
    "no rows": (torch.empty(1, 0, dtype=torch.int64), ValueError, "prompt is empty"),
    "batch of lists": ([[1, 2], [3, 4]], ValueError, "batch size 1"),
    "batch tensor": (torch.ones(2, 3, dtype=torch.int64), ValueError, "batch size 1"),
    "batch of texts": (["a", "b"], ValueError, "batch size 1"),
    "three dimensions": (torch.ones(1, 1, 3, dtype=torch.int64), ValueError, "batch size 1"),
    "fractions": (torch.ones(3), ValueError, "integers"),
    "mixed": ([1, "a"], ValueError, "integers"),
    "id too large": ([5, 260], ValueError, "0..259, found 5..260"),
    "id negative": ([5, -1], ValueError, "found -1..5"),
    "nothing": (None, TypeError, "not NoneType"),
    "a mapping": ({"input_ids": [1]}, TypeError, "not dict"),
    "too long": ([5] * 129, ValueError, "129 tokens does not fit max_cache_len 128"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts(decoder, case):
    prompt, error, message = BAD_PROMPTS[case]
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(error, match=message):
            call(prompt)


def test_text_needs_a_tokenizer(parts):
    decoder = load_decoder(parts, tokenizer=None)
    for prompt in ("hello", [{"role": "user", "content": "x"}]):
        with pytest.raises(ValueError, match="tokenizer"):
            decoder.generate(prompt)
    assert decoder.generate([1, 2, 3], max_new_tokens=2).text == ""


UNSUPPORTED = {
    "num_beams": 4,
    "num_return_sequences": 2,
    "temperature": 0.7,  # without do_sample
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "sequence_bias": {(1,): 2.0},
    "max_time": 3.0,
    "output_logits": True,
    "assistant_model": "x",
    "use_cache": False,
    "attention_mask": torch.ones(1, 1),
    "max_new_token": 5,  # a slip of the pen
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_options_are_named(decoder, name):
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            call([1, 2, 3], **{name: UNSUPPORTED[name]})


def test_neutral_options_pass(decoder):
    neutral = dict(do_sample=False, num_beams=1, repetition_penalty=1.0, stop_strings=None, logits_processor=None, top_p=None)
    out = decoder.generate([1, 2, 3], max_new_tokens=4, eos_token_id=None, streamer=None, generation_config=None, **neutral)
    assert out.stats.new_tokens == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "nothing to generate"),
        ({"max_new_tokens": -3}, "nothing to generate"),
        ({"max_length": 3}, "max_length 3"),
        ({"max_new_tokens": 127}, "127 new tokens after a prompt of 3 exceed max_cache_len 128"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({"max_length": "20"}, "max_length must be a whole number"),
        ({"eos_token_id": "<|end|>"}, "eos_token_id must be a whole number"),
        ({"eos_token_id": [1.5]}, "eos_token_id must be a whole number"),
        ({"chat_template_kwargs": {"loud": True}}, "chat_template_kwargs"),
    ],
)
def test_bad_option_values(decoder, options, message):
    with pytest.raises(ValueError, match=message):
        decoder.generate([1, 2, 3], **options)


BAD_LOADS = {
    "drafter nowhere": ({"dflash": "no-such-folder"}, CheckpointError, "no-such-folder"),
    "other drafter": ({"dflash": "eagle3"}, CheckpointError, "DFlash"),
    "unknown arm": ({"router": "static:medusa"}, ValueError, "unknown arm 'medusa'"),
    "unknown router": ({"router": "thompson"}, ValueError, "unknown router 'thompson'"),
    "arm without drafter": ({"router": "static:dflash", "dflash": None}, ValueError, "dflash=..."),
    "listed arm without drafter": ({"router": RandomRouter(ARMS), "eagle3": None}, ValueError, "eagle3=..."),
    "entropy with one drafter": ({"router": "entropy", "eagle3": None}, ValueError, "missing: eagle3"),
    "arm too long": ({"router": "static:dflash:6"}, ValueError, "dflash:1 to dflash:5"),
    "arm too short": ({"router": StaticRouter(Arm("dflash", 0))}, ValueError, "arm dflash:0 is out of range"),
    "router without arms": ({"router": RandomRouter([])}, ValueError, "lists no arm"),
    "arms in words": ({"router": SimpleNamespace(arms=("ar",), choose=None)}, TypeError, "parse_arm"),
    "tokenizer by name": ({"tokenizer": "gpt2"}, TypeError, "AutoTokenizer.from_pretrained"),
    "no router at all": ({"router": 3}, TypeError, "choose"),
    "threshold for static": ({"router": "static:ar", "router_threshold": 0.5}, ValueError, "threshold 0.5"),
    "threshold for a Router": ({"router": RandomRouter(ARMS), "router_threshold": 0.5}, ValueError, "threshold 0.5"),
    "threshold not a number": ({"router": "entropy", "router_threshold": float("nan")}, ValueError, "finite"),
    "no cache": ({"max_cache_len": 0}, ValueError, "max_cache_len 0"),
    "other dtype": ({"dtype": "bfloat16"}, ValueError, "model.to"),
    "unknown dtype": ({"dtype": "int7"}, ValueError, "int7"),
    "other device": ({"device": "cuda"}, ValueError, "device cuda"),
}


@pytest.mark.parametrize("case", BAD_LOADS)
def test_bad_loads(parts, case):
    changes, error, message = BAD_LOADS[case]
    changes = {k: parts.root / v if v == "eagle3" else v for k, v in changes.items()}
    with pytest.raises(error, match=message):
        load_decoder(parts, **changes)


@pytest.mark.parametrize("changes", [{"vocab_size": 300}, {"hidden_size": 64}, {"num_hidden_layers": 5}], ids=str)
def test_drafters_of_another_target(parts, changes):
    other = hf_model("qwen3", torch.float32, **({"vocab_size": 260} | changes))
    with pytest.raises(CheckpointError, match="target"):
        WhiFlashDecoder.from_pretrained(other, dflash=parts.root / "dflash", max_cache_len=32)
    if "num_hidden_layers" not in changes:
        with pytest.raises(CheckpointError, match="target"):
            WhiFlashDecoder.from_pretrained(other, eagle3=parts.root / "eagle3", max_cache_len=32)


def test_targets_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="hub id"):
        WhiFlashDecoder.from_pretrained(str(tmp_path / "nothing"))
    with pytest.raises(TypeError, match="PreTrainedModel, not Linear"):
        WhiFlashDecoder.from_pretrained(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("router", ["static:ar", "static:dflash", "static:eagle3"])
def test_nan_logits_raise(parts, router):
    """A broken weight: at once, or when the text meets a broken embedding; the tokens before it are right."""
    ids = prompt_ids(6, vocab=250)
    whole = hf_generate(parts.model, ids, max_new_tokens=20)[6:]
    model = copy.deepcopy(parts.model)
    at = next(i for i in range(5, 20) if whole[i] not in whole[:i] and whole[i] not in ids)
    model.model.embed_tokens.weight.data[whole[at]] = float("nan")
    options = dict(dflash=parts.root / "dflash", eagle3=parts.root / "eagle3", max_cache_len=64)
    decoder, told = WhiFlashDecoder.from_pretrained(model, router=router, **options), []
    with pytest.raises(NaNLogits, match="NaN"):
        for piece in decoder.stream(ids, max_new_tokens=20, eos_token_id=[]):
            told += piece.tokens
    assert told == whole[: len(told)] and len(told) <= at + 1
    assert router != "static:ar" or len(told) == at + 1
    short = decoder.generate(ids, max_new_tokens=4)
    assert short.sequences[0, 6:].tolist() == whole[:4]  # the decoder survives
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(NaNLogits, match="float32"):
        WhiFlashDecoder.from_pretrained(model, router=router, **options).generate(ids)


def test_a_router_that_breaks_its_word(decoder):
    decoder.use_router(SimpleNamespace(arms=(Arm("ar"),), choose=lambda state: Arm("dflash", 2)))
    with pytest.raises(ValueError, match="chose dflash:2, which its arms do not list: ar"):
        decoder.generate([1, 2, 3])


@pytest.mark.parametrize(
    ("device", "message"), [("tpu", "cpu, cuda or cuda:N"), ("cuda:x", "cpu, cuda or"), ("cuda:99", "not there")]
)
def test_devices_that_are_not_there(device, message):
    from whiflash_triton.loading import pick_device

    with pytest.raises(ValueError, match=message):
        pick_device(device)
