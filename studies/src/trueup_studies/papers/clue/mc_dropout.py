"""Networks with Monte-Carlo dropout: small data sets for them, their training, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trueup import losses, metrics
from trueup._core.registry import LOSSES
from trueup._core.splits import split_indices
from trueup.calibrators.forecasts import VarianceScaling
from trueup.calibrators.temperature import Temperature
from trueup.metrics import ranking, regression
from trueup.models.dropout import VARIANCE_FLOOR, entropy_of, log_probs_of, mc_dropout, mean_log_probs, moments
from trueup.models.image_data import library
from trueup.models.networks import Normalise
from trueup_studies.networks import build_network, network_options
from trueup_studies.trained_networks import channels_last
from trueup_studies.training.data import load_data
from trueup_studies.training.data.dataset import Data
from trueup_studies.training.data.tabular import split_table
from trueup_studies.training.loop import make_fabric, train
from trueup_studies.training.tasks import Classification, Regression, Task

BINS = 10
"""Number of bins of equal size, ordered by uncertainty, of the alignment error."""
BATCH = 500
"""Inputs per batch; texts have fewer."""
DESCRIBED = ("iris", "digits", "wine", "breast_cancer", "diabetes", "linnerud")
WINDOW = 64
NETWORK = {"image": "cnn", "text": "text_cnn", "characters": "char_transformer", "tabular": "mlp"}

Pair = tuple[Tensor, Tensor]


class Forecast(NamedTuple):
    """Predictions and labels of a part: ln p̄ (n, K) for classes, or mean and variance (n,) for numbers."""

    prediction: Tensor
    variance: Tensor | None
    target: Tensor

    @property
    def errors(self) -> Tensor:
        """Errors −ln p̄_y, or (y − μ̄)²."""
        if self.variance is None:
            return F.nll_loss(self.prediction, self.target, reduction="none")
        return (self.target - self.prediction).square()

    @property
    def uncertainty(self) -> Tensor:
        """Uncertainties H(p̄), or predictive variances; equal to the error on average for a calibrated network."""
        return entropy_of(self.prediction) if self.variance is None else self.variance


def load_data_set(name: str, folder: str | None, seed: int) -> Data:
    """Load a data set by name: one of `load_data`, or diabetes and descriptions, which come with scikit-learn."""
    bundled = {"diabetes": _diabetes, "descriptions": _descriptions}
    return bundled[name](seed) if name in bundled else load_data(name, folder, seed=seed)


def description() -> str:
    """Return about 15,000 characters of English that describe scikit-learn's small data sets."""
    datasets = library("sklearn.datasets", "scikit-learn")
    return "\n".join(str(getattr(datasets, f"load_{name}")().DESCR) for name in DESCRIBED)


def _diabetes(seed: int) -> Data:
    """Load 442 patients, 10 columns: disease progression in a year (Efron et al. 2004); the seed is the split."""
    x, y = library("sklearn.datasets", "scikit-learn").load_diabetes(return_X_y=True)
    return split_table("diabetes", x, y, test=0.2, val=0.25, seed=seed)


