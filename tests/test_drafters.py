"""Drafters: one block and one step at a time against independent formulas; caches against caches rebuilt from scratch."""

from __future__ import annotations

import random

import pytest
import torch

from tests.tiny import dflash, eagle3, hf_model
from whiflash_triton.arms import Arm
from whiflash_triton.drafters.dflash import DFlashDrafter
from whiflash_triton.drafters.eagle3 import Eagle3Drafter
from whiflash_triton.training.models import Pack, Rope, dflash_forward, eagle3_forward
from whiflash_triton.tree import chain
from whiflash_triton.weights import load_target

FLAGS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"qk_norm": True},
]


@pytest.fixture(scope="module")
def target():
    return load_target(hf_model("qwen3"), torch.device("cpu"), torch.float64)[0]


def text(target, n: int = 30, seed: int = 9):
    """(tokens [1, n], features of taps 1, 2, 3 [3, 1, n, H], final [n, H]) from the target itself."""
    tokens = torch.randint(0, target.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))
    cache = target.new_cache(n, 1)
    with torch.no_grad():
        hidden, features = target.forward(chain(tokens), cache, (1, 2, 3), prefill=True)
    return tokens, features, hidden[0]


def pack(tokens, features, final) -> Pack:
    n = tokens.shape[1]
    zeros = torch.zeros(n, dtype=torch.int64)
    return Pack(tokens[0], zeros, zeros, torch.arange(n), torch.ones(n, dtype=torch.bool), features[:, 0], final)


def params(target, tensors):
    return {k: v for k, v in tensors.items() if k != "draft_ids"}


@pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
@pytest.mark.parametrize("draft_vocab", [None, 60])
def test_dflash_block_equals_training_forward(target, draft_vocab, scratch):
    """Incremental context and one block at decoding = the training forward, which has neither cache nor kernels."""
    config, tensors = dflash(target, draft_vocab=draft_vocab)
    tokens, features, final = text(target)
    drafter = DFlashDrafter(config, tensors, target, rows=64, scratch=scratch)
    with torch.no_grad():
        expected = dflash_forward(
            params(target, tensors),
            config,
            target.embed,
            Rope(config, 64, torch.float64),
            pack(tokens, features, final),
            torch.tensor([12, 20]),
        )
        for anchor, reference in ((12, expected[0]), (20, expected[1])):
            known = drafter.cache.length
            drafter.ingest(features[:, :, known:anchor], tokens[:, known:anchor])
            states = drafter.block_hidden(tokens[:, anchor : anchor + 1])[0]
            torch.testing.assert_close(states, reference, rtol=1e-5, atol=1e-6)
            tree = drafter.draft(tokens[:, anchor : anchor + 1], Arm("dflash", 3), 9)
            logits = target.logits(states[1:4])
            if draft_vocab is not None:
                outside = torch.ones(target.config.vocab_size, dtype=torch.bool)
                outside[tensors["draft_ids"]] = False
                logits = logits.masked_fill(outside, float("-inf"))
            assert tree.tokens[0].tolist() == [int(tokens[0, anchor]), *logits.argmax(-1).tolist()]


@pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
@pytest.mark.parametrize("flags", FLAGS[:1], ids=["plain"])
def test_eagle3_chain_equals_training_forward(target, flags, scratch):
    """Drafting along the text's own tokens = the unrolled training forward at the same slots."""
    config, tensors = eagle3(target, **flags)
    tokens, features, final = text(target)
    with torch.no_grad():
        outputs = eagle3_forward(
            params(target, tensors), config, target.embed, Rope(config, 64, torch.float64), pack(tokens, features, final), 3
        )
        table = [dict(zip(slots.tolist(), states, strict=True)) for states, slots in outputs]
        for start in (5, 11):  # committed tokens 0..start, so the newest slot is start - 1
            drafter = Eagle3Drafter(config, tensors, target, rows=64, scratch=scratch)
            drafter.ingest(features[:, :, :start], tokens[:, :start])
            hidden, _ = drafter.catch_up(tokens[:, start : start + 1])
            drafter.cache.set_length(start - 1)
            tree = chain(torch.zeros(1, 3, dtype=torch.int64))
            for step in range(3):
                token = tokens[:, start + step : start + step + 1]
                block = drafter.cache.block(tree, 1, step)
                hidden, normed = drafter.forward(hidden, token, step, block)
                torch.testing.assert_close(normed[0, 0], table[step][start - 1 + step], rtol=1e-5, atol=1e-6)


