"""Small colour images of few classes, and a small network with batch norm that knows them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

CLASSES = 4


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pixels (n, 3, 8, 8) in [0, 1] whose class is in their colours and edges, with noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    palette = torch.tensor([[0.6, 0.4, 0.3], [0.4, 0.55, 0.35], [0.35, 0.4, 0.6], [0.5, 0.5, 0.4]])
    ramp = torch.linspace(-1, 1, 8)
    across, down = ramp[None].expand(8, 8), ramp[:, None].expand(8, 8)
    edges = torch.stack([across, down, across * down, -down.abs()])
    noise = torch.randn(n, 3, 8, 8, generator=generator)
    tint = 0.1 * torch.randn(n, 3, 1, 1, generator=generator)
    strength = 0.1 * torch.randn(n, 1, 1, 1, generator=generator)
    x = palette[y][:, :, None, None] + tint + (0.1 + strength) * edges[y][:, None] + 0.12 * noise
    return x.clamp(0, 1), y


@cache
@torch.enable_grad()
def trained() -> nn.Module:
    """A network of two convolutions, trained by one thread, since more threads lead to other weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    x, y = images(3000, 1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(10):
        optimiser.param_groups[0]["lr"] = 0.01 * (1 - epoch / 10)
        for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    for parameter in net.parameters():
        parameter.grad = None
    torch.set_num_threads(threads)
    return net.eval()


def white_balance(x: Tensor) -> Tensor:
    """Another white."""
    return (x * torch.tensor([0.6, 1.0, 1.3]).reshape(3, 1, 1)).clamp(0, 1)
