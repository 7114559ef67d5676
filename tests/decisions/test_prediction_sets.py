"""Prediction sets: coverage by simulation, a slow reference, files, export, and input people have."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup import load, save
from trueup._core.errors import InputError
from trueup.decisions import PredictionSets, Raps, evaluate_sets
from trueup.decisions.prediction_sets import conformal_quantile
from trueup.io import load_artifact
from trueup.models import as_module

RULES = [
    {"score": "lac"},
    {"score": "aps", "seed": None},
    {"score": "aps", "seed": 0},
    {"score": "raps", "penalty": 0.05, "rank": 1, "seed": None},
    {"score": "raps", "penalty": 0.01, "rank": 2, "seed": 0},
]


def options_of(rule):
    """As `fit` takes them."""
    extra = {"score": Raps(rule["penalty"], rule["rank"])} if rule["score"] == "raps" else {"score": rule["score"]}
    return extra | {"seed": rule.get("seed")}


def draw(n, seed, classes=5, scale=2.0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * scale
    return z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


def slow_score(p, k, rule, u):
    """Of class k, by the definition."""
    if rule["score"] == "lac":
        return 1 - p[k]
    above = [j for j in range(len(p)) if p[j] >= p[k]]
    penalty = rule.get("penalty", 0) * max(0, len(above) - rule.get("rank", 0))
    return sum(p[j] for j in above) - u * p[k] + penalty


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 80), st.sampled_from(RULES), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 3.0]), st.booleans()
)
def test_sets_are_the_classes_within_the_limit(classes, rule, seed, scale, ties):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(30, classes)) * scale
    z = z.round() if ties else z
    u = rng.random(30) if rule.get("seed") is not None else np.zeros(30)
    limit = rng.uniform(0.3, 1.1)
    made = PredictionSets(rule["score"], limit - 1, 0.9, rule.get("penalty", 0), rule.get("rank", 0))
    chosen = made(z, uniform=u)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    for i in range(30):
        for k in range(classes):
            score = slow_score(p[i], k, rule, u[i])
            if abs(score - limit) > 1e-9:
                assert chosen[i, k] == (score <= limit)


@pytest.mark.parametrize("rule", RULES)
def test_coverage_is_what_was_asked_for(rule):
    z, y = draw(6000, 0)
    own = PredictionSets(rule["score"], math.inf, 0.9, **{k: v for k, v in rule.items() if k != "score"}).label_scores(
        z, y
    )
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(200):
        order = rng.permutation(6000)
        covered.append((own[order[200:]] <= conformal_quantile(own[order[:200]], 0.8)).mean())
    target = math.ceil(201 * 0.8) / 201
    assert abs(np.mean(covered) - target) < 4 * np.std(covered) / math.sqrt(200)


@pytest.mark.parametrize("rule", RULES)
def test_the_fit_covers_as_its_own_scores_say(rule):
    z, y = draw(2000, 2)
    made = PredictionSets.fit(z[:1000], y[:1000], coverage=0.85, **options_of(rule))
    chosen = made(z[1000:])
    held = chosen[np.arange(1000), y[1000:]]
    assert (held == (made.label_scores(z[1000:], y[1000:]) <= float(made.quantile))).all()
    assert 0.8 < held.mean() < 0.9
    assert (made(torch.from_numpy(z[1000:])).numpy() == chosen).all()
    assert (made(z[1500:]) == chosen[500:]).all()  # whatever stands beside a row
    assert ((made.all_scores(z[1000:]) <= made.quantile + 1e-12 * abs(made.quantile)) == chosen).all()
    assert (as_module(made)(torch.from_numpy(z[1000:])).numpy() == chosen).all()


def test_each_class_and_each_group_is_covered():
    rng = np.random.default_rng(3)
    z, y = draw(6000, 3)
    z[:, 4] -= 3  # a class that the network underrates
    by_class = PredictionSets.fit(z[:3000], y[:3000], groups="class")
    covered = [one.value for one in evaluate_sets(by_class(z[3000:]), y[3000:]).by_class]
    assert min(covered) > 0.86
    group = rng.integers(0, 2, 6000)
    z[group == 1] *= 4
    by_group = PredictionSets.fit(z[:3000], y[:3000], groups=group[:3000])
    chosen = by_group(z[3000:], groups=group[3000:])
    held = chosen[np.arange(3000), y[3000:]]
    assert [abs(held[group[3000:] == g].mean() - 0.9) < 0.03 for g in (0, 1)] == [True, True]
    assert by_group(z[:1], groups=[7]).all()
    with pytest.raises(ValueError, match="groups must be given"):
        by_group(z)


def test_a_rare_class_is_in_every_set():
    z, y = draw(500, 4)
    y = np.where(y == 4, 0, y)
    y[:3] = 4
    with pytest.warns(UserWarning, match="class 4 has fewer than 9 rows: it is in every set"):
        made = PredictionSets.fit(z, y, groups="class")
    assert math.isinf(made.quantile[4])
    assert made(z)[:, 4].all()
    assert PredictionSets.fit(z[:5], y[:5])(z).all()  # too few rows for any limit


def test_weights_cover_under_a_shift_of_the_inputs():
    rng = np.random.default_rng(5)
    x = rng.random(12000)
    sharp = 1 + 3 * x[:, None]  # hard where x is small
    z = rng.normal(size=(12000, 5)) * sharp
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    z = z * np.where(x < 0.5, 3.0, 1.0)[:, None]  # and too sure there
    target = np.flatnonzero(rng.random(12000) < np.where(x < 0.5, 1.0, 0.1))
    cal, new = np.arange(6000), target[target >= 6000]
    weight = np.where(x < 0.5, 1.0, 0.1)
    plain = PredictionSets.fit(z[cal], y[cal], score="lac")
    shifted = PredictionSets.fit(z[cal], y[cal], score="lac", sample_weight=weight[cal])
    before = plain(z[new])[np.arange(len(new)), y[new]].mean()
    after = shifted(z[new], sample_weight=weight[new])[np.arange(len(new)), y[new]].mean()
    assert before < 0.88
    assert abs(after - 0.9) < 0.02
    equal = PredictionSets.fit(z[cal], y[cal], score="lac", sample_weight=np.ones(6000))
    assert (equal(z[new], sample_weight=np.ones(len(new))) == plain(z[new])).all()
    with pytest.raises(ValueError, match="sample_weight must be given"):
        shifted(z)


def test_raps_chooses_its_penalty_on_other_rows():
    z, y = draw(3000, 6, classes=40)
    made = PredictionSets.fit(z, y, score="raps")
    assert made.penalty > 0
    assert made.rank >= 1
    plain = PredictionSets.fit(z, y, score="aps")
    assert made(z).sum() <= 1.05 * plain(z).sum()


def test_a_file_holds_the_rule(tmp_path):
    z, y = draw(400, 7)
    for options in ({}, {"groups": "class"}, {"groups": np.where(y > 1, "a", "b")}, {"sample_weight": np.ones(400)}):
        made = PredictionSets.fit(z, y, **options)
        save(made, tmp_path / "sets.safetensors", summary={"fitted to": "val"})
        loaded = load(tmp_path / "sets.safetensors")
        extra = {name: x for name, x in options.items() if not isinstance(x, str)}
        assert (loaded(z, **extra) == made(z, **extra)).all()
    with pytest.raises(InputError, match="reads a rule of prediction sets"):
        load_artifact(tmp_path / "sets.safetensors", "calibrator")


def test_it_exports():
    z, y = draw(300, 8)
    for rule in RULES[:2]:
        made = PredictionSets.fit(z, y, **options_of(rule))
        example = torch.from_numpy(z[:7])
        exported = torch.export.export(as_module(made), (example,)).module()
        assert (exported(example) == made(example)).all()


def test_a_set_of_onnx_is_the_same(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    z, y = draw(300, 8)
    made = PredictionSets.fit(z, y, score=Raps(0.05, 1), seed=None)
    z = draw(300, 9)[0].astype(np.float32)  # other rows: one of those may lie on the limit itself
    z[::2, 1] = z[::2, 0]
    z[::3, 2] = -np.inf
    path = tmp_path / "sets.onnx"
    rows = {"array": {0: torch.export.Dim("rows")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch's exporter itself calls old
        torch.onnx.export(
            as_module(made), (torch.from_numpy(z[:5]),), path, dynamo=True, dynamic_shapes=rows, verbose=False
        )
    session = onnxruntime.InferenceSession(path)
    (sets,) = session.run(None, {session.get_inputs()[0].name: z})
    assert (sets == made(z)).all()


def test_diagnostics_are_plain_data():
    z, y = draw(500, 9)
    scores = evaluate_sets(PredictionSets.fit(z, y)(z), y)
    assert scores.coverage.low < scores.coverage.value < scores.coverage.high
    assert sum(one.rows for one in scores.by_size.values()) == 500
    json.dumps(scores.to_dict(), allow_nan=False)
    with pytest.raises(InputError, match="sets must be booleans"):
        evaluate_sets(z, y)
    with pytest.raises(InputError, match="score must be lac, aps or raps"):
        PredictionSets.fit(z, y, score="top")
    with pytest.raises(InputError, match="coverage must lie"):
        PredictionSets.fit(z, y, coverage=1)


def test_absent_options_are_in_no_set_and_clusters_count_once():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(600, 5)) * 2
    z[::2, 3:] = -np.inf
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    for score in ("lac", "aps", "raps"):
        for limit in (PredictionSets(score, np.inf, 0.9), PredictionSets.fit(z, y, score=score, groups="class")):
            assert not limit(z)[np.isinf(z)].any()
    assert PredictionSets("aps", np.inf, 0.9)(z)[~np.isinf(z)].all()
    each = PredictionSets.fit(z, y, clusters=np.arange(600))
    assert each.quantile == PredictionSets.fit(z, y).quantile
    few = PredictionSets.fit(
        np.repeat(z[:40], 15, axis=0), np.repeat(y[:40], 15), clusters=np.repeat(np.arange(40), 15)
    )
    assert few.quantile == PredictionSets.fit(z[:40], y[:40]).quantile


def test_what_a_rule_cannot_take_is_said():
    z, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    with pytest.raises(InputError, match="have the 3 classes of the rule, got 4"):
        PredictionSets.fit(z, y, groups="class")(np.zeros((5, 4)))
    with pytest.raises(InputError, match="sample_weight must be non-negative"):
        PredictionSets.fit(z, y, sample_weight=np.ones(60))(z, sample_weight=-np.ones(60))
    with pytest.raises(InputError, match="groups must have a value in every row"):
        PredictionSets.fit(z, y, groups=np.array(["a", float("nan")] * 30, dtype=object))
    with pytest.raises(ValueError, match="at least 1 row"):
        evaluate_sets(np.zeros((0, 3), bool), np.zeros(0, int))
    with pytest.raises(ValueError, match="seed=None"):
        torch.export.export(as_module(PredictionSets.fit(z, y)), (torch.from_numpy(z),))


def test_a_class_or_group_with_too_few_rows_is_named():
    z = np.random.default_rng(0).normal(size=(203, 3))
    y = np.repeat([0, 1, 2], [100, 100, 3])
    with pytest.warns(UserWarning, match="class 2 has fewer than 9 rows: it is in every set"):
        rule = PredictionSets.fit(z, y, coverage=0.9, groups="class")
    assert rule(z)[:, 2].all()
    with pytest.warns(UserWarning, match="group rare has fewer than 9 rows: its sets hold every class"):
        rule = PredictionSets.fit(z, y, coverage=0.9, groups=np.where(y == 2, "rare", "common"))
    assert rule(z, groups=np.full(203, "rare")).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PredictionSets.fit(z[:200], y[:200], coverage=0.9, groups=y[:200])
