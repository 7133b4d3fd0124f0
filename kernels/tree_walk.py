"""Acceptance along a draft tree: from the root, follow the children that the target itself chose."""

import torch
from torch import Tensor


def _check(tokens: Tensor, parents: Tensor, choices: Tensor) -> None:
    assert tokens.ndim == 2 and 0 < tokens.shape[1] <= 1025, f"tokens must be [B, 1..1025], got {tuple(tokens.shape)}"
    assert tokens.shape == parents.shape == choices.shape, "tokens, parents and choices must have one shape"
    assert tokens.dtype == choices.dtype == torch.int64 and parents.dtype == torch.int32
    assert tokens.stride(1) == parents.stride(1) == choices.stride(1) == 1


def tree_walk_torch(tokens: Tensor, parents: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch reference of `tree_walk`."""
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
    return padded, length, torch.tensor(bonus, dtype=torch.int64, device=device)
