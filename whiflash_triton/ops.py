"""One function a kernel: Triton on CUDA (or when forced), the PyTorch reference elsewhere.

Eager calls go straight to the implementation; under torch.compile they are the custom ops ``torch.ops.whiflash.<name>``
registered here. The kernel files' wrappers say what shapes, dtypes and strides they take, and what they raise.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

_FILES = ("tree_attention", "block_sampling", "router_scoring", "kv_compaction", "kv_injection", "tree_walk", "tree_build")
_SCHEMAS = {
    "tree_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_len, Tensor k_tree, Tensor v_tree, "
    "Tensor words, float scale, Tensor? depths=None, int window=0, int q0=0) -> Tensor",
    "block_sampling": "(Tensor logits, int top_k=0, Tensor? seed=None, Tensor? positions=None, float temperature=1.0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "entropy_rule": "(Tensor entropy, float threshold, bool above) -> Tensor",
    "router_mlp": "(Tensor hidden, Tensor w1, Tensor b1, Tensor w2, Tensor b2, float threshold) -> (Tensor, Tensor)",
    "kv_compaction": "(Tensor scratch_kv, Tensor(a!) cache_kv, Tensor path, Tensor path_len, Tensor start, "
    "Tensor? scratch_features=None, Tensor(b!)? features=None, Tensor? feature_start=None) -> ()",
    "kv_injection": "(Tensor projected, Tensor? k_norm, Tensor cos, Tensor sin, Tensor(a!) cache_kv, Tensor start, "
    "float eps) -> ()",
    "tree_walk": "(Tensor tokens, Tensor parents, Tensor choices) -> (Tensor, Tensor, Tensor)",
    "tree_build": "(Tensor log_probs, Tensor tokens, Tensor anchor, int budget) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "ancestor_words": "(Tensor parents) -> Tensor",
}
_MUTATED = {"kv_compaction": ("cache_kv", "features"), "kv_injection": ("cache_kv",)}

_forced = os.environ.get("WHIFLASH_FORCE_TRITON") == "1"


def force_triton(on: bool) -> None:
    """Use the kernels for CPU tensors too, which works in a process that interprets them (TRITON_INTERPRET=1)."""
    global _forced
    _forced = on


def _load() -> dict[str, Any]:
    """Every public name of the kernel files, or nothing where Triton is not installed."""
    try:
        files = [importlib.import_module(f"whiflash_triton.kernels.{name}") for name in _FILES]
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return {}
    return {name: value for file in files for name, value in vars(file).items() if not name.startswith("_")}


_NAMES = _load()


def _implementation(name: str, anchor: Tensor) -> Callable:
    """Kernel or reference, by the device of the first argument."""
    if not _NAMES:
        raise ImportError("whiflash_triton needs Triton (Linux), on a CPU too: pip install 'triton>=3.6'")
    return _NAMES[name if _forced or anchor.is_cuda else f"{name}_torch"]


def _call(name: str, *args, **kwargs):
    if torch.compiler.is_compiling():
        return getattr(torch.ops.whiflash, name)(*args, **kwargs)
    if args[0].is_cuda:
        with torch.cuda.device(args[0].device):  # Triton launches on the current device, whatever its tensors' is
            return _implementation(name, args[0])(*args, **kwargs)
    return _implementation(name, args[0])(*args, **kwargs)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_len: Tensor,
    k_tree: Tensor,
    v_tree: Tensor,
    words: Tensor,
    *,
    scale: float,
    depths: Tensor | None = None,
    window: int = 0,
    q0: int = 0,
) -> Tensor:
    """Attention [B, T, Hq, D] of tree nodes over the cache and the tree keys that their ancestor words name."""
    tensors = (q, k_cache, v_cache, cache_len, k_tree, v_tree, words)
    return _call("tree_attention", *tensors, scale=scale, depths=depths, window=window, q0=q0)


def block_sampling(
    logits: Tensor, top_k: int = 0, seed: Tensor | None = None, positions: Tensor | None = None, temperature: float = 1.0
):
    """BlockSample(token, logsumexp, entropy, topk_logits, topk_tokens) of every row of logits [R, V]; with a seed int64
    [1] and positions int64 [R] the token is drawn at the temperature."""
    return _NAMES["BlockSample"](*_call("block_sampling", logits, top_k, seed, positions, temperature))


def entropy_rule(entropy: Tensor, threshold: float, above: bool) -> Tensor:
    """Decision int32 [R], 1 for the diffusion arm, from entropy [R] in nats."""
    return _call("entropy_rule", entropy, threshold, above)


def router_mlp(hidden: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Score fp32 [R] and decision int32 [R], 1 for the diffusion arm, from hidden [R, H]."""
    return _call("router_mlp", hidden, w1, b1, w2, b2, threshold)


