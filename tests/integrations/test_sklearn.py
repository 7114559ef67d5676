import pickle

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from sklearn import config_context
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_predict, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import check_estimator

from strategies import calibrated
from trueup import METHODS, metrics
from trueup.calibrators import Temperature
from trueup.integrations.sklearn import CalibratedClassifier, LogitCalibrator

NAMES = np.array(["ant", "bee", "cat", "dog"])

OTHER_WIDTH = "the check's X has another number of columns than y has classes, and here a column is a class"
EXCEPTIONS = dict.fromkeys(
    [
        "check_classifiers_classes",
        "check_classifiers_train",
        "check_dtype_object",
        "check_estimators_dtypes",
        "check_estimators_fit_returns_self",
        "check_estimators_nan_inf",
        "check_estimators_overwrite_params",
        "check_estimators_pickle",
        "check_n_features_in_after_fitting",
        "check_pipeline_consistency",
        "check_positive_only_tag_during_fit",
        "check_readonly_memmap_input",
        "check_sample_weight_equivalence_on_dense_data",
    ],
    OTHER_WIDTH,
)


class AnyWidth(LogitCalibrator):
    """Takes X of any width, making a column for each class of it, so that the excepted checks reach our code too."""

    def fit(self, X, y):
        self._columns = max(2, len(np.unique(y)) if isinstance(y, (list, np.ndarray)) else 2)
        return super().fit(X, y)

    def _logits(self, X):
        k = np.arange(self._columns)
        return super()._logits(X @ np.cos(np.outer(np.arange(X.shape[1]), k) + k))


def checks(estimator, **options):
    found = check_estimator(estimator, on_fail=None, on_skip=None, **options)
    assert len(found) > 50
    return {
        (result["check_name"], result["status"]): str(result["exception"])
        for result in found
        if result["status"] != "passed" and result["check_name"] != "check_array_api_input"  # needs SCIPY_ARRAY_API
    }


