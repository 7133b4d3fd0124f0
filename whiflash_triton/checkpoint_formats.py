"""The published drafter formats: which config keys exist, what they mean, how tensors and taps are named.

Sources: configurations and files of z-lab/dflash, vllm-project/speculators, DeepSpec, SafeAILab/EAGLE, SpecForge and
AngelSlim.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import Tensor

from whiflash_triton.checkpoint_files import CheckpointError
from whiflash_triton.checkpoint_schema import TargetShape

log = logging.getLogger(__name__)
REQUIRED: Any = object()
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

# keys that never change what a drafter computes
HARMLESS = frozenset(
    """architectures auto_map model_type target_model_type target_model_name_or_path name_or_path _name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id dtype torch_dtype transformers_version
    initializer_range use_cache tie_word_embeddings attention_dropout hidden_dropout pretraining_tp max_window_layers
    num_target_layers return_dict output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder
    id2label label2id problem_type _attn_implementation speculators_model_type speculators_version speculators_config
    has_no_defaults_at_init base_model_ep_plan base_model_tp_plan embed_requires_grad enable_sp_ulysses
    sliding_window_non_causal max_anchors num_anchors auf emb_dim gru_hidden_dim pure_draft_prefix_len
    lambda_base_start lambda_base_decay_ratio markov_head_type has_embed_tokens has_lm_head""".split()
)
# key: (the values we implement, what any other value means)
ONLY = {
    "hidden_act": (("silu", "swish"), "another MLP activation"),
    "bias": ((False,), "a bias on the fusion layer"),
    "mlp_bias": ((False,), "biases in the MLP"),
    "projector_type": (("dflash",), "a Domino or DSpark projector"),
    "shift_label": ((False,), "Domino's shifted slots"),
    "sample_from_anchor": ((False,), "DSpark's shifted slots"),
    "markov_rank": ((0,), "DSpark's Markov head"),
    "dspark_markov_rank": ((0,), "DSpark's Markov head"),
    "enable_confidence_head": ((False,), "DSpark's confidence head"),
    "confidence_head_alpha": ((0,), "DSpark's confidence head"),
    "confidence_head_with_markov": ((False,), "DSpark's confidence head"),
    "conv_kernel_size": ((), "DFlash 2's convolutions"),
    "conv_group_size": ((), "DFlash 2's convolutions"),
    "selector_rank": ((), "DFlash 2's candidate selector"),
    "selector_top_k": ((), "DFlash 2's candidate selector"),
    "causal": ((False,), "causal attention inside the block"),
    "is_causal": ((False,), "causal attention inside the block"),
    "dflash_query_causal": ((False,), "causal attention inside the block"),
    "use_swa": ((False,), "sliding-window attention"),
    "swa_window_size": ((), "sliding-window attention"),
    "sliding_window_size": ((), "sliding-window attention"),
    "attention_sink_bias": ((False,), "attention sinks"),
    "input_embedding_scale": ((1,), "scaled embeddings"),
    "output_multiplier": ((1,), "scaled logits"),
    "final_logit_softcapping": ((0,), "capped logits"),
    "partial_rotary_factor": ((1,), "partial rotary embedding"),
    "use_aux_hidden_state": ((True,), "a head without feature fusion (EAGLE-1/2 style)"),
    "parallel_drafting": ((False,), "P-EAGLE's parallel drafting"),
    "quantization_config": ((), "a quantised file"),
    "compression_config": ((), "a quantised file"),
    "quantization": ((), "a quantised file"),
}
VARIANTS = {  # part of an architecture name: the variant it means
    "dflash2": "DFlash 2", "dspark": "DSpark", "domino": "Domino", "dflare": "DFlare", "jetspec": "JetSpec",
    "peagle": "P-EAGLE", "p-eagle": "P-EAGLE",
}  # fmt: skip
FOREIGN = {  # part of a tensor name: the variant it belongs to
    "mask_hidden": "P-EAGLE", "prefix_gru": "Domino", "embed_proj": "Domino", "logit_head": "Domino",
    "candidate_selector": "DFlash 2", "_conv.": "DFlash 2", "markov": "DSpark", "confidence": "DSpark",
    "g_proj": "Laguna", "aux_hidden_norms": "Laguna", "sink": "attention sinks", "layer_fusion": "DFlare",
    "experts": "a mixture of experts", "weight_scale": "a quantised file", "input_scale": "a quantised file",
    "weight_packed": "a quantised file", "qweight": "a quantised file", "qzeros": "a quantised file",
    "mask_embedding": "a separate mask embedding",
}  # fmt: skip
DROPPED = ("verifier_norm.weight", "verifier_lm_head.weight")  # training-only copies of the target
RENAMED = [
    (r"^(draft_model\.|model\.)+", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
]
# transformers' class defaults: speculators writes only what differs from them
CLASS_DEFAULTS = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
              "num_hidden_layers": 32, "max_position_embeddings": 2048},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
              "num_hidden_layers": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768},
}  # fmt: skip


class Fields:
    """A config dictionary that remembers which keys were read, so that `finish` can name the rest."""

    def __init__(self, raw: Any, where: str):
        if not isinstance(raw, dict):
            raise CheckpointError(f"{where}: expected a JSON object, found {raw!r}")
        self.raw, self.where, self.seen = raw, where, set()
        self.defaults: dict[str, Any] = {}  # what a missing key means

    def take(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """Value of `key` of the given type; null counts as absent; absent without a default is an error."""
        self.seen.add(key)
        value = self.raw.get(key)
        value = self.defaults.get(key) if value is None else value
        if value is None:
            if default is REQUIRED:
                raise CheckpointError(f"{self.where}: {key} is missing; add it (see the drafter's training config)")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}, expected {kind.__name__}")
        return value

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """A positive integer."""
        value = self.take(key, int, default)
        if value is not None and value < 1:
            raise CheckpointError(f"{self.where}: {key} is {value}, expected a positive integer")
        return value

    def finish(self) -> None:
        """Raise for any key that was not read and is neither harmless nor switched off."""
        for key, value in self.raw.items():
            if key in self.seen or key in HARMLESS or value is None:
                continue
            if key in ONLY:
                allowed, meaning = ONLY[key]
                if value not in allowed:
                    raise CheckpointError(f"{self.where}: {key}={value!r} means {meaning}, which is not supported")
            elif value or type(value) in (int, float):  # a number is a setting, not a switch
                raise CheckpointError(
                    f"{self.where}: unknown key {key}={value!r}; it may change what the drafter computes. "
                    "Remove it from config.json if it does not"
                )


def agreed(key: str, kind: type, *places: Fields, default: Any = REQUIRED) -> Any:
    """Value of a key that may stand in several places; the places that hold it must agree."""
    found = {place.where: place.take(key, kind, None) for place in places}
    values = [value for value in found.values() if value is not None]
    if any(value != values[0] for value in values):
        raise CheckpointError(f"{places[0].where}: {key} is given twice and differs: {found}")
    if not values and default is REQUIRED:
        raise CheckpointError(f"{' or '.join(found)}: {key} is missing; add it (see the drafter's training config)")
    return values[0] if values else default


def check_architecture(fields: Fields, kind: str, accepted: str) -> None:
    """Reject architectures that name another variant; `accepted` is a pattern over the lower-case name."""
    for name in fields.take("architectures", list, []):
        for part, variant in VARIANTS.items():
            if part in str(name).lower():
                raise CheckpointError(f"{fields.where}: {name} is {variant}, which is not supported; pass {kind} drafter")
        if not re.search(accepted, str(name).lower()):
            raise CheckpointError(f"{fields.where}: architecture {name} is not that of {kind} drafter")


def check_full_attention(*places: Fields) -> None:
    """Reject drafters trained with a sliding window: running them dense would lower acceptance silently."""
    for fields in places:
        types = fields.take("layer_types", list, None)
        window = fields.take("sliding_window", int, None)
        switched = fields.take("use_sliding_window", bool, None)
        sliding = set(types) - {"full_attention"} if types else switched or (window and switched is None)
        if sliding:
            raise CheckpointError(
                f"{fields.where}: layer_types={types}, use_sliding_window={switched}, sliding_window={window}: "
                "drafters with sliding-window layers are not supported; pass one with full attention"
            )


def read_rope(fields: Fields, override: float | None) -> dict:
    """RoPE of the drafter itself as {"rope_type", "rope_theta", ...}; top-level rope_theta and rope_scaling, or
    rope_parameters; theta 10000 when nothing is said (the original EAGLE files)."""
    nested = fields.take("rope_parameters", dict, {})
    if "full_attention" in nested:  # one entry a layer type
        nested = Fields(nested, f"{fields.where}: rope_parameters").take("full_attention", dict)
    scaling = fields.take("rope_scaling", dict, {})
    theta = fields.take("rope_theta", float, None)
    inner = nested.get("rope_theta", scaling.get("rope_theta"))
    rope, other = (_rope_without_theta(given) for given in (nested or scaling, scaling or nested))
    if rope != other:
        raise CheckpointError(f"{fields.where}: rope_parameters and rope_scaling are both given and differ; keep one")
    rope_type = rope.pop("rope_type")
    if theta is not None and inner is not None and theta != inner:
        raise CheckpointError(f"{fields.where}: rope_theta is {theta} and {inner} in one file; keep one")
    chosen = next((t for t in (override, theta, inner) if t is not None), 10000.0)
    if rope_type not in ROPE_TYPES or rope.pop("partial_rotary_factor", 1) not in (1, None):
        raise CheckpointError(f"{fields.where}: RoPE {rope_type} {rope} is not supported; use one of {ROPE_TYPES}")
    if isinstance(chosen, bool) or not isinstance(chosen, int | float) or not chosen > 0:
        raise CheckpointError(f"{fields.where}: rope_theta is {chosen!r}, expected a positive number")
    return {"rope_type": rope_type, "rope_theta": float(chosen), **rope}


def _rope_without_theta(given: dict) -> dict:
    kept = {key: value for key, value in given.items() if key not in ("type", "rope_theta")}
    return {"rope_type": given.get("type") or "default"} | {k: v for k, v in kept.items() if v is not None}


def resolve_taps(
    where: str, found: list[tuple[str, list | None, int]], default: list[int], target: TargetShape, override
) -> tuple[int, ...]:
    """Hugging Face hidden_states indices from the spelled lists `found` = (key, ids, shift), an override or a default.

    Index 0 is the embedding output, k the residual stream after layer k - 1, num_layers the post-norm final state.
    """
    found = [(key, ids, shift) for key, ids, shift in found if ids is not None and override is None]
    given = {key: tuple(ids) for key, ids, _ in found}
    if not all(type(i) is int and i >= 0 for ids in given.values() for i in ids):  # -1 is read in two ways elsewhere
        raise CheckpointError(f"{where}: layer ids must be integers from 0, found {given}; pass taps=[...]")
    resolved = {key: tuple(i + shift for i in ids) for key, ids, shift in found}
    if override is not None:
        taps, how = tuple(override), "given by the caller"
    elif len(set(resolved.values())) > 1:
        raise CheckpointError(f"{where}: {given} name different hidden states {resolved}; pass taps=[...] to choose")
    elif resolved:
        key = next(iter(resolved))
        taps, how = resolved[key], f"{key}={list(given[key])}"
        if given[key] == taps == tuple(i - 1 for i in default):
            log.warning("%s: %s equals the usual layers minus one; if few drafts are accepted it was copied from a "
                        "format that counts layer outputs: pass taps=%s", where, how, default)  # fmt: skip
    else:
        taps, how = tuple(default), "the usual default"
        log.warning("%s: no layer ids in config.json, falling back to hidden_states %s", where, default)
    if not taps or any(type(tap) is not int or not 0 <= tap <= target.num_layers for tap in taps):
        raise CheckpointError(
            f"{where}: taps {how} are hidden_states {list(taps)}, but the target has indices 0 to {target.num_layers}; "
            "wrong target, or pass taps=[...]"
        )
    log.info("%s: reads hidden_states %s (%s)", where, list(taps), how)
    return taps


def canonical(state: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """`state` under our tensor names: prefixes and aliases resolved, copies of the target dropped."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        new = name
        for pattern, replacement in RENAMED:
            new = re.sub(pattern, replacement, new)
        if new in DROPPED or new.endswith("rotary_emb.inv_freq"):
            continue
        if new in out:
            raise CheckpointError(f"{where}: {name} and another tensor both mean {new}; keep one")
        if foreign := next((variant for part, variant in FOREIGN.items() if part in new), None):
            raise CheckpointError(f"{where}: tensor {name} belongs to {foreign}, which is not supported")
        out[new] = tensor
    return out


