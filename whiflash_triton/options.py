"""Generation options under their Hugging Face names: what the caller gives -> how tokens are chosen and where the text ends.

Precedence as in transformers: the call, its `generation_config`, the model's own generation_config, transformers' defaults. One
thing differs: decoding is greedy until `do_sample=True` is asked for, whatever the model's generation_config says.
"""

from __future__ import annotations

import argparse
import math
import operator
from dataclasses import dataclass, field

import torch

from .sampling import Sampling

DEFAULT_NEW_TOKENS = 256
DEFAULT_TOP_K = 50  # transformers' own default when it samples
SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p")
HOST_PROCESSORS = ("no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "logits_processor")
HOST_CRITERIA = ("stop_strings", "stopping_criteria")
# Fields of a GenerationConfig that mean nothing here, and those that only one value of is supported.
_INERT = ("transformers_version", "bos_token_id", "pad_token_id", "return_dict_in_generate", "use_cache")
_ONLY = {"num_beams": 1, "num_return_sequences": 1}
_SUPPORTED = (
    "max_new_tokens", "max_length", "eos_token_id", "do_sample", *SAMPLING_ONLY, "repetition_penalty", *HOST_PROCESSORS,
    *HOST_CRITERIA, "streamer", "output_scores", "seed", "reuse_prefix",
)  # fmt: skip


@dataclass
class Ending:
    """Where a text ends: end tokens, transformers stopping criteria, or `limit` tokens, prompt included."""

    limit: int
    stops: set[int]
    criteria: list = field(default_factory=list)
    device: torch.device | str = "cpu"

    def __call__(self, text: list[int], scores: tuple | None = None) -> str | None:
        """'stop', 'length' or None, after the newest token of the text; called once a token, in order."""
        stopped = text[-1] in self.stops
        if self.criteria:
            ids = torch.tensor([text], device=self.device)
            met = [bool(torch.as_tensor(criterion(ids, scores)).all()) for criterion in self.criteria]
            stopped = stopped or any(met)
        return "stop" if stopped else "length" if len(text) >= self.limit else None


@dataclass
class Request:
    """One generation: prompt ids, how to choose, where to end, what to hand out."""

    ids: list[int]
    sampling: Sampling
    ending: Ending
    streamer: object = None
    output_scores: bool = False
    reuse_prefix: bool = True
    host_options: tuple[str, ...] = ()  # the options given that cost a pass on the host


def parse_options(
    ids: list[int], options: dict, defaults: dict, rows: int, vocab: int, device: torch.device, tokenizer=None
) -> Request:
    """options: the call's; defaults: the model's generation_config as a dict; rows: max_cache_len. ValueError names the option."""
    given = {name: value for name, value in options.items() if value is not None}  # None is transformers' "not given"
    config = given.pop("generation_config", None)
    told = given if config is None else config_options(config) | given
    if told.get("use_cache") is False:
        raise ValueError("use_cache: only True is supported")
    told = {name: value for name, value in told.items() if name not in _INERT}
    for name, value in _ONLY.items():
        if told.pop(name, value) != value:
            raise ValueError(f"{name}: only {value} is supported")
    unknown = sorted(set(told) - set(_SUPPORTED))
    if unknown:
        raise ValueError(f"not supported: {', '.join(unknown)}; the options are {', '.join(_SUPPORTED)}, generation_config")
    do_sample = bool(told.pop("do_sample", False))
    idle = [] if do_sample else [n for n in SAMPLING_ONLY if n in given and not _is_off(n, given[n])]
    if idle and given.get("do_sample") is None:
        raise ValueError(f"{', '.join(idle)}: decoding is greedy and would ignore it; give do_sample=True to sample")
    usable = {k: v for k, v in defaults.items() if k not in ("do_sample", "max_length", "max_new_tokens", *_INERT, *_ONLY)}
    if not do_sample:  # transformers ignores a config's sampling fields when it does not sample
        usable = {k: v for k, v in usable.items() if k not in SAMPLING_ONLY}
    strange = sorted(set(usable) - set(_SUPPORTED) - set(told))
    if strange:
        raise ValueError(f"the model's generation_config sets {', '.join(strange)}, which is not supported: remove it there")
    told = usable | told
    stops = ids_of("eos_token_id", told.get("eos_token_id", []))
    new, total = (whole(name, told.get(name)) for name in ("max_new_tokens", "max_length"))
    limit = len(ids) + token_limit(len(ids), new, total, rows)
    host, names = _processors(told, len(ids), limit, stops, vocab, device)
    criteria = _criteria(told, tokenizer)
    sampling = _sampling(told, do_sample, host)
    names += [n for n in HOST_CRITERIA if told.get(n)]
    if host and sampling.repetition_penalty != 1.0:
        names.append("repetition_penalty")
    return Request(
        ids, sampling, Ending(limit, set(stops), criteria, device), told.get("streamer"), bool(told.get("output_scores")),
        bool(told.get("reuse_prefix", True)), tuple(names),
    )  # fmt: skip


def token_limit(prompt: int, new: int | None, total: int | None, rows: int) -> int:
    """New tokens to generate at most. ValueError where nothing, or too much, is asked for."""
    room = rows - prompt + 1  # the newest token needs no row
    if prompt > rows:
        raise ValueError(f"a prompt of {prompt} tokens does not fit max_cache_len {rows}: shorten it or raise max_cache_len")
    if new is None:
        new = min(DEFAULT_NEW_TOKENS, room) if total is None else total - prompt
    if new < 1:
        raise ValueError(f"nothing to generate: max_new_tokens {new} (prompt of {prompt} tokens, max_length {total})")
    if new > room:
        raise ValueError(
            f"{new} new tokens after a prompt of {prompt} exceed max_cache_len {rows}: raise max_cache_len or lower max_new_tokens"
        )
    return new


def _sampling(told: dict, do_sample: bool, host: list) -> Sampling:
    penalty = _number("repetition_penalty", told.get("repetition_penalty", 1.0), lambda x: x > 0, "above 0")
    if host and penalty != 1.0:  # transformers' order: the penalty comes before every other processor
        from transformers import RepetitionPenaltyLogitsProcessor

        host.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
    seed = whole("seed", told.get("seed"))
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed}: give a whole number from 0 to 2**64 - 1")
    if not do_sample:
        return Sampling(repetition_penalty=penalty, host=host)
    top_k = whole("top_k", told.get("top_k", DEFAULT_TOP_K))
    if top_k < 0:
        raise ValueError(f"top_k {top_k}: give a number of tokens, or 0 for all of them")
    return Sampling(
        temperature=_number("temperature", told.get("temperature", 1.0), lambda x: x > 0, "above 0 (do_sample=False is greedy)"),
        top_k=top_k,
        top_p=_number("top_p", told.get("top_p", 1.0), lambda x: 0 < x <= 1, "above 0 and at most 1"),
        min_p=_number("min_p", told.get("min_p", 0.0), lambda x: 0 <= x <= 1, "from 0 to 1"),
        repetition_penalty=penalty,
        seed=int(torch.randint(2**63 - 1, (1,))) if seed is None else seed,
        host=host,
    )