@pytest.mark.filterwarnings("ignore")  # the checks provoke warnings on purpose
class TestChecks:
    def test_logit_calibrator_but_for_the_width(self):
        found = checks(LogitCalibrator(), expected_failed_checks=EXCEPTIONS)
        assert set(found) == {(name, "xfail") for name in EXCEPTIONS}

    def test_logit_calibrator_of_any_width(self):
        assert checks(AnyWidth()) == {}

    @pytest.mark.parametrize(
        ("estimator", "method"),  # the choice among methods is checked once: it is what takes the time
        [(RidgeClassifier(), "auto"), (GaussianNB(), "temperature")],
        ids=["decision", "proba"],
    )
    def test_calibrated_classifier(self, estimator, method):
        # One check has fewer than five rows in a class, so that five folds are refused by right.
        # Copies of a row are dealt to folds one by one; a row of their weight goes to one fold.
        names = (f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse"))
        folds = dict.fromkeys(names, "copies and weights meet other folds")
        found = checks(CalibratedClassifier(estimator, method, cv=3), expected_failed_checks=folds)
        assert set(found) <= {(name, "xfail") for name in folds}


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.filterwarnings("ignore")  # how a fit ends on little data is other tests' matter
def test_every_method(method):
    z, y = calibrated(80, 3, temperature=2.0)
    found = LogitCalibrator(method).fit(z, NAMES[y])
    expected = found.calibrator_(z)
    np.testing.assert_array_equal(found.decision_function(z), expected)
    np.testing.assert_allclose(found.predict_proba(z), softmax(expected, axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.predict_log_proba(z), log_softmax(expected, axis=1), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found.predict(z), NAMES[expected.argmax(axis=1)])
    again = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(again.predict_proba(z), found.predict_proba(z))


def test_is_the_method_itself():
    z, y = calibrated(600, 4, temperature=2.0)
    found = LogitCalibrator("matrix", {"penalty": 0.1}).fit(z, NAMES[y])
    np.testing.assert_array_equal(found.decision_function(z), METHODS["matrix"](z, y, penalty=0.1)(z))
    np.testing.assert_array_equal(clone(found).fit(z, NAMES[y]).predict_proba(z), found.predict_proba(z))


def test_probabilities_are_read_as_such():
    z, y = calibrated(500, 3, temperature=2.0)
    by_logits = LogitCalibrator().fit(z, y)
    by_probs = LogitCalibrator(input="probs").fit(softmax(z, axis=1), y)
    np.testing.assert_allclose(by_probs.predict_proba(softmax(z, axis=1)), by_logits.predict_proba(z), rtol=1e-6)
    with pytest.raises(ValueError, match=r"X must lie in \[0, 1\]"):
        LogitCalibrator(input="probs").fit(z, y)
    with pytest.raises(ValueError, match='input must be "logits" or "probs", got \'guess\''):
        LogitCalibrator(input="guess").fit(z, y)


def test_one_column_is_a_binary_score():
    z, y = calibrated(500, 2, temperature=2.0)
    score = (z[:, 1] - z[:, 0])[:, None]
    whole, single = LogitCalibrator().fit(z, y), LogitCalibrator().fit(score, y)
    np.testing.assert_allclose(single.predict_proba(score), whole.predict_proba(z), rtol=1e-9)
    assert single.decision_function(score).shape == (500,)
    p = softmax(z, axis=1)[:, 1:]
    np.testing.assert_allclose(
        LogitCalibrator(input="probs").fit(p, y).predict_proba(p), whole.predict_proba(z), rtol=1e-6
    )


def test_classes_name_the_columns_where_labels_are_missing():
    z, y = calibrated(400, 4)
    z, y = z[y != 2], y[y != 2]
    with pytest.raises(ValueError, match=r"a column for each class in y, got 4 columns .* and 3 classes"):
        LogitCalibrator().fit(z, NAMES[y])
    # In an order of their own.
    own = NAMES[[3, 0, 2, 1]]
    found = LogitCalibrator(class_names=list(own)).fit(z, own[y])
    np.testing.assert_array_equal(found.classes_, own)
    np.testing.assert_array_equal(found.predict(z), own[z.argmax(axis=1)])
    assert found.calibrator_.temperature == Temperature.fit(z, y).temperature
    with pytest.raises(ValueError, match=r"y must hold the classes \['ant', .*\] only, got \['yak'\]"):
        LogitCalibrator(class_names=list(NAMES)).fit(z, np.where(y == 0, "yak", NAMES[y]))
    with pytest.raises(ValueError, match="class_names must name each of the 4 columns once"):
        LogitCalibrator(class_names=["ant", "ant", "cat", "dog"]).fit(z, NAMES[y])


def test_parameters():
    found = LogitCalibrator(method=Temperature.fit, options={})
    assert set(found.get_params()) == {"method", "options", "input", "class_names"}
    z, y = calibrated(300, 3)
    assert isinstance(found.fit(z, y).calibrator_, Temperature)
    with pytest.raises(KeyError, match="no method is called 'nonsense'"):
        LogitCalibrator("nonsense").fit(z, y)
    with pytest.raises(TypeError, match="nonsense"):
        LogitCalibrator(options={"nonsense": 1}).fit(z, y)
    with pytest.raises(NotFittedError):
        LogitCalibrator().predict(z)


def overconfident(n=900, classes=3):
    X, y = make_classification(n, 20, n_informative=6, n_classes=classes, flip_y=0.2, class_sep=1.0, random_state=0)
    return X, NAMES[y]


def weighted_classes():
    X, y = make_classification(200, 6, n_informative=4, random_state=0)
    return X, np.array(["no", "yes"])[y], np.random.default_rng(0).uniform(0.1, 3, 200)


class TestMetadata:
    """Weights and groups reach whom they are for."""

    def test_weights_that_a_pipeline_cannot_take_go_to_the_calibrator_alone(self):
        X, y, w = weighted_classes()
        model = CalibratedClassifier(make_pipeline(StandardScaler(), LogisticRegression()), "temperature", cv=3)
        with pytest.warns(UserWarning, match="Pipeline.fit takes no sample_weight: the weights go to the calibrator"):
            model.fit(X, y, sample_weight=w)
        plain = clone(model).fit(X, y)
        np.testing.assert_array_equal(model.estimators_[0].predict_proba(X), plain.estimators_[0].predict_proba(X))
        assert model.calibrator_.temperature != plain.calibrator_.temperature

    @pytest.mark.parametrize("ensemble", [True, False])
    def test_routing_brings_them_to_the_step_of_a_pipeline(self, ensemble):
        X, y, w = weighted_classes()
        with config_context(enable_metadata_routing=True):
            inner = LogisticRegression().set_fit_request(sample_weight=True)
            scaler = StandardScaler().set_fit_request(sample_weight=False)
            model = CalibratedClassifier(make_pipeline(scaler, inner), "temperature", cv=3, ensemble=ensemble)
            model.set_fit_request(sample_weight=True)
            routed = clone(model).fit(X, y, sample_weight=w)
            plain = clone(model).fit(X, y)
            nested = cross_val_score(model.set_score_request(sample_weight=True), X, y, params={"sample_weight": w})
        assert (routed.estimators_[0].predict_proba(X) != plain.estimators_[0].predict_proba(X)).any()
        assert (nested > 0.6).all()

    def test_routing_brings_groups_to_the_splitter(self):
        X, y, _ = weighted_classes()
        groups = np.arange(200) % 10
        with config_context(enable_metadata_routing=True):
            model = CalibratedClassifier(LogisticRegression(), "temperature", cv=GroupKFold(5))
            by_group = clone(model).fit(X, y, groups=groups)
            rows = next(GroupKFold(5).split(X, y, groups))[0]
        expected = LogisticRegression().fit(X[rows], y[rows])
        np.testing.assert_allclose(by_group.estimators_[0].coef_, expected.coef_)

    def test_further_parameters_reach_the_classifier(self):
        X, y, _ = weighted_classes()
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            CalibratedClassifier(LogisticRegression(), cv=3).fit(X, y, colour=1)
        frozen = FrozenEstimator(LogisticRegression().fit(X, y))
        with pytest.raises(ValueError, match="a frozen classifier is not fitted again, got colour for its fit"):
            CalibratedClassifier(frozen).fit(X, y, colour=1)


def test_works_in_a_pipeline():
    X, y = overconfident()
    network = LogisticRegression().fit(X[:450], y[:450])
    pipeline = make_pipeline(FunctionTransformer(network.decision_function), LogitCalibrator()).fit(X[450:], y[450:])
    expected = LogitCalibrator().fit(network.decision_function(X[450:]), y[450:])
    np.testing.assert_array_equal(pipeline.predict_proba(X), expected.predict_proba(network.decision_function(X)))


@pytest.mark.parametrize("classes", [2, 3])
def test_classifier_is_calibrated_on_rows_it_has_not_seen(classes):
    X, y = overconfident(classes=classes)
    forest, folds = RandomForestClassifier(20, random_state=0), StratifiedKFold(4, shuffle=True, random_state=0)
    found = CalibratedClassifier(forest, "temperature", cv=folds, ensemble=False).fit(X, y)
    left_out = cross_val_predict(forest, X, y, cv=folds, method="predict_proba")
    labels = np.searchsorted(found.classes_, y)
    floor = left_out[left_out > 0].min() / 2
    assert found.floor_ in (floor, floor / 5)
    floor = found.floor_
    expected = Temperature.fit(np.log(left_out.clip(floor)), labels)
    assert found.calibrator_.temperature == expected.temperature
    raw = forest.fit(X, y).predict_proba(X)
    np.testing.assert_allclose(found.predict_proba(X), softmax(expected(np.log(raw.clip(floor))), axis=1), rtol=1e-12)
    assert found.n_features_in_ == 20


def test_agrees_with_scikit_learn_on_temperature():
    X, y = overconfident(2000, classes=2)
    train, test = slice(1000), slice(1000, None)
    machine = SVC(gamma="scale")
    ours = CalibratedClassifier(machine, "temperature", ensemble=False).fit(X[train], y[train]).predict_proba(X[test])
    theirs = CalibratedClassifierCV(machine, method="temperature", ensemble=False).fit(X[train], y[train])
    np.testing.assert_allclose(ours, theirs.predict_proba(X[test]), atol=2e-3)


def test_votes_of_a_support_vector_machine_are_taken_apart():
    """Folded into a third of a vote, its margins say nothing to a temperature."""
    X, y = overconfident(1000)
    train, test = slice(500), slice(500, None)
    machine = SVC().fit(X[train], y[train])
    pairs = machine.set_params(decision_function_shape="ovo").decision_function(X[test])
    margins = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 2] - pairs[:, 0], -pairs[:, 1] - pairs[:, 2]], axis=1)
    machine.set_params(decision_function_shape="ovr")
    ours = CalibratedClassifier(FrozenEstimator(machine), "temperature").fit(X[test], y[test])
    assert ours.votes_ in (0.0, 0.25, 0.5)
    votes = np.round(machine.decision_function(X[test]))
    expected = Temperature.fit(margins + ours.votes_ * votes, np.searchsorted(ours.classes_, y[test]))
    assert ours.calibrator_.temperature == pytest.approx(expected.temperature, rel=1e-6)
    theirs = CalibratedClassifierCV(FrozenEstimator(machine), method="temperature").fit(X[test], y[test])
    assert log_loss(y[test], ours.predict_proba(X[test])) < log_loss(y[test], theirs.predict_proba(X[test])) - 0.01
    assert CalibratedClassifier(LogisticRegression(), "temperature").fit(X[train], y[train]).votes_ is None


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_what_no_vote_stands_for_is_what_the_labels_say(share):
    """Votes of five neighbours: a class without a vote is right in one of ten rows, or in one of fifty."""
    rng = np.random.default_rng(0)
    votes = rng.choice([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], size=4000)
    y = rng.random(4000) < np.where(votes == 0, share, np.where(votes == 1, 1 - share, votes))
    found = LogitCalibrator(input="probs").fit(votes[:, None], y.astype(int))
    assert found.floor_ == pytest.approx(share)
    assert LogitCalibrator(input="probs").fit(votes[:, None].clip(1e-9, 1 - 1e-9), y).floor_ == pytest.approx(5e-10)


