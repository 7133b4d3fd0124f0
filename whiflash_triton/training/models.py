"""Training forwards of both drafters over packed rows, and their start from the target.

They compute what drafters/dflash.py and drafters/eagle3.py compute at decoding, for many positions at once and with gradients;
tests hold the two against each other. Parameters are dicts under the canonical names of checkpoints.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from ..checkpoints import DFlashConfig, Eagle3Config
from ..layers import rms_norm
from ..rope import apply_rope, full_tables, rope_tables
from ..target import Target

Params = dict[str, torch.Tensor]


@dataclass
class Pack:
    """Rows side by side, padded to a fixed length: tokens, choices, segment, position int64 [n]; learn bool [n];
    features [taps, n, H].

    segment is -1 on padding; choices the target's argmax; learn marks rows of the response; final [n, H] after the final norm.
    """

    tokens: torch.Tensor
    choices: torch.Tensor
    segment: torch.Tensor
    position: torch.Tensor
    learn: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor

    def to(self, device: torch.device) -> Pack:
        return Pack(*(getattr(self, f.name).to(device) for f in fields(self)))


def _heads(x: torch.Tensor, d: int) -> torch.Tensor:
    return x.view(x.shape[0], -1, d)


def _grouped(k: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, Hkv, D] -> [Hq, n, D]."""
    return k.repeat_interleave(heads // k.shape[1], 1).transpose(0, 1)


def _swiglu(p: Params, x: torch.Tensor, prefix: str) -> torch.Tensor:
    hidden = F.silu(F.linear(x, p[prefix + "gate_proj.weight"])) * F.linear(x, p[prefix + "up_proj.weight"])
    return F.linear(hidden, p[prefix + "down_proj.weight"])


class Rope:
    """cos, sin looked up by position, in float32 training precision or the parameters' own."""

    def __init__(self, config, rows: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        half = rope_tables(config.rope, config.head_dim, rows, config.max_position_embeddings, device)
        self.cos, self.sin = full_tables(*half, dtype)

    def __call__(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return apply_rope(x, self.cos[position], self.sin[position])


def eagle3_forward(
    p: Params, c: Eagle3Config, embed: torch.Tensor, rope: Rope, pack: Pack, steps: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Training-time test (EAGLE-3 section 3): step j feeds the states of step j - 1, one slot on.

    Returns for each step (normed states [m, H], slots int64 [m]): slot i of a step predicts token i + 2. A query of step j sees the
    true keys up to slot i - j and its own chain's draft keys at i - j + 1 .. i, as at decoding.
    """
    n, d, eps = pack.tokens.shape[0], c.head_dim, c.rms_norm_eps
    features = pack.features[: len(c.taps)].transpose(0, 1).reshape(n, -1)
    state = F.linear(features, p["fc.weight"])  # [n, H]
    following = torch.cat((pack.tokens[1:], pack.tokens[:1]))
    same_next = torch.cat((pack.segment[1:], pack.segment.new_full((1,), -2))) == pack.segment
    embedded = rms_norm(F.embedding(following, embed), p["layers.0.input_layernorm.weight"], eps)
    reach = pack.segment[:, None] == pack.segment[None, :]
    index = torch.arange(n, device=state.device)
    a, outputs, draft_keys = "layers.0.self_attn.", [], []
    alive = same_next & (pack.segment >= 0)  # slots whose following token is in the row
    learn_next = torch.cat((pack.learn[1:], pack.learn.new_zeros(1)))
    wanted = alive & learn_next  # the slot's own embedded token is response: decoding drafts from here
    for step in range(steps):
        x = torch.cat((embedded, rms_norm(state, p["layers.0.hidden_norm.weight"], eps)), -1)
        k = rope(_heads(F.linear(x, p[a + "k_proj.weight"]), d), pack.position)
        v = _heads(F.linear(x, p[a + "v_proj.weight"]), d)
        if step == 0:
            true_k, true_v = _grouped(k, c.num_heads), _grouped(v, c.num_heads)
        else:
            draft_keys.append((k, v))
            shifted = torch.cat((wanted.new_zeros(1), wanted[:-1])) & alive
            wanted = shifted & torch.cat((same_next.new_zeros(1), same_next[:-1]))
        slots = wanted.nonzero()[:, 0]
        q = rope(_heads(F.linear(x[slots], p[a + "q_proj.weight"]), d), pack.position[slots]).transpose(0, 1)  # [Hq, m, D]
        visible = reach[slots] & (index[None, :] <= slots[:, None] - step)
        scores = (q @ true_k.transpose(1, 2) * d**-0.5).masked_fill(~visible, float("-inf"))
        values = []
        for back, (dk, dv) in enumerate(reversed(draft_keys)):  # the draft row `back` slots before this one
            rows = slots - back
            key, value = _grouped(dk[rows], c.num_heads), _grouped(dv[rows], c.num_heads)
            scores = torch.cat((scores, (q * key).sum(-1, keepdim=True) * d**-0.5), -1)
            values.append(value)
        weights = scores.softmax(-1)
        out = weights[..., :n] @ true_v
        for i, value in enumerate(values):
            out = out + weights[..., n + i : n + i + 1] * value
        h = state[slots] + F.linear(out.transpose(0, 1).reshape(len(slots), -1), p[a + "o_proj.weight"])
        h = h + _swiglu(p, rms_norm(h, p["layers.0.post_attention_layernorm.weight"], eps), "layers.0.mlp.")
        outputs.append((rms_norm(h, p["norm.weight"], eps), slots))
        # The state moves one slot on; slots that were not computed keep a value nobody reads.
        moved = torch.zeros_like(state)
        keep = slots < n - 1
        state = moved.index_copy(0, slots[keep] + 1, h[keep])
    return outputs


def dflash_forward(p: Params, c: DFlashConfig, embed: torch.Tensor, rope: Rope, pack: Pack, anchors: torch.Tensor) -> torch.Tensor:
    """anchors int64 [A] rows of the pack -> states after the final norm [A, block_size, H].

    A block sees context strictly before its anchor, and itself in both directions.
    """
    n, d, eps, heads = pack.tokens.shape[0], c.head_dim, c.rms_norm_eps, c.num_heads
    size = c.block_size
    features = pack.features[: len(c.taps)].transpose(0, 1).reshape(n, -1)
    context = rms_norm(F.linear(features, p["fc.weight"]), p["hidden_norm.weight"], eps)
    device = anchors.device
    ids = torch.full((len(anchors), size), c.mask_token_id, device=device)
    ids[:, 0] = pack.tokens[anchors]
    x = F.embedding(ids, embed).view(len(anchors) * size, -1)
    position = (pack.position[anchors][:, None] + torch.arange(size, device=device)).view(-1)
    visible = (pack.segment[anchors][:, None] == pack.segment[None, :]) & (
        torch.arange(n, device=device)[None, :] < anchors[:, None]
    )
    bias = torch.zeros(len(anchors), 1, n, dtype=x.dtype, device=device).masked_fill_(~visible[:, None], float("-inf"))
    for i in range(c.num_layers):
        a, layer = f"layers.{i}.self_attn.", f"layers.{i}."

        def keys_values(rows: torch.Tensor, where: torch.Tensor, a: str = a) -> tuple[torch.Tensor, torch.Tensor]:
            k = rms_norm(_heads(F.linear(rows, p[a + "k_proj.weight"]), d), p[a + "k_norm.weight"], eps)
            return rope(k, where), _heads(F.linear(rows, p[a + "v_proj.weight"]), d)

        h = rms_norm(x, p[layer + "input_layernorm.weight"], eps)
        q = rope(rms_norm(_heads(F.linear(h, p[a + "q_proj.weight"]), d), p[a + "q_norm.weight"], eps), position)
        q = q.view(len(anchors), size, heads, d)
        ck, cv = (_grouped(t, heads) for t in keys_values(context, pack.position))  # [Hq, n, D]
        bk, bv = (_grouped(t, heads).view(heads, len(anchors), size, d) for t in keys_values(h, position))
        q = q.permute(2, 0, 1, 3) * d**-0.5  # [Hq, A, B, D]
        scores = torch.cat(
            (
                (q.reshape(heads, -1, d) @ ck.transpose(1, 2)).view(heads, len(anchors), size, n) + bias,
                q @ bk.transpose(2, 3),
            ),
            -1,
        )
        weights = scores.softmax(-1)
        out = (weights[..., :n].reshape(heads, -1, n) @ cv).view(heads, len(anchors), size, d) + weights[..., n:] @ bv
        x = x + F.linear(out.permute(1, 2, 0, 3).reshape(len(x), -1), p[a + "o_proj.weight"])
        x = x + _swiglu(p, rms_norm(x, p[layer + "post_attention_layernorm.weight"], eps), layer + "mlp.")
    return rms_norm(x, p["norm.weight"], eps).view(len(anchors), size, -1)


def _noisy_identity(rows: int, blocks: int, which: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, blocks * rows]: the identity on block `which` plus small noise."""
    weight = torch.randn(rows, blocks * rows, generator=generator) * 0.01 / blocks
    weight[:, which * rows : (which + 1) * rows] += torch.eye(rows)
    return weight


def _split_qkv(target: Target, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    c = target.config
    weight = torch.cat(target.layers[i].qkv.weights).float()
    kv = c.num_kv_heads * c.head_dim
    return weight.split([c.num_heads * c.head_dim, kv, kv])


def _trainable(params: Params, device: torch.device) -> Params:
    return {k: v.detach().to(device=device, dtype=torch.float32, copy=True).requires_grad_() for k, v in params.items()}


def init_eagle3(c: Eagle3Config, target: Target, draft_ids: torch.Tensor, seed: int) -> Params:
    """Attention (its hidden half), MLP and norms from the target's last layer; fc the identity on the last tap; head its rows."""
    g, h = torch.Generator().manual_seed(seed), c.hidden_size
    layer = target.layers[-1]
    gate, up = torch.cat(layer.gate_up.weights).float().chunk(2)
    p = {
        "fc.weight": _noisy_identity(h, len(c.taps), len(c.taps) - 1, g),
        "layers.0.input_layernorm.weight": torch.ones(h),
        "layers.0.hidden_norm.weight": layer.input_norm.float(),
        "layers.0.post_attention_layernorm.weight": layer.post_norm.float(),
        "layers.0.self_attn.o_proj.weight": layer.o.weights[0].float(),
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": up,
        "layers.0.mlp.down_proj.weight": layer.down.weights[0].float(),
        "norm.weight": target.norm.float(),
        "lm_head.weight": target.head[draft_ids].float(),
    }
    for name, weight in zip("qkv", _split_qkv(target, -1), strict=True):
        embedding_half = (torch.randn(weight.shape, generator=g) * 0.02).to(weight.device)
        p[f"layers.0.self_attn.{name}_proj.weight"] = torch.cat((embedding_half, weight), 1)
    return _trainable(p, target.device)


def init_dflash(c: DFlashConfig, target: Target, qk_rms: list[tuple[float, float]], seed: int) -> Params:
    """Layers from the target's last ones; fc the identity on the last tap; q/k norms at the target's own q and k size (qk_rms)."""
    g, h, n = torch.Generator().manual_seed(seed), c.hidden_size, target.config.num_layers
    first = n - c.num_layers
    p = {
        "fc.weight": _noisy_identity(h, len(c.taps), len(c.taps) - 1, g),
        "hidden_norm.weight": target.layers[min(c.taps[-1], n - 1)].input_norm.float(),
        "norm.weight": target.norm.float(),
    }
    for i in range(c.num_layers):
        layer, a = target.layers[first + i], f"layers.{i}.self_attn."
        gate, up = torch.cat(layer.gate_up.weights).float().chunk(2)
        p[f"layers.{i}.input_layernorm.weight"] = layer.input_norm.float()
        p[f"layers.{i}.post_attention_layernorm.weight"] = layer.post_norm.float()
        for name, weight in zip("qkv", _split_qkv(target, first + i), strict=True):
            p[a + f"{name}_proj.weight"] = weight
        p[a + "o_proj.weight"] = layer.o.weights[0].float()
        p[a + "q_norm.weight"] = torch.full((c.head_dim,), qk_rms[i][0])
        p[a + "k_norm.weight"] = torch.full((c.head_dim,), qk_rms[i][1])
        m = f"layers.{i}.mlp."
        p[m + "gate_proj.weight"], p[m + "up_proj.weight"] = gate, up
        p[m + "down_proj.weight"] = layer.down.weights[0].float()
    return _trainable(p, target.device)
