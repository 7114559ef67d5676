"""Forty ordinary inputs in the functions that people call first: a right answer, or an error with a remedy that works.

Each case is a pair as people have it. `RIGHT` pairs mean the same as the plain arrays, so every function must return
the same numbers. A `REFUSED` pair must raise an error that names its remedy, and the remedy must work.
"""

import re
import warnings

import numpy as np
import pandas as pd
import pytest

import trueup
from trueup.convert import from_log_odds, from_probs, number_labels

RNG = np.random.default_rng(0)
N = 120
Z = RNG.normal(size=(N, 3)) * 2
Y = (Z + RNG.gumbel(size=Z.shape)).argmax(axis=1)
P = np.exp(Z) / np.exp(Z).sum(axis=1, keepdims=True)
INDEX = RNG.permutation(N) + 1000
NAMES = ["ant", "bee", "cat"]
TEXTS = np.array(NAMES)[Y]
RISK = P[:, 1]
HAPPENED = (RNG.random(N) < RISK).astype(int)


def frame(z, **options):
    return pd.DataFrame(z, columns=NAMES[: z.shape[1]], **options)


FUNCTIONS = {
    "evaluate": lambda z, y: trueup.evaluate(z, y, metrics=["nll", "ece"], n_resamples=10)["nll"].value,
    "compare": lambda z, y: trueup.compare(a=(z, y), metrics=["nll"], n_resamples=10)["a", "nll"].value,
    "nll": trueup.METRICS["nll"],
    "ece": trueup.METRICS["ece"],
    "temperature": lambda z, y: trueup.fit(z, y, "temperature").temperature,
    "histogram": lambda z, y: np.asarray(trueup.fit(z, y, "histogram")(Z[:, : np.shape(z)[1]])),
    "isotonic": lambda z, y: np.asarray(trueup.fit(z, y, "isotonic")(Z[:, : np.shape(z)[1]])),
    "monitor": lambda z, y: trueup.Monitor(max([2, *np.shape(z)[1:2]])).update(z, y).accuracy,
    "threshold": lambda z, y: trueup.decisions.threshold(z, y, max_risk=0.4).bound,
    "tally": lambda z, y: trueup.metrics.Tally.of(z, y).score_bins.ece(),
}

