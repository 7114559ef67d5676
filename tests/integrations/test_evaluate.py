"""A metric for Hugging Face's `evaluate`: batches, combinations and refusals."""

import numpy as np
import pytest
from frame_rows import overconfident, softmax

library = pytest.importorskip("evaluate", reason="evaluate is not installed: make test-integrations")

import trueup  # noqa: E402
from trueup.integrations.evaluate import Calibration  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture(scope="module")
def pair():
    return overconfident(900, classes=3)


@pytest.fixture
def options(tmp_path):
    return {"cache_dir": str(tmp_path)}


def test_batches_give_the_table_of_evaluate(pair, options):
    metric = Calibration(["ece", "nll", "brier"], **options)
    for rows in np.split(np.arange(900), 3):
        metric.add_batch(predictions=softmax(pair.logits[rows]), references=pair.labels[rows])
    numbers = metric.compute()
    scores = trueup.evaluate(np.log(softmax(pair.logits)), pair.labels, metrics=["ece", "nll", "brier"])
    for name in ("ece", "nll", "brier"):
        expected = [scores[name].value, scores[name].low, scores[name].high]
        assert [numbers[name], numbers[f"{name}_low"], numbers[f"{name}_high"]] == pytest.approx(expected, abs=1e-9)
    assert numbers["rows"] == 900


def test_logits_and_events(pair, options):
    z = pair.logits.astype(np.float64)
    numbers = Calibration(["nll"], input="logits", **options).compute(predictions=z, references=pair.labels)
    assert numbers["nll"] == pytest.approx(trueup.metrics.nll(z, pair.labels))
    happened = (pair.labels == 1).astype(int)
    risk = softmax(z)[:, 1]
    numbers = Calibration(event=True, **options).compute(predictions=risk, references=happened)
    assert numbers["predicted"] == pytest.approx(risk.mean())
    log_odds = Calibration(event=True, input="logits", **options)
    assert log_odds.compute(predictions=np.log(risk / (1 - risk)), references=happened) == pytest.approx(numbers)


def test_it_combines_with_other_metrics(pair, options):
    combined = library.combine([Calibration(["ece"], **options), Calibration(["nll"], **options)], force_prefix=True)
    numbers = combined.compute(predictions=softmax(pair.logits), references=pair.labels)
    assert any(name.endswith("ece") for name in numbers)
    assert any(name.endswith("nll") for name in numbers)


def test_refusals(pair, options):
    with pytest.raises(ValueError, match='input must be "probs" or "logits"'):
        Calibration(input="scores", **options)
    with pytest.raises(ValueError, match="metrics must be names of METRICS"):
        Calibration(["nope"], **options).compute(predictions=softmax(pair.logits), references=pair.labels)
    with pytest.raises(ValueError, match=r"predictions must .*logits need no from_probs"):
        Calibration(**options).compute(predictions=pair.logits, references=pair.labels)
    with pytest.raises(ValueError, match="logits must not be probabilities"):
        Calibration(input="logits", **options).compute(predictions=softmax(pair.logits), references=pair.labels)
