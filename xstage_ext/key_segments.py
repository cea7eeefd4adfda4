"""Which keys are valid: half-open runs per batch entry, the form that the attention ops take.

int32 [B, N, 2], (begin, end) in rows of the whole key sequence, ascending, disjoint; a run with
end <= begin is empty. Runs live on the device of q, k and v; kernels read them without host sync.
"""

from __future__ import annotations

import torch

MAX_SEGMENTS = 64


def segments_from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Keys 0 to lengths[b] - 1 are valid. No host sync.

    Parameters
    ----------
    lengths : integer [B]

    Returns
    -------
    torch.Tensor
        int32 [B, 1, 2].
    """
    ends = lengths.to(torch.int32)
    return torch.stack([torch.zeros_like(ends), ends], -1).unsqueeze(1)


def segments_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """Runs of True. Waits for the device: do it once per mask, outside of CUDA graphs.

    Parameters
    ----------
    mask : bool [B, Sk]
        True where a key is valid.

    Raises
    ------
    TypeError
        Not a bool tensor of two dimensions; an additive mask is not a set of keys.
    NotImplementedError
        More than 64 runs in one batch entry.
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise TypeError(
            f"xstage: key mask: expected bool [B, Sk], got {mask.dtype} {list(mask.shape)}; only "
            "masks of whole keys are supported, not additive or per-query masks"
        )
    padded = torch.nn.functional.pad(mask.cpu(), (1, 1)).to(torch.int8)
    edge = padded.diff(dim=1)
    runs = [
        torch.stack([(row == 1).nonzero()[:, 0], (row == -1).nonzero()[:, 0]], -1) for row in edge
    ]
    most = max([1, *(len(run) for run in runs)])
    if most > MAX_SEGMENTS:
        raise NotImplementedError(
            f"xstage: key mask: expected at most {MAX_SEGMENTS} runs of valid keys per batch "
            f"entry, got {most}; gather the valid keys first"
        )
    segments = torch.zeros(mask.shape[0], most, 2, dtype=torch.int32)
    for index, run in enumerate(runs):
        segments[index, : len(run)] = run
    return segments.to(mask.device)
