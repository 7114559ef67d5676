"""Ray Data: sums over a dataset equal one process, for the columns that people have."""

import os

import numpy as np
import pytest
from frame_rows import assert_same_fit, assert_same_table, overconfident, softmax, table_of_votes, votes

ray = pytest.importorskip("ray", reason="ray is not installed: make test-spark")
pytest.importorskip("ray.data", reason="ray[data] is not installed: make test-spark")

import pyarrow as pa  # noqa: E402

from trueup import METHODS, evaluate, from_probs  # noqa: E402
from trueup.integrations import ray as connection  # noqa: E402
from trueup.io.shards import BadShard  # noqa: E402
from trueup.metrics.sharded import evaluate_shards  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning", "ignore::UserWarning:ray"
)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def dataset_of(blocks=3, **columns):
    table = pa.table({name: pa.array(np.asarray(values).tolist()) for name, values in columns.items()})
    return ray.data.from_arrow(table).repartition(blocks).materialize()


def test_a_table_and_a_fit_equal_one_process():
    pair = overconfident()
    dataset = dataset_of(logits=pair.logits, label=pair.labels)
    shards = connection.shards(dataset)
    assert len(shards) == 3
    assert_same_table(shards, evaluate(*pair))
    fitted = assert_same_fit(shards, pair)
    rows = connection.apply(fitted, dataset).take_all()
    after = np.asarray(fitted(np.array([row["logits"] for row in rows])))
    assert np.abs(np.array([row["calibrated"] for row in rows]) - softmax(after)).max() < 1e-12


def test_tensors_of_numpy_datasets():
    pair = overconfident(600, classes=3)
    dataset = ray.data.from_numpy(pair.logits).zip(ray.data.from_numpy(pair.labels)).materialize()
    assert_same_table(connection.shards(dataset, logits="data", labels="data_1"), evaluate(*pair))


def test_probabilities_with_zeros_and_stated_confidences():
    p, y = votes()
    with pytest.warns(UserWarning, match="exact zeros"):
        shards = connection.shards(dataset_of(4, probs=p, label=y).sort("label"), probs=True)
    assert_same_table(shards, table_of_votes(p, y))
    rng = np.random.default_rng(3)
    stated = np.round(rng.uniform(0.05, 0.95, 800), 2)
    right = rng.random(800) < stated
    dataset = dataset_of(sure=stated, correct=right)
    assert_same_table(connection.shards(dataset, confidence="sure"), evaluate(from_probs(stated), right.astype(int)))
    platt = METHODS["platt"](from_probs(stated), right.astype(int))
    rows = connection.apply(platt, dataset, confidence="sure").take_all()
    before = from_probs(np.array([row["sure"] for row in rows]))
    assert np.array([row["calibrated"] for row in rows]) == pytest.approx(softmax(np.asarray(platt(before)))[:, 1])


def test_refusals():
    pair = overconfident(50)
    with pytest.raises(ValueError, match="the frame must have labels"):
        connection.shards(dataset_of(logits=pair.logits, klass=pair.labels))
    wrong = connection.shards(dataset_of(1, logits=pair.logits, label=pair.labels + 1))
    with pytest.raises(BadShard, match=r"labels must lie in 0\.\.3"):
        evaluate_shards(wrong, progress=False)
