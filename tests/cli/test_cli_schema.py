"""The JSON of each verb: keys may be added, but none may go or change its kind without a new schema."""

import pytest

EVALUATE = {
    "schema": int,
    "verb": str,
    "file": str,
    "split": None,
    "verdict": str,
    "scores": {
        "schema": int,
        "rows": int,
        "classes": int,
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
        "folds": int,
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
    "classes": int,
    "methods": list,
    "chosen": str,
    "losses": {"identity": float, "temperature": float},
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
    "classes": int,
    "method": str,
    "summary": {"method": str, "fitted to": str, "rows": int},
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
    fitted = ("fit", "val.npz", "-o", "cal.safetensors")
    for words, wanted in (
        (("evaluate", "test.npz"), EVALUATE),
        (("compare", "val.npz", "test.npz", "-m", "temperature"), COMPARE),
        (fitted, FIT),
        (("apply", "cal.safetensors", "test.npz", "-o", "after.npz"), APPLY),
    ):
        found = asked(*words)
        check(found, wanted, words[0])
        assert set(found) == set(wanted)
        assert (found["schema"], found["verb"]) == (1, words[0])


def test_the_check_can_fail():
    with pytest.raises(AssertionError, match=r"x\.rows"):
        check({}, {"rows": int}, "x")
    with pytest.raises(AssertionError, match=r"x\.rows"):
        check({"rows": 1.0}, {"rows": int}, "x")