def eagle3_by_hand(target, config, w, features, tokens, size):
    """A second, cacheless EAGLE-3 with every flag, straight from the definition: full attention over all slots each step."""

    def norm(x, weight):
        x = x.double()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rope(x):
        inv = 1.0 / (10000.0 ** (torch.arange(0, config.head_dim, 2) / config.head_dim))
        angle = torch.outer(torch.arange(len(x)).float(), inv)
        cos, sin = (f(angle).double().repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    g = [features[i, 0] for i in range(3)]
    if config.fc_norm:
        g = [norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(g)]
    g = torch.cat(g, -1)
    if config.norm_before_fc:
        g = norm(g, w["input_norm.weight"])
    states, ids, drafted = g @ w["fc.weight"].T, list(tokens[1:]), []
    p, a, m = "layers.0.", "layers.0.self_attn.", "layers.0.mlp."
    for _ in range(size):
        h = norm(states, w[p + "hidden_norm.weight"])
        x = torch.cat((norm(target.embed[torch.tensor(ids)], w[p + "input_layernorm.weight"]), h), -1)
        q, k, v = ((x @ w[a + f"{n}_proj.weight"].T).view(len(x), -1, config.head_dim) for n in "qkv")
        if config.qk_norm:
            q, k = norm(q, w[a + "q_norm.weight"]), norm(k, w[a + "k_norm.weight"])
        q, k = rope(q)[-1], rope(k)
        rep = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        weights = (torch.einsum("hd,nhd->hn", q, k) * config.head_dim**-0.5).softmax(-1)
        out = torch.einsum("hn,nhd->hd", weights, v).reshape(-1)
        residual = h[-1] if config.norm_before_residual else states[-1]
        y = residual + out @ w[a + "o_proj.weight"].T
        z = norm(y, w[p + "post_attention_layernorm.weight"])
        gate, up = z @ w[m + "gate_proj.weight"].T, z @ w[m + "up_proj.weight"].T
        y = y + (torch.nn.functional.silu(gate) * up) @ w[m + "down_proj.weight"].T
        logits = norm(y, w["norm.weight"]) @ w["lm_head.weight"].T
        drafted.append(int(w["draft_ids"][logits.argmax()]))
        ids.append(drafted[-1])
        states = torch.cat((states, (norm(y, w["norm.weight"]) if config.norm_output else y)[None]))
    return drafted


@pytest.mark.parametrize("scratch", [False, True], ids=["tail", "scratch"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "-".join(f) or "plain")
def test_eagle3_drafts_by_definition(target, flags, scratch):
    config, tensors = eagle3(target, **flags)
    tokens, features, _ = text(target)
    drafter = Eagle3Drafter(config, tensors, target, rows=64, scratch=scratch)
    known = 0
    with torch.no_grad():
        for start in (1, 2, 7, 19):
            drafter.ingest(features[:, :, known:start], tokens[:, known:start])
            known = start
            expected = eagle3_by_hand(target, config, tensors, features[:, :, :start], tokens[0, : start + 1].tolist(), 5)
            for _ in range(2):  # drafting twice from one state changes nothing
                tree = drafter.draft(tokens[:, start : start + 1], Arm("eagle3", 5), 9)
                assert tree.tokens[0, 1:].tolist() == expected


def rebuilt(build, features, tokens):
    drafter = build(pending_limit=10**6)
    drafter.ingest(features[:, :, : tokens.shape[1] - 1], tokens[:, :-1])
    drafter.draft(tokens[:, -1:], Arm("any", 1), 1)
    return drafter


@pytest.mark.parametrize("limit", [1, 3, 10**6])
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
@pytest.mark.parametrize("seed", range(4))
def test_cache_after_any_sequence_equals_a_rebuilt_one(target, kind, limit, seed):
    """Random splits, drafts in between, catch-up forced by a small pending limit: length, ids exactly, values to 1e-9."""
    make = (dflash if kind == "dflash" else eagle3)(target)
    cls = DFlashDrafter if kind == "dflash" else Eagle3Drafter

    def build(pending_limit):
        return cls(*make, target, rows=64, pending_limit=pending_limit)

    tokens, features, _ = text(target, 40, seed)
    rng, drafter, at = random.Random(seed), build(limit), 0
    with torch.no_grad():
        while at < 38:
            step = rng.randint(1, 5)
            drafter.ingest(features[:, :, at : min(at + step, 38)], tokens[:, at : min(at + step, 38)])
            at = min(at + step, 38)
            assert drafter.cache.length + drafter.pending == at
            assert drafter.pending <= max(limit, 1)
            if rng.random() < 0.4:
                drafter.draft(tokens[:, at : at + 1], Arm(kind, 5), rng.randint(1, 5))
                assert drafter.pending == 0 and drafter.cache.length == at
                drafter.cache.poison()
        drafter.draft(tokens[:, 38:39], Arm(kind, 1), 9)
        fresh = rebuilt(build, features, tokens[:, :39])
    assert drafter.cache.length == fresh.cache.length == 38
    first = 0 if kind == "dflash" else 1  # EAGLE-3 embeds the following token
    assert drafter.tokens == fresh.tokens == tokens[0, first : 38 + first].tolist()
    torch.testing.assert_close(drafter.cache.kv[..., :38, :], fresh.cache.kv[..., :38, :], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("limit", [2, 10**6])
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
@pytest.mark.parametrize("seed", range(6))
def test_cropped_drafters_equal_rebuilt_ones(target, kind, limit, seed):
    """Two texts that share a prefix, cropped back at every stage of ingestion: ids exactly, values to 1e-9, and the same draft."""
    make, cls = (dflash, DFlashDrafter) if kind == "dflash" else (eagle3, Eagle3Drafter)
    config, tensors = make(target)

    def build(pending_limit):
        return cls(config, tensors, target, rows=64, pending_limit=pending_limit)

    rng = random.Random(seed)
    one, other = (text(target, 40, s)[0] for s in (seed, seed + 100))
    shared = rng.randint(2, 20)
    both = {}
    for name, tokens in (("one", one), ("other", torch.cat((one[:, :shared], other[:, shared:]), 1))):
        with torch.no_grad():
            both[name] = tokens, target.forward(chain(tokens), target.new_cache(40, 1), (1, 2, 3), prefill=True)[1]
    drafter, at = build(limit), 0
    with torch.no_grad():
        tokens, features = both["one"]
        while at < 30:
            step = min(rng.randint(1, 6), 30 - at)
            drafter.ingest(features[:, :, at : at + step], tokens[:, at : at + step])
            at += step
            if rng.random() < 0.3:
                drafter.draft(tokens[:, at : at + 1], Arm(kind, 3), 9)
            before, length = drafter.cache.length + drafter.pending, max(0, rng.randint(at - 3, at + 2))
            drafter.crop(length)
            at = drafter.cache.length + drafter.pending
            assert at == min(before, length) and drafter.cache.length == int(drafter.cache.lengths)
        keep = shared - (kind == "eagle3")  # EAGLE-3's row i embeds token i + 1
        drafter.crop(keep)
        drafter.cache.poison()
        assert drafter.cache.length + drafter.pending == keep
        tokens, features = both["other"]
        drafter.ingest(features[:, :, keep:38], tokens[:, keep:38])
        tree = drafter.draft(tokens[:, 38:39], Arm(kind, 5), 9)
        fresh = rebuilt(build, features, tokens[:, :39])
        assert torch.equal(tree.tokens, fresh.draft(tokens[:, 38:39], Arm(kind, 5), 9).tokens)
    first = 0 if kind == "dflash" else 1
    assert drafter.tokens == fresh.tokens == tokens[0, first : 38 + first].tolist()
    torch.testing.assert_close(drafter.cache.kv[..., :38, :], fresh.cache.kv[..., :38, :], rtol=1e-9, atol=1e-12)
    drafter.crop(0)
    assert drafter.cache.length == drafter.pending == 0 and drafter.tokens == []


def test_an_eagle3_crop_forgets_the_newest_row(target):
    """Nothing is left to draft from until another row is ingested."""
    config, tensors = eagle3(target)
    drafter = Eagle3Drafter(config, tensors, target, rows=64)
    tokens, features, _ = text(target)
    with torch.no_grad():
        drafter.ingest(features[:, :, :9], tokens[:, :9])
        first = drafter.draft(tokens[:, 9:10], Arm("eagle3", 3), 9).tokens
        drafter.crop(9)
        assert torch.equal(drafter.draft(tokens[:, 9:10], Arm("eagle3", 3), 9).tokens, first)
        drafter.crop(8)
        with pytest.raises(RuntimeError, match="ingest the prompt"):
            drafter.draft(tokens[:, 8:9], Arm("eagle3", 3), 9)
        drafter.ingest(features[:, :, 8:9], tokens[:, 8:9])
        assert torch.equal(drafter.draft(tokens[:, 9:10], Arm("eagle3", 3), 9).tokens, first)


def test_reset_and_limits(target):
    config, tensors = eagle3(target)
    drafter = Eagle3Drafter(config, tensors, target, rows=8)
    tokens, features, _ = text(target)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="ingest the prompt"):
            drafter.draft(tokens[:, :1], Arm("eagle3", 1), 9)
        drafter.ingest(features[:, :, :9], tokens[:, :9])
        with pytest.raises(ValueError, match="max_cache_len"):
            drafter.draft(tokens[:, 9:10], Arm("eagle3", 1), 9)
        drafter.reset()
        drafter.ingest(features[:, :, :4], tokens[:, :4])
        first = drafter.draft(tokens[:, 4:5], Arm("eagle3", 3), 9).tokens
        with pytest.raises(ValueError, match="eagle3:17"):
            drafter.draft(tokens[:, 4:5], Arm("eagle3", 17), 99)
        fresh = Eagle3Drafter(config, tensors, target, rows=8)
        fresh.ingest(features[:, :, :4], tokens[:, :4])
        assert torch.equal(first, fresh.draft(tokens[:, 4:5], Arm("eagle3", 3), 9).tokens)
    block, tensors = dflash(target)
    with pytest.raises(ValueError, match="dflash:6"):
        DFlashDrafter(block, tensors, target, rows=8).draft(tokens[:, :1], Arm("dflash", 6), 9)


def test_dflash_block_equals_z_labs_own_model(target, tmp_path):
    """The exported file in z-lab's package drafts what ours drafts: same states, context fed in two pieces."""
    package = pytest.importorskip("dflash.model", reason="needs z-lab's package: pip install --no-deps dflash==0.1.0")
    import transformers

    from whiflash_triton.checkpoints import save_dflash

    config, tensors = dflash(target)
    save_dflash(tmp_path, config, tensors, dtype=torch.float32)
    theirs = package.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    tokens, features, _ = text(target)
    ours = DFlashDrafter(config, tensors, target, rows=64)
    cache, known = transformers.DynamicCache(), 0
    with torch.no_grad():
        for start in (9, 14):
            ids = torch.full((1, config.block_size), config.mask_token_id)
            ids[0, 0] = tokens[0, start]
            context = features[:, :, known:start].permute(1, 2, 0, 3).reshape(1, start - known, -1)
            states = theirs(
                position_ids=torch.arange(known, start + config.block_size)[None],
                noise_embedding=torch.nn.functional.embedding(ids, target.embed),
                target_hidden=context,
                past_key_values=cache,
                use_cache=True,
            )[:, -config.block_size :]
            cache.crop(-config.block_size)
            ours.ingest(features[:, :, known:start], tokens[:, known:start])
            torch.testing.assert_close(ours.block_hidden(tokens[:, start : start + 1]), states, rtol=1e-4, atol=1e-5)
            known = start
