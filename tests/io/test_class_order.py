"""A calibrator from a file is not applied to predictions whose classes come in another order or under other names."""

import re
from pathlib import Path

import numpy as np
import pytest

from trueup import load, save
from trueup.calibrators import Vector
from trueup.io import open_predictions, read_header
from trueup.io.rewrite import rewrite

CALIBRATOR = Vector([2.0, 1.0, 1.0], [0.0, 1.0, -1.0])
NUMBERED = ("logit_0", "logit_1", "logit_2")
TURNED = ("logit_1", "logit_0", "logit_2")
NAMED = ("cat", "dog", "bee")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fitted.safetensors"


def check(path, fitted, given):
    save(CALIBRATOR, path, class_names=fitted, n_classes=3)
    read_header(path).check_class_names(given, "new.csv")


@pytest.mark.parametrize(
    ("fitted", "given"),
    [
        (NAMED, NAMED),
        (NAMED, list(NAMED)),
        (NAMED, None),
        (None, NAMED),
        (None, None),
        (NAMED, NUMBERED),
        (NUMBERED, NAMED),
        (NUMBERED, None),
        (None, NUMBERED),
        (("0", "1", "2"), NUMBERED),
        (TURNED, TURNED),
        (("2017", "2018", "2019"), ("2017", "2018", "2019")),
    ],
)
def test_the_same_classes_are_accepted(path, fitted, given):
    check(path, fitted, given)


@pytest.mark.parametrize(
    ("fitted", "given"),
    [
        (NAMED, ("dog", "cat", "bee")),
        (NAMED, ("cat", "dog", "wasp")),
        (NAMED, ("cat", "dog")),
        (NAMED, TURNED),
        (TURNED, NAMED),
        (None, TURNED),
        (TURNED, None),
        (NUMBERED, TURNED),
    ],
)
def test_other_orders_and_names_are_rejected_with_the_expected_order(path, fitted, given):
    expected = ", ".join(fitted) if fitted else "unnamed"
    with pytest.raises(ValueError, match=re.escape(f"classes must be those of the fit in their order ({expected})")):
        check(path, fitted, given)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_columns_of_classes_keep_their_names(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    Path(tmp_path / "a.csv").write_text("id,cat,dog,bee,label\nx,1.0,0.5,,0\ny,0.0,2.0,1.0,1\n")
    target = tmp_path / f"out{suffix}"
    with open_predictions(tmp_path / "a.csv", logits=NAMED) as file:
        assert rewrite(file, target, CALIBRATOR) == (2, 3)
    after = load(target, logits=NAMED)
    np.testing.assert_allclose(after.logits, CALIBRATOR(load(tmp_path / "a.csv", logits=NAMED).logits))
    assert after.labels.tolist() == [0, 1]
    with open_predictions(target, logits=NAMED) as file:
        assert set(file.source.columns) == {"id", *NAMED, "label"}
