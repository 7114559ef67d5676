import numpy as np
import pytest

from optional import torch
from strategies import calibrated
from trueup import METHODS, load, metrics, save
from trueup._core.splits import k_fold
from trueup.calibrators import Chain, Temperature, chain, choose, cross_fit, for_event, grid, one_vs_rest, refinement
from trueup.calibrators.compose import simplest
from trueup.convert import as_event, event_logits

LOGITS, LABELS = calibrated(600, 4, temperature=2.0)


def test_a_chain_fits_each_step_on_what_came_before():
    found = chain("temperature", "histogram")(LOGITS, LABELS)
    first, second = found.steps
    assert np.allclose(found(LOGITS), second(first(LOGITS)))
    alone = METHODS["histogram"](first(LOGITS), LABELS)
    assert np.allclose(second(LOGITS), alone(LOGITS))
    assert found.keeps_argmax
    assert np.allclose(METHODS["temperature_histogram"](LOGITS, LABELS)(LOGITS), found(LOGITS))


def test_a_chain_knows_what_it_keeps():
    assert Chain([Temperature(1.0)]).shift_invariant
    matrix = METHODS["matrix"](LOGITS, LABELS)
    assert not Chain([Temperature(1.0), matrix]).keeps_argmax


def test_one_vs_rest_of_two_classes_is_the_method_itself():
    z, y = calibrated(500, 2, temperature=2.0)
    direct = torch.softmax(torch.tensor(Temperature.fit(z, y)(z)), dim=1)
    lifted = torch.softmax(torch.tensor(one_vs_rest("temperature")(z, y)(z)), dim=1)
    assert torch.allclose(direct, lifted, atol=1e-6)


def test_one_vs_rest_repairs_each_class():
    found = one_vs_rest("temperature")(LOGITS, LABELS)
    assert metrics.nll(found(LOGITS), LABELS) < metrics.nll(LOGITS, LABELS)
    assert len(found.calibrators) == 4


def test_cross_fitted_rows_are_calibrated_by_strangers():
    seen = []

    def spy(logits, labels):
        seen.append(logits.copy())
        return Temperature(2.0)

    out = cross_fit(spy, n_folds=3)(LOGITS, LABELS)
    assert np.allclose(out, LOGITS / 2)
    assert len(seen) == 3
    assert sum(len(part) for part in seen) == 2 * len(LOGITS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_cross_fitted_and_judged(dtype):
    z, y = torch.tensor(LOGITS).to(dtype), torch.tensor(LABELS)
    out = cross_fit("temperature")(z, y)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), cross_fit("temperature")(z.float(), y), rtol=0.01)
    assert refinement(z, y) == pytest.approx(refinement(z.float(), y), abs=0.005)
    assert choose(["identity", "temperature"])(z, y).choice.chosen == "temperature"


def test_the_simplest_within_a_standard_error_of_the_best():
    rng = np.random.default_rng(0)
    best, noise = rng.normal(size=400), rng.normal(size=400)
    noise -= noise.mean()
    error = noise.std() / 20
    near, far = best + noise + 0.9 * error, best + noise + 1.1 * error
    assert simplest({"near": near, "best": best}) == "near"
    assert simplest({"far": far, "best": best}) == "best"
    assert simplest({"far": far, "near": near, "best": best}) == "near"
    assert simplest({"best": best, "near": near}) == "best"
    assert simplest({"far": far, "best": best}, standard_errors=1.2) == "far"
    assert simplest({"near": near, "best": best}, standard_errors=0.0) == "best"


def test_choose_takes_the_simplest_that_is_as_good():
    calibrated_pair = calibrated(800, 3)
    assert choose(["identity", "temperature", "sms"])(*calibrated_pair).choice.chosen == "identity"
    found = choose(["identity", "temperature", "sms"])(LOGITS, LABELS)
    assert found.choice.chosen == "temperature"
    assert found.choice.scores["identity"] > found.choice.scores["temperature"]
    assert isinstance(found, Temperature)
    assert choose(["identity", "temperature"], score="brier")(LOGITS, LABELS).choice.chosen == "temperature"


