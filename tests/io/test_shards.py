"""Shards are opened once a pass, and what is wrong with one keeps its fields."""

import pickle
import zipfile

import numpy as np
import pytest

import trueup
from trueup._core.errors import Hint, error_message
from trueup.io import BadShard, Shards, open_predictions
from trueup.io.shards import map_shards

Z, Y = np.arange(12.0).reshape(6, 2), np.zeros(6, int)


@pytest.fixture
def opened(monkeypatch):
    """The archives that are opened, one after the other."""
    paths = []

    class Counted(zipfile.ZipFile):
        def __init__(self, file, *args, **options):
            paths.append(str(file))
            super().__init__(file, *args, **options)

    monkeypatch.setattr(zipfile, "ZipFile", Counted)
    return paths


def count_rows(part):
    return len(part.labels)


def test_each_shard_is_opened_once_a_pass(tmp_path, opened):
    files = [tmp_path / f"{i}.npz" for i in range(3)]
    for file in files:
        trueup.save((Z, Y), file)
    opened.clear()
    assert map_shards(count_rows, Shards.of(tmp_path), progress=False)[0] == 18
    assert opened == [str(file) for file in files]


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_both_splits_come_from_one_opening(tmp_path, opened, suffix):
    file = tmp_path / f"both{suffix}"
    if suffix == ".npz":
        np.savez(file, val_logits=Z, val_labels=Y, test_logits=-Z, test_labels=Y)
    else:
        rows = "\n".join(f"{a},{b},0,{-a},{-b},0" for a, b in Z)
        file.write_text(f"val_logit_0,val_logit_1,val_label,test_logit_0,test_logit_1,test_label\n{rows}\n")
    opened.clear()
    with open_predictions(file) as both:
        assert both.splits == ("val", "test")
        np.testing.assert_array_equal(both.load("val").logits, Z)
        np.testing.assert_array_equal(both.load("test").logits, -Z)
    assert len(opened) == (suffix == ".npz")


def test_the_error_of_a_shard_is_worded_by_its_fields(tmp_path):
    np.savez(tmp_path / "a.npz", logits=Z[:, 0], labels=Y)
    with pytest.raises(BadShard, match=r"a\.npz: logits must have shape .* a binary score goes through") as caught:
        map_shards(count_rows, Shards.of(tmp_path), progress=False)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error_message(error, {Hint.BINARY_SCORE: "two columns"}).endswith("got (6,); two columns")
