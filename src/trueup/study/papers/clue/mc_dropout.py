"""Networks that are asked several times with dropout: small data sets for them, their training, and their figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trueup import losses, metrics
from trueup.calibrators.regression import VarianceScaling
from trueup.calibrators.temperature import Temperature
from trueup.metrics import ranking, regression
from trueup.models.networks import Normalise
from trueup.models.uncertainty import VARIANCE_FLOOR, entropy_of, log_probs_of, mc_dropout, mean_log_probs, moments
from trueup.registry import NETWORKS
from trueup.training.data import load_data
from trueup.training.data.dataset import Data, split_off
from trueup.training.data.sources import library
from trueup.training.data.tabular import split_table
from trueup.training.loop import train
from trueup.training.tasks import Classification, Regression, Task

BINS = 10
"""Parts of equal size, in the order of the uncertainty, of the alignment error."""
BATCH = 500
"""Inputs that are asked about at a time; of texts, fewer."""
DESCRIBED = ("iris", "digits", "wine", "breast_cancer", "diabetes", "linnerud")
WINDOW = 64
NETWORK = {"image": "cnn", "text": "text_cnn", "characters": "char_transformer", "tabular": "mlp"}

Pair = tuple[Tensor, Tensor]


class Forecast(NamedTuple):
    """What a network says of a part: of classes ln p̄ (n, K), of numbers mean and variance (n,); and what was true."""

    said: Tensor
    variance: Tensor | None
    truth: Tensor

    @property
    def errors(self) -> Tensor:
        """−ln p̄_y, or (y − μ̄)²."""
        if self.variance is None:
            return F.nll_loss(self.said, self.truth, reduction="none")
        return (self.truth - self.said).square()

    @property
    def doubts(self) -> Tensor:
        """H(p̄), or the predictive variance: on average the error, of an honest network."""
        return entropy_of(self.said) if self.variance is None else self.variance


def data_of(name: str, folder: str | None, seed: int) -> Data:
    """A data set by name; beside those of `load_data`, two that scikit-learn brings along: diabetes, descriptions."""
    own = {"diabetes": _diabetes, "descriptions": _descriptions}
    return own[name](seed) if name in own else load_data(name, folder, seed=seed)


def description() -> str:
    """Some fifteen thousand characters of English, which tell of scikit-learn's small data sets."""
    rooms = library("sklearn.datasets", "scikit-learn")
    return "\n".join(str(getattr(rooms, f"load_{name}")().DESCR) for name in DESCRIBED)


def _diabetes(seed: int) -> Data:
    """442 patients, 10 columns: how far the illness went on in a year (Efron et al. 2004); the seed is the split."""
    x, y = library("sklearn.datasets", "scikit-learn").load_diabetes(return_X_y=True)
    return split_table("diabetes", x, y, test=0.2, val=0.25, seed=seed)