def test_a_method_that_cannot_be_fitted_is_passed_over_with_its_reason():
    def broken(logits, labels):
        raise ValueError("it needs 10**9 rows")

    found = choose({"broken": broken, "temperature": Temperature.fit})(LOGITS, LABELS)
    assert found.choice.chosen == "temperature"
    assert found.choice.reasons == {"broken": "it needs 10**9 rows"}
    assert found.choice.scores["broken"] == float("inf")
    with pytest.raises(ValueError, match="none of the methods could be fitted"):
        choose({"broken": broken})(LOGITS, LABELS)


def test_grid_keeps_the_option_of_least_loss():
    found = grid("matrix", penalty=[1e-6, 1e3])(LOGITS, LABELS)
    assert found.choice.chosen == "{'penalty': 1e-06}"
    assert len(grid("temperature_ece", temperatures=[[1.0], [2.0]], bins=[10, 15])(LOGITS, LABELS).choice.scores) == 4


def test_refinement_adds_up():
    for score in ("nll", "brier"):
        parts = refinement(LOGITS, LABELS, score=score)
        assert parts.calibration + parts.refinement == pytest.approx(parts.score)
        assert parts.calibration > 0
        assert parts.score == pytest.approx(metrics.METRICS[score](LOGITS, LABELS))


def test_refusals():
    with pytest.raises(ValueError, match='score must be "nll" or "brier"'):
        choose(["temperature"], score="ece")
    with pytest.raises(KeyError, match="no method is called 'nonsense'"):
        chain("nonsense")
    with pytest.raises(ValueError, match="logits must have at least 10 rows, got 4"):
        choose(["temperature"])(LOGITS[:4], LABELS[:4])


def nearly_right(n, classes, wrong):
    """Logits of a network that is sure of every row, and labels of which so many are not its own."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(n, classes))
    z[np.arange(n), np.arange(n) % classes] += 10
    y = z.argmax(axis=1)
    y[rng.permutation(n)[:wrong]] += 1
    return z, y % classes


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_refinement_rises_a_little_with_every_error(classes, kind):
    n = 360
    scores = []
    for wrong in (0, 1, 2, 3, 5):
        z, y = nearly_right(n, classes, wrong)
        scores.append(refinement(z.astype(kind), y).refinement)
    assert np.isfinite(scores).all()
    assert (np.diff(scores) > 0).all()
    assert 0 < scores[0] < 0.005
    assert scores[1] < 0.1
    # The one error is held out once, and its fold's temperature was fitted to rows that are all right.
    assert scores[1] > np.log((0.8 * n + 1) * classes) / n


def test_refinement_mixes_every_fold_with_the_uniform_distribution():
    z, y = calibrated(203, 3, temperature=2.0)
    mixed = np.empty(len(y))
    pair = torch.from_numpy(z), torch.from_numpy(y)
    for others, fold in (tuple(mask.numpy() for mask in masks) for masks in k_fold(*pair, 5)):
        scaled = z[fold].astype(float) / float(Temperature.fit(z[others], y[others]).temperature)
        q = np.exp(scaled) / np.exp(scaled).sum(axis=1, keepdims=True)
        n = others.sum()
        mixed[fold] = (n * q[np.arange(len(q)), y[fold]] + 1 / 3) / (n + 1)
    assert refinement(z, y).refinement == pytest.approx(-np.log(mixed).mean(), rel=1e-9)


def test_refinement_of_rows_that_lack_options():
    z, y = nearly_right(100, 4, 0)
    z[::2, 3] = -np.inf
    each = [-np.log((80 + 1 / options) / 81) for options in (3, 4)]  # all are right, and folds have 20 rows
    assert refinement(z, y).refinement == pytest.approx(np.mean(each), rel=1e-9)


def test_a_calibrator_of_an_event_takes_the_logits_it_was_fitted_to(tmp_path):
    for event, classes in ((2, 4), (0, 2), (1, 2)):
        z, y = calibrated(300, classes, temperature=2.0)
        for method in ("beta", "vector"):
            calibrator = for_event(method, event)(z, y)
            pair, hits = as_event(z, y, event)
            expected = METHODS[method](pair, hits)(pair)
            np.testing.assert_allclose(calibrator(z), expected, atol=1e-12)
            np.testing.assert_allclose(calibrator(torch.tensor(z)).numpy(), expected, atol=1e-12)
            if classes > 2:
                np.testing.assert_allclose(calibrator(event_logits(z, event)), expected, atol=1e-12)
            save(calibrator, tmp_path / "event.safetensors")
            np.testing.assert_array_equal(load(tmp_path / "event.safetensors")(z), calibrator(z))
