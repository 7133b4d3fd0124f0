"""DraftTree: the tokens a round verifies, as one tree whose root is the anchor.

Ancestor bit words: word w of row t holds keys 64w..64w+63; bit j % 64 of word j // 64 is set iff node j is t or one of its
ancestors. A chain is a tree without branches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass
class DraftTree:
    """Node 0 is the anchor; parents precede children.

    tokens int64 [B, N]; parents int32 [N] (root -1); depths int32 [N] (root 0); words int64 [N, ceil(N / 64)].
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    words: torch.Tensor
    is_chain: bool = False
    _visible: torch.Tensor | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def visible(self) -> torch.Tensor:
        """bool [N, N]: visible[t, j] iff tree key j is an ancestor of t or t itself."""
        if self._visible is None:
            self._visible = words_to_mask(self.words, self.size)
        return self._visible


def chain(tokens: torch.Tensor) -> DraftTree:
    """tokens int64 [B, N], anchor first -> the tree in which every node is the child of the one before."""
    n, device = tokens.shape[1], tokens.device
    parents, depths, words = _chain_parts(n, device)
    return DraftTree(tokens, parents, depths, words, is_chain=True)


_CHAINS: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}


def _chain_parts(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    key = (n, device)
    if key not in _CHAINS:
        if len(_CHAINS) > 256:  # prefill chunks come in a few sizes; anything more is a leak
            _CHAINS.clear()
        depths = torch.arange(n, dtype=torch.int32)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        _CHAINS[key] = ((depths - 1).to(device), depths.to(device), mask_to_words(mask).to(device))
    return _CHAINS[key]


def from_parents(tokens: torch.Tensor, parents: list[int]) -> DraftTree:
    """tokens int64 [B, N]; parents: one index a node, -1 for the root, each smaller than its node's own."""
    n = tokens.shape[1]
    if len(parents) != n or n == 0 or parents[0] != -1:
        raise ValueError(f"a tree of {n} tokens needs {n} parents, the first -1; got {parents[:4]}")
    mask = torch.eye(n, dtype=torch.bool)
    depths = [0] * n
    for node in range(1, n):
        if not 0 <= parents[node] < node:
            raise ValueError(f"node {node} has parent {parents[node]}; parents must precede their children")
        mask[node] |= mask[parents[node]]
        depths[node] = depths[parents[node]] + 1
    device = tokens.device
    return DraftTree(
        tokens,
        torch.tensor(parents, dtype=torch.int32, device=device),
        torch.tensor(depths, dtype=torch.int32, device=device),
        mask_to_words(mask).to(device),
    )


@dataclass
class Proposal:
    """A drafter's nodes, root first, each after its parent, pads last.

    tokens int64 [N]; parents int32 [N], -1 for the root and pads; depths int32 [N]; scores float64 [N], the log-probability of the
    path from the root: 0 for the root, never above the parent's, -inf for pads.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor


def best_nodes(
    root: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, scores: torch.Tensor, size: int
) -> Proposal:
    """The best `size` of P nodes by (-score, index), in index order under the root; those of score -inf are the pads.

    root int64 [1]; tokens, parents and depths int64 [P], scores float64 [P]. Parents count the root as 0 and node i as i + 1; each
    comes before its children and scores no less, so the ancestors of what is kept are kept.
    """
    count = len(scores)
    best = scores.sort(descending=True, stable=True).indices[:size]
    kept = torch.where(scores[best] > float("-inf"), best, best + count).sort().values % count  # pads last
    scores = scores[kept]
    pads = scores == float("-inf")
    place = torch.zeros(count + 1, dtype=torch.int64, device=root.device)
    place[kept + 1] = torch.arange(1, len(kept) + 1, device=root.device)
    return Proposal(
        torch.cat((root, tokens[kept].masked_fill(pads, 0))),
        F.pad(place[parents[kept]].masked_fill(pads, -1), (1, 0), value=-1).int(),
        F.pad(depths[kept].masked_fill(pads, 0), (1, 0)).int(),
        F.pad(scores, (1, 0)),
    )


def from_nodes(tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, words: torch.Tensor) -> DraftTree:
    """A tree whose pads (parent -1, at the end) are dropped on a CPU, where each would be verified for nothing.

    On CUDA they stay, as counting them would wait for the device. tokens int64 [1, N], the rest as in DraftTree.
    """
    if not tokens.is_cuda:
        n = 1 + int((parents >= 0).sum())
        tokens, parents, depths, words = tokens[:, :n], parents[:n], depths[:n], words[:n, : (n + 63) // 64]
    return DraftTree(tokens, parents, depths, words)


def mask_to_words(mask: torch.Tensor) -> torch.Tensor:
    """bool [T, N] -> int64 [T, ceil(N / 64)]; bit 63 is the sign bit."""
    t, n = mask.shape
    words = (n + 63) // 64
    padded = torch.zeros(t, words * 64, dtype=torch.int64, device=mask.device)
    padded[:, :n] = mask
    shifts = torch.arange(64, dtype=torch.int64, device=mask.device)
    return (padded.view(t, words, 64) << shifts).sum(-1)  # distinct bits: the sum is their union, wrapping at bit 63


def words_to_mask(words: torch.Tensor, n: int) -> torch.Tensor:
    """int64 [T, W] -> bool [T, n]."""
    shifts = torch.arange(64, dtype=torch.int64, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1  # arithmetic shift: bit 63 reads as 1 all the same after the mask
    return bits.view(words.shape[0], -1)[:, :n].bool()