def count_rows(tensor: Tensor) -> int:
    """First dimension, 0 for a scalar."""
    return tensor.shape[0] if tensor.ndim else 0


def split_fused_qkv(state: dict[str, Tensor], q: int, kv: int, where: str) -> None:
    """Replace every fused self_attn.qkv_proj [q + 2 kv, ...] by its three projections, in place."""
    for name in [name for name in state if ".qkv_proj." in name]:
        fused = state.pop(name)
        if count_rows(fused) != q + 2 * kv:
            raise CheckpointError(f"{where}: {name} has {count_rows(fused)} rows, expected {q} + 2 x {kv}")
        for part, rows in zip("qkv", fused.split([q, kv, kv]), strict=True):
            state[name.replace("qkv_proj", f"{part}_proj")] = rows


def count_layers(state: dict[str, Tensor], where: str) -> int:
    """Number of decoder layers, from the tensor names; they must count from zero without a gap."""
    numbers = {int(match[1]) for name in state if (match := re.match(r"layers\.(\d+)\.", name))}
    if numbers != set(range(len(numbers))) or not numbers:
        raise CheckpointError(f"{where}: decoder layers {sorted(numbers)} are not 0, 1, ...; the file is incomplete")
    return len(numbers)


def head_dim(fields: Fields, state: dict[str, Tensor], heads: int, kv_heads: int, where: str) -> int:
    """Head size: as config.json says (and then the q projection must agree), else from the q projection."""
    fused = "layers.0.self_attn.qkv_proj.weight"
    name, parts = (fused, heads + 2 * kv_heads) if fused in state else ("layers.0.self_attn.q_proj.weight", heads)
    rows = count_rows(state[name]) if name in state else 0
    if heads % kv_heads:
        raise CheckpointError(f"{where}: {heads} heads are not a multiple of {kv_heads} key-value heads")
    said = fields.size("head_dim", None)
    dim = said or rows // parts
    if rows and rows != parts * dim:
        raise CheckpointError(
            f"{where}: {name} has {rows} rows, which is not {parts} heads x head_dim {dim}; "
            "correct head_dim or num_attention_heads in config.json"
        )
    return dim
