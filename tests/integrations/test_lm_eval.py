"""Calibration in lm-evaluation-harness: a task in YAML, run by the harness on a model of a few lines."""

import json

import numpy as np
import pytest

harness = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-integrations")

import trueup  # noqa: E402
from trueup.integrations import lm_eval as connection  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

TASK = """
task: calibrated_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: "{{{{options}}}}"
process_results: !function trueup.integrations.lm_eval.process_results
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: ece
    aggregation: !function trueup.integrations.lm_eval.ece
    higher_is_better: false
  - metric: nll
    aggregation: !function trueup.integrations.lm_eval.nll
    higher_is_better: false
  - metric: brier
    aggregation: !function trueup.integrations.lm_eval.brier
    higher_is_better: false
"""


@pytest.fixture(scope="module")
def questions():
    """Forty questions with 2 to 4 options; the text of an option is its log-likelihood."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(40):
        scores = np.round(rng.normal(size=int(rng.integers(2, 5))) - 3, 3)
        label = int((scores + rng.gumbel(size=len(scores))).argmax())
        made.append({"question": f"Question {number}", "options": [str(score) for score in scores], "label": label})
    return made


def pair_of(questions):
    z = np.full((len(questions), 4), -np.inf)
    for row, question in zip(z, questions, strict=True):
        row[: len(question["options"])] = [float(text) for text in question["options"]]
    return z, np.array([question["label"] for question in questions])


@pytest.fixture(scope="module")
def outcome(questions, tmp_path_factory):
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Parrot(LM):
        def loglikelihood(self, requests):
            return [(float(request.args[1]), False) for request in requests]

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

        def generate_until(self, requests):
            raise NotImplementedError

    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "choice.yaml").write_text(TASK.format(path=folder / "questions.jsonl"))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"task_manager": manager, "tasks": ["calibrated_choice"], "bootstrap_iters": 0, "verbosity": "ERROR"}
    return harness.simple_evaluate(model=Parrot(), **options)


def test_the_harness_reports_calibration(outcome, questions):
    numbers, (z, y) = outcome["results"]["calibrated_choice"], pair_of(questions)
    assert numbers["acc,none"] == pytest.approx((z.argmax(axis=1) == y).mean())
    for metric in ("ece", "nll", "brier"):
        assert numbers[f"{metric},none"] == pytest.approx(trueup.METRICS[metric](z, y), abs=1e-12), metric


def test_logged_samples_load_as_the_same_predictions(outcome, questions, tmp_path):
    samples = outcome["samples"]["calibrated_choice"]
    path = tmp_path / "samples_choice.jsonl"
    path.write_text("\n".join(json.dumps(sample, default=str) for sample in samples))
    loaded, (z, y) = trueup.load(path), pair_of(questions)
    order = [sample["doc_id"] for sample in samples]
    assert np.array_equal(loaded.labels, y[order])
    assert trueup.metrics.nll(*loaded) == pytest.approx(trueup.metrics.nll(z, y))


def test_questions_without_a_clear_target_are_refused():
    results = [(-1.0, False), (-2.0, False)]
    for doc in ({"question": "?"}, {"label": 2}, {"label": 0, "answer": 1}, {"label": True}, {"label": "a"}):
        with pytest.raises(ValueError, match="doc must have the number of one of its 2 options in one field"):
            connection.process_results(doc, results)
    assert connection.results_of("right")({"right": 1}, results)["acc"] == 0.0
    with pytest.raises(ValueError, match="got right; name the field"):
        connection.results_of("wrong")({"right": 1}, results)
