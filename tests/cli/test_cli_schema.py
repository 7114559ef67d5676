"""The JSON of each verb: keys may be added, but none may go or change its kind without a new schema."""

import pytest

import trueup

EVALUATE = {
    "schema": int,
    "verb": str,
    "file": str,
    "split": None,
    "verdict": str,
    "scores": {
        "schema": int,
        "rows": int,
        "n_classes": int,
        "bins": int,
        "level": float,
        "methods": {
            "network": {
                "metrics": {"ece": {"value": float, "low": float, "high": float, "level": float}},
                "test": {"p_value": float, "expected": float},
                "change": {},
            }
        },
    },
}
COMPARE = {
    "schema": int,
    "verb": str,
    "files": list,
    "split": None,
    "scores": {
        "rows": int,
        "methods": {"test": {"change": {}}, "other": {"change": {"ece": {"value": float, "low": float}}}},
    },
}
RANK = {
    "schema": int,
    "verb": str,
    "val": str,
    "test": str,
    "audit": {
        "schema": int,
        "verdict": str,
        "chosen": str,
        "titles": {"raw": str, "temperature": str},
        "losses": {"raw": {"nll": float, "error": float}},
        "seconds": {"temperature": float},
        "failures": {},
        "warnings": {},
        "calibration_rows": int,
        "cross_fitted": bool,
        "n_folds": int,
        "bins": int,
        "seed": int,
        "scores": {
            "schema": int,
            "methods": {"raw": {"metrics": {}}, "temperature": {"change": {"ece": {"value": float, "low": float}}}},
        },
    },
}
FIT = {
    "schema": int,
    "verb": str,
    "file": str,
    "output": str,
    "rows": int,
    "n_classes": int,
    "methods": list,
    "chosen": str,
    "losses": {"identity": float, "bayesian_temperature": float},
    "failures": {},
    "calibrator": str,
}
APPLY = {
    "schema": int,
    "verb": str,
    "calibrator": str,
    "file": str,
    "split": None,
    "output": str,
    "rows": int,
    "n_classes": int,
    "method": str,
    "summary": {"method": str, "fitted to": str, "rows": int},
}

CURVE = {"threshold": list, "coverage": list, "risk": list, "low": list, "high": list}
DECIDE = {
    "schema": int,
    "verb": str,
    "val": str,
    "new": str,
    "output": None,
    "text": str,
    "threshold": {
        "schema": int,
        "promised": bool,
        "threshold": float,
        "risk": str,
        "event": int,
        "max_risk": float,
        "level": float,
        "rows": int,
        "answered": int,
        "coverage": float,
        "review": float,
        "observed": float,
        "bound": float,
        "labels_needed": None,
        "calibrator": None,
        "note": str,
        "curve": CURVE,
    },
    "prior": {
        "schema": int,
        "method": str,
        "rows": int,
        "level": float,
        "p_value": float,
        "prior": list,
        "low": list,
        "high": list,
        "old": list,
    },
    "performance": {
        "schema": int,
        "rows": int,
        "level": float,
        "calibration_rows": int,
        "shifted": bool,
        "metrics": {"accuracy": {"value": float, "low": float, "high": float, "level": float}, "f1": {}, "roc_auc": {}},
    },
    "net_benefit": {
        "schema": int,
        "rows": int,
        "event": int,
        "prevalence": float,
        "level": float,
        "useful": list,
        **dict.fromkeys(("threshold", "value", "low", "high", "treat_all", "gain_low"), list),
    },
}
COVERAGE = {"value": float, "low": float, "high": float, "rows": int}
SETS = {
    "schema": int,
    "verb": str,
    "val": str,
    "test": str,
    "output": None,
    "score": str,
    "coverage": float,
    "rows": int,
    "limit": list,
    "mean_size": float,
    "scores": {
        "schema": int,
        "coverage": COVERAGE,
        "size": float,
        "empty": float,
        "by_size": {"1": COVERAGE},
        "by_class": list,
    },
}
PLAN = {
    "schema": int,
    "verb": str,
    "file": str,
    "split": None,
    "text": str,
    "plan": {
        "schema": int,
        "detectable": {"rows": int, "error": float, "overconfident": float, "underconfident": float, "power": float},
        "rows_to_detect": None,
        "error": None,
        "rows_for_ece": int,
        "precision": float,
        "rows_for_promise": int,
        "promise": {"max_risk": float, "coverage": None, "level": float},
        "rows_for_comparison": None,
        "difference": None,
    },
}
MONITOR = {
    "schema": int,
    "verb": str,
    "files": list,
    "state": None,
    "status": {
        "rows": int,
        "accuracy": float,
        "evidence": float,
        "p_value": float,
        "alarm": None,
        "unlabelled": None,
        "promise": {
            **dict.fromkeys(("threshold", "max_risk", "level", "coverage", "observed", "low", "high"), float),
            "risk": str,
            "answered": int,
            "wrong": int,
            "evidence": float,
            "broken": bool,
            "text": str,
        },
    },
}


def check(found, wanted, where=""):
    if wanted is None:
        assert found is None, where
    elif isinstance(wanted, type):
        assert type(found) is wanted, where
    else:
        for key, kind in wanted.items():
            assert key in found, f"{where}.{key}"
            check(found[key], kind, f"{where}.{key}")


def test_the_schema_of_each_verb(folder, asked):
    logits, labels = trueup.load("test.npz")
    trueup.save((logits / 3, labels), "other.npz")
    trueup.save(trueup.load("val.npz"), "same.npz")
    fitted = ("fit", "val.npz", "-o", "cal.safetensors")
    for words, wanted in (
        (("evaluate", "test.npz"), EVALUATE),
        (("compare", "test.npz", "other.npz"), COMPARE),
        (("rank", "val.npz", "test.npz", "-m", "temperature"), RANK),
        (fitted, FIT),
        (("apply", "cal.safetensors", "test.npz", "-o", "after.npz"), APPLY),
        (("decide", "val.npz", "same.npz", "--event", "1", "--max-risk", "0.6"), DECIDE),
        (("sets", "val.npz", "test.npz"), SETS),
        (("plan", "val.npz", "--precision", "0.05", "--max-risk", "0.6"), PLAN),
        (("monitor", "after.npz", "--threshold", "0.3", "--max-risk", "0.9"), MONITOR),
    ):
        found = asked(*words)
        check(found, wanted, words[0])
        assert set(found) == {*wanted, "warnings"}
        assert found["warnings"] == []
        assert (found["schema"], found["verb"]) == (1, words[0])


def test_the_check_can_fail():
    with pytest.raises(AssertionError, match=r"x\.rows"):
        check({}, {"rows": int}, "x")
    with pytest.raises(AssertionError, match=r"x\.rows"):
        check({"rows": 1.0}, {"rows": int}, "x")