def test_probabilities_of_single_precision_need_not_sum_to_one_exactly():
    class Rounded(GaussianNB):
        def predict_proba(self, X):
            return super().predict_proba(X) * (1 + 8e-6)

    X, y = overconfident(600)
    found = CalibratedClassifier(Rounded(), "temperature").fit(X, y).predict_proba(X)
    np.testing.assert_allclose(
        found, CalibratedClassifier(GaussianNB(), "temperature").fit(X, y).predict_proba(X), 1e-5
    )


def test_improves_a_classifier():
    X, y = overconfident(2000)
    train, test = slice(1000), slice(1000, None)
    found = CalibratedClassifier(GaussianNB()).fit(X[train], y[train])
    labels = np.searchsorted(found.classes_, y[test])
    before, after = (
        metrics.nll(np.log(m.predict_proba(X[test]).clip(1e-30)), labels)
        for m in (GaussianNB().fit(X[train], y[train]), found)
    )
    assert after < before - 0.02


def test_frozen_classifiers_are_not_fitted_again():
    X, y = overconfident()
    network = LogisticRegression().fit(X[:450], y[:450])
    found = CalibratedClassifier(FrozenEstimator(network), "temperature").fit(X[450:], y[450:])
    expected = Temperature.fit(network.decision_function(X[450:]), np.searchsorted(network.classes_, y[450:]))
    assert found.calibrator_.temperature == pytest.approx(expected.temperature, rel=1e-9)