def _descriptions(seed: int) -> Data:
    """Stretches of the description, none of which overlaps another: a fifth for testing, a fifth for validation."""
    text = description()
    alphabet = tuple(sorted(set(text)))
    signs = np.array([alphabet.index(sign) for sign in text])
    stretches = torch.from_numpy(signs[: len(signs) // (WINDOW + 1) * (WINDOW + 1)].reshape(-1, WINDOW + 1))
    rest, test = split_off(len(stretches), share=0.2, seed=0)
    train_rows, val = (rest[part] for part in split_off(len(rest), share=0.25, seed=seed))
    first, second, third = (TensorDataset(stretches[i, :-1], stretches[i, 1:]) for i in (train_rows, val, test))
    return Data("descriptions", "characters", first, second, third, classes=alphabet, vocabulary=alphabet)


def tensors_of(data: Data) -> tuple[Pair, Pair, Pair]:
    """The three parts in whole tensors, images normalised."""
    change: nn.Module = nn.Identity() if data.normalisation is None else Normalise(*data.normalisation)
    train_part, val, test = ((change(x), y) for x, y in map(whole, (data.train, data.val, data.test)))
    return train_part, val, test


def whole(part: Dataset[Any]) -> Pair:
    """All samples of a part at once."""
    # A loader draws a number for workers, also without any: not from the global generator.
    loader = DataLoader(part, batch_size=len(part), generator=torch.Generator())  # type: ignore[arg-type]
    x, y = next(iter(loader))
    return x, y


def network_of(data: Data, options: Mapping[str, Any], seed: int, *, head: bool = False) -> nn.Module:
    """The small network of a kind of data, with dropout; of numbers with a variance head if wanted."""
    has = {
        "image": ("channels", len(data.val[0][0])),
        "text": ("vocabulary", len(data.vocabulary)),
        "characters": ("context", len(data.val[0][0])),
        "tabular": ("inputs", len(data.val[0][0])),
    }
    told = {**dict([has[data.kind]]), **options, "seed": seed}
    made: nn.Module = NETWORKS[NETWORK[data.kind]](len(data.classes) or 1 + head, **told)
    return made


def task_of(kind: str, *, head: bool = False) -> Task:
    """How outputs meet a loss."""
    if kind == "tabular":
        return Regression(variance_head=head, passes=1)
    return Classification(classes="last" if kind == "characters" else None)


def loss_of(kind: str, *, head: bool = False, clue: Mapping[str, Any] | None = None, ramp: int = 0) -> Any:
    """The plain loss of a kind of data (of numbers the squared error, with a variance head the Gaussian), or CLUE."""
    if clue is not None:
        task: Any = "regression" if kind == "tabular" else "classification"
        classes: Any = "last" if kind == "characters" else None
        return losses.CLUE(task=task, classes=classes, variance_head=head, ramp=ramp, **clue)
    if kind == "tabular":
        return losses.gaussian_nll if head else nn.MSELoss()
    return losses.CrossEntropy()


def learned(network: nn.Module, part: Pair, loss: Any, task: Task, *, seed: int, **how: Any) -> nn.Module:
    """Train a network by AdamW with a cosine."""
    parts = (TensorDataset(*part), None, None)
    train(network, parts, loss, task=task, optimiser="adamw", schedule="cosine", seed=seed, progress=False, **how)
    return network.cpu().eval()


def operations(network: nn.Module, part: Pair, loss: Any, task: Task) -> int:
    """Floating-point operations of one training step, as torch counts them: those of matrix products alone."""
    counter: Any = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    x, y = part

    def step() -> None:
        own = getattr(loss, "takes_model", False)
        found: Tensor = loss(network, x, y) if own else loss(task.for_loss(network(x), y), y)
        found.backward()  # type: ignore[no-untyped-call]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network.train()
        step()  # a network that is asked for the first time is asked twice: whether its trunk is random
        with counter:
            step()
    return int(counter.get_total_flops())


def asked(network: nn.Module, inputs: Tensor, passes: int, *, seed: int = 0) -> Iterator[Tensor]:
    """Samples (passes, n, …) of one batch after the other, each with masks of its own."""
    rng = np.random.default_rng(seed)
    for part in torch.split(inputs, BATCH if inputs.is_floating_point() else BATCH // 5):
        yield mc_dropout(network, part, passes, seed=rng)


def forecast(network: nn.Module, part: Pair, kind: str, passes: int, *, head: bool = False) -> Forecast:
    """The mean of so many passes with dropout, over one part; of texts a row each token."""
    if kind == "tabular":
        found = moments(torch.cat(list(asked(network, part[0], passes)), dim=1).double(), variance_head=head)
        return Forecast(found.mean, found.variance.clamp(min=VARIANCE_FLOOR), part[1].double())
    classes: Any = "last" if kind == "characters" else None
    means = [
        mean_log_probs(log_probs_of(each, classes)).flatten(end_dim=-2) for each in asked(network, part[0], passes)
    ]
    return Forecast(torch.cat(means).double(), None, part[1].reshape(-1))


def figures(test: Forecast, val: Forecast) -> dict[str, Any]:
    """Every figure of the test part, some also after a post-hoc repair that is fitted on the validation part.

    `gap` is |mean e − mean u| of errors e and uncertainties u, what CLUE aligns at batch level; `alignment` the mean of
    that over ten parts of equal size in the order of u; "large" errors of numbers are those above their median.

    >>> z = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]).log()
    >>> found = figures(Forecast(z, None, torch.tensor([0, 0, 0])), Forecast(z, None, torch.tensor([0, 0, 0])))
    >>> f"{found['nll']:.4f} {found['gap']:.4f} {found['alignment']:.4f} {found['auroc']:.4f}"
    '0.4149 0.0846 0.2468 1.0000'
    """
    error, doubt = test.errors, test.doubts
    curve = aligned(error, doubt)
    weights = np.array([part[2] for part in curve]) / len(error)
    found: dict[str, Any] = {
        "gap": abs(float(error.mean() - doubt.mean())),
        "alignment": float(weights @ [abs(e - u) for u, e, _ in curve]),
        "correlation": float(torch.corrcoef(torch.stack([doubt, error]))[0, 1]),
        "curve": curve,
    }
    if test.variance is None:
        pair, after = (test.said, test.truth), Temperature.fit(val.said, val.truth)(test.said)
        found |= {name: getattr(metrics, name)(*pair) for name in ("accuracy", "nll", "brier", "ece", "uce")}
        found |= {"auroc": metrics.auroc(*pair, score="entropy")}
        found |= {f"{name}_after": getattr(metrics, name)(after, test.truth) for name in ("nll", "ece")}
        return found
    numbers = _gaussian(test)
    found |= {name: getattr(regression, name)(*numbers) for name in ("rmse", "ence", "coverage", "crps")}
    found |= {"nll": regression.gaussian_nll(*numbers), "auroc": ranking.roc_area(doubt, error > error.median())}
    mean, std = VarianceScaling.fit(*_gaussian(val))(numbers[0], numbers[1])
    found["nll_after"] = regression.gaussian_nll(mean, std, numbers[2])
    found["ence_after"] = regression.ence(mean, std, numbers[2])
    return found


def loss_on(part: Forecast) -> float:
    """The negative log-likelihood, by which level and α are chosen on validation."""
    return metrics.nll(part.said, part.truth) if part.variance is None else regression.gaussian_nll(*_gaussian(part))


def aligned(error: Tensor, doubt: Tensor, bins: int = BINS) -> list[tuple[float, float, int]]:
    """Mean uncertainty, mean error and size of parts of nearly equal size, in the order of the uncertainty.

    >>> aligned(torch.tensor([0.0, 2.0, 4.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]), bins=2)
    [(1.5, 1.0, 2), (3.5, 4.0, 2)]
    """
    order = doubt.argsort(stable=True)
    parts = zip(doubt[order].tensor_split(bins), error[order].tensor_split(bins), strict=True)
    return [(float(u.mean()), float(e.mean()), len(u)) for u, e in parts if len(u)]


def _gaussian(found: Forecast) -> tuple[Tensor, Tensor, Tensor]:
    assert found.variance is not None
    return found.said, found.variance.sqrt(), found.truth
