"""From the target's logits to its choice of token, at every node of a tree at once, the same for every arm.

A token is drawn as argmax(processed logits + noise), the noise a hash of (seed, position, token id) (kernels/keyed_noise.py): the
choice at a node depends on nothing but the text before it, so drafted and plain decoding draw the very same tokens. Names,
meaning and order of the options are those of transformers' `GenerationConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import ops
from .tree import DraftTree

TOP_P_CANDIDATES = 256  # on the CPU a full sort of every row is the last resort


@dataclass
class Sampling:
    """temperature None is greedy. `host` holds transformers processors that need the text; they run row by row along the walk."""

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    host: list = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Greedy, and no option changes a logit."""
        return self.temperature is None and self.repetition_penalty == 1.0 and not self.host


def penalised(logits: torch.Tensor, penalty: float, seen: torch.Tensor) -> torch.Tensor:
    """Repetition penalty: logits [N, V] of the tokens seen [N, L] int64 divided by it where positive, multiplied where negative."""
    score = logits.gather(1, seen)
    return logits.scatter(1, seen, torch.where(score < 0, score * penalty, score / penalty))


def warped(x: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Temperature, top-k, top-p and min-p over rows x [N, V], in this order; what is filtered becomes -inf.

    Values equal to the last one kept are kept too, so that no cut depends on the order of equal logits.
    """
    x = x / s.temperature
    if 0 < s.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(s.top_k).values[:, -1:], float("-inf"))
    if s.top_p < 1.0:
        x = x.masked_fill(x < _top_p_cut(x, s.top_p), float("-inf"))
    if s.min_p > 0.0:
        x = x.masked_fill((x - x.amax(-1, keepdim=True)).exp() < s.min_p, float("-inf"))
    return x


def _top_p_cut(x: torch.Tensor, top_p: float) -> torch.Tensor:
    """The lowest value [N, 1] of the smallest set of best tokens that holds at least top_p of the probability."""
    log_total = x.logsumexp(-1, keepdim=True)
    count = min(TOP_P_CANDIDATES, x.shape[-1]) if x.device.type == "cpu" else x.shape[-1]
    values = x.topk(count).values
    mass = (values - log_total).exp().cumsum(-1)
    if count < x.shape[-1] and bool((mass[:, -1] < top_p).any()):
        values = x.sort(descending=True).values
        mass = (values - log_total).exp().cumsum(-1)
    wanted = torch.cat((torch.ones_like(mass[:, :1]), (mass[:, :-1] < top_p).to(mass.dtype)), -1)
    return values.gather(1, wanted.sum(-1, keepdim=True).long() - 1)


def float_logits(logits: torch.Tensor) -> torch.Tensor:
    """Options are evaluated in float32, as transformers does, or in the float64 of a float64 target."""
    return logits if logits.dtype == torch.float64 else logits.float()


def node_scores(logits: torch.Tensor, s: Sampling, tree: DraftTree, text: torch.Tensor) -> torch.Tensor:
    """Processed logits [N, V] of every node, each with its own path as the end of its text; text int64 [L], the anchor last."""
    x = float_logits(logits)
    if s.repetition_penalty != 1.0:
        path = torch.where(tree.visible(), tree.tokens, tree.tokens[:, :1])  # [N, N]: the node's ancestors, else the anchor
        x = penalised(x, s.repetition_penalty, torch.cat((text.expand(len(x), -1), path), 1))
    return x if s.temperature is None else warped(x, s)


def choose(scores: torch.Tensor, s: Sampling, positions: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the token that processed logits [N, V] give at positions int64 [N] of the text; -1 where none is possible."""
    if s.temperature is None:
        return ops.block_sampling(scores).token
    return ops.block_sampling(scores, seed=seed_tensor(s.seed, scores.device), positions=positions).token


def seed_tensor(seed: int, device: torch.device) -> torch.Tensor:
    """int64 [1] with the bits of an unsigned 64-bit seed."""
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed], device=device)


def host_scores(logits: torch.Tensor, s: Sampling, text: list[int]) -> torch.Tensor:
    """Processed logits [1, V] of one row [V] whose text is known, through transformers' own processors."""
    x, ids = float_logits(logits)[None].clone(), torch.tensor([text], device=logits.device)
    for processor in s.host:
        x = processor(ids, x)
    return x if s.temperature is None else warped(x, s)
