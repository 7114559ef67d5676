"""The likeliest answers with the rest as one class: from arrays, and from records of services."""

import json
import math

import numpy as np
import pytest

import trueup
from optional import torch
from trueup._core.errors import InputError
from trueup.io import from_rows, load

TOP = [{"token": "B", "logprob": math.log(0.6)}, {"token": " B", "logprob": math.log(0.1)}]
TOP += [{"token": "A", "logprob": math.log(0.2)}, {"token": "?", "logprob": -9999.0}]


def test_the_rest_has_what_is_left():
    for kind in (np.array, torch.tensor):
        logits = trueup.convert.from_topk(kind([[math.log(0.5), math.log(0.3)], [math.log(0.9), math.log(0.1)]]))
        probs = np.exp(np.asarray(logits))
        assert np.allclose(probs, [[0.5, 0.3, 0.2], [0.9, 0.1, 1e-6]], atol=1e-6)
        assert np.allclose(probs.sum(axis=1), 1, atol=1e-12)
    half = trueup.convert.from_topk(np.log(np.array([[0.5, 0.25]], np.float16)))
    assert half.dtype == np.float16
    assert np.allclose(np.exp(half.astype(float)), [[0.5, 0.25, 0.25]], atol=1e-3)


def test_what_was_not_told_is_absent():
    logits = trueup.convert.from_topk(np.array([[math.log(0.5), -9999.0], [math.log(0.5), -np.inf]]))
    assert np.isneginf(logits[:, 1]).all()
    assert np.allclose(np.exp(logits[:, [0, 2]]), 0.5)
    assert trueup.metrics.nll(logits, [0, 2]) == pytest.approx(math.log(2))


def test_refusals():
    with pytest.raises(InputError, match=r"sum to at most 1 in each row, got 1\.4 in row 1"):
        trueup.convert.from_topk(np.log([[0.5, 0.3], [0.7, 0.7]]))
    with pytest.raises(InputError, match="shape"):
        trueup.convert.from_topk(np.zeros(3))
    with pytest.raises(InputError, match="finite"):
        trueup.convert.from_topk(np.array([[np.nan, -1.0]]))


@pytest.mark.parametrize(
    "response",
    [
        {"top_logprobs": TOP},
        {"top_logprobs": {entry["token"]: entry["logprob"] for entry in TOP}},
        {"logprobs": {"content": [{"token": "B", "top_logprobs": TOP}]}},
        {"choices": [{"logprobs": {"content": [{"token": "B", "top_logprobs": TOP}, {"top_logprobs": TOP[:1]}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{entry["token"]: entry["logprob"] for entry in TOP}]}}]},
    ],
)
def test_records_of_services(tmp_path, response):
    path = tmp_path / "answers.jsonl"
    records = [response | {"answer": answer, "topic": "law"} for answer in ("B", "A", "C")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    z, y = load(path)
    assert np.allclose(np.exp(z), [[0.7, 0.2, 0.1]] * 3)
    assert y.tolist() == [0, 1, 2]
    assert from_rows(records).labels.tolist() == [0, 1, 2]


def test_records_of_different_lengths(tmp_path):
    path = tmp_path / "answers.jsonl"
    few = {"top_logprobs": {"A": math.log(0.5)}, "answer": "B"}
    path.write_text(json.dumps(few) + "\n" + json.dumps({"top_logprobs": TOP, "answer": "A"}) + "\n")
    z, y = load(path)
    assert np.allclose(np.exp(z), [[0.5, 0.0, 0.5], [0.7, 0.2, 0.1]])
    assert y.tolist() == [2, 1]


def test_records_that_make_no_sense(tmp_path):
    path = tmp_path / "answers.jsonl"
    good = json.dumps({"top_logprobs": TOP, "answer": "A"}) + "\n"
    path.write_text(good + json.dumps({"top_logprobs": [{"token": "A"}], "answer": "A"}) + "\n")
    with pytest.raises(InputError, match="line 2, top_logprobs must be tokens and their log-probabilities"):
        load(path)
    path.write_text(good + json.dumps({"top_logprobs": {"A": -0.1, "B": -0.1}, "answer": "A"}) + "\n")
    with pytest.raises(InputError, match="line 2, top_logprobs must be logarithms of probabilities that sum"):
        load(path)
    path.write_text(good + json.dumps({"answer": "A"}) + "\n")
    with pytest.raises(InputError, match="line 2"):
        load(path)
