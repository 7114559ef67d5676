"""Methods that are made of others, each under a name of its own, and the automatic choice among all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Chain, Choice, Fit, chain, simplest
from trueup.calibrators.identity import Identity
from trueup.calibrators.pool import Mixture, brier_weights, likelihood_weights
from trueup.calibrators.residual import average_folds, fit_folds
from trueup.calibrators.temperature_search import brier_inverse_temperature, inverse_temperature
from trueup.calibrators.uniform_mixture import UniformMixture
from trueup.core.arrays import as_tensors, take_rows
from trueup.core.optimize import FitError
from trueup.core.progress import track
from trueup.core.row_scores import score_rows
from trueup.core.splits import k_fold, stratified_folds
from trueup.core.warning_capture import silence_warnings
from trueup.registry import METHODS

FEW_ROWS, FEW_ROWS_OF_CLASS = 500, 5
"""Fewer rows, or fewer a class on average, are left to candidates of few parameters."""
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    "few rows of two classes": ("identity", "temperature", "platt"),
    "few rows": ("identity", "temperature", "svs"),
    "two classes": ("identity", "temperature", "platt", "beta", "quadratic", "smoothing_spline", "residual"),
    "up to 20 classes": (
        *("identity", "temperature", "bias_corrected_temperature", "svs"),
        *("sms", "diagonal_sms", "quadratic", "isotonic_ovr", "residual"),
    ),
    "up to 200 classes": ("identity", "temperature", "svs", "sms", "diagonal_sms", "isotonic_ovr"),
    "more classes": ("identity", "temperature", "bias_corrected_temperature", "svs"),
    "the same argmax": ("identity", "temperature", "ets", "diagonal"),
}
"""What `auto` pools, by the size of the problem, the simplest first; the last where the argmax must stay."""
AFTER_MIXTURE = ("sms", "diagonal_sms", "quadratic", "smoothing_spline", "svs", "platt")
"""Candidates that are tried a second time after a share of the uniform distribution, where likelihood wants one."""
SIMPLE = ("temperature", "platt")
"""Candidates whose weight counts one more row; they are never dropped."""
BASES_OF_RESIDUAL = ("diagonal_sms", "smoothing_spline")
"""The base of the residual network: the first that is a candidate."""
DETECTED = 1.645 + 0.842
"""Standard errors of a difference that is seen in four of five samples, by a one-sided test at 5 %."""
_LEAST_WEIGHT = 0.02
_RACE_AFTER = 2  # folds after which candidates can be dropped
_SCORED = 1 << 23  # held-out log-probabilities that are kept of each candidate
_MANY_ROWS = 1000  # from which on a mixture has a temperature of its own


def temperature_histogram(logits: Any, labels: Any) -> Calibrator:
    """Temperature scaling, then histogram binning: `chain("temperature", "histogram")`.

    Not for ranking: confidences of one bin become equal.
    """
    return chain("temperature", "histogram")(logits, labels)


def diagonal_sms(logits: Any, labels: Any) -> Calibrator:
    """Diagonal map, then structured matrix scaling: `chain("diagonal", "sms")`.

    The first repairs what is wrong at each confidence, the second what is wrong between classes. Not for maps that must
    keep the predicted class.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(500, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> diagonal_sms(3 * z, y)(3 * z).shape
    (500, 3)
    """
    return chain("diagonal", "sms")(logits, labels)


def auto(
    logits: Any, labels: Any, *, keep_argmax: bool = False, score: str = "nll", folds: int = 5, progress: bool = True
) -> Calibrator:
    """Automatic choice: a mixture of the `CANDIDATES` for the problem's size, by their loss on held-out rows.

    Each candidate is fitted to folds and predicts the rows left out. The mixture's weights maximise the likelihood of
    those predictions (or, by `score="brier"`, minimise the Brier score), and the candidates with a share are fitted
    again to all rows. One candidate alone is taken where the mixture predicts held-out rows worse than it by more than
    a standard error, and the identity where nothing beats it. `keep_argmax=True` pools only candidates that keep every
    predicted class. The calibrator that comes out carries the comparison as `choice`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(auto(3 * z, y).choice.chosen)
    mixture
    >>> auto(z, y)
    Identity()
    """
    if score not in ("nll", "brier"):
        raise ValueError(f'score must be "nll" or "brier", got {score!r}')
    z, y = as_tensors(logits, labels, at_least=2 * folds)
    with silence_warnings():  # of fits to folds: what comes of them is judged by its held-out loss
        trial = _Trial(z, y, _candidates(z, y, keep_argmax), k_fold(z, y, folds), score)
        trial.run(progress)
        return trial.conclude()


def _candidates(z: Tensor, y: Tensor, keep_argmax: bool) -> dict[str, Fit]:
    n, classes = z.shape
    few = n < FEW_ROWS or n < FEW_ROWS_OF_CLASS * classes
    if keep_argmax:
        size = "the same argmax"
    elif few:
        size = "few rows of two classes" if classes == 2 else "few rows"
    elif classes == 2:
        size = "two classes"
    else:
        size = "up to 20 classes" if classes <= 20 else "up to 200 classes" if classes <= 200 else "more classes"
    fits: dict[str, Fit] = {name: METHODS[name] for name in CANDIDATES[size]}
    if not keep_argmax and float(UniformMixture.fit(z, y).share) > 0:
        fits |= {f"mixed_{name}": chain(UniformMixture.fit, name) for name in fits if name in AFTER_MIXTURE}
    return fits


class _Trial:
    """Candidates fitted to folds, and what each says of rows that it has not seen."""

    def __init__(
        self, z: Tensor, y: Tensor, fits: dict[str, Fit], folds: Sequence[tuple[Tensor, Tensor]], score: str
    ) -> None:
        self.z, self.y, self.fits, self.folds, self.score = z, y, fits, folds, score
        # Held-out losses of some rows are enough where there are very many numbers; each fold has its share of them.
        place = torch.from_numpy(stratified_folds(z, y, len(z))).to(z.device)
        self.rows = (place < max(_SCORED // z.shape[1], 2 * len(folds))).nonzero()[:, 0]
        self.labels = y[self.rows]
        self.fold = np.argmax(torch.stack([held_out[self.rows] for _, held_out in folds]).cpu().numpy(), axis=0)
        # No later row can cost more than ln(K(n + 1)) with a share of the uniform as of one more row.
        self.back = UniformMixture(1 / (len(z) + 1))
        self.models: dict[str, list[Calibrator]] = {}
        self.log_probs: dict[str, Tensor] = {}
        self.reasons: dict[str, str] = {}

    def run(self, progress: bool) -> None:
        """Fit every candidate to every fold, but drop on the way those that cannot win."""
        alone = [name for name in self.fits if name != "residual"]
        steps = [(k, name) for k in range(len(self.folds)) for name in alone]
        for k, name in track(steps, label="fitting candidates to folds", enabled=progress):
            if (k, name) == (_RACE_AFTER, alone[0]):
                self._race()
            if name in self.reasons:
                continue
            try:
                model = self.fits[name](*take_rows(self.z, self.y, self.folds[k][0]))
            except (FitError, ValueError) as error:
                self._drop(name, str(error))
            else:
                self._predict(k, name, model)
        if "residual" in self.fits:
            self._train_residual()
        if not self.models:
            raise FitError(f"no candidate could be fitted: {self.reasons}")

    def conclude(self) -> Calibrator:
        """The mixture, the best candidate alone, or the identity, with a record of the choice."""
        names = list(self.log_probs)
        losses = {name: self._losses(name) for name in names}
        best = simplest(losses, standard_errors=0.0)
        weights = self._fit_weights(names)
        names_kept = [name for name, weight in zip(names, weights, strict=True) if weight >= _LEAST_WEIGHT]
        pooled = self._pooled_losses(names_kept)
        behind = pooled - losses[best]
        if len(names_kept) == 1 or behind.mean() > _standard_error(behind):
            names_kept, pooled = [simplest(losses)], losses[best]
        if "identity" in losses and losses["identity"].mean() <= pooled.mean():
            names_kept, pooled = ["identity"], losses["identity"]
        weights = self._fit_weights(names_kept)
        calibrator = self._refit(names_kept, weights)
        calibrator.choice = Choice(  # type: ignore[assignment]
            names_kept[0] if len(names_kept) == 1 else "mixture",
            {name: float(losses[name].mean()) if name in losses else math.inf for name in self.fits},
            self.reasons,
            errors={name: _standard_error(losses[name] - pooled) for name in losses},
            weights=dict(zip(names_kept, weights.tolist(), strict=True)),
            loss=float(pooled.mean()),
            detectable=DETECTED * max((_standard_error(loss - pooled) for loss in losses.values()), default=0.0),
        )
        return calibrator

    def _predict(self, k: int, name: str, model: Calibrator) -> None:
        self.models.setdefault(name, []).append(model)
        mine = torch.from_numpy(self.fold == k).to(self.rows.device)
        log_p = torch.log_softmax(model(self.z[self.rows[mine]]).double(), dim=1)
        shape = len(self.rows), self.z.shape[1]
        known = self.log_probs.setdefault(name, torch.zeros(shape, dtype=torch.float32, device=self.z.device))
        known[mine] = (log_p if name == "identity" else self.back(log_p)).float()

    def _drop(self, name: str, reason: str) -> None:
        self.reasons[name] = reason
        self.models.pop(name, None)
        self.log_probs.pop(name, None)

    def _race(self) -> None:
        """Drop candidates that have no share in the mixture on the first folds and are clearly behind the best."""
        seen = self.fold < _RACE_AFTER
        names = list(self.log_probs)
        losses = {name: self._losses(name)[seen] for name in names}
        best = simplest(losses, standard_errors=0.0)
        for name, weight in zip(names, self._fit_weights(names, seen), strict=True):
            behind = losses[name] - losses[best]
            kept = name in ("identity", *SIMPLE) or (name in BASES_OF_RESIDUAL and "residual" in self.fits)
            if weight < _LEAST_WEIGHT and behind.mean() > 2 * _standard_error(behind) and not kept:
                self._drop(name, "dropped after two folds: behind the best, and without a share in the mixture")

    def _train_residual(self) -> None:
        """On the bases' own folds, which are fitted already."""
        bases = next((self.models[name] for name in BASES_OF_RESIDUAL if name in self.models), None)
        if bases is None:
            self._drop("residual", "none of its base maps could be fitted")
            return
        for k, model in enumerate(fit_folds(self.z, self.y, self.folds, bases=bases)):
            self._predict(k, "residual", model)

    def _losses(self, name: str) -> np.ndarray:
        losses: np.ndarray = getattr(score_rows(self.log_probs[name].double(), self.labels), self.score)
        return losses

    def _fit_weights(self, names: Sequence[str], rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        prior = np.array([2.0 if name in SIMPLE else 1.0 for name in names])
        if self.score == "nll":
            return likelihood_weights(self._label_probs(names)[rows], prior)
        probs = np.stack([self.log_probs[name].cpu().numpy()[rows] for name in names])
        return brier_weights(np.exp(probs), self.labels.cpu().numpy()[rows], prior)

    def _label_probs(self, names: Sequence[str]) -> np.ndarray:
        columns = [self.log_probs[name].gather(1, self.labels[:, None])[:, 0] for name in names]
        return np.exp(torch.stack(columns, dim=1).double().cpu().numpy()).clip(1e-300)

    def _pooled_losses(self, names: Sequence[str]) -> np.ndarray:
        """The loss of each row under a mixture whose weights did not see its fold (its temperature is left out)."""
        losses = np.empty(len(self.rows))
        for k in range(len(self.folds)):
            mine = self.fold == k
            weights = self._fit_weights(names, ~mine)
            if self.score == "nll":
                losses[mine] = -np.log(self._label_probs(names)[mine] @ weights)
            else:
                mixed = self._mix(names, weights, torch.from_numpy(mine).to(self.rows.device))
                losses[mine] = score_rows(mixed, self.labels[torch.from_numpy(mine)]).brier
        return losses

    def _mix(self, names: Sequence[str], weights: np.ndarray, rows: Tensor | slice = slice(None)) -> Tensor:
        parts = (
            weight * self.log_probs[name][rows].double().exp() for name, weight in zip(names, weights, strict=True)
        )
        return sum(parts, start=torch.zeros((), dtype=torch.float64)).clamp(min=1e-300).log()

    def _refit(self, names: Sequence[str], weights: np.ndarray) -> Calibrator:
        """The candidates on all rows, mixed."""
        if list(names) == ["identity"]:
            return Identity()
        parts = [self._refit_one(name) for name in names]
        if len(parts) == 1:
            return Chain([parts[0], self.back])
        temperature = 1.0
        if self.z.shape[1] > 2 and len(self.rows) >= _MANY_ROWS:  # of few rows it would follow the luck of the folds
            search = inverse_temperature if self.score == "nll" else brier_inverse_temperature
            temperature = 1 / min(max(search(self._mix(names, weights), self.labels)[0], 0.5), 2.0)
        return Chain([Mixture(parts, weights, temperature), self.back])

    def _refit_one(self, name: str) -> Calibrator:
        if name != "residual":
            return self.fits[name](self.z, self.y)
        base = next(base for base in BASES_OF_RESIDUAL if base in self.models)
        return average_folds(self.models["residual"], self.fits[base](self.z, self.y))


def _standard_error(losses: np.ndarray) -> float:
    return float(losses.std() / math.sqrt(len(losses)))