def test_classifiers_are_searched_and_cross_validated():
    X, y = overconfident(300)
    model = CalibratedClassifier(make_pipeline(StandardScaler(), LogisticRegression()), cv=3)
    search = GridSearchCV(model, {"estimator__logisticregression__C": [0.1, 1.0]}, cv=2).fit(X, y)
    assert pickle.loads(pickle.dumps(search)).score(X, y) == search.score(X, y)
    assert cross_val_score(clone(model), X, y, cv=2).shape == (2,)


def test_what_cannot_be_calibrated_is_refused():
    X, y = overconfident(300)
    with pytest.raises(ValueError, match="must have decision_function or predict_proba, got LinearRegression"):
        CalibratedClassifier(LinearRegression()).fit(X, y)
    few = np.append(np.flatnonzero(y != "cat"), np.flatnonzero(y == "cat")[:4])
    with pytest.raises(ValueError, match="at least 5 rows for 5 folds, got one class with 4"):
        CalibratedClassifier(LogisticRegression()).fit(X[few], y[few])
    X, y = overconfident(300, classes=4)
    pairwise = SVC(decision_function_shape="ovo")
    with pytest.raises(ValueError, match="a column for each of 4 classes, got 6; use decision_function_shape='ovr'"):
        CalibratedClassifier(pairwise).fit(X, y)
    X, y = overconfident(300)  # of three classes there are as many pairs
    for machine in (pairwise, make_pipeline(StandardScaler(), pairwise), FrozenEstimator(pairwise.fit(X, y))):
        with pytest.raises(ValueError, match="each of 3 pairs of classes; use decision_function_shape='ovr'"):
            CalibratedClassifier(machine).fit(X, y)


def test_a_frozen_classifier_needs_no_folds_and_keeps_its_classes():
    X, y = make_classification(400, n_classes=3, n_informative=5, random_state=0)
    names = np.array(["ant", "bee", "cat"])[y]
    forest = RandomForestClassifier(10, random_state=0).fit(X[:200], names[:200])
    rest, labels = X[200:], names[200:]
    kept = (labels != "cat") | (np.cumsum(labels == "cat") <= 1)  # one row of a class is too few for two folds
    for rows in (kept, labels != "cat"):
        found = CalibratedClassifier(FrozenEstimator(forest), "temperature").fit(rest[rows], labels[rows])
        assert found.classes_.tolist() == ["ant", "bee", "cat"]
        assert np.isfinite(found.predict_proba(rest)).all()
    with pytest.raises(ValueError, match="y must hold the classes"):
        CalibratedClassifier(FrozenEstimator(forest)).fit(rest, np.where(kept, "dog", labels))


def test_one_class_is_refused_in_words():
    with pytest.raises(ValueError, match="at least 2 classes, got one class"):
        CalibratedClassifier(GaussianNB()).fit(np.zeros((20, 2)), ["a"] * 20)
