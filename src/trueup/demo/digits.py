"""Handwritten digits, and a network that learns too few of them by heart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup.core.progress import track
from trueup.models.networks import CNN

LEARN, CALIBRATE = 200, 700
"""Digits to learn from and to calibrate on; the rest of the 1,797 are the test."""
EPOCHS = 150
"""Far more than it takes to learn them: the loss goes on falling, by certainty alone."""
BATCH = 50

Images: TypeAlias = tuple[Tensor, Tensor]
"""Pixels in [0, 1], (n, 1, 8, 8), and labels (n,)."""


@dataclass(frozen=True)
class Digits:
    """Three parts of one data set."""

    learn: Images
    val: Images
    test: Images


def digits(seed: int = 0) -> Digits:
    """The digits inside scikit-learn, dealt at random.

    >>> parts = digits()
    >>> len(parts.learn[1]), len(parts.val[1]), len(parts.test[1]), parts.test[0].shape[1:]
    (200, 700, 897, torch.Size([1, 8, 8]))
    """
    from sklearn.datasets import load_digits

    whole = load_digits()
    images = torch.tensor(whole.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(whole.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order[:LEARN], order[LEARN : LEARN + CALIBRATE], order[LEARN + CALIBRATE :]
    return Digits(*((images[part], labels[part]) for part in parts))


def trained(learn: Images, *, epochs: int = EPOCHS, seed: int = 0, progress: bool = True) -> nn.Module:
    """A small convolutional network, fitted to a few digits with cross-entropy and nothing that holds it back."""
    images, labels = learn
    # Batch normalisation, decay or noise would each keep the network from growing sure of itself.
    network = CNN(10, channels=1, width=16, batch_norm=False, seed=seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    seen = [0.0]
    for _ in track(range(epochs), label="training", enabled=progress, note=lambda: f"loss {seen[0]:.5f}"):
        order = torch.randperm(len(labels), generator=generator)
        for part in (order[at : at + BATCH] for at in range(0, len(order), BATCH)):
            loss = F.cross_entropy(network(images[part]), labels[part])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            seen[0] = loss.item()
    return network.eval()


def loader(images: Images, *, size: int = 500) -> list[Images]:
    """Batches, in order."""
    pixels, labels = images
    return [(pixels[at : at + size], labels[at : at + size]) for at in range(0, len(labels), size)]
