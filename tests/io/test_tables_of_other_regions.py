"""CSV files with other separators, decimal commas and numbers in per cent are read right, with a note."""

import numpy as np
import pytest

import trueup
from trueup import load
from trueup.io import load_table

EUROPEAN = "id;logit_0;logit_1;gewicht;label\nx;1,5;-0,25;0,5;0\ny;2;1e-1;1,5;1\n"
ENGLISH = "id,logit_0,logit_1,gewicht,label\nx,1.5,-0.25,0.5,0\ny,2,1e-1,1.5,1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EUROPEAN, r"a\.csv: read as CSV with sep=';' and decimal=','"),
        (EUROPEAN.replace(";", "\t"), r"sep='\\t' and decimal=','"),
        (ENGLISH.replace(",", ";"), "sep=';' and decimal='.'"),
        (ENGLISH.replace(",", "|"), r"sep='\|' and decimal='.'"),
    ],
)
def test_european_tables_are_recognised_with_a_note(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(ENGLISH)
    expected = load_table(path, sample_weight="gewicht")
    path.write_text(text, encoding="utf-8-sig")
    with pytest.warns(UserWarning, match=message) as notes:
        table = load_table(path, sample_weight="gewicht")
    assert len(notes) == 1
    assert notes[0].filename == __file__
    np.testing.assert_array_equal(table.logits, expected.logits)
    np.testing.assert_array_equal(table.sample_weight, expected.sample_weight)
    assert table.labels.tolist() == [0, 1]


def test_separator_and_decimal_mark_can_be_given(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(EUROPEAN)
    np.testing.assert_array_equal(load(path, sep=";", decimal=",").logits, [[1.5, -0.25], [2, 0.1]])
    with pytest.raises(ValueError, match="could not convert string to float: '1,5'"):
        load(path, sep=";", decimal=".")
    trueup.save((np.zeros((1, 2)), [0]), tmp_path / "a.npz")
    with pytest.raises(ValueError, match="sep must be left out for files other than .csv, got .npz"):
        load(tmp_path / "a.npz", sep=";")


def test_a_decimal_comma_and_a_point_do_not_mix(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("logit_0;logit_1;label\n1,5;2;0\n1.234;2;0\n")
    with pytest.raises(ValueError, match="line 3: numbers must have a decimal comma, got '1.234'"):
        load(path, sep=";", decimal=",")
    path.write_text('logit_0,logit_1,label\n"1,234",2,0\n')
    with pytest.raises(ValueError, match="could not convert string to float: '1,234'"):
        load(path)


def test_cells_in_per_cent_are_shares(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("stated,correct\n93%,1\n60 %,0\n50%,1\n")
    p = np.exp(load(path, confidence="stated").logits)[:, 1]
    np.testing.assert_allclose(p, [0.93, 0.6, 0.5])
    path.write_text("stated,correct\n93,1\n60,0\n")
    with pytest.raises(ValueError, match="divide per cent by 100"):
        load(path, confidence="stated")


def test_other_encodings_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(ENGLISH, encoding="utf-16")
    with pytest.raises(ValueError, match=r"a\.csv: .*it must be UTF-8 text; save it in that encoding"):
        load(path)
