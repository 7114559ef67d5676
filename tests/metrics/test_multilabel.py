"""Labels by the dozen: events, metrics and fits."""

import numpy as np
import pytest
from scipy.special import expit, logit

import trueup
from optional import torch
from trueup import metrics
from trueup._core.errors import InputError
from trueup.calibrators import PerLabel, per_label
from trueup.metrics import evaluate_labels


def tags(n=400, labels=3, *, slopes=1.0, seed=0):
    """Log-odds and targets drawn from σ(slope · log-odds)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, labels)) * 1.5
    return x, (rng.random(x.shape) < expit(x * np.asarray(slopes))).astype(int)


def test_every_label_is_an_event():
    x = np.array([[2.0, -1.0], [0.5, 3.0], [0.0, -2.0]])
    y = np.array([[1, 0], [-100, 1], [0, -100]])
    table = trueup.io.from_multilabel(x, y, class_names=["cat", "dog"])
    assert expit(table.logits[:, 1] - table.logits[:, 0]) == pytest.approx(expit([2.0, -1.0, 3.0, 0.0]))
    assert table.labels.tolist() == [1, 0, 1, 0]
    assert table.groups["label"].tolist() == ["cat", "dog", "dog", "cat"]
    assert table.clusters.tolist() == [0, 0, 1, 2]
    float_targets = np.where(y < 0, np.nan, y)
    assert trueup.io.from_multilabel(x, float_targets).labels.tolist() == [1, 0, 1, 0]
    in_torch = trueup.io.from_multilabel(torch.from_numpy(x), torch.from_numpy(y))
    assert torch.equal(in_torch.logits, torch.from_numpy(table.logits))
    by_probs = trueup.io.from_multilabel(expit(x), y, probs=True)
    assert logit(np.exp(by_probs.logits[:, 1])) == pytest.approx([2.0, -1.0, 3.0, 0.0])


def test_micro_macro_and_each_label():
    x, y = tags(labels=4, slopes=[1.0, 0.5, 1.0, 2.0])
    y[::7, 1] = -100
    scores = evaluate_labels(x, y, class_names=list("abcd"), n_resamples=200)
    kept = y != -100
    loss = np.logaddexp(0, np.where(y == 1, -x, x))
    assert scores.micro["nll"].value == pytest.approx(loss[kept].mean())
    each = [loss[kept[:, k], k].mean() for k in range(4)]
    assert [scores.labels[name]["nll"].value for name in "abcd"] == pytest.approx(each)
    assert scores.macro["nll"].value == pytest.approx(np.mean(each))
    pair = (np.stack([np.zeros(400), x[:, 2]], axis=1), y[:, 2])
    assert scores.labels["c"]["ece"].value == pytest.approx(metrics.ece(*pair))
    assert scores.labels["c"]["ece"].low == pytest.approx(trueup.evaluate(*pair, n_resamples=200)["ece"].low)
    for result in scores.macro.values():
        assert result.low <= result.value + 0.02
        assert result.value <= result.high + 0.02
    assert scores.micro.clusters == 400
    assert "mean (macro)" in str(scores)
    assert scores.to_dict()["macro"]["nll"]["value"] == scores.macro["nll"].value
    assert "<table" in scores._repr_html_()


def test_the_macro_interval_is_that_of_rows():
    """The macro interval is Student's over blocks of rows, and has the nominal coverage."""
    x, y = tags(100_000, seed=99)
    truth = np.logaddexp(0, np.where(y == 1, -x, x)).mean()
    covered = {"nll": 0, "ece": 0}
    for seed in range(16):
        macro = evaluate_labels(*tags(150, 2, seed=seed), n_resamples=20).macro
        covered["nll"] += macro["nll"].low <= truth <= macro["nll"].high
        covered["ece"] += macro["ece"].low == 0  # calibrated
    assert covered["nll"] >= 12
    assert covered["ece"] >= 12


def test_correlated_rows_widen_it():
    x, y = tags(60)
    many, patient = (np.repeat(a, 10, axis=0) for a in (x, y)), np.repeat(np.arange(60), 10)
    x10, y10 = many
    alone, by_row = evaluate_labels(x, y, n_resamples=50), evaluate_labels(x10, y10, n_resamples=50)
    by_patient = evaluate_labels(x10, y10, clusters={"patient": patient}, n_resamples=50)
    for name in ("nll", "auroc"):
        widths = [scores.macro[name].high - scores.macro[name].low for scores in (alone, by_row, by_patient)]
        assert widths[1] < 0.5 * widths[0]
        assert widths[2] == pytest.approx(widths[0], rel=0.15)
    assert by_patient.micro.cluster_name == "patient"


def test_fits_per_label_share_strength_with_few_rows(tmp_path):
    x, y = tags(3000, 3, slopes=[1.0, 0.3, 1.0])
    y[20:, 2] = -100  # twenty rows of the last label
    fitted = per_label("platt")(x, y)
    assert isinstance(fitted, PerLabel)
    new = np.random.default_rng(5).normal(size=(50, 3)) * 1.5
    after = fitted(new)
    assert after[:, 0] == pytest.approx(new[:, 0], abs=0.35)
    assert after[:, 1] == pytest.approx(0.3 * new[:, 1], abs=0.35)
    alone = PerLabel(fitted.calibrator, 3)(new)
    assert np.array_equal(alone, after)
    trueup.save(fitted, tmp_path / "tags.safetensors")
    assert np.array_equal(trueup.load(tmp_path / "tags.safetensors")(new), after)
    in_torch = fitted(torch.from_numpy(new).float())
    assert in_torch.dtype == torch.float32
    assert in_torch.numpy() == pytest.approx(after, abs=1e-5)
    with pytest.raises(ValueError, match="3 classes"):
        fitted(new[:, :2])


def test_bad_input_is_named_in_the_error():
    x, y = tags(10)
    with pytest.raises(InputError, match=r"targets must be 0 or 1, or -100 if unknown, got 2 at \[0, 1\]"):
        trueup.io.from_multilabel(x, np.where(np.arange(30).reshape(10, 3) == 1, 2, y))
    with pytest.raises(InputError, match=r"targets must have the logits' shape \(10, 3\), got \(10,\)"):
        trueup.io.from_multilabel(x, y[:, 0])
    with pytest.raises(InputError, match="class_names must name the 3 labels, got 2 names"):
        trueup.io.from_multilabel(x, y, class_names=["a", "b"])
    with pytest.raises(InputError, match="at least 2 labels"):
        per_label()(x[:, :1], y[:, :1])


def test_another_mark_of_unknown_labels_gets_a_hint():
    with pytest.raises(InputError, match="got -1 at .*; ignore_index names another mark"):
        evaluate_labels(np.zeros((2, 2)), [[0, 1], [-1, 1]])


def test_the_parts_of_a_fit_are_printed_once():
    x = np.random.default_rng(0).normal(size=(200, 2))
    printed = repr(per_label("temperature")(x, (x > 0.3).astype(int)))
    assert printed.count("Temperature(") == 1
    assert printed.count("base=") == printed.count("calibrator=") == 1
