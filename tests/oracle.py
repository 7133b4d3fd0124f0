"""Test doubles for rounds: a drafter that knows the text, a router that throws dice, a streamer that keeps what it is given."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.tiny import dflash, eagle3, hf_model
from whiflash_triton.arms import Arm
from whiflash_triton.cache import KVCache
from whiflash_triton.checkpoint_export import save_dflash, save_eagle3
from whiflash_triton.decoder import WhiFlashDecoder
from whiflash_triton.drafters.dflash import DFlashDrafter
from whiflash_triton.drafters.eagle3 import Eagle3Drafter
from whiflash_triton.routers.static import StaticRouter
from whiflash_triton.scheduler import Stream
from whiflash_triton.tree import DraftTree, chain, from_parents
from whiflash_triton.weights import load_target

CPU = torch.device("cpu")


@functools.cache
def models(family: str, dtype=torch.float64, seed: int = 0, **changes):
    """(transformers model, our target over the same weights)."""
    model = hf_model(family, dtype, seed=seed, **changes)
    return model, load_target(model, CPU, dtype)[0]


def prompt_ids(n: int = 7, seed: int = 0, vocab: int = 211) -> list[int]:
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def hf_generate(model, prompt: list[int], **options) -> list[int]:
    """Prompt and continuation as transformers decodes it greedily."""
    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options)
    return out[0].tolist()


class OracleDrafter:
    """Drafts the next tokens of `text` and gets exactly `rights` of them right, one number a call.

    branching: the right tokens hide in a tree among wrong siblings, whose own children tempt with tokens right for their depth.
    """

    taps = (1,)

    def __init__(self, text: list[int], rights: Iterator[int], rows: int, branching: bool = False, seed: int = 0, vocab=211):
        self.text, self.rights, self.branching = text, rights, branching
        self.rng, self.vocab, self.max_draft = random.Random(seed), vocab, 9
        self.cache = KVCache(1, 1, 2, rows, 1, torch.float32, CPU)
        self.tokens: list[int] = []
        self.seen: list[int] = []
        self.promised: list[int] = []

    @property
    def pending(self) -> int:
        return len(self.seen) - len(self.tokens)

    def reset(self) -> None:
        self.cache.set_length(0)
        self.tokens, self.seen = [], []

    def ingest(self, features: torch.Tensor, tokens: torch.Tensor) -> None:
        assert features.shape[:3] == (1, 1, tokens.shape[1]) and bool(features.isfinite().all())
        self.seen += tokens[0].tolist()

    def crop(self, length: int) -> None:
        self.seen, self.tokens = self.seen[:length], self.tokens[:length]
        self.cache.set_length(len(self.tokens))

    def draft(self, anchor: torch.Tensor, arm: Arm, max_depth: int) -> DraftTree:
        start, size = len(self.seen), min(arm.size, max_depth)
        assert self.seen == self.text[:start] and anchor.tolist() == [[self.text[start]]]
        self.tokens = list(self.seen)
        self.cache.set_length(start)
        truth = self.text[start + 1 : start + 2 + size]
        right = min(next(self.rights), size)
        self.promised.append(right)
        if not self.branching:
            tokens = [wrong if i == right else t for i, (t, wrong) in enumerate(zip(truth[:size], map(self._not, truth)))]  # noqa: B905
            return chain(torch.tensor([[int(anchor), *tokens]]))
        tokens, parents, depths, spine = [int(anchor)], [-1], [0], [0]
        order = ["right"] * right + ["wrong"] * (size - right)
        self.rng.shuffle(order)
        for kind in order:
            parent = spine[-1] if kind == "right" else self.rng.randrange(len(tokens))
            token = truth[depths[parent]]
            if kind == "right":
                spine.append(len(tokens))
            elif parent in spine:
                token = self._not(token)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return from_parents(torch.tensor([tokens]), parents)

    def _not(self, token: int) -> int:
        return (token + self.rng.randrange(1, self.vocab)) % self.vocab


class RandomRouter:
    """Another arm every round."""

    def __init__(self, arms: list[Arm], seed: int = 0):
        self.arms, self.rng = tuple(arms), random.Random(seed)

    def choose(self, state) -> Arm:
        return self.rng.choice(self.arms)


class Recorder:
    """A transformers streamer that keeps every value and counts its ends."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends, "put after end"
        self.values.append(value)

    def end(self) -> None:
        self.ends += 1

    @property
    def tokens(self) -> list[int]:
        """What came after the prompt."""
        return [token for value in self.values[1:] for token in value.tolist()]


