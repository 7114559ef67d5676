"""Augmentation of training batches; labels do not change."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def flip_and_crop(images: Tensor, generator: torch.Generator, *, padding: int = 4) -> Tensor:
    """Mirror each image with probability ½, and shift it by up to `padding` pixels with a black border.

    This is the usual augmentation for CIFAR; `train` applies it to data whose attribute `augment` it is.

    >>> flip_and_crop(torch.ones(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])

    He et al., "Deep residual learning for image recognition" (2016), section 4.2.
    """
    n, _, height, width = images.shape
    device = generator.device
    mirrored = torch.rand(n, generator=generator, device=device) < 0.5
    shifts = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=generator, device=device)
    rows, columns = (
        shift + torch.arange(side, device=device) for shift, side in zip(shifts, (height, width), strict=True)
    )
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    at = [index.to(images.device) for index in (torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None])]
    padded = F.pad(images, (padding,) * 4)
    return padded[at[0], :, at[1], at[2]].permute(0, 3, 1, 2).contiguous()