def _processors(told: dict, prompt: int, limit: int, stops: list[int], vocab: int, device: torch.device) -> tuple[list, list[str]]:
    """transformers' own processors for the options that read the text, in its order, and the names of those options."""
    from transformers import (
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
    )

    made, names, end = [], [], torch.tensor(stops, device=device)
    ngram, least, least_new = (whole(n, told.get(n)) for n in ("no_repeat_ngram_size", "min_length", "min_new_tokens"))
    for name, value in (("no_repeat_ngram_size", ngram), ("min_length", least), ("min_new_tokens", least_new)):
        if value is not None and value < 0:
            raise ValueError(f"{name} {value}: give a whole number from 0 up")
    if least_new is not None and least_new > limit - prompt:
        raise ValueError(f"min_new_tokens {least_new} is more than the {limit - prompt} new tokens allowed")
    if ngram:
        made.append(NoRepeatNGramLogitsProcessor(ngram))
        names.append("no_repeat_ngram_size")
    if told.get("bad_words_ids"):
        made.append(NoBadWordsLogitsProcessor(_bad_words(told["bad_words_ids"], vocab), end if stops else None))
        names.append("bad_words_ids")
    if least and stops:
        made.append(MinLengthLogitsProcessor(least, end, device=device))
        names.append("min_length")
    if least_new and stops:
        made.append(MinNewTokensLengthLogitsProcessor(prompt, least_new, end, device=device))
        names.append("min_new_tokens")
    custom = told.get("logits_processor") or []
    if custom:
        made += _callables("logits_processor", custom)
        names.append("logits_processor")
    return made, names