RIGHT = {
    "lists": (Z.tolist(), Y.tolist()),
    "float32 lists of tuples": ([tuple(row) for row in Z], tuple(Y)),
    "data frame and series": (frame(Z), pd.Series(Y)),
    "shuffled index": (frame(Z, index=INDEX), pd.Series(Y, index=INDEX)),
    "text index": (frame(Z, index=[f"r{i}" for i in INDEX]), pd.Series(Y, index=INDEX)),
    "nullable types": (frame(Z).convert_dtypes(), pd.Series(Y).convert_dtypes()),
    "object columns": (frame(Z).astype(object), pd.Series(Y, dtype=object)),
    "Fortran order": (np.asfortranarray(Z), Y),
    "every second row of a larger array": (np.repeat(Z, 2, axis=0)[::2], np.repeat(Y, 2)[::2]),
    "big-endian": (Z.astype(">f8"), Y.astype(">i4")),
    "read-only": (np.frombuffer(Z.tobytes()).reshape(Z.shape), Y),
    "uint8 labels": (Z, Y.astype(np.uint8)),
    "whole float labels": (Z, Y.astype(float)),
    "float32 labels": (Z, Y.astype(np.float32)),
    "series of whole floats": (frame(Z), pd.Series(Y.astype(float), index=INDEX)),
    "numbered categories": (Z, number_labels(pd.Categorical(TEXTS), NAMES)),
    "named labels": (Z, number_labels(TEXTS, NAMES)),
    "series of names": (Z, number_labels(pd.Series(TEXTS, index=INDEX), NAMES)),
    "list of names": (Z, number_labels(TEXTS.tolist(), NAMES)),
    "shifted logits": (Z + 5.0, Y),
    "log-probabilities": (np.log(P), Y),
    "probabilities": (from_probs(P), Y),
    "probabilities of a data frame": (from_probs(frame(P)), Y),
    "float32 probabilities": (from_probs(P.astype(np.float32)), Y),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", RIGHT)
def test_ordinary_inputs_give_the_numbers_of_plain_arrays(case, function):
    expected = FUNCTIONS[function](Z, Y)
    tolerance = 1e-4 if "float32" in case else 1e-6
    np.testing.assert_allclose(FUNCTIONS[function](*RIGHT[case]), expected, rtol=tolerance, atol=tolerance)


REFUSED = {
    "probabilities as logits": (P, Y, "from_probs", lambda z, y: (from_probs(z), y)),
    "probabilities insisted on": (P, Y, "subtract 1", lambda z, y: (z - 1, y)),
    "per cent as logits": (100 * P, Y, "from_probs", lambda z, y: (from_probs(z / 100), y)),
    "labels from 1": (Z, Y + 1, "subtract 1 if classes are numbered from 1", lambda z, y: (z, y - 1)),
    "labels of -1 and 1": (
        Z[:, :2], np.where(HAPPENED, 1, -1), "(labels > 0).astype(int)", lambda z, y: (z, (y > 0).astype(int))
    ),
    "texts": (Z, TEXTS, "convert.number_labels(labels, class_names)", lambda z, y: (z, number_labels(y, NAMES))),
    "list of texts": (Z, TEXTS.tolist(), "number_labels", lambda z, y: (z, number_labels(y, NAMES))),
    "categories": (Z, pd.Series(pd.Categorical(TEXTS)), "number_labels", lambda z, y: (z, number_labels(y, NAMES))),
    "column of labels": (Z, Y[:, None], "labels.squeeze(1)", lambda z, y: (z, y.squeeze(1))),
    "one-hot labels": (Z, np.eye(3)[Y], "labels.argmax(axis=1)", lambda z, y: (z, y.argmax(axis=1))),
    "missing labels": (
        Z, np.where(Y == 0, np.nan, Y), "leave out those rows", lambda z, y: (z[y == y], y[y == y])
    ),
    "missing texts": (
        Z, pd.Series(np.where(Y == 0, None, TEXTS)), "leave out the",
        lambda z, y: (z[y.notna()], number_labels(y[y.notna()], NAMES)),
    ),
    "ignored labels": (Z, np.where(Y == 0, -100, Y), "flatten leaves out", trueup.convert.flatten),
    "whole-number logits": ((10 * Z).astype(int), Y, ".astype(float)", lambda z, y: (z.astype(float), y)),
    "transposed": (Z.T, Y, "transpose", lambda z, y: (z.T, y)),
    "swapped": (Y, Z, "come first", lambda z, y: (y, z)),
    "a column of dates": (
        frame(Z).assign(day=pd.Timestamp("2020-01-01")), Y, "leave out that column", lambda z, y: (z[NAMES], y)
    ),
    "a column of truth values": (
        frame(Z).assign(seen=True), Y, "leave out that column", lambda z, y: (z[NAMES], y)
    ),
    "log-odds": (np.log(RISK / (1 - RISK)), HAPPENED, "from_log_odds", lambda z, y: (from_log_odds(z), y)),
    "risk": (RISK, HAPPENED, "from_probs", lambda z, y: (from_probs(z), y)),
    "column of risks": (RISK[:, None], HAPPENED, "from_probs", lambda z, y: (from_probs(z), y)),
    "images": (
        np.zeros((N, 3, 2, 2)) + Z[:, :, None, None], np.repeat(Y, 4).reshape(N, 2, 2), "flatten",
        lambda z, y: trueup.convert.flatten(z, y, class_axis="first"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", REFUSED)
def test_ambiguous_inputs_are_rejected_with_a_remedy_that_works(case, function):
    logits, labels, remedy, apply = REFUSED[case]
    if (case, function) == ("one-hot labels", "nll"):
        pytest.skip("one-hot labels are soft labels of the log-loss")
    with pytest.raises(ValueError, match=re.escape(remedy)):
        FUNCTIONS[function](logits, labels)
    assert np.isfinite(FUNCTIONS[function](*apply(logits, labels))).all()


def test_several_labels_per_row_are_not_taken_for_one_hot_labels():
    labels = (RNG.random(Z.shape) < 1 / (1 + np.exp(-Z))).astype(int)
    with pytest.raises(ValueError, match=r"metrics\.evaluate_labels and calibrators\.per_label"):
        trueup.evaluate(Z, labels)
    assert np.isfinite(trueup.metrics.evaluate_labels(Z, labels, n_resamples=10).macro["auroc"].value)
    assert trueup.calibrators.per_label("platt")(Z, labels)(Z).shape == Z.shape


@pytest.mark.parametrize(
    ("probs", "remedy", "apply"),
    [
        (100 * P, "divide per cent by 100", lambda p: p / 100),
        (100 * RISK, "divide per cent by 100", lambda p: p / 100),
        (Z, "logits need no from_probs", lambda p: P),
    ],
)
def test_probabilities_in_per_cent_are_rejected(probs, remedy, apply):
    with pytest.raises(ValueError, match=remedy):
        from_probs(probs)
    assert len(from_probs(apply(probs))) == N


NAMED_FUNCTIONS = {
    "evaluate": lambda y: trueup.evaluate(Z, y, class_names=NAMES, metrics=["nll"], n_resamples=10)["nll"].value,
    "event": lambda y: trueup.evaluate(
        Z, y, event="bee", class_names=NAMES, metrics=["nll"], n_resamples=10
    )["nll"].value,
    "compare": lambda y: trueup.compare(
        a=(Z, y), class_names=NAMES, metrics=["nll"], n_resamples=10
    )["a", "nll"].value,
    "fit": lambda y: trueup.fit(Z, y, "temperature", class_names=NAMES).temperature,
    "as_event": lambda y: trueup.convert.as_event(Z, y, "bee", class_names=NAMES)[1],
}  # fmt: skip


@pytest.mark.parametrize("function", NAMED_FUNCTIONS)
def test_labels_may_be_names_where_class_names_are_given(function):
    expected = NAMED_FUNCTIONS[function](Y)
    for labels in (TEXTS, TEXTS.tolist(), pd.Series(TEXTS, index=INDEX), pd.Categorical(TEXTS)):
        np.testing.assert_array_equal(NAMED_FUNCTIONS[function](labels), expected)
    with pytest.raises(ValueError, match="'wasp' in row 0"):
        number_labels(["wasp", "ant"], NAMES)


def test_weights_groups_and_clusters_may_be_series_and_frames():
    weight, region = RNG.random(N), np.where(np.arange(N) % 3, "eu", "us")
    plain = trueup.evaluate(Z, Y, sample_weight=weight, groups={"region": region}, clusters=INDEX % 20, n_resamples=10)
    columns = pd.DataFrame({"region": region}, index=INDEX)
    for clusters in (pd.Series(INDEX % 20, index=INDEX), pd.DataFrame({"patient": INDEX % 20})):
        scores = trueup.evaluate(
            frame(Z, index=INDEX), pd.Series(Y, index=INDEX), groups=columns, clusters=clusters, n_resamples=10,
            sample_weight=pd.Series(weight, index=INDEX),
        )  # fmt: skip
        assert scores["nll"] == plain["nll"]
        assert str(scores.groups) == str(plain.groups)


@pytest.mark.parametrize("method", sorted(trueup.METHODS))
def test_every_method_accepts_data_frames_and_series_with_any_index(method):
    if method in ("residual", "order_invariant"):
        pytest.importorskip("torch")
    z, y = frame(Z, index=INDEX), pd.Series(Y, index=INDEX)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = trueup.METHODS[method](z, y)(z)
        np.testing.assert_allclose(np.asarray(after), trueup.METHODS[method](Z, Y)(Z), atol=1e-5)
