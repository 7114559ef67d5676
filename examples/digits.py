"""Train a small network on scikit-learn's digits until it is overconfident, measure its calibration, and improve it."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import trueup


def train(seed: int = 0) -> tuple[trueup.Predictions, trueup.Predictions]:
    """Return validation and test predictions of a two-layer network that has memorised 300 digits."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
    images = images.float() / 16
    order = torch.randperm(len(labels), generator=generator)
    learn, val, test = order[:300], order[300:800], order[800:]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(300):
        loss = nn.functional.cross_entropy(network(images[learn]), labels[learn])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        val, test = (trueup.Predictions(network(images[part]), labels[part]) for part in (val, test))
    return val, test


if __name__ == "__main__":
    val, test = train()
    print("A network that has memorised 300 digits, on 997 held-out digits:\n")
    print(trueup.evaluate(*test))
    print("\nCalibrated on 500 other digits by several methods:\n")
    methods = ("temperature", "vector", "ets", "svs", "sms", "isotonic", "histogram")
    calibrated = {name: (trueup.METHODS[name](*val)(test.logits), test.labels) for name in methods}
    print(trueup.compare({"raw": test, **calibrated}))
    best = trueup.METHODS["auto"](*val)
    print(f"\nCross-validation on these 500 digits chooses {best.choice.chosen}: {best}")