def kv_compaction(
    scratch_kv: Tensor,
    cache_kv: Tensor,
    path: Tensor,
    path_len: Tensor,
    start: Tensor,
    scratch_features: Tensor | None = None,
    features: Tensor | None = None,
    feature_start: Tensor | None = None,
) -> None:
    """Append the accepted scratch rows to cache_kv, and their features to features, in place."""
    _call(
        "kv_compaction", scratch_kv, cache_kv, path, path_len, start, scratch_features, features, feature_start
    )  # fmt: skip


def kv_injection(
    projected: Tensor, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache_kv: Tensor, start: Tensor, eps: float
) -> None:
    """Write the projected context K (normed, rotated) and V of all draft layers into cache_kv, in place."""
    _call("kv_injection", projected, k_norm, cos, sin, cache_kv, start, eps)


def tree_walk(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Path int32 [B, N] (pad -1), its length int32 [B] and the bonus token int64 [B] of the target's choices."""
    return _call("tree_walk", tokens, parents, choices)


def tree_build(log_probs: Tensor, tokens: Tensor, anchor: Tensor, budget: int):
    """TreeNodes(tokens, parents, depths, words, scores): the budget most probable prefixes of log_probs, tokens [L, K]."""
    return _NAMES["TreeNodes"](*_call("tree_build", log_probs, tokens, anchor, budget))


def ancestor_words(parents: Tensor) -> Tensor:
    """Ancestor bit words int64 [N, ceil(N / 64)] of the nodes of a tree with parents int32 [N]."""
    return _call("ancestor_words", parents)


def _register(name: str) -> Callable:
    parameters = list(inspect.signature(globals()[name]).parameters)

    def run(*args, **kwargs):
        named = dict(zip(parameters, args)) | kwargs  # noqa: B905 (arguments with defaults may be left out)
        out = _implementation(name, args[0])(**named)
        return tuple(out) if isinstance(out, tuple) else out  # a named tuple becomes a plain one

    return custom_op(f"whiflash::{name}", run, mutates_args=_MUTATED.get(name, ()), schema=_SCHEMAS[name])


_OPS = {name: _register(name) for name in _SCHEMAS}


@_OPS["tree_attention"].register_fake
def _(q, *args, **kwargs):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@_OPS["block_sampling"].register_fake
def _(logits, top_k=0, seed=None, positions=None, temperature=1.0):
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, top_k, dtype=torch.float32),
        logits.new_empty(rows, top_k, dtype=torch.int64),
    )


@_OPS["entropy_rule"].register_fake
def _(entropy, threshold, above):
    return torch.empty(entropy.shape, dtype=torch.int32, device=entropy.device)


@_OPS["router_mlp"].register_fake
def _(hidden, *args):
    rows = hidden.shape[0]
    return hidden.new_empty(rows, dtype=torch.float32), hidden.new_empty(rows, dtype=torch.int32)


@_OPS["tree_walk"].register_fake
def _(tokens, parents, choices):
    batch, nodes = tokens.shape
    sizes = ((batch, nodes), torch.int32), ((batch,), torch.int32), ((batch,), torch.int64)
    return tuple(tokens.new_empty(size, dtype=dtype) for size, dtype in sizes)


@_OPS["tree_build"].register_fake
def _(log_probs, tokens, anchor, budget):
    n = budget + 1
    sizes = ((1, n), torch.int64), ((n,), torch.int32), ((n,), torch.int32), ((n, (n + 63) // 64), torch.int64)
    return tuple(tokens.new_empty(size, dtype=dtype) for size, dtype in (*sizes, ((n,), torch.float64)))


@_OPS["ancestor_words"].register_fake
def _(parents):
    n = parents.shape[0]
    return parents.new_empty(n, (n + 63) // 64, dtype=torch.int64)


@_OPS["kv_compaction"].register_fake
@_OPS["kv_injection"].register_fake
def _(*args):
    return None
