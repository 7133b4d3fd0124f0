"""Published sizes of the models the benchmarks stand for: a target, its DFlash drafter and its EAGLE-3 head.

From the config.json files of Qwen/Qwen3-4B, Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B-Instruct,
HuggingFaceTB/SmolLM2-135M-Instruct, z-lab/Qwen3-{4B,8B}-DFlash-b16, SpecForge's templates of EAGLE-3 heads, and the drafters
shipped in assets/. Of Llama's DFlash drafter layers, heads and block are published; its intermediate size is taken to be the
target's, and its mask token is any row of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from whiflash_triton.checkpoint_schema import DFlashConfig, Eagle3Config
from whiflash_triton.target import TargetConfig

LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Model:
    target: TargetConfig
    dflash: DFlashConfig
    eagle3: Eagle3Config


def _rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


def _target(family, layers, hidden, inner, heads, kv_heads, dim, vocab, eps, rope, positions, tied) -> TargetConfig:
    bias = dict(qkv_bias=False, o_bias=False, mlp_bias=False)
    return TargetConfig(
        family, layers, hidden, inner, heads, kv_heads, dim, vocab, eps, rope, positions, (0,) * layers,
        qk_norm=family == "qwen3", tied=tied, **bias,
    )  # fmt: skip


def _dflash(
    t: TargetConfig, layers: int, block: int, mask: int, taps: tuple[int, ...], draft_vocab: int | None = None
) -> DFlashConfig:
    """A drafter as wide as its target; taps are hidden_states indices."""
    return DFlashConfig(
        t.hidden_size, t.intermediate_size, layers, t.num_heads, t.num_kv_heads, t.head_dim, t.rms_norm_eps, t.rope, t.vocab_size,
        block, mask, taps, False, t.max_position_embeddings, draft_vocab, t.num_layers,
    )  # fmt: skip


def _eagle3(t: TargetConfig, rope: dict, draft_vocab: int, taps: tuple[int, ...]) -> Eagle3Config:
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    return Eagle3Config(
        t.hidden_size, t.hidden_size, t.intermediate_size, t.num_heads, t.num_kv_heads, t.head_dim, t.rms_norm_eps, rope,
        t.vocab_size, draft_vocab, taps, False, max_position_embeddings=t.max_position_embeddings, **dict.fromkeys(flags, False),
    )  # fmt: skip


def _model(t: TargetConfig, dflash: tuple, eagle3: tuple) -> Model:
    return Model(t, _dflash(t, *dflash), _eagle3(t, *eagle3))


QWEN3_TAPS = (2, 10, 18, 26, 34)
MODELS = {
    "qwen3-4b": _model(
        _target("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 1e-6, _rope(1e6), 40960, True),
        (5, 16, 151669, QWEN3_TAPS),
        (_rope(1e6), 32000, (2, 18, 33)),
    ),
    "qwen3-8b": _model(
        _target("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 1e-6, _rope(1e6), 40960, False),
        (5, 16, 151669, QWEN3_TAPS),
        (_rope(1e6), 32000, (2, 18, 33)),
    ),
    "llama-3.1-8b": _model(
        _target("llama", 32, 4096, 14336, 32, 8, 128, 128256, 1e-5, LLAMA_ROPE, 131072, False),
        (5, 10, 0, (2, 9, 16, 23, 30)),
        (_rope(1e4), 32000, (2, 16, 29)),
    ),
    "smollm2-135m": _model(
        _target("llama", 30, 576, 1536, 9, 3, 64, 49152, 1e-5, _rope(1e5), 8192, True),
        (3, 8, 16, (2, 9, 15, 21, 28), 12288),
        (_rope(1e5), 12288, (2, 15, 27)),
    ),
}
# Not published anywhere: small enough that a rehearsal without a GPU takes seconds.
REHEARSAL = _model(
    _target("qwen3", 2, 64, 128, 4, 2, 16, 512, 1e-6, _rope(1e4), 4096, True),
    (1, 8, 7, (0, 1, 2)),
    (_rope(1e4), 256, (0, 1, 2)),
)


def distinct(key: Callable[[Model], Hashable]) -> list[tuple[str, Model]]:
    """The models whose sizes a kernel can tell apart by `key`, each labelled with all that share them."""
    names: dict[Hashable, list[str]] = {}
    for name, model in MODELS.items():
        names.setdefault(key(model), []).append(name)
    return [("+".join(group), MODELS[group[0]]) for group in names.values()]
