"""fit and apply."""

from pathlib import Path

import numpy as np
import pytest

import trueup
from trueup.io import read_header


def test_fit_saves_what_the_library_fits(folder, command):
    out = command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors").stdout
    wanted = trueup.METHODS["temperature"](*trueup.load("val.npz"))
    assert out == f"{wanted!r}\n\nWritten: cal.safetensors\n"
    assert trueup.load("cal.safetensors").config() == wanted.config()
    told = read_header("cal.safetensors")
    assert told.n_classes == 3
    assert told.summary == {"method": "temperature", "fitted to": "val.npz", "rows": 300}


def test_of_a_file_with_halves_val_is_fitted_to(folder, asked):
    one = asked("fit", "both.npz", "-m", "temperature", "-o", "one.safetensors")
    other = asked("fit", "val.npz", "-m", "temperature", "-o", "other.safetensors")
    third = asked("fit", "both.npz", "-m", "temperature", "-o", "third.safetensors", "--split", "test")
    assert one["calibrator"] == other["calibrator"] != third["calibrator"]


def test_cross_validation_chooses_unless_told(folder, command, asked):
    out = command("fit", "val.npz", "-o", "cal.safetensors").stdout
    assert "cross-validated NLL" in out
    chosen = (
        "Chosen: bayesian_temperature. Bayesian temperature scaling was chosen alone. Its log-loss on held-out rows is"
    )
    assert chosen in " ".join(out.split())
    assert "Mixture(14 temperatures from " in out  # not one a line
    found = asked("fit", "val.npz", "-m", "identity", "-m", "vector", "-o", "cal.safetensors")
    assert list(found["losses"]) == ["identity", "vector"]
    assert found["chosen"] == "vector"
    assert found["losses"]["vector"] < found["losses"]["identity"]


def test_apply_calibrates_and_keeps_the_labels(folder, command):
    command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors")
    out = command("apply", "cal.safetensors", "test.npz", "-o", "after.csv").stdout
    assert out == "Temperature on 400 rows of 3 classes\n\nWritten: after.csv\n"
    before, after = trueup.load("test.npz"), trueup.load("after.csv")
    wanted = trueup.load("cal.safetensors")(before.logits)
    assert np.array_equal(after.logits.astype(np.float32), wanted)
    assert np.array_equal(after.labels, before.labels)


def test_apply_takes_a_half(folder, command):
    command("fit", "both.npz", "-m", "temperature", "-o", "cal.safetensors")
    command("apply", "cal.safetensors", "both.npz", "--split", "test", "-o", "one.npz")
    command("apply", "cal.safetensors", "test.npz", "-o", "two.npz")
    assert np.array_equal(trueup.load("one.npz").logits, trueup.load("two.npz").logits)


def test_quiet_prints_nothing(folder, command):
    assert command("fit", "val.npz", "-m", "vector", "-o", "cal.safetensors", "-q").output == ""
    assert command("apply", "cal.safetensors", "test.npz", "-o", "after.npz", "-q").output == ""


def test_another_number_of_classes_is_refused(folder, command):
    command("fit", "val.npz", "-m", "vector", "-o", "cal.safetensors")
    trueup.save((np.zeros((5, 4)), [0, 1, 2, 3, 0]), "four.npz")
    line = command("apply", "cal.safetensors", "four.npz", "-o", "after.npz", code=2).stderr
    assert "3" in line
    assert "4" in line
    assert not (folder / "after.npz").exists()


@pytest.mark.parametrize("name", ["val.npz", "./val.npz", "link.npz"])
def test_an_input_is_never_overwritten(folder, command, name):
    command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors")
    (folder / "link.npz").symlink_to(folder / "val.npz")
    before = (folder / "val.npz").read_bytes()
    line = command("apply", "cal.safetensors", "val.npz", "-o", name, code=2).stderr
    assert "would overwrite the input val.npz" in line
    assert (folder / "val.npz").read_bytes() == before


def test_the_labels_beside_an_array_are_an_input_too(folder, command):
    trueup.save(trueup.load("val.npz"), "x.npy")
    command("fit", "x.npy", "-m", "temperature", "-o", "cal.safetensors")
    line = command("apply", "cal.safetensors", "x.npy", "-o", "x.labels.npy", code=2).stderr
    assert "would overwrite the input x.npy" in line


def test_a_calibrator_is_no_file_of_logits(folder, command):
    assert (
        "not a calibrator; `trueup fit` saves one"
        in command("apply", _safetensors(), "test.npz", "-o", "after.npz", code=2).stderr
    )


def _safetensors():
    trueup.save(trueup.load("val.npz"), "logits.safetensors")
    return "logits.safetensors"


def test_apply_refuses_classes_in_another_order(folder, command):
    z, y = trueup.load("val.npz")
    rows = [",".join([*map(str, row), str(label)]) for row, label in zip(z.tolist(), y.tolist(), strict=True)]
    Path("named.csv").write_text("cat,dog,bird,label\n" + "\n".join(rows))
    command("fit", "named.csv", "--logits", "cat,dog,bird", "-m", "temperature", "-o", "cal.safetensors")
    assert read_header("cal.safetensors").class_names == ("cat", "dog", "bird")
    command("apply", "cal.safetensors", "named.csv", "-o", "out.csv", "--logits", "cat,dog,bird")
    refused = command("apply", "cal.safetensors", "named.csv", "-o", "out.csv", "--logits", "dog,cat,bird", code=2)
    assert "must be those of the fit in their order (cat, dog, bird), got dog, cat, bird" in refused.stderr
    assert "list the columns of the classes in that order with --logits" in refused.stderr
    assert Path("out.csv").read_text().startswith("cat,dog,bird,label\n")
