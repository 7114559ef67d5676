"""Calibrators as scikit-learn estimators: `LogitCalibrator` for scores, `CalibratedClassifier` for a classifier."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from scipy.special import log_softmax, logsumexp, softmax

from trueup._core.arrays import effective_rows, warn_users, weight_kwargs
from trueup._core.registry import METHODS
from trueup._core.types import ArrayLike
from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature import inverse_temperature
from trueup.convert import MIN_FLOOR, from_log_odds, from_probs, resolution

try:
    from sklearn import get_config
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
    from sklearn.frozen import FrozenEstimator
    from sklearn.model_selection import check_cv, cross_val_predict, cross_validate
    from sklearn.pipeline import Pipeline
    from sklearn.utils import _safe_indexing, get_tags, indexable, validation
    from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
    from sklearn.utils.multiclass import check_classification_targets
except ImportError:
    raise ImportError("trueup.integrations.sklearn needs scikit-learn: pip install 'trueup[sklearn]'") from None

__all__ = ["CalibratedClassifier", "LogitCalibrator"]

_VOTE_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Candidates for the weight of a won comparison of two classes, relative to the margins."""
_SHARPENING_ROWS, _MAX_SHARPENING = 12.0, 0.15
"""The mean of the folds' classifiers may be more confident than each of them, because their noise cancels. The noise
falls with the number of rows n: sharpening by 12/n, at most 0.15, did best on small data sets."""


class _CalibratedBase(ClassifierMixin, BaseEstimator):
    """Predictions from calibrated logits."""

    classes_: np.ndarray

    @abstractmethod
    def _calibrated_logits(self, X: Any) -> np.ndarray:
        """Return calibrated logits, one column per class."""

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return calibrated probabilities.

        Parameters
        ----------
        X
            Rows to predict, shape (n, features).

        Returns
        -------
        np.ndarray
            Probabilities, one column for each of `classes_`.
        """
        return softmax(self._calibrated_logits(X), axis=1)

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Return logarithms of the calibrated probabilities.

        Parameters
        ----------
        X
            Rows to predict, shape (n, features).

        Returns
        -------
        np.ndarray
            Log-probabilities, one column for each of `classes_`.
        """
        return log_softmax(self._calibrated_logits(X), axis=1)

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Return calibrated logits.

        Parameters
        ----------
        X
            Rows to predict, shape (n, features).

        Returns
        -------
        np.ndarray
            Logits, one column for each of `classes_`; for two classes the log-odds of the second, shape (n,).
        """
        z = self._calibrated_logits(X)
        return z[:, 1] - z[:, 0] if z.shape[1] == 2 else z

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the class with the largest probability, the first one among equals.

        Parameters
        ----------
        X
            Rows to predict, shape (n, features).

        Returns
        -------
        np.ndarray
            Predicted classes, shape (n,).
        """
        best = self._calibrated_logits(X).argmax(axis=1)  # before classes_, which an unfitted estimator lacks
        return self.classes_[best]


