"""Boosted trees of XGBoost, LightGBM and scikit-learn: their raw scores as logits, without class weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from scipy.special import log_expit

from trueup._core.errors import InputError
from trueup.calibrators.linear import Vector
from trueup.convert import from_log_odds

__all__ = ["logits", "undo_weights"]

Model: TypeAlias = Any
"""A booster or an estimator of XGBoost, LightGBM or scikit-learn."""

_RANKING = re.compile(r"rank|ndcg|xendcg")
_CLASSIFIERS = {
    *("binary:logistic", "binary:logitraw", "reg:logistic", "multi:softprob", "multi:softmax"),
    *("binary", "cross_entropy", "multiclass", "multiclassova"),
    *("log_loss", "exponential"),
}
"""Objectives whose raw scores are log-odds or logits, up to a factor: of XGBoost, LightGBM and scikit-learn."""


def logits(model: Model, data: Any, **options: Any) -> np.ndarray:
    """Return the raw scores of a boosted classifier as logits.

    Raw scores keep digits that probabilities in single precision lose near 0 and 1. A model that stopped early predicts
    with its best number of trees.

    Parameters
    ----------
    model
        `xgboost.Booster`, `XGBClassifier`, `lightgbm.Booster`, `LGBMClassifier`, `HistGradientBoostingClassifier` or
        `GradientBoostingClassifier`.
    data
        Rows to predict, in a form that the model takes. For `xgboost.Booster` a `DMatrix`, an array or a data frame.
    **options
        Further options of the model's `predict`.

    Returns
    -------
    np.ndarray
        Logits, shape (n, classes), in the order of the model's classes.

    Raises
    ------
    ValueError
        If the objective gives no probabilities of classes, such as a ranking.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.ensemble import HistGradientBoostingClassifier
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> boosted = HistGradientBoostingClassifier(max_iter=20).fit(X[::2], y[::2])
    >>> z = logits(boosted, X[1::2])
    >>> z.shape, bool(np.allclose(z[:, 1] - z[:, 0], boosted.decision_function(X[1::2])))
    ((284, 2), True)
    """
    library = type(model).__module__.partition(".")[0]
    reader = {"xgboost": _xgboost, "lightgbm": _lightgbm, "sklearn": _sklearn}.get(library)
    if reader is None:
        hint = "from_log_odds takes log-odds, from_probs takes probabilities"
        raise InputError("model", "be of XGBoost, LightGBM or scikit-learn", f"a {type(model).__name__}", hint)
    objective, scale, predict = reader(model)
    if objective not in _CLASSIFIERS:
        raise InputError("model", "be a classifier", f"the objective {objective}", _reason(objective))
    scores = scale * np.asarray(predict(data, **options), np.float64)
    if objective == "multiclassova":  # one classifier per class, against the rest
        return np.asarray(log_expit(scores))
    return from_log_odds(scores) if scores.ndim == 1 else scores


def undo_weights(class_weight: float | Sequence[float]) -> Vector:
    """Return a calibrator that removes the weights of classes in training: it subtracts ln(weight) from each logit.

    A model trained with `scale_pos_weight=w` predicts odds that are about w times too large.

    Parameters
    ----------
    class_weight
        The weight of each class, or one number for class 1 of two: `scale_pos_weight`.

    Returns
    -------
    Vector
        The calibrator.

    Examples
    --------
    >>> z = undo_weights(9.0)(np.array([[0.0, np.log(9.0)]]))
    >>> (np.exp(z) / np.exp(z).sum()).round(4)
    array([[0.5, 0.5]])
    """
    weights = np.asarray([1.0, class_weight] if np.ndim(class_weight) == 0 else class_weight, np.float64)
    if weights.ndim != 1 or len(weights) < 2 or not (np.isfinite(weights) & (weights > 0)).all():
        raise InputError("class_weight", "be one positive number per class", repr(class_weight))
    log_weights = np.log(weights)
    return Vector(np.ones(len(weights)), log_weights.mean() - log_weights)


def _reason(objective: str) -> str:
    if _RANKING.search(objective):
        return "a ranking score only orders the rows of one query; train a classifier on the relevance labels"
    return "only a classifier trained by log-loss has log-odds as raw scores; from_probs takes probabilities"


Read: TypeAlias = tuple[str, float, Callable[..., Any]]
"""The objective, the factor from raw scores to log-odds, and a function of data that returns raw scores."""


def _xgboost(model: Model) -> Read:
    import xgboost

    is_booster = isinstance(model, xgboost.Booster)
    booster = model if is_booster else model.get_booster()
    objective = json.loads(booster.save_config())["learner"]["objective"]["name"]

    def predict(data: Any, **options: Any) -> Any:
        if is_booster:
            if not isinstance(data, xgboost.DMatrix):
                data = xgboost.DMatrix(data, enable_categorical=True)
            best = booster.attr("best_iteration")  # a booster does not use it by itself
            options = {"iteration_range": (0, 0 if best is None else int(best) + 1)} | options
        return model.predict(data, output_margin=True, **options)

    return objective, 1.0, predict


def _lightgbm(model: Model) -> Read:
    booster: Any = getattr(model, "booster_", model)
    described = re.search(r"^objective=(\S+)(.*)$", booster.model_to_string(num_iteration=1), re.MULTILINE)
    objective, parameters = described.groups() if described else ("custom", "")
    slope = re.search(r"sigmoid:(\S+)", parameters)
    return objective, float(slope[1]) if slope else 1.0, partial(model.predict, raw_score=True)


def _sklearn(model: Model) -> Read:
    objective = str(getattr(model, "loss", type(model).__name__))
    # The exponential loss is smallest at half the log-odds.
    return objective, 2.0 if objective == "exponential" else 1.0, getattr(model, "decision_function", model.predict)
