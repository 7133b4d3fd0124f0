"""WhiFlashDecoder: load a target with its drafters and a router, generate and stream."""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from .arms import Arm
from .drafters.base import Drafter
from .drafters.draft import check_arm
from .graphs import warm_up
from .loading import build_router, default_dtype, load_drafters, load_tokenizer, pick_device, resolve_source
from .options import Request, config_options, ids_of, parse_options
from .routers.base import Router
from .scheduler import Step, Stream, Workspace
from .stats import Output, Round, Stats
from .target import Target
from .weights import load_target

log = logging.getLogger(__name__)


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
        generation_defaults: dict | None = None,
    ):
        self.target, self.tokenizer, self.drafters = target, tokenizer, drafters
        self.max_cache_len, self.eos_token_ids = max_cache_len, eos_token_ids
        self.generation_defaults = generation_defaults or {}  # what the model's generation_config sets
        self._lock = threading.RLock()  # a round runs whole; the next one finds out who owns the caches
        self.work = Workspace(target, drafters)
        self._use(router)

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
        draft_window: int | None = None,
    ) -> WhiFlashDecoder:
        """target: hub id, folder, .gguf file, loaded PreTrainedModel (its weights are shared, not copied), or "smollm2-135m".

        dflash, eagle3: hub id or folder of a drafter, None for none; "auto" means the shipped pair for the embedded default, none
        otherwise. router: "static:<arm>", "entropy", a router checkpoint or a Router; "auto" is "entropy" where both drafters are
        there and static otherwise. dtype None: bfloat16 on CUDA and on CPUs that compute in it, else float32. *_taps override the
        taps a checkpoint resolves to (hidden_states indices). draft_window: drafters look at so many of the newest rows only, which
        helps those that were trained on short texts and are lost past them.
        Errors: FileNotFoundError, ValueError (CheckpointError for drafter files), each naming what to change.
        """
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len {max_cache_len}: give the rows of prompt and answer together, at least 1")
        if draft_window is not None and draft_window < 1:
            raise ValueError(f"draft_window {draft_window}: give the rows that drafters may look back, at least 1, or None for all")
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
        for drafter in drafters.values():
            drafter.window = draft_window or 0
        chosen = build_router(assets.get("router", "auto") if router == "auto" else router, drafters, model, router_threshold)
        tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
        if isinstance(tokenizer, (str, Path)):
            raise TypeError(f"tokenizer must be a loaded one: AutoTokenizer.from_pretrained({str(tokenizer)!r})")
        defaults = _generation_defaults(source)
        eos = defaults.pop("eos_token_id", config.eos_token_id)
        return cls(model, tokenizer, drafters, chosen, max_cache_len, [] if eos is None else ids_of("eos_token_id", eos), defaults)

    def use_router(self, router: str | Path | Router, threshold: float | None = None) -> None:
        """Change the router between generations; the same spellings as `from_pretrained`."""
        self._use(build_router(router, self.drafters, self.target, threshold))

    def _use(self, router: Router) -> None:
        """Check the router's arms; the target's cache gets as many draft rows as the largest of them asks for."""
        if not router.arms:
            raise ValueError(f"{type(router).__name__} lists no arm it could choose: set its `arms`")
        for arm in router.arms:
            if not isinstance(arm, Arm):
                raise TypeError(f"{type(router).__name__} lists {arm!r}, which is no Arm: build it with parse_arm")
            check_arm(self.drafters, arm)
        draft_rows = 1 + max([arm.size for arm in router.arms] + [d.max_draft for d in self.drafters.values()])
        with self._lock:
            if self.work.cache is None or self.work.cache.draft_rows < draft_rows:
                self.work.replace_cache(self.target.new_cache(self.max_cache_len, draft_rows))
            self.work.rows = None  # building a router may have used the drafters' caches
            if self.work.device is not None and max(arm.size for arm in router.arms) + 1 >= self.work.device.nodes:
                self.work.device = None
            self.router = router

    def warmup(self, ahead: int = 1) -> dict:
        """Prepare rounds that never wait for the host, for the router's arms: on CUDA one graph per arm and context length.

        ahead: rounds given to the device before the last one is read, 0 or 1; with 1 the router sees the state of one round ago.
        Returns {"graphs", "seconds", "bytes"}. On a CPU there is nothing to prepare. Rounds that copy from the text, and calls
        that need a processor, scores or a repetition penalty, run as before. Another router with other arms undoes it.
        """
        caches = [self.work.cache, *(d.cache for d in self.drafters.values())]
        if not all(cache.uses_scratch for cache in caches):
            return {"graphs": 0, "seconds": 0.0, "bytes": 0}
        with self._lock:
            return warm_up(self.work, self.router.arms, ahead)

    def generate(self, prompt, **options) -> Output:
        """prompt: str (chat-templated where the tokenizer has a template), chat messages, or input ids (list or tensor).

        Options under their Hugging Face names and with their meaning: max_new_tokens, max_length, eos_token_id, do_sample (False
        unless given), temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size, bad_words_ids, min_length,
        min_new_tokens, logits_processor, stopping_criteria, stop_strings, streamer, output_scores, generation_config; and seed
        (None draws one from torch's default generator), chat_template_kwargs, reuse_prefix (a prompt that goes on from the last
        answer keeps its cached rows; True by default). What is not supported raises ValueError naming it. Returns one Output.
        """
        request = self._prepare(prompt, options)
        ids, streamer = request.ids, request.streamer
        if streamer is not None:
            streamer.put(torch.tensor([ids]))
        begin, prefill = time.perf_counter(), 0.0
        tokens: list[int] = []
        arms: list[Arm] = []
        rounds: list[Round] = []
        stream = self._new_stream(request)
        with self._lock:  # generations take turns whole; streams take turns round by round
            for step in self._steps(stream, request):
                tokens += step.tokens
                arms += step.arms
                if step.round is None:
                    prefill, reused = time.perf_counter() - begin, stream.reused
                else:
                    rounds.append(step.round)
                if streamer is not None:
                    streamer.put(torch.tensor(step.tokens))
        seconds = time.perf_counter() - begin
        if streamer is not None:
            streamer.end()
        seed = request.sampling.seed
        stats = Stats(len(ids), len(tokens), stream.forwards, seconds, prefill, seed, reused, request.host_options)
        return Output(
            self._decode(tokens), torch.tensor([ids + tokens]), stats, rounds, arms, step.finish,
            stream.scores if request.output_scores else None,
        )  # fmt: skip

    def stream(self, prompt, **options) -> Iterator[Piece]:
        """Yield a Piece as soon as a round is accepted; options as in `generate`. It may be closed at any point, and several
        streams may be open at once: each takes the caches back, at the price of a prefill, when its turn comes."""
        request = self._prepare(prompt, options)
        for name, given in (("streamer", request.streamer is not None), ("output_scores", request.output_scores)):
            if given:
                raise ValueError(f"{name}: pass it to generate(); stream() yields pieces of text")
        return self._pieces(request)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        tokens: list[int] = []
        shown = ""
        for step in self._steps(self._new_stream(request), request):
            tokens += step.tokens
            text = self._decode(tokens)
            if text.endswith("\ufffd"):  # the middle of a character: hold it back
                text = shown
            yield Piece(text[len(shown) :], step.tokens, step.arms, step.round)
            shown = text
        rest = self._decode(tokens)[len(shown) :]
        if rest:
            yield Piece(rest, [], [], None)

    def _new_stream(self, request: Request) -> Stream:
        return Stream(self.work, self.router, request.sampling, request.ending, request.output_scores)

    @torch.inference_mode()
    def _first(self, stream: Stream, request: Request) -> Step:
        with self._lock:
            return stream.start(request.ids, request.reuse_prefix)

    @torch.inference_mode()
    def _next(self, stream: Stream, limit: int) -> Step:
        with self._lock:
            # As many drafts as the text and the cache still take, beside the target's own token.
            return stream.round(min(limit, self.max_cache_len + 1) - len(stream.tokens) - 1)

    def _steps(self, stream: Stream, request: Request) -> Iterator[Step]:
        """Rounds until the text ends."""
        step = self._first(stream, request)
        yield step
        while step.finish is None:
            step = self._next(stream, request.ending.limit)
            yield step

    def _prepare(self, prompt, options: dict) -> Request:
        template_kwargs = options.pop("chat_template_kwargs", None) or {}
        ids = self._encode(prompt, template_kwargs)
        defaults = {"eos_token_id": self.eos_token_ids} | self.generation_defaults
        vocab = self.target.config.vocab_size
        return parse_options(ids, options, defaults, self.max_cache_len, vocab, self.target.device, self.tokenizer)

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
        if self.drafters and "enable_thinking" in self.tokenizer.chat_template and template_kwargs.get("enable_thinking", True):
            _warn_of_thinking()
        options = {"add_generation_prompt": True, "return_dict": False} | template_kwargs
        return list(self.tokenizer.apply_chat_template(messages, **options))

    def _decode(self, tokens: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)


@lru_cache(maxsize=1)
def _warn_of_thinking() -> None:
    """Once a process. A checkpoint does not say what its drafter was trained on."""
    log.warning(
        "thinking mode is on: drafters trained without it, as z-lab's for Qwen3 are, have far fewer of their tokens accepted; "
        "chat_template_kwargs={'enable_thinking': False} turns it off"
    )


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


def _generation_defaults(source) -> dict:
    """What the model's own generation_config sets."""
    from transformers import GenerationConfig

    if hasattr(source, "generation_config"):
        return config_options(source.generation_config)
    path = Path(source)
    return config_options(GenerationConfig.from_pretrained(path)) if (path / "generation_config.json").exists() else {}
