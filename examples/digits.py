"""Train a small network on scikit-learn's digits until it is overconfident, and ask how honest its confidence is."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import trueup


def train(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return test logits and labels of a two-layer network that has learnt 300 digits by heart."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
    images = images.float() / 16
    order = torch.randperm(len(labels), generator=generator)
    learn, test = order[:300], order[300:]
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
        return network(images[test]), labels[test]


if __name__ == "__main__":
    print("A network that has learnt 300 digits by heart, on 1,497 it has not seen:\n")
    print(trueup.evaluate(*train()))