def _bad_words(words, vocab: int) -> list[list[int]]:
    if not (isinstance(words, (list, tuple)) and all(isinstance(word, (list, tuple)) and word for word in words)):
        raise ValueError("bad_words_ids: give a list of lists of token ids, none of them empty")
    words = [[whole("bad_words_ids", token) for token in word] for word in words]
    outside = [token for word in words for token in word if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"bad_words_ids: {outside[0]} lies outside the vocabulary of {vocab}")
    return words


def _criteria(told: dict, tokenizer) -> list:
    """transformers' stopping criteria, those of `stop_strings` first."""
    made = []
    strings = told.get("stop_strings")
    if strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings: this decoder has no tokenizer; pass tokenizer= to from_pretrained")
        from transformers import StopStringCriteria

        strings = list(strings) if isinstance(strings, (list, tuple)) else [strings]
        if not strings or not all(isinstance(s, str) and s for s in strings):
            raise ValueError("stop_strings: give one or several strings that are not empty")
        made.append(StopStringCriteria(tokenizer, strings))
    return made + _callables("stopping_criteria", told.get("stopping_criteria") or [])


def _callables(name: str, value) -> list:
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(callable(item) for item in items):
        raise ValueError(f"{name}: give a list of callables, as transformers takes them")
    return items


def config_options(config) -> dict:
    """What a GenerationConfig sets, without what is switched off or has no meaning for one stream."""
    if not hasattr(config, "to_diff_dict"):
        raise TypeError(f"generation_config must be a transformers GenerationConfig, not {type(config).__name__}")
    given = {k: v for k, v in config.to_diff_dict().items() if not k.startswith("_") and k not in _INERT}
    return {k: v for k, v in given.items() if v is not None and v is not False}


def _is_off(name: str, value) -> bool:
    return value == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]


def _number(name: str, value, allowed, text: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, not {value!r}") from None
    if not (math.isfinite(number) and allowed(number)):
        raise ValueError(f"{name} {value}: it must be {text}")
    return number


def whole(name: str, value) -> int | None:
    """value as an int, None for None; ValueError for anything that is no whole number."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None


def ids_of(name: str, value) -> list[int]:
    """One id, several, or a tensor of them."""
    values = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    return [whole(name, token) for token in (values if isinstance(values, (list, tuple, set)) else [values])]


def add_sampling(p: argparse.ArgumentParser) -> None:
    """Options of sampling, under transformers' names."""
    p.add_argument("--do-sample", action="store_true", help="sample; any of temperature, top-k, top-p and min-p implies it")
    p.add_argument("--temperature", type=float)
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--min-p", type=float)
    p.add_argument("--repetition-penalty", type=float)
    p.add_argument("--seed", type=int, help="the same seed gives the same text under every router")


def sampling_options(args: argparse.Namespace) -> dict:
    """Of the parsed arguments, what `generate` takes."""
    warps = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    options = warps | {"repetition_penalty": args.repetition_penalty, "seed": args.seed}
    if args.do_sample or any(value is not None for value in warps.values()):
        options["do_sample"] = True
    return {name: value for name, value in options.items() if value is not None}
