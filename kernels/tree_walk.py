"""Acceptance along a draft tree: from the root, follow the children that the target itself chose.

One launch, grid (B,): a program holds its tree in registers, so a step down is one reduction and no memory access.
Bytes: 28 a node (token, parent, choice, and its parent's choice), plus 4 a node written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whiflash_triton.autotune.lookup import pick


@triton.jit
def _tree_walk_kernel(
    tokens_ptr,  # int64 [B, N]
    parents_ptr,  # int32 [B, N]
    choices_ptr,  # int64 [B, N]
    path_ptr,  # int32 [B, N]
    length_ptr,  # int32 [B]
    bonus_ptr,  # int64 [B]
    stride_tokens,
    stride_parents,
    stride_choices,
    n_nodes,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    choices_ptr += batch * stride_choices
    node = tl.arange(0, BLOCK)
    inside = node < n_nodes
    token = tl.load(tokens_ptr + batch * stride_tokens + node, mask=inside, other=-1)
    parent = tl.load(parents_ptr + batch * stride_parents + node, mask=inside, other=-1)
    child = (parent >= 0) & (parent < node)
    wanted = tl.load(choices_ptr + parent, mask=child, other=-1)  # what the target chose at the node's parent
    # A node that matches can be entered from its parent only; any other has no parent at all.
    entry = tl.where(child & (token == wanted) & (wanted >= 0), parent, -1)

    path = tl.where(node == 0, 0, -1)  # in registers: stored once, so no two threads write one address
    length = 1
    last = 0
    step = tl.min(tl.where(entry == 0, node, BLOCK), 0)  # lowest matching child, BLOCK if none
    while step < BLOCK:
        path = tl.where(node == length, step, path)
        length += 1
        last = step
        step = tl.min(tl.where(entry == last, node, BLOCK), 0)
    tl.store(path_ptr + batch * n_nodes + node, path, mask=inside)
    tl.store(length_ptr + batch, length)
    tl.store(bonus_ptr + batch, tl.load(choices_ptr + last))


def tree_walk(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Longest path from the root along the target's own choices: path int32 [B, N] (pad -1), length int32 [B], bonus
    int64 [B], the target's choice at the path's last node.

    tokens int64 [B, N] (node 0 is the anchor), parents int32 [B, N] (root and pad nodes -1, otherwise below the node's
    own index), choices int64 [B, N], the target's token at every node; N <= 1025. Among children with equal tokens
    the lowest is taken; a choice of -1 (a NaN row) matches nothing. No host sync. Raises AssertionError on wrong
    shapes, dtypes or strides.
    """
    _check(tokens, parents, choices)
    batch, n_nodes = tokens.shape
    path = torch.empty(batch, n_nodes, dtype=torch.int32, device=tokens.device)
    length = torch.empty(batch, dtype=torch.int32, device=tokens.device)
    bonus = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    if batch:
        block = triton.next_power_of_2(n_nodes)
        _tree_walk_kernel[(batch,)](
            *(tokens, parents, choices, path, length, bonus),
            *(tokens.stride(0), parents.stride(0), choices.stride(0), n_nodes),
            BLOCK=block,
            **pick("tree_walk", N=block),
        )
    return path, length, bonus


def _check(tokens: Tensor, parents: Tensor, choices: Tensor) -> None:
    assert tokens.ndim == 2 and 0 < tokens.shape[1] <= 1025, f"tokens must be [B, 1..1025], got {tuple(tokens.shape)}"
    assert tokens.shape == parents.shape == choices.shape, "tokens, parents and choices must have one shape"
    assert tokens.dtype == choices.dtype == torch.int64, "tokens and choices must be int64"
    assert parents.dtype == torch.int32, "parents must be int32"
    assert tokens.stride(1) == parents.stride(1) == choices.stride(1) == 1, "rows must be contiguous"


def tree_walk_torch(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch reference of `tree_walk`, on host lists."""
    _check(tokens, parents, choices)
    n, paths, bonus = tokens.shape[1], [], []
    for token, parent, choice in zip(tokens.tolist(), parents.tolist(), choices.tolist(), strict=True):
        path = [0]
        wanted = choice[0]
        # A parent precedes its children, so one scan in index order meets the lowest matching child of every step.
        for j in range(1, n):
            if parent[j] == path[-1] and token[j] == wanted >= 0:
                path.append(j)
                wanted = choice[j]
        paths.append(path)
        bonus.append(wanted)
    device = tokens.device
    padded = torch.tensor([path + [-1] * (n - len(path)) for path in paths], dtype=torch.int32, device=device)
    length = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device)
    return padded.view(-1, n), length, torch.tensor(bonus, dtype=torch.int64, device=device)
