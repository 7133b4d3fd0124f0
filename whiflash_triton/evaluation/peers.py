"""Others' decoders on the same prompts: transformers' `generate`, its prompt lookup, its DFlash assistant, and z-lab's dflash.

All share one transformers model, of the target's source, dtype and device. Their texts are cut after the first end token.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from ..checkpoints import DFlashConfig, TargetShape, load_dflash, save_dflash
from ..decoder import WhiFlashDecoder
from ..loading import resolve_source
from ..options import DEFAULT_TOP_K, SAMPLING_ONLY
from .runs import Side, Text

PEERS = ("hf", "prompt-lookup", "hf-dflash", "dflash")
LOOKUP_TOKENS = 10  # what prompt lookup drafts where no size is given
ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}  # transformers' names


def check_peers(names: list[str], dflash: object, options: dict) -> None:
    """Before anything is loaded: ValueError for a peer that cannot take part, ImportError naming the package that is missing."""
    for name in names:
        kind, _, size = name.partition(":")
        if kind not in PEERS or (size and (kind not in ("prompt-lookup", "dflash") or not size.isdigit() or size == "0")):
            raise ValueError(f"unknown peer {name!r}: {', '.join(PEERS)}; prompt-lookup and dflash take a number of drafted tokens")
        if "dflash" in kind and dflash is None:
            raise ValueError(f"peer {name} runs our DFlash drafter, and none is loaded: give --dflash")
        if kind == "dflash" and find_spec("dflash") is None:
            raise ImportError("peer dflash needs z-lab's package: pip install dflash, or leave the peer out")
        if kind == "dflash" and (extra := options.keys() & {"min_p", "repetition_penalty"}):
            raise ValueError(f"peer dflash knows no {', '.join(sorted(extra))}: leave the option or the peer out")
        if kind == "hf-dflash" and find_spec("transformers.models.muse_glimmer_assistant") is None:
            raise ImportError("peer hf-dflash needs a transformers with a DFlash assistant (5.24 has one), or leave the peer out")


def make_peers(decoder: WhiFlashDecoder, target: str, dflash: object, names: list[str], options: dict) -> dict[str, Side]:
    """Sides by name, `peer:` before it. options: sampling, as the decoder takes them; a sampled text is the peer's own."""
    if not names:
        return {}
    model = load_transformers(decoder, target, options)
    calls = [0]
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def side(generate) -> Side:
        def call(ids: list[int], new_tokens: int) -> Text:
            torch.manual_seed(options.get("seed", 0))
            calls[0] = 0
            prompt = torch.tensor([ids], device=decoder.target.device)
            with torch.inference_mode():
                tokens = generate(prompt, new_tokens)[0, len(ids) :].tolist()
            tokens = cut(tokens, decoder.eos_token_ids, new_tokens)
            decoder._decode(tokens)
            return Text(tokens, calls[0] - 1)

        return call

    def through_transformers(**more):
        return lambda ids, new: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **more)

    made = {}
    for name in names:
        kind, _, size = name.partition(":")
        if kind == "hf":
            generate = through_transformers()
        elif kind == "prompt-lookup":
            generate = through_transformers(prompt_lookup_num_tokens=int(size or LOOKUP_TOKENS))
            name = f"{kind}:{size or LOOKUP_TOKENS}"
        elif kind == "hf-dflash":
            assistant = load_assistant(decoder, dflash)
            generate = through_transformers(assistant_model=assistant, speculation_type="dflash")
        else:
            generate = z_lab(decoder, model, dflash, int(size) if size else None, options)
        made[f"peer:{name}"] = side(generate)
    return made


def cut(tokens: list[int], stops: list[int], limit: int) -> list[int]:
    """Up to the first end token, it included, and to the limit: what follows is not counted."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: min(end, limit)]


def load_transformers(decoder: WhiFlashDecoder, target: str, options: dict):
    """The target's source as transformers' own model, with the decoder's end tokens and the model's own generation defaults."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    path, gguf = Path(resolve_source(target)[0]), {}
    if path.suffix == ".gguf":
        path, gguf = path.parent, {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=decoder.target.dtype, **gguf).to(decoder.target.device).eval()
    ours = ("max_length", "max_new_tokens", "eos_token_id", "do_sample") + (() if options.get("do_sample") else SAMPLING_ONLY)
    defaults = {name: value for name, value in decoder.generation_defaults.items() if name not in ours}
    asked = {name: value for name, value in options.items() if name not in ("seed", "do_sample")}
    stops = decoder.eos_token_ids or None
    model.generation_config = GenerationConfig(
        **(defaults | asked), do_sample=bool(options.get("do_sample")), eos_token_id=stops, pad_token_id=stops[0] if stops else 0
    )
    return model


def _drafter(decoder: WhiFlashDecoder, dflash: object) -> tuple[DFlashConfig, dict[str, torch.Tensor]]:
    """Our DFlash checkpoint in plain floats. A reduced head is ours alone: the peers draft over the whole vocabulary."""
    c = decoder.target.config
    config, tensors = load_dflash(dflash, target=TargetShape(c.num_layers, c.hidden_size, c.vocab_size))
    return config, dict(tensors)


def z_lab(decoder: WhiFlashDecoder, model, dflash: object, size: int | None, options: dict):
    """z-lab's own loop over its own module, read from the checkpoint written in its format."""
    from dflash import DFlashDraftModel
    from dflash.model import dflash_generate

    dtype = decoder.target.dtype
    with tempfile.TemporaryDirectory() as folder:
        save_dflash(folder, *_drafter(decoder, dflash), dtype=dtype)
        drafter = DFlashDraftModel.from_pretrained(folder, dtype=dtype).to(decoder.target.device).eval()
    sampled = {}
    if options.get("do_sample"):
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": DEFAULT_TOP_K} | decoder.generation_defaults | options
        sampled = {name: defaults[name] for name in ("temperature", "top_p", "top_k")}
    stops, block = decoder.eos_token_ids or None, None if size is None else size + 1
    return lambda ids, new: dflash_generate(drafter, model, ids, new, stops, block_size=block, **sampled)


def load_assistant(decoder: WhiFlashDecoder, dflash: object):
    """transformers' DFlash module (its only one, MuseGlimmerAssistantModel, is z-lab's under other names) with our weights."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    c, tensors = _drafter(decoder, dflash)
    if c.attention_bias:
        raise ValueError("peer hf-dflash: transformers' DFlash assistant has no attention bias, and this drafter does")
    config = MuseGlimmerAssistantConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=dict(c.rope),
        max_position_embeddings=c.max_position_embeddings,
        layer_types=["full_attention"] * c.num_layers,
        block_size=c.block_size,
        mask_token_id=c.mask_token_id,
        target_layer_ids=[tap - 1 for tap in c.taps],
    )
    assistant = MuseGlimmerAssistantModel(config)
    assistant.load_state_dict({ENCODER.get(name, name): t for name, t in tensors.items() if name != "draft_ids"})
    return assistant.to(device=decoder.target.device, dtype=decoder.target.dtype).eval()