def _descriptions(seed: int) -> Data:
    """Split the descriptions into disjoint pieces: a fifth for testing, a fifth for validation."""
    text = description()
    alphabet = tuple(sorted(set(text)))
    codes = np.array([alphabet.index(character) for character in text])
    stretches = torch.from_numpy(codes[: len(codes) // (WINDOW + 1) * (WINDOW + 1)].reshape(-1, WINDOW + 1))
    rest, test = split_indices(len(stretches), share=0.2, seed=0)
    train_rows, val = (rest[part] for part in split_indices(len(rest), share=0.25, seed=seed))
    first, second, third = (TensorDataset(stretches[i, :-1], stretches[i, 1:]) for i in (train_rows, val, test))
    return Data("descriptions", "characters", first, second, third, classes=alphabet, vocabulary=alphabet)


def normalised_tensors(data: Data) -> tuple[Pair, Pair, Pair]:
    """Return the three parts as whole tensors, with images normalised."""
    change: nn.Module = nn.Identity() if data.normalisation is None else Normalise(*data.normalisation)
    train_part, val, test = ((change(x), y) for x, y in map(stack_samples, (data.train, data.val, data.test)))
    return train_part, val, test


def stack_samples(part: Dataset[Any]) -> Pair:
    """Return all samples of a part."""
    # A loader draws a number even without workers; keep it away from the global generator.
    loader = DataLoader(part, batch_size=len(part), generator=torch.Generator())  # type: ignore[arg-type]
    x, y = next(iter(loader))
    return x, y


def make_network(data: Data, options: Mapping[str, Any], seed: int, *, head: bool = False) -> nn.Module:
    """Build the small network for a kind of data, with dropout; `head` adds a variance head to a regression."""
    name, outputs = NETWORK[data.kind], len(data.classes) or 1 + head
    return channels_last(build_network(name, network_options(name, data, outputs=outputs, **{**options, "seed": seed})))


class WarmedAvUC(losses.AvUC):
    """Cross-entropy for `warmup` steps, then AvUC with the threshold from the predictions of these steps.

    With the default threshold from the first step, predictions on digits became uncertain and stayed so.

    >>> loss = WarmedAvUC(warmup=1)
    >>> z, y = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]]).log(), torch.tensor([0, 1, 1])
    >>> [f"{loss(z, y).item():.4f}" for _ in range(2)], f"{loss.threshold:.4f}"
    (['0.7419', '1.9506'], '0.4997')

    Krishnan & Tickoo (2020), Improving model calibration with accuracy versus uncertainty optimization.
    """

    def __init__(self, warmup: int) -> None:
        super().__init__(strength=0.0)
        self.warmup, self.steps = warmup, 0
        self.sums = torch.zeros(2, 2, dtype=torch.float64)
        """Sum of entropies and number of rows, for wrong and for correct predictions."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean over the batch."""
        if self.steps < self.warmup:
            log_probs = torch.log_softmax(logits.detach().movedim(1, -1), dim=-1)
            entropy, right = entropy_of(log_probs), log_probs.argmax(dim=-1) == labels
            for side in (0, 1):
                selected = entropy[right == bool(side)].double()
                self.sums[side] += torch.tensor([selected.sum(), len(selected)], dtype=torch.float64)
        elif self.steps == self.warmup:
            self.strength = self.defaults["strength"]
            if bool((self.sums[:, 1] > 0).all()):
                self.threshold = float((self.sums[:, 0] / self.sums[:, 1]).mean())
        self.steps += 1
        return super().forward(logits, labels)


def make_task(kind: str, *, head: bool = False) -> Task:
    """Return the task of a kind of data."""
    if kind == "tabular":
        return Regression(variance_head=head, passes=1)
    return Classification(class_axis="last" if kind == "characters" else None)


def make_loss(
    kind: str, *, head: bool = False, clue: Mapping[str, Any] | None = None, ramp: int = 0, name: str = "cross_entropy"
) -> Any:
    """Return the plain loss of a kind of data, or CLUE; for numbers the squared error, or Gaussian NLL with a head.

    `name` is another loss for classes. CLUE's square is ramped over `ramp` steps; AvUC begins after them.
    """
    if clue is not None:
        measure: Any = partial(losses.error_and_entropy, class_axis="last" if kind == "characters" else None)
        if kind == "tabular":
            measure = partial(losses.error_and_variance, variance_head=head)
        return losses.CLUE(measure=measure, ramp=ramp, **clue)
    if kind == "tabular":
        return losses.gaussian_nll if head else nn.MSELoss()
    return WarmedAvUC(ramp) if name == "avuc" else LOSSES[name]()


def train_network(
    network: nn.Module, part: Pair, loss: Any, task: Task, *, seed: int, device: str | None = None, **how: Any
) -> nn.Module:
    """Train a network by AdamW with a cosine schedule; return it in evaluation mode, on the device."""
    parts = (TensorDataset(*part), None, None)
    how |= {"fabric": make_fabric(device), "evaluate_train": False, "progress": False}
    train(network, parts, loss, task=task, optimiser="adamw", schedule="cosine", seed=seed, **how)
    return network.eval()


def count_flops(network: nn.Module, loss: Any, part: Pair, task: Task) -> int:
    """Count the floating-point operations of one training step with torch: matrix products only."""
    counter: Any = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    x, y = part

    def step() -> None:
        takes_model = getattr(loss, "takes_model", False)
        value: Tensor = loss(network, x, y) if takes_model else loss(task.for_loss(network(x), y), y)
        value.backward()  # type: ignore[no-untyped-call]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network.train()
        step()  # the first call may take an additional pass
        with counter:
            step()
    return int(counter.get_total_flops())


def sample(networks: Sequence[nn.Module], inputs: Tensor, passes: int, *, seed: Any = 0) -> Tensor:
    """Sample with dropout (passes, n, …); members of an ensemble share the passes equally, without the remainder.

    The passes run on the networks' device, and the result is on that of the inputs.
    """
    each = max(1, passes // len(networks))
    samples = []
    for network in networks:
        device = next(network.parameters()).device
        samples.append(mc_dropout(network, inputs.to(device), each, seed=seed).to(inputs.device))
    return torch.cat(samples)


def mc_samples(networks: Sequence[nn.Module], inputs: Tensor, passes: int, *, seed: int = 0) -> Iterator[Tensor]:
    """Yield samples (passes, n, …) batch by batch, each with its own masks."""
    rng = np.random.default_rng(seed)
    for part in torch.split(inputs, BATCH if inputs.is_floating_point() else BATCH // 5):
        yield sample(networks, part, passes, seed=rng)


def forecast(networks: Sequence[nn.Module], part: Pair, kind: str, passes: int, *, head: bool = False) -> Forecast:
    """Compute the mean of Monte-Carlo passes over one part; texts have one row per token."""
    if kind == "tabular":
        moments_of_passes = moments(
            torch.cat(list(mc_samples(networks, part[0], passes)), dim=1).double(), variance_head=head
        )
        return Forecast(moments_of_passes.mean, moments_of_passes.variance.clamp(min=VARIANCE_FLOOR), part[1].double())
    classes: Any = "last" if kind == "characters" else None
    means = [
        mean_log_probs(log_probs_of(each, classes)).flatten(end_dim=-2)
        for each in mc_samples(networks, part[0], passes)
    ]
    return Forecast(torch.cat(means).double(), None, part[1].reshape(-1))


def figures(test: Forecast, val: Forecast) -> dict[str, Any]:
    """Compute every metric of the test part, some also after post-hoc calibration on the validation part.

    `gap` is |mean e − mean u| of errors e and uncertainties u, which CLUE aligns at batch level. `alignment` is its
    mean over ten bins of equal size ordered by u. For numbers, errors above their median count as large.

    >>> z = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]).log()
    >>> scores = figures(Forecast(z, None, torch.tensor([0, 0, 0])), Forecast(z, None, torch.tensor([0, 0, 0])))
    >>> f"{scores['nll']:.4f} {scores['gap']:.4f} {scores['alignment']:.4f} {scores['auroc']:.4f}"
    '0.4149 0.0846 0.2468 1.0000'
    """
    error, uncertainty = test.errors, test.uncertainty
    curve = alignment_curve(error, uncertainty)
    weights = np.array([part[2] for part in curve]) / len(error)
    scores: dict[str, Any] = {
        "gap": abs(float(error.mean() - uncertainty.mean())),
        "alignment": float(weights @ [abs(e - u) for u, e, _ in curve]),
        "correlation": float(torch.corrcoef(torch.stack([uncertainty, error]))[0, 1]),
        "curve": curve,
    }
    if test.variance is None:
        pair, after = (test.prediction, test.target), Temperature.fit(val.prediction, val.target)(test.prediction)
        scores |= {name: getattr(metrics, name)(*pair) for name in ("accuracy", "nll", "brier", "ece", "uce")}
        scores |= {"auroc": metrics.misclassification_auroc(*pair, score="entropy")}
        scores |= {f"{name}_after": getattr(metrics, name)(after, test.target) for name in ("nll", "ece")}
        return scores
    numbers = _gaussian(test)
    scores |= {name: getattr(regression, name)(*numbers) for name in ("rmse", "ence", "coverage", "crps")}
    scores |= {"nll": regression.gaussian_nll(*numbers), "auroc": ranking.roc_area(uncertainty, error > error.median())}
    mean, std = VarianceScaling.fit(*_gaussian(val))(numbers[0], numbers[1])
    scores["nll_after"] = regression.gaussian_nll(mean, std, numbers[2])
    scores["ence_after"] = regression.ence(mean, std, numbers[2])
    return scores


def validation_nll(part: Forecast) -> float:
    """Compute the negative log-likelihood that chooses level and α."""
    if part.variance is None:
        return metrics.nll(part.prediction, part.target)
    return regression.gaussian_nll(*_gaussian(part))


def alignment_curve(error: Tensor, uncertainty: Tensor, bins: int = BINS) -> list[tuple[float, float, int]]:
    """Compute mean uncertainty, mean error and size of bins of nearly equal size, ordered by uncertainty.

    >>> alignment_curve(torch.tensor([0.0, 2.0, 4.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]), bins=2)
    [(1.5, 1.0, 2), (3.5, 4.0, 2)]
    """
    order = uncertainty.argsort(stable=True)
    parts = zip(uncertainty[order].tensor_split(bins), error[order].tensor_split(bins), strict=True)
    return [(float(u.mean()), float(e.mean()), len(u)) for u, e in parts if len(u)]


def _gaussian(forecast: Forecast) -> tuple[Tensor, Tensor, Tensor]:
    assert forecast.variance is not None
    return forecast.prediction, forecast.variance.sqrt(), forecast.target
