"""Handwritten digits, and a network that overfits a few of them.

    python -m trueup.demo.digits

trains it and stores its predictions, which the demo uses if torch is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup._core.progress import track
from trueup.demo.walkthrough import EPOCHS, STORED
from trueup.models.networks import CNN

N_TRAIN, N_CALIBRATION = 200, 700
"""Number of digits for training and for calibration; the rest of the 1,797 are the test set."""
BATCH_SIZE = 50

Images: TypeAlias = tuple[Tensor, Tensor]
"""Pixels in [0, 1], (n, 1, 8, 8), and labels (n,)."""


@dataclass(frozen=True)
class Digits:
    """Training, calibration and test images."""

    train: Images
    val: Images
    test: Images


def digits(seed: int = 0) -> Digits:
    """Split the digits of scikit-learn at random.

    >>> data = digits()
    >>> len(data.train[1]), len(data.val[1]), len(data.test[1]), data.test[0].shape[1:]
    (200, 700, 897, torch.Size([1, 8, 8]))
    """
    from sklearn.datasets import load_digits

    whole = load_digits()
    images = torch.tensor(whole.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(whole.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order[:N_TRAIN], order[N_TRAIN : N_TRAIN + N_CALIBRATION], order[N_TRAIN + N_CALIBRATION :]
    return Digits(*((images[part], labels[part]) for part in parts))


def train_network(train: Images, *, epochs: int = EPOCHS, seed: int = 0, progress: bool = True) -> nn.Module:
    """Train a small convolutional network with cross-entropy and no regularization."""
    images, labels = train
    # Batch normalisation, weight decay or noise would each prevent overconfidence.
    network = CNN(10, channels=1, width=16, batch_norm=False, seed=seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    last_loss = [0.0]
    for _ in track(range(epochs), label="training", enabled=progress, note=lambda: f"loss {last_loss[0]:.5f}"):
        order = torch.randperm(len(labels), generator=generator)
        for batch in torch.split(order, BATCH_SIZE):
            loss = F.cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            last_loss[0] = loss.item()
    return network.eval()


def loader(images: Images, *, batch_size: int = 500) -> list[Images]:
    """Split images and labels into batches, in order."""
    pixels, labels = images
    return list(zip(torch.split(pixels, batch_size), torch.split(labels, batch_size), strict=True))


def store_predictions() -> None:
    """Write the predictions of the network with seed 0 on the calibration and test digits."""
    from trueup.models.calibrated import collect

    data = digits()
    network = train_network(data.train)
    arrays: dict[str, Any] = {}
    for name, part in (("val", data.val), ("test", data.test)):
        logits, labels = collect(network, loader(part), progress=False)
        arrays |= {f"{name}_logits": np.asarray(logits), f"{name}_labels": np.asarray(labels).astype(np.uint8)}
    np.savez_compressed(STORED, **arrays)


if __name__ == "__main__":
    store_predictions()
