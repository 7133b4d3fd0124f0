"""WhiFlashDecoder: load a target with its drafters and a router, generate and stream."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .arms import Arm
from .drafters.base import Drafter
from .loading import build_router, default_dtype, load_drafters, load_tokenizer, pick_device, resolve_source
from .routers.base import Router
from .scheduler import Step, Stream
from .stats import Output, Round, Stats
from .target import Target
from .weights import load_target

_ONLY = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "use_cache": True}
_IGNORED_WHEN_GREEDY = ("temperature", "top_p", "top_k")


@dataclass
class Piece:
    """A piece of streamed text: the tokens one round added, and the arm that drafted each."""

    text: str
    tokens: list[int]
    arms: list[Arm]
    round: Round | None


class WhiFlashDecoder:
    """One target, up to two drafters and a router. One stream at a time; `generate` and `stream` start afresh."""

    def __init__(
        self,
        target: Target,
        tokenizer,
        drafters: dict[str, Drafter],
        router: Router,
        max_cache_len: int,
        eos_token_ids: list[int],
    ):
        self.target, self.tokenizer, self.drafters, self.router = target, tokenizer, drafters, router
        self.max_cache_len, self.eos_token_ids = max_cache_len, eos_token_ids
        self._check_arms(router)
        draft_rows = 1 + max([arm.size for arm in router.arms] + [d.max_draft for d in drafters.values()])
        self.cache = target.new_cache(max_cache_len, draft_rows)
        self._active: Stream | None = None  # the one that owns the caches
        self._lock = threading.RLock()  # a round runs whole; the next one finds out who owns the caches

    @classmethod
    def from_pretrained(
        cls,
        target,
        dflash: str | Path | None = "auto",
        eagle3: str | Path | None = "auto",
        router: str | Path | Router = "auto",
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        max_cache_len: int = 4096,
        tokenizer=None,
        router_threshold: float | None = None,
        dflash_taps: tuple[int, ...] | None = None,
        eagle3_taps: tuple[int, ...] | None = None,
    ) -> WhiFlashDecoder:
        """target: hub id, folder, .gguf file, loaded PreTrainedModel (its weights are shared, not copied), or "smollm2-135m".

        dflash, eagle3: hub id or folder of a drafter, None for none; "auto" means the shipped pair for the embedded default, none
        otherwise. router: "static:<arm>", "entropy", a router checkpoint or a Router; "auto" is "entropy" where both drafters are
        there and static otherwise. dtype None: bfloat16 on CUDA and on CPUs that compute in it, else float32. *_taps override the
        taps a checkpoint resolves to (hidden_states indices).
        Errors: FileNotFoundError, ValueError (CheckpointError for drafter files), each naming what to change.
        """
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len {max_cache_len}: give the rows of prompt and answer together, at least 1")
        device, dtype = _place(target, device, dtype)
        source, assets = resolve_source(target)
        model, config = load_target(source, device, dtype)
        drafters = load_drafters(
            model,
            {
                "dflash": assets.get("dflash") if dflash == "auto" else dflash,
                "eagle3": assets.get("eagle3") if eagle3 == "auto" else eagle3,
            },
            {"dflash": dflash_taps, "eagle3": eagle3_taps},
            max_cache_len,
        )
        chosen = build_router(assets.get("router", "auto") if router == "auto" else router, drafters, model, router_threshold)
        tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
        if isinstance(tokenizer, (str, Path)):
            raise TypeError(f"tokenizer must be a loaded one: AutoTokenizer.from_pretrained({str(tokenizer)!r})")
        return cls(model, tokenizer, drafters, chosen, max_cache_len, _eos_ids(source, config))

    def use_router(self, router: str | Path | Router, threshold: float | None = None) -> None:
        """Change the router between generations; the same spellings as `from_pretrained`."""
        chosen = build_router(router, self.drafters, self.target, threshold)
        self._check_arms(chosen)
        self.router = chosen

    def _check_arms(self, router: Router) -> None:
        if not router.arms:
            raise ValueError(f"{type(router).__name__} lists no arm it could choose: set its `arms`")
        for arm in router.arms:
            if not isinstance(arm, Arm):
                raise TypeError(f"{type(router).__name__} lists {arm!r}, which is no Arm: build it with parse_arm")
            if arm.kind == "ar":
                continue
            if arm.kind not in self.drafters:
                raise ValueError(f"arm {arm} needs a {arm.kind} drafter, none is loaded: give {arm.kind}=... to from_pretrained")
            limit = self.drafters[arm.kind].max_draft
            if not 1 <= arm.size <= limit:
                raise ValueError(f"arm {arm} is out of range: this drafter drafts {arm.kind}:1 to {arm.kind}:{limit}")

    def generate(self, prompt, **options) -> Output:
        """prompt: str (chat-templated where the tokenizer has a template), chat messages, or input ids (list or tensor).

        Options under their Hugging Face names: max_new_tokens, max_length, eos_token_id, streamer, generation_config, and
        chat_template_kwargs. What is not supported raises ValueError naming it. Returns one Output.
        """
        ids, limit, stops, streamer = self._prepare(prompt, options)
        if streamer is not None:
            streamer.put(torch.tensor([ids]))
        begin, prefill = time.perf_counter(), 0.0
        tokens: list[int] = []
        arms: list[Arm] = []
        rounds: list[Round] = []
        stream = self._new_stream()
        for step in self._steps(stream, ids, limit, stops):
            tokens += step.tokens
            arms += step.arms
            if step.round is None:
                prefill = time.perf_counter() - begin
            else:
                rounds.append(step.round)
            if streamer is not None:
                streamer.put(torch.tensor(step.tokens))
        seconds = time.perf_counter() - begin
        if streamer is not None:
            streamer.end()
        stats = Stats(len(ids), len(tokens), stream.forwards, seconds, prefill)
        finish = "stop" if tokens and tokens[-1] in stops else "length"
        text = self._decode(tokens)
        return Output(text, torch.tensor([ids + tokens]), stats, rounds, arms, finish)

    def stream(self, prompt, **options) -> Iterator[Piece]:
        """Yield a Piece as soon as a round is accepted; options as in `generate`. It may be closed at any point."""
        ids, limit, stops, streamer = self._prepare(prompt, options)
        if streamer is not None:
            raise ValueError("streamer: pass it to generate(); stream() yields the pieces itself")
        return self._pieces(ids, limit, stops)

    def _pieces(self, ids: list[int], limit: int, stops: set[int]) -> Iterator[Piece]:
        tokens: list[int] = []
        shown = ""
        for step in self._steps(self._new_stream(), ids, limit, stops):
            tokens += step.tokens
            text = self._decode(tokens)
            if text.endswith("\ufffd"):  # the middle of a character: hold it back
                text = shown
            yield Piece(text[len(shown) :], step.tokens, step.arms, step.round)
            shown = text
        rest = self._decode(tokens)[len(shown) :]
        if rest:
            yield Piece(rest, [], [], None)

    def _new_stream(self) -> Stream:
        return Stream(self.target, self.drafters, self.router, self.cache)

    @torch.inference_mode()
    def _first(self, stream: Stream, ids: list[int]) -> Step:
        with self._lock:
            self._active = stream
            return self._owned(stream, stream.start(torch.tensor([ids], device=self.target.device)))

    @torch.inference_mode()
    def _next(self, stream: Stream, max_draft: int) -> Step:
        with self._lock:
            self._owned(stream)
            return self._owned(stream, stream.round(max_draft))

    def _owned(self, stream: Stream, step: Step | None = None) -> Step | None:
        """step, as long as the caches are this stream's: a drafter or router may itself have started another generation."""
        if stream is not self._active:
            raise RuntimeError(
                "another generation has started on this decoder, which holds one stream at a time: "
                "finish one before the next, or load a second decoder"
            )
        return step

    def _steps(self, stream: Stream, ids: list[int], limit: int, stops: set[int]) -> Iterator[Step]:
        """Rounds until a stop token or `limit` new tokens; a step is cut where the text ends."""
        step, count = self._first(stream, ids), 0
        while True:
            cut = next((i + 1 for i, t in enumerate(step.tokens) if t in stops), None)
            keep = min(limit - count, cut if cut is not None else len(step.tokens))
            step.tokens, step.arms = step.tokens[:keep], step.arms[:keep]
            count += keep
            if step.round is not None:
                step.round.committed, step.round.accepted = keep, min(step.round.accepted, keep)
            yield step
            if cut is not None or count >= limit:
                return
            step = self._next(stream, min(limit - count - 1, self.max_cache_len - stream.cache.length - 1))

    def _prepare(self, prompt, options: dict) -> tuple[list[int], int, set[int], object]:
        options = {name: value for name, value in options.items() if value is not None}  # None is transformers' "not given"
        ids = self._encode(prompt, options.pop("chat_template_kwargs", {}))
        config, given = options.pop("generation_config", None), set(options)
        if config is not None:
            options = _config_options(config) | options
        streamer = options.pop("streamer", None)
        stops = _ids_of("eos_token_id", options.pop("eos_token_id", self.eos_token_ids))
        new, total = (_whole(name, options.pop(name, None)) for name in ("max_new_tokens", "max_length"))
        for name, value in _ONLY.items():
            if options.pop(name, value) != value:
                raise ValueError(f"{name}: only {value} is supported")
        for name in _IGNORED_WHEN_GREEDY:  # transformers ignores a config's sampling fields when do_sample is False
            if name not in given:
                options.pop(name, None)
        if options:
            raise ValueError(
                f"not supported: {', '.join(sorted(options))}; decoding is greedy and takes max_new_tokens, max_length, "
                "eos_token_id, streamer and generation_config"
            )
        return ids, self._limit(len(ids), new, total), set(stops), streamer

    def _limit(self, prompt: int, new: int | None, total: int | None) -> int:
        room = self.max_cache_len - prompt + 1  # the newest token needs no row
        if prompt > self.max_cache_len:
            raise ValueError(
                f"a prompt of {prompt} tokens does not fit max_cache_len {self.max_cache_len}: shorten it or raise max_cache_len"
            )
        if new is None:
            new = min(256, room) if total is None else total - prompt
        if new < 1:
            raise ValueError(f"nothing to generate: max_new_tokens {new} (prompt of {prompt} tokens, max_length {total})")
        if new > room:
            raise ValueError(
                f"{new} new tokens after a prompt of {prompt} exceed max_cache_len {self.max_cache_len}: "
                "raise max_cache_len or lower max_new_tokens"
            )
        return new

    def _encode(self, prompt, template_kwargs: dict) -> list[int]:
        messages = isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], dict)
        if template_kwargs and not (messages or isinstance(prompt, str) and self._has_template()):
            raise ValueError("chat_template_kwargs: this prompt goes through no chat template")
        if isinstance(prompt, torch.Tensor):
            if prompt.dim() > 2 or (prompt.dim() == 2 and prompt.shape[0] != 1):
                raise ValueError(f"input ids of shape {list(prompt.shape)}: one stream at a time, batch size 1")
            ids = prompt.flatten().tolist()
        elif messages:
            ids = self._chat(list(prompt), template_kwargs)
        elif isinstance(prompt, (list, tuple)):
            ids = list(prompt)
        elif isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: give some text")
            if self.tokenizer is None:
                raise ValueError("this decoder has no tokenizer: give input ids, or pass tokenizer= to from_pretrained")
            if self._has_template():
                ids = self._chat([{"role": "user", "content": prompt}], template_kwargs)
            else:
                ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            raise TypeError(f"prompt must be text, chat messages or input ids, not {type(prompt).__name__}")
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        try:
            ids = [operator.index(token) for token in ids]
        except TypeError:
            raise ValueError("input ids must be one flat list of integers: one stream at a time, batch size 1") from None
        vocab = self.target.config.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"input ids must lie in 0..{vocab - 1}, found {min(ids)}..{max(ids)}")
        return ids

    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def _chat(self, messages: list[dict], template_kwargs: dict) -> list[int]:
        if not self._has_template():
            raise ValueError("the tokenizer has no chat template: give text or input ids instead of messages")
        options = {"add_generation_prompt": True, "return_dict": False} | template_kwargs
        return list(self.tokenizer.apply_chat_template(messages, **options))

    def _decode(self, tokens: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)


