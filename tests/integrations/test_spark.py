"""Spark in local mode: sums over a data frame equal one process, for the columns that people have."""

import os
import sys

import numpy as np
import pytest
from frame_rows import assert_same_fit, assert_same_table, overconfident, softmax, table_of_votes, votes

pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed: make test-spark")
if os.system("java -version 2> /dev/null"):
    pytest.skip("Spark needs Java", allow_module_level=True)

import pandas as pd  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from trueup import METHODS, evaluate, from_probs  # noqa: E402
from trueup.calibrators import Identity  # noqa: E402
from trueup.integrations import spark  # noqa: E402
from trueup.io.shards import BadShard  # noqa: E402
from trueup.metrics.sharded import evaluate_shards  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture(scope="module")
def session():
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"ui.enabled": "false", "driver.host": "127.0.0.1", "sql.shuffle.partitions": "3"}
    builder = pyspark.sql.SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def frame_of(session, partitions=3, **columns):
    return session.createDataFrame(pd.DataFrame(columns)).repartition(partitions)


def test_a_table_and_a_fit_equal_one_process(session):
    pair = overconfident()
    frame = frame_of(session, logits=list(pair.logits.tolist()), label=pair.labels).cache()
    shards = spark.shards(frame)
    assert len(shards) == 3
    assert_same_table(shards, evaluate(*pair))
    fitted = assert_same_fit(shards, pair)
    rows = spark.apply(fitted, frame).toPandas()
    after = np.asarray(fitted(np.array(rows.logits.tolist())))
    assert np.abs(np.array(rows.calibrated.tolist()) - softmax(after)).max() < 1e-12


def test_vectors_of_spark_ml_and_labels_in_double(session):
    from pyspark.ml.linalg import Vectors

    pair = overconfident(600, classes=3)
    p = softmax(pair.logits)
    rows = [(Vectors.dense(row), float(y), "a" if y else "b") for row, y in zip(p, pair.labels, strict=True)]
    frame = session.createDataFrame(rows, ["probability", "target", "site"]).repartition(2)
    names = {"logits": "probability", "labels": "target", "probs": True}
    scores = assert_same_table(spark.shards(frame, groups="site", **names), evaluate(from_probs(p), pair.labels))
    assert scores.groups["b"].rows == (pair.labels == 0).sum()
    rows = spark.apply(METHODS["identity"](*pair), frame, **names, output="p").toPandas()
    assert np.array(rows.p.tolist()) == pytest.approx(np.array([list(row) for row in rows.probability]), abs=1e-12)


def test_a_column_per_class_with_weights_and_gaps(session):
    pair = overconfident(900, classes=2)
    weights = np.random.default_rng(2).uniform(0.5, 2, 900)
    labels = pd.array(pair.labels, dtype="Int64")
    labels[::9] = pd.NA
    columns = {"logit_0": pair.logits[:, 0], "logit_1": pair.logits[:, 1], "labels": labels, "a.w": weights}
    shards = spark.shards(frame_of(session, **columns), sample_weight="a.w")
    kept = np.arange(900) % 9 > 0
    with pytest.warns(UserWarning, match="100 rows"):
        assert_same_table(shards, evaluate(pair.logits[kept], pair.labels[kept], sample_weight=weights[kept]))


def test_stated_confidences(session):
    rng = np.random.default_rng(3)
    stated = np.round(rng.uniform(0.05, 0.95, 800), 2)
    right = rng.random(800) < stated
    frame = frame_of(session, sure=stated, correct=right)
    assert_same_table(spark.shards(frame, confidence="sure"), evaluate(from_probs(stated), right.astype(int)))
    platt = METHODS["platt"](from_probs(stated), right.astype(int))
    rows = spark.apply(platt, frame, confidence="sure").toPandas()
    after = softmax(np.asarray(platt(from_probs(rows.sure.to_numpy()))))[:, 1]
    assert rows.calibrated.to_numpy() == pytest.approx(after, abs=1e-12)


def test_exact_zeros_are_raised_by_the_same_number_in_every_partition(session):
    p, y = votes()
    frame = session.createDataFrame(pd.DataFrame({"probs": p.tolist(), "label": y})).repartitionByRange(4, "label")
    with pytest.warns(UserWarning, match="exact zeros"):
        shards = spark.shards(frame, probs=True)
    assert_same_table(shards, table_of_votes(p, y))
    identity = Identity()
    with pytest.raises(Exception, match="floor must replace exact zeros"):
        spark.apply(identity, frame, probs=True).toPandas()
    rows = spark.apply(identity, frame, probs=True, floor=0.01).toPandas()
    assert np.array(rows.calibrated.tolist()).min() > 0.009


def test_refusals(session):
    pair = overconfident(50)
    frame = frame_of(session, logits=pair.logits.tolist(), klass=pair.labels)
    with pytest.raises(ValueError, match="the frame must have labels, got 'logits' array<double>, 'klass' bigint"):
        spark.shards(frame)
    with pytest.raises(ValueError, match="executor must be left out"):
        evaluate_shards(spark.shards(frame, labels="klass"), executor=object(), progress=False)
    with pytest.raises(ValueError, match="be left out with data frames"):
        spark.shards(frame, labels="klass", class_axis="last")
    likely = frame_of(session, 1, logits=softmax(pair.logits).tolist(), label=pair.labels)
    with pytest.raises(BadShard, match=r"partition 0.* must not be probabilities"):
        evaluate_shards(spark.shards(likely), progress=False)
    wrong = frame_of(session, 1, logits=pair.logits.tolist(), label=pair.labels + 1)
    with pytest.raises(BadShard, match=r"partition 0.*labels must lie in 0\.\.3"):
        evaluate_shards(spark.shards(wrong), progress=False)


@pytest.mark.skipif(not os.environ.get("TRUEUP_LONG"), reason="takes minutes: TRUEUP_LONG=1 make test-spark")
def test_a_million_rows_equal_one_process(session, tmp_path):
    pair = overconfident(10**6, classes=10)
    table = pa.table(
        {"logits": pa.FixedSizeListArray.from_arrays(pa.array(pair.logits.ravel()), 10), "label": pair.labels}
    )
    pq.write_table(table, tmp_path / "net.parquet", row_group_size=100_000)
    frame = session.read.parquet(str(tmp_path / "net.parquet")).repartition(8)
    assert_same_table(spark.shards(frame), evaluate(*pair))