def build(kind: str, target, rows: int, scratch: bool, pending_limit: int = 10**6):
    """A random DFlash or EAGLE-3 drafter."""
    parts, cls = (dflash(target), DFlashDrafter) if kind == "dflash" else (eagle3(target, qk_norm=True), Eagle3Drafter)
    return cls(*parts, target, rows=rows, pending_limit=pending_limit, scratch=scratch)


def check_invariants(stream: Stream, committed: list[int]) -> None:
    """design: one committed token has no row yet; every cache and queue agrees with the text, on host and device."""
    start = len(committed) - 1
    assert stream.cache.length == start == stream.state.position
    assert stream.cache.lengths.tolist() == [start]
    assert stream.anchor.tolist() == [[committed[-1]]]
    assert bool(stream.state.hidden.isfinite().all()) and float(stream.state.entropy) >= 0
    for name, drafter in stream.drafters.items():
        known = drafter.cache.length
        assert known + drafter.pending == start, name
        assert drafter.cache.lengths.tolist() == [known], name
        first = 1 if name == "eagle3" else 0  # EAGLE-3 embeds the token that follows
        assert drafter.tokens == committed[first : known + first], name


def poison(stream: Stream) -> None:
    """Whatever is not committed becomes NaN."""
    for cache in (stream.cache, *(drafter.cache for drafter in stream.drafters.values())):
        cache.poison()


def run(stream: Stream, prompt: list[int], new: int, every_round: Callable | None = None) -> tuple[list[int], list]:
    """(committed tokens, rounds) of at least `new` new tokens, invariants checked and rows poisoned after every round."""
    with torch.no_grad():
        step = stream.start(prompt)
        committed, rounds = prompt + step.tokens, []
        check_invariants(stream, committed)
        poison(stream)
        while len(committed) < len(prompt) + new:
            step = stream.round(stream.cache.rows - stream.cache.length - 1)
            committed += step.tokens
            rounds.append(step.round)
            assert len(step.tokens) == len(step.arms) == step.round.committed == step.round.accepted + 1
            check_invariants(stream, committed)
            poison(stream)
            if every_round is not None:
                every_round(step, committed)
    return committed, rounds


def static(kind: str, size: int) -> StaticRouter:
    return StaticRouter(Arm(kind, size))


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'LOUD ' if loud else '' }}assistant: {% endif %}"
)


def byte_tokenizer(chat_template: str | None = TEMPLATE):
    """Token = byte, 256 of them and four special ones, so that characters break across tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "additional_special_tokens": ["<|a|>", "<|b|>", "<|c|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=chat_template, **special)


def decoder_parts(root: Path) -> SimpleNamespace:
    """A random target as a live model and as a folder, with drafters in their published formats."""
    model, tokenizer = hf_model("qwen3", torch.float32, seed=4, vocab_size=260), byte_tokenizer()
    target = load_target(model, CPU, torch.float32)[0]
    save_dflash(root / "dflash", *dflash(target), dtype=torch.float32)
    save_eagle3(root / "eagle3", *eagle3(target), dtype=torch.float32)
    model.generation_config.eos_token_id = [256, 257]
    model.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    return SimpleNamespace(root=root, model=model, tokenizer=tokenizer, target=target)


def load_decoder(parts: SimpleNamespace, **changes) -> WhiFlashDecoder:
    options = dict(dflash=parts.root / "dflash", eagle3=parts.root / "eagle3", tokenizer=parts.tokenizer, max_cache_len=128)
    return WhiFlashDecoder.from_pretrained(parts.model, **(options | changes))
