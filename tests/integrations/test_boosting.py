"""Boosted trees of XGBoost, LightGBM and scikit-learn: raw scores, class weights, refusals and calibration."""

import numpy as np
import pytest

from trueup import evaluate, from_probs
from trueup.calibrators import fit
from trueup.integrations import boosting
from trueup.integrations.sklearn import CalibratedClassifier
from trueup.metrics import nll

xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: make test-integrations")
lightgbm = pytest.importorskip("lightgbm", reason="lightgbm is not installed: make test-integrations")

import pandas as pd  # noqa: E402
from sklearn.ensemble import (  # noqa: E402
    AdaBoostClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:X does not have valid feature names")
QUIET = {"verbose": -1, "num_threads": 1}


def data(rows=3000, classes=2, seed=0, shift=0.0):
    """Eight features; the class depends on three of them, so the largest probability is 0.9 on average."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 8))
    z = np.stack([np.zeros(rows), 2 * X[:, 0] * X[:, 1] + X[:, 2] - shift, 2 * X[:, 3]], axis=1)[:, :classes]
    return X, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


def softmax(z):
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def xgboost_booster(X, y, **parameters):
    return xgboost.train({"nthread": 1} | parameters, xgboost.DMatrix(X, y), num_boost_round=20)


def lightgbm_booster(X, y, **parameters):
    return lightgbm.train(QUIET | parameters, lightgbm.Dataset(X, y), num_boost_round=20)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: xgboost.XGBClassifier(n_estimators=20, n_jobs=1),
        lambda: lightgbm.LGBMClassifier(n_estimators=20, n_jobs=1, verbose=-1),
        lambda: HistGradientBoostingClassifier(max_iter=20),
        lambda: GradientBoostingClassifier(n_estimators=20),
    ],
)
def test_the_softmax_of_an_estimators_logits_are_its_probabilities(make, classes):
    X, y = data(600, classes)
    model = make().fit(X, y)
    z = boosting.logits(model, X)
    assert (z.dtype, z.shape) == (np.float64, (600, classes))
    assert softmax(z) == pytest.approx(model.predict_proba(X), abs=2e-6)


@pytest.mark.parametrize("objective", ["binary:logistic", "binary:logitraw", "reg:logistic"])
def test_boosters_of_xgboost(objective, tmp_path):
    X, y = data(600)
    booster = xgboost_booster(X, y, objective=objective)
    z = boosting.logits(booster, X)
    raw = booster.predict(xgboost.DMatrix(X), output_margin=True)
    assert z[:, 1] - z[:, 0] == pytest.approx(raw)
    assert np.array_equal(boosting.logits(booster, xgboost.DMatrix(X)), z)
    booster.save_model(tmp_path / "model.ubj")
    assert np.array_equal(boosting.logits(xgboost.Booster(model_file=tmp_path / "model.ubj"), X), z)


@pytest.mark.parametrize("objective", ["multi:softprob", "multi:softmax"])
def test_boosters_of_xgboost_with_classes(objective):
    X, y = data(600, 3)
    booster = xgboost_booster(X, y, objective=objective, num_class=3)
    likely = xgboost_booster(X, y, objective="multi:softprob", num_class=3).predict(xgboost.DMatrix(X))
    assert softmax(boosting.logits(booster, X)) == pytest.approx(likely, abs=1e-6)


@pytest.mark.parametrize(
    ("classes", "parameters"),
    [
        (2, {"objective": "binary"}),
        (2, {"objective": "binary", "sigmoid": 2.5}),
        (2, {"objective": "cross_entropy"}),
        (3, {"objective": "multiclass", "num_class": 3}),
        (3, {"objective": "multiclassova", "num_class": 3, "sigmoid": 0.5}),
    ],
)
def test_boosters_of_lightgbm(classes, parameters, tmp_path):
    X, y = data(600, classes)
    booster = lightgbm_booster(X, y, **parameters)
    z, p = boosting.logits(booster, X), booster.predict(X)
    expected = np.stack([1 - p, p], axis=1) if p.ndim == 1 else p / p.sum(axis=1, keepdims=True)
    assert softmax(z) == pytest.approx(expected, abs=1e-12)
    booster.save_model(tmp_path / "model.txt")
    assert boosting.logits(lightgbm.Booster(model_file=tmp_path / "model.txt"), X) == pytest.approx(z, abs=1e-12)


def test_the_exponential_loss_has_half_the_log_odds():
    X, y = data(600)
    model = GradientBoostingClassifier(loss="exponential", n_estimators=20).fit(X, y)
    assert softmax(boosting.logits(model, X)) == pytest.approx(model.predict_proba(X), abs=1e-12)


def test_a_model_that_stopped_early_predicts_with_its_best_trees():
    X, y = data(400)
    late_X, late_y = data(400, seed=1)
    train, late = xgboost.DMatrix(X, y), xgboost.DMatrix(late_X, late_y)
    settings = {"num_boost_round": 200, "evals": [(late, "late")], "early_stopping_rounds": 5, "verbose_eval": False}
    booster = xgboost.train({"objective": "binary:logistic", "eta": 0.5, "nthread": 1}, train, **settings)
    best = booster.predict(late, output_margin=True, iteration_range=(0, booster.best_iteration + 1))
    z = boosting.logits(booster, late)
    assert z[:, 1] - z[:, 0] == pytest.approx(best)
    assert abs(best - booster.predict(late, output_margin=True)).max() > 0.1
    three = boosting.logits(booster, late, iteration_range=(0, 3))
    assert nll(three, late_y) > nll(z, late_y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda X, y: xgboost_booster(X, y, objective="rank:pairwise"), "rank:pairwise; a ranking score only orders"),
        (
            lambda X, y: xgboost_booster(X, y, objective="rank:ndcg"),
            "a ranking score only orders the rows of one query",
        ),
        (lambda X, y: xgboost_booster(X, y, objective="reg:squarederror"), "the objective reg:squarederror; only a"),
        (lambda X, y: xgboost_booster(X, y, objective="binary:hinge"), "the objective binary:hinge; only a"),
        (lambda X, y: xgboost.XGBRegressor(n_estimators=3).fit(X, y), "the objective reg:squarederror"),
        (lambda X, y: lightgbm.LGBMRegressor(n_estimators=3, verbose=-1).fit(X, y), "the objective regression"),
        (lambda X, y: AdaBoostClassifier(n_estimators=3).fit(X, y), "got the objective AdaBoostClassifier"),
        (lambda X, y: HistGradientBoostingRegressor(max_iter=3).fit(X, y), "the objective squared_error"),
        (lambda X, y: object(), "be of XGBoost, LightGBM or scikit-learn, got a object"),
    ],
)
def test_models_without_log_odds_are_refused(make, words):
    X, y = data(200)
    with pytest.raises(ValueError, match=words):
        boosting.logits(make(X, y), X)


@pytest.mark.parametrize("objective", ["lambdarank", "rank_xendcg"])
def test_rankings_of_lightgbm_are_refused(objective):
    X, y = data(200)
    rows = lightgbm.Dataset(X, y, group=[20] * 10)
    booster = lightgbm.train(QUIET | {"objective": objective}, rows, num_boost_round=3)
    with pytest.raises(ValueError, match=f"the objective {objective}; a ranking score only orders"):
        boosting.logits(booster, X)


@pytest.mark.parametrize("weight", [9.0, 0.25])
def test_removing_scale_pos_weight_restores_the_mean(weight):
    X, y = data(10_000, shift=1.5)
    new_X, new_y = data(10_000, seed=1, shift=1.5)
    settings = {"objective": "binary:logistic", "eta": 0.2, "max_depth": 4, "scale_pos_weight": weight}
    weighted = boosting.logits(xgboost_booster(X, y, **settings), new_X)
    means = [evaluate(z, new_y)["predicted"].value for z in (weighted, boosting.undo_weights(weight)(weighted))]
    assert abs(means[0] - new_y.mean()) > 0.1
    assert abs(means[1] - new_y.mean()) < 0.03


def test_removing_balanced_weights_of_three_classes():
    X, y = data(10_000, 3, shift=1.0)
    new_X, new_y = data(10_000, 3, seed=1, shift=1.0)
    weights = np.array([1.0, 5.0, 0.5])
    model = HistGradientBoostingClassifier(max_iter=40, class_weight=dict(enumerate(weights))).fit(X, y)
    weighted = boosting.logits(model, new_X)
    corrected = boosting.undo_weights(weights)(weighted)
    shares = np.bincount(new_y) / len(new_y)
    before, after = (abs(softmax(z).mean(axis=0) - shares).max() for z in (weighted, corrected))
    assert before > 0.1
    assert after < before / 4


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, [1.0], [[1.0, 2.0]], [1.0, 0.0]])
def test_weights_that_are_not_positive_are_refused(weight):
    with pytest.raises(ValueError, match="class_weight must be one positive number per class"):
        boosting.undo_weights(weight)


def test_calibration_lowers_the_loss_of_an_overfitted_booster():
    X, y = data(2000)
    calibration, test = data(2000, seed=1), data(5000, seed=2)
    booster = lightgbm.train(QUIET | {"objective": "binary", "learning_rate": 0.3}, lightgbm.Dataset(X, y), 200)
    raw = boosting.logits(booster, test[0])
    calibrator = fit(boosting.logits(booster, calibration[0]), calibration[1], "platt")
    assert nll(calibrator(raw), test[1]) < nll(raw, test[1]) - 0.1


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_a_calibrated_booster_in_a_grid_search(library):
    X, y = data(800, 3)
    boosters = {
        "xgboost": lambda: xgboost.XGBClassifier(n_estimators=15, n_jobs=1),
        "lightgbm": lambda: lightgbm.LGBMClassifier(n_estimators=15, n_jobs=1, verbose=-1),
    }
    search = GridSearchCV(
        CalibratedClassifier(boosters[library](), method="temperature", cv=2),
        {"estimator__max_depth": [2, 4], "method": ["identity", "temperature"]},
        scoring="neg_log_loss",
        cv=2,
    ).fit(X, y)
    assert search.best_params_["estimator__max_depth"] in (2, 4)
    assert search.predict_proba(X).shape == (800, 3)
    by_method = dict(zip(search.cv_results_["param_method"], search.cv_results_["mean_test_score"], strict=True))
    assert by_method["temperature"] >= by_method["identity"] - 0.01


def categorical_frame(rows=900):
    rng = np.random.default_rng(0)
    city = rng.integers(0, 5, rows)
    frame = pd.DataFrame({"city": pd.Categorical(np.array(list("abcde"))[city]), "x": rng.normal(size=rows)})
    return frame, np.where(rng.random(rows) < 1 / (1 + np.exp(1.5 - city + frame.x)), "yes", "no")


@pytest.mark.parametrize("library", ["xgboost", "lightgbm", "sklearn"])
def test_frames_with_categories_and_labels_that_are_texts(library):
    frame, answer = categorical_frame()
    y = (answer == "yes").astype(int) if library == "xgboost" else answer  # XGBoost takes numbers only
    booster = {
        "xgboost": lambda: xgboost.XGBClassifier(n_estimators=15, n_jobs=1, enable_categorical=True),
        "lightgbm": lambda: lightgbm.LGBMClassifier(n_estimators=15, n_jobs=1, verbose=-1),
        "sklearn": lambda: HistGradientBoostingClassifier(max_iter=15, categorical_features="from_dtype"),
    }[library]()
    model = CalibratedClassifier(booster, method="platt", cv=3)
    assert cross_val_score(model, frame, y, scoring="neg_log_loss", cv=2).mean() > np.log(0.5)
    assert model.fit(frame, y).predict(frame)[0] in set(y)
    assert boosting.logits(booster.fit(frame, y), frame).shape == (900, 2)


def test_raw_scores_keep_digits_that_probabilities_lose():
    X = np.linspace(-1, 1, 400)[:, None]
    model = xgboost.XGBClassifier(n_estimators=300, learning_rate=1.0, reg_lambda=0, min_child_weight=0, n_jobs=1)
    model.fit(X, (X[:, 0] > 0).astype(int))
    p = model.predict_proba(X)
    assert (p == 0).any()
    with pytest.warns(UserWarning, match="exact zeros"):
        from_probs(p, renormalise=True)
    assert np.isfinite(boosting.logits(model, X)).all()