class LogitCalibrator(_CalibratedBase):
    """Calibrate scores: X holds the logits or probabilities of a classifier, one column per class.

    A single column is a binary score: the log-odds of the second class, or its probability. The fitted calibrator is
    `calibrator_`. Probabilities below `floor_` are raised to it. `floor_` is 1/2 or 1/10 of the smallest positive
    probability of the fit, whichever has the larger likelihood after a temperature, and at least 1e-45.

    Parameters
    ----------
    method
        A name of `METHODS`, or a function of (logits, labels) that returns a calibrator.
    options
        Keyword arguments of the method.
    input
        What X holds: ``"logits"`` or ``"probs"``.
    class_names
        Label of each column. By default the columns belong to the labels in y in sorted order.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = np.array(["cat", "dog", "eel"])[(z + rng.gumbel(size=z.shape)).argmax(axis=1)]
    >>> overconfident = LogitCalibrator().fit(3 * z, y)
    >>> overconfident.predict([[6.0, 0.0, 3.0]]), overconfident.predict_proba([[6.0, 0.0, 3.0]]).round(2)
    (array(['cat'], dtype='<U3'), array([[0.68, 0.08, 0.24]]))
    """

    calibrator_: Calibrator
    floor_: float

    def __init__(
        self,
        method: str | Any = "temperature",
        options: Mapping[str, Any] | None = None,
        *,
        input: Literal["logits", "probs"] = "logits",
        class_names: Sequence[Any] | None = None,
    ) -> None:
        self.method, self.options, self.input, self.class_names = method, options, input, class_names

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the calibrator.

        Parameters
        ----------
        X
            Logits or probabilities, shape (n, classes), or (n, 1) for a binary score.
        y
            True labels of any type, shape (n,).
        sample_weight
            Weight of each row, shape (n,).

        Returns
        -------
        Self
            The fitted estimator.
        """
        scores, targets = validation.validate_data(self, X, y, dtype=[np.float64, np.float32])
        weights = _weights(sample_weight, scores)
        check_classification_targets(targets)
        self.floor_ = MIN_FLOOR
        columns = self._logits(scores).shape[1]
        self.classes_, labels = _encode(validation.column_or_1d(targets), self.class_names, columns)
        if self.input == "probs":
            self.floor_ = _floor(_both(scores), labels, weights, "X")
        self.calibrator_ = _fit(self, self._logits(scores), labels, weights)
        return self

    def _calibrated_logits(self, X: Any) -> np.ndarray:
        validation.check_is_fitted(self)
        X = validation.validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return self.calibrator_(self._logits(X).astype(np.float64))

    def _logits(self, X: np.ndarray) -> np.ndarray:
        if self.input == "logits":
            return X if X.shape[1] > 1 else from_log_odds(X)
        if self.input == "probs":
            return from_probs(_both(X), floor=self.floor_, name="X")
        raise ValueError(f'input must be "logits" or "probs", got {self.input!r}')


class CalibratedClassifier(MetaEstimatorMixin, _CalibratedBase):
    """Calibrate a classifier by cross-validation: one calibrator is fitted to its scores on held-out rows.

    The scores are the classifier's `decision_function`, or without one the logarithms of its `predict_proba`. In a
    support vector machine for more than two classes, `decision_function` counts votes of pairs: it jumps where a margin
    changes its sign. Votes and margins are then separated, and a vote gets the weight `votes_` with the largest
    likelihood after a temperature.

    By default the prediction averages the calibrated probabilities of the folds' classifiers, `estimators_`. With few
    rows the average is sharpened by `temperature_`. To calibrate a fitted classifier, pass
    `sklearn.frozen.FrozenEstimator(classifier)` and rows that it was not trained on.

    Parameters
    ----------
    estimator
        The classifier.
    method
        A name of `METHODS`, or a function of (logits, labels) that returns a calibrator.
    options
        Keyword arguments of the method.
    cv
        Number of folds, a splitter, or an iterable of splits, as in scikit-learn.
    n_jobs
        Number of processes that fit the folds' classifiers.
    ensemble
        If false, predict by one classifier fitted to all rows, instead of the average over the folds.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.ensemble import RandomForestClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> forest = CalibratedClassifier(RandomForestClassifier(30, random_state=0)).fit(X[::2], y[::2])
    >>> for model in (RandomForestClassifier(30, random_state=0).fit(X[::2], y[::2]), forest):
    ...     confidence = model.predict_proba(X[1::2]).max(axis=1)
    ...     print(f"says {confidence.mean():.3f}, is right {model.score(X[1::2], y[1::2]):.3f}")
    says 0.731, is right 0.943
    says 0.932, is right 0.958
    """

    calibrator_: Calibrator
    estimators_: list[Any]
    floor_: float
    votes_: float | None
    temperature_: float

    def __init__(
        self,
        estimator: Any,
        method: str | Any = "auto",
        options: Mapping[str, Any] | None = None,
        *,
        cv: Any = 5,
        n_jobs: int | None = None,
        ensemble: bool = True,
    ) -> None:
        self.estimator, self.method, self.options = estimator, method, options
        self.cv, self.n_jobs, self.ensemble = cv, n_jobs, ensemble

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None, **fit_params: Any) -> Self:
        """Fit a classifier to each fold, and the calibrator to their scores on the held-out rows.

        Parameters
        ----------
        X
            Training rows, in any form that the classifier takes.
        y
            True labels of any type, shape (n,).
        sample_weight
            Weight of each row, shape (n,), for the calibrator and the classifiers. If the classifiers' `fit` takes no
            weights, a warning says so.
        **fit_params
            Further parameters of the classifiers' `fit`. With scikit-learn's metadata routing each goes where it is
            requested, such as `groups` to the splitter.

        Returns
        -------
        Self
            The fitted estimator.
        """
        if y is None:
            raise ValueError("y must be given: it requires y to be passed, but the target y is None")
        check_classification_targets(y)
        targets = validation.column_or_1d(y, warn=True)
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if isinstance(self.estimator, FrozenEstimator):
            if fit_params:
                raise ValueError(f"a frozen classifier is not fitted again, got {', '.join(fit_params)} for its fit")
            return self._fit_frozen(X, targets, sample_weight)
        if len(self.classes_) == 1:
            raise ValueError(f"y must have at least 2 classes, got one class, {self.classes_[0]!r}")
        weights = _weights(sample_weight, X)
        params, split_params = self._route(weights, fit_params)
        folds = check_cv(self.cv, targets, classifier=True)
        fewest = int(np.bincount(labels).min())
        if fewest < (n_folds := folds.get_n_splits(X, targets, **split_params)):
            raise ValueError(
                f"each class must have at least {n_folds} rows for {n_folds} folds, got one class with {fewest}"
            )
        response = _response(self.estimator)
        if weights is not None and not (class_weights := np.bincount(labels, weights)).all():
            lacking = self.classes_[class_weights == 0]
            raise ValueError(f"each class must have rows of positive weight, got none in {lacking}")
        X, _ = indexable(X, targets)
        options: dict[str, Any] = {"cv": folds, "n_jobs": self.n_jobs, "params": params | split_params}
        if self.ensemble:
            options |= {"scoring": _no_score, "return_estimator": True, "return_indices": True, "error_score": "raise"}
            parts = cross_validate(clone(self.estimator), X, targets, **options)
            self.estimators_ = parts["estimator"]
            for rows, part in zip(parts["indices"]["test"], self.estimators_, strict=True):
                held_out = np.asarray(getattr(part, response)(_safe_indexing(X, rows)))
                if part is self.estimators_[0]:
                    scores = np.full((len(targets), *held_out.shape[1:]), np.nan)
                scores[rows] = held_out
        else:
            scores = cross_val_predict(clone(self.estimator), X, targets, method=response, **options)
            self.estimators_ = [clone(self.estimator).fit(X, targets, **params)]
        return self._fit_calibrator(scores, response, labels, weights)

    def _route(
        self, sample_weight: np.ndarray | None, fit_params: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split parameters into those of the classifiers' fit and those of the splitter."""
        all_params = fit_params if sample_weight is None else fit_params | {"sample_weight": sample_weight}
        if get_config()["enable_metadata_routing"]:
            routed = process_routing(self, "fit", **all_params)
            return dict(routed.estimator.fit), dict(routed.splitter.split)
        if sample_weight is None or validation.has_fit_parameter(self.estimator, "sample_weight"):
            return all_params, {}
        warn_users(
            f"{type(self.estimator).__name__}.fit takes no sample_weight: the weights go to the calibrator alone; "
            "metadata routing passes them to a step of a pipeline"
        )
        return fit_params, {}

    def get_metadata_routing(self) -> MetadataRouter:
        """Return the routing of `fit` parameters to this estimator, the classifier and the splitter.

        Returns
        -------
        MetadataRouter
            As scikit-learn's metadata routing requires.
        """
        to_fit, to_split = (MethodMapping().add(caller="fit", callee=callee) for callee in ("fit", "split"))
        router = MetadataRouter(owner=self).add_self_request(self)
        router = router.add(estimator=self.estimator, method_mapping=to_fit)
        return router.add(splitter=self.cv, method_mapping=to_split)

    def _fit_frozen(self, X: Any, y: np.ndarray, sample_weight: Any) -> Self:
        """Fit the calibrator alone: all rows are held out, and some of the classifier's classes may be absent."""
        response, weights = _response(self.estimator), _weights(sample_weight, X)
        self.classes_ = np.asarray(self.estimator.classes_)
        labels = _encode(y, self.classes_.tolist(), len(self.classes_))[1]
        self.estimators_ = [clone(self.estimator)]
        return self._fit_calibrator(np.asarray(getattr(self.estimator, response)(X)), response, labels, weights)

    def _fit_calibrator(self, scores: np.ndarray, response: str, labels: np.ndarray, sample_weight: Any) -> Self:
        probs = response == "predict_proba"
        if (
            len(self.classes_) == 3 and not probs and _is_pairwise(self.estimator)
        ):  # with 3 classes only, pairs and classes are equally many
            raise ValueError(
                "decision_function must have a column for each class, got one for each of 3 pairs of classes; "
                "use decision_function_shape='ovr'"
            )
        self.floor_ = _floor(scores, labels, sample_weight) if probs else MIN_FLOOR
        self.votes_ = None
        if not probs and _are_votes(scores):
            self.votes_ = min(
                _VOTE_WEIGHTS, key=lambda weight: _loss(_margins_and_votes(scores, weight), labels, sample_weight)
            )
        noise = _SHARPENING_ROWS / effective_rows(sample_weight, len(labels)) * (1 - 1 / len(self.estimators_))
        self.temperature_ = 1 / (1 + min(noise, _MAX_SHARPENING))
        self.calibrator_ = _fit(self, self._logits(scores, response), labels, sample_weight)
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimators_[0], name):
                setattr(self, name, getattr(self.estimators_[0], name))
        return self

    def _calibrated_logits(self, X: Any) -> np.ndarray:
        validation.check_is_fitted(self)
        calibrated = []
        for part in self.estimators_:
            response = _response(part)
            z = self._logits(getattr(part, response)(X), response)
            calibrated.append(self.calibrator_(z.astype(np.float64)))
        if len(calibrated) == 1:
            return calibrated[0]
        mean: np.ndarray = logsumexp(log_softmax(np.stack(calibrated), axis=2), axis=0) - np.log(len(calibrated))
        return mean / self.temperature_

    def _logits(self, scores: Any, response: str) -> np.ndarray:
        z, classes = np.asarray(scores), len(self.classes_)
        if response == "predict_proba":
            z = from_probs(z, floor=self.floor_, renormalise=True)  # sums of float32 differ from 1 by rounding
        elif z.ndim == 1:
            z = from_log_odds(z)
        if z.shape[1] != classes:
            pairs = z.shape[1] == classes * (classes - 1) / 2
            hint = "; use decision_function_shape='ovr'" if pairs else ""
            raise ValueError(f"{response} must have a column for each of {classes} classes, got {z.shape[1]}{hint}")
        return z if self.votes_ is None else _margins_and_votes(z, self.votes_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags = get_tags(self.estimator).input_tags
        return tags


def _no_score(estimator: Any, X: Any, y: Any) -> float:
    """Return nothing of use: `cross_validate` is called for its classifiers, and requires a scorer."""
    return 0.0


def _fit(estimator: Any, logits: np.ndarray, labels: np.ndarray, sample_weight: np.ndarray | None) -> Calibrator:
    fit = METHODS[estimator.method] if isinstance(estimator.method, str) else estimator.method
    return fit(logits, labels, **{**(estimator.options or {}), **weight_kwargs(sample_weight)})


def _both(probs: np.ndarray) -> np.ndarray:
    """Return probabilities of all classes; a single column is the probability of the second of two."""
    return probs if probs.shape[1] > 1 else np.hstack([1 - probs, probs])


def _floor(probs: np.ndarray, labels: np.ndarray, sample_weight: np.ndarray | None, name: str = "probs") -> float:
    """Return the value for exact zeros: 1/2 or 1/10 of the smallest positive probability, by likelihood.

    A zero among five neighbours is weaker evidence than a zero among a hundred trees; the labels decide by how much.
    """
    half = resolution(probs)
    if half == MIN_FLOOR or probs.min() > 0:
        return half

    def loss(floor: float) -> float:
        return _loss(from_probs(probs, floor=floor, renormalise=True, name=name), labels, sample_weight)

    return min(half, half / 5, key=loss)


def _are_votes(scores: np.ndarray) -> bool:
    """Return whether scores are scikit-learn's votes of pairs of classes plus margins squeezed into (−⅓, ⅓)."""
    if scores.ndim == 1 or scores.shape[1] < 3:
        return False
    votes, pairs = np.round(scores), scores.shape[1] * (scores.shape[1] - 1) / 2
    return bool((np.abs(scores - votes) <= 1 / 3).all() and (votes >= 0).all() and (votes.sum(axis=1) == pairs).all())


def _margins_and_votes(scores: np.ndarray, weight: float) -> np.ndarray:
    """Return each class's sum of margins against the others, plus `weight` times its number of votes.

    >>> margins = np.array([[2.0, -0.5, -1.5]])
    >>> _margins_and_votes(np.array([[2.0, 1.0, 0.0]]) + margins / (3 * (abs(margins) + 1)), 1.0)
    array([[ 4. ,  0.5, -1.5]])
    """
    votes = np.round(scores)
    squeezed = 3 * (scores - votes)
    margins: np.ndarray = squeezed / np.maximum(1 - np.abs(squeezed), 1e-12)
    return margins + weight * votes


def _loss(logits: np.ndarray, labels: np.ndarray, sample_weight: np.ndarray | None) -> float:
    """Return the log-loss after the best temperature."""
    return inverse_temperature(logits, labels, sample_weight, smooth=0.1)[1].loss


def _weights(sample_weight: Any, X: Any) -> np.ndarray | None:
    """Return one weight per row from scikit-learn's argument: None, one number, or one number per row."""
    if sample_weight is None:
        return None
    return validation._check_sample_weight(sample_weight, X, ensure_non_negative=True)


def _encode(y: np.ndarray, class_names: Sequence[Any] | None, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the label of each column, and y as column indices."""
    present, labels = np.unique(y, return_inverse=True)
    if class_names is None:
        if len(present) != columns:
            raise ValueError(
                f"X must have a column for each class in y, got {columns} columns (one for a binary score counts as 2) "
                f"and {len(present)} classes; if y lacks classes, name all columns by class_names=…"
            )
        return present, labels
    named = np.asarray(class_names)
    if len(np.unique(named)) != columns or len(named) != columns:
        raise ValueError(f"class_names must name each of the {columns} columns once, got {list(class_names)}")
    if unknown := [label for label in present.tolist() if label not in named.tolist()]:
        raise ValueError(f"y must hold the classes {named.tolist()} only, got {unknown}")
    order = np.argsort(named)
    return named, order[np.searchsorted(named, present, sorter=order)][labels]


def _response(estimator: Any) -> str:
    for name in ("decision_function", "predict_proba"):
        if hasattr(estimator, name):
            return name
    raise ValueError(f"estimator must have decision_function or predict_proba, got {type(estimator).__name__}")


def _is_pairwise(estimator: Any) -> bool:
    """Return whether the columns of the scores are pairs of classes."""
    inner = estimator.estimator if isinstance(estimator, FrozenEstimator) else estimator
    classifier = inner.steps[-1][1] if isinstance(inner, Pipeline) else inner
    return getattr(classifier, "decision_function_shape", None) == "ovo"