def _config_options(config) -> dict:
    """What a GenerationConfig sets, without what is switched off or has no meaning for one stream."""
    if not hasattr(config, "to_diff_dict"):
        raise TypeError(f"generation_config must be a transformers GenerationConfig, not {type(config).__name__}")
    inert = ("transformers_version", "bos_token_id", "pad_token_id")
    given = {k: v for k, v in config.to_diff_dict().items() if not k.startswith("_") and k not in inert}
    return {k: v for k, v in given.items() if v is not None and v is not False}


def _whole(name: str, value) -> int | None:
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None


def _ids_of(name: str, value) -> list[int]:
    """One id, several, or a tensor of them."""
    values = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    return [_whole(name, token) for token in (values if isinstance(values, (list, tuple, set)) else [values])]


def _place(target, device, dtype) -> tuple[torch.device, torch.dtype]:
    """Where and in what the target runs; a live model stays what it is."""
    if not hasattr(target, "state_dict"):
        device = pick_device(device)
        return device, _dtype(dtype, device)
    if not hasattr(target, "config") or not hasattr(target, "device"):
        raise TypeError(f"a live target must be a transformers PreTrainedModel, not {type(target).__name__}")
    if dtype is not None and _dtype(dtype, target.device) != target.dtype:
        raise ValueError(f"dtype {dtype}: a live model lends its weights as they are, {target.dtype}; call model.to(dtype) first")
    asked = target.device if device is None else torch.device(device)
    if asked.type != target.device.type or asked.index not in (None, target.device.index):
        raise ValueError(f"device {device}: a live model lends its weights where they are, {target.device}; move it first")
    return target.device, target.dtype


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return default_dtype(device)
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype {dtype!r} is not supported: float32, bfloat16, float16 or float64")
    if found == torch.float64 and device.type == "cuda":
        raise ValueError("dtype float64 has no kernels on CUDA: choose float32, bfloat16 or float16")
    return found


def _eos_ids(source, config) -> list[int]:
    """End tokens as transformers would take them: generation_config first, then the model's config."""
    from transformers import GenerationConfig

    eos = None
    if hasattr(source, "generation_config"):
        eos = source.generation_config.eos_token_id
    elif Path(source).is_dir() and (Path(source) / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(source).eos_token_id
    eos = config.eos_token_id if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
