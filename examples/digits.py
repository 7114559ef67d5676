"""Train a small network on scikit-learn's digits until it is overconfident, measure its confidence, and repair it."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import trueup


def train(seed: int = 0) -> tuple[trueup.Predictions, trueup.Predictions]:
    """Return validation and test predictions of a two-layer network that has learnt 300 digits by heart."""
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
    print("A network that has learnt 300 digits by heart, on 997 it has not seen:\n")
    print(trueup.evaluate(*test))
    print("\nRepaired with 500 more, in several ways:\n")
    methods = ("temperature", "vector", "ets", "svs", "sms", "isotonic", "histogram")
    repaired = {name: (trueup.METHODS[name](*val)(test.logits), test.labels) for name in methods}
    print(trueup.compare({"raw": test, **repaired}))
    best = trueup.METHODS["auto"](*val)
    print(f"\nCross-validation on the 500 chooses {best.choice.chosen}: {best}")
