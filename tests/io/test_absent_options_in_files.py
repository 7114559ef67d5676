"""Options that a row does not have, in every kind of file."""

import json

import numpy as np
import pytest

import trueup
from trueup._core.errors import InputError
from trueup.io import load, load_logits, save, save_logits, stream

inf = np.inf
LOGITS = np.array([[2.0, 1.0, -inf, 0.5], [0.25, -inf, 1.5, -inf], [1.0, 2.0, 3.0, 4.0]])
LABELS = np.array([0, 2, 3])


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".csv", ".csv.gz", ".jsonl", ".parquet", ".safetensors"])
def test_what_is_written_is_read(tmp_path, suffix):
    path = tmp_path / f"choice{suffix}"
    for dtype in (np.float32, np.float64):
        save((LOGITS.astype(dtype), LABELS), path)
        z, y = load(path)
        assert np.array_equal(z, LOGITS)
        assert np.array_equal(y, LABELS)
        assert np.array_equal(np.concatenate([part.logits for part in stream(path, rows=2)]), LOGITS)
    save_logits(tmp_path / f"new{suffix}", LOGITS)
    assert np.array_equal(load_logits(tmp_path / f"new{suffix}"), LOGITS)


def test_json_stays_json(tmp_path):
    path = tmp_path / "choice.jsonl"
    save((LOGITS, LABELS), path)
    assert "null" in path.read_text()
    assert "Infinity" not in path.read_text()


def test_empty_cells_and_nulls(tmp_path):
    table = tmp_path / "choice.csv"
    table.write_text("logit_0,logit_1,logit_2,label\n1.5,0.5,,0\n1,2,-inf,1\n0.5,NA,1,2\n")
    assert np.array_equal(load(table).logits, [[1.5, 0.5, -inf], [1.0, 2.0, -inf], [0.5, -inf, 1.0]])
    table.write_text("logit_0,logit_1,label\n1.5,0.5,0\n1,nan,0\n")
    with pytest.raises(InputError, match="finite, got nan"):
        load(table)
    table.write_text("logit_0,logit_1,logit_2,label\n1.5,0.5,1,0\n1,,,0\n")
    with pytest.raises(InputError, match="at least 2 options in each row, got 1 in row 1"):
        load(table)
    table.write_text("logit_0,logit_1,logit_2,label\n1.5,0.5,,2\n")
    with pytest.raises(InputError, match="got 2 in row 0, where that option is absent"):
        load(table)
    lines = tmp_path / "choice.jsonl"
    lines.write_text('{"logits": [1, 2, null], "label": 1}\n{"logits": [1, 2], "label": 1}\n')
    with pytest.raises(InputError, match="line 2, logits must have 3 numbers, as before, got 2; null stands for"):
        load(lines)


def test_null_in_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "choice.parquet"
    pq.write_table(pa.table({"logits": [[1.5, 0.5, None], [1.0, 2.0, 3.0]], "label": [0, 2]}), path)
    assert np.array_equal(load(path).logits, [[1.5, 0.5, -inf], [1.0, 2.0, 3.0]])
    columns = {"logit_0": [1.5, 1.0], "logit_1": [0.5, 2.0], "logit_2": [None, 3.0], "label": [0, 2]}
    pq.write_table(pa.table(columns), path)
    assert np.array_equal(load(path).logits, [[1.5, 0.5, -inf], [1.0, 2.0, 3.0]])
    pq.write_table(pa.table({"logits": [[1.5, 0.5], [1.0, 2.0, 3.0]], "label": [0, 2]}), path)
    with pytest.raises(InputError, match="null stands for"):
        load(path)


def test_empty_cells_among_probabilities(tmp_path):
    path = tmp_path / "choice.csv"
    path.write_text("prob_0,prob_1,prob_2,label\n0.75,0.25,,0\n0.5,0.25,0.25,1\n")
    z, _ = load(path, probs=True)
    assert np.allclose(np.exp(z), [[0.75, 0.25, 0.0], [0.5, 0.25, 0.25]])
    assert z[0, 2] == -inf
    assert np.exp(trueup.from_probs(np.array([[0.75, 0.25, np.nan]], np.float16)))[0, 2] == 0
    with pytest.raises(InputError, match="sum to 1"):
        trueup.from_probs(np.array([[0.75, 0.2, np.nan]]))


def test_samples_of_different_numbers_of_options(tmp_path):
    path = tmp_path / "samples_arc.jsonl"
    records = [
        {"target": 1, "filtered_resps": [["-1.5", "False"], ["-0.5", "True"], ["-3", "False"]], "arguments": []},
        {"target": 3, "filtered_resps": [["-1", "F"], ["-2", "F"], ["-3", "F"], ["-0.5", "T"]], "arguments": []},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    z, y = load(path)
    assert np.array_equal(z, [[-1.5, -0.5, -3.0, -inf], [-1.0, -2.0, -3.0, -0.5]])
    assert y.tolist() == [1, 3]
