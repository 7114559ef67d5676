"""JSON lines, gzip, stated confidences, names of classes, weights and groups, samples of language models, addresses."""

import gzip
import json
import os

import numpy as np
import pytest

import trueup
from trueup._core.errors import InputError
from trueup.io import Shards, from_rows, load_table, open_predictions
from trueup.io.rewrite import rewrite
from trueup.io.shards import partitions_of

RNG = np.random.default_rng(0)
Z, Y = 3 * RNG.normal(size=(40, 3)), RNG.integers(0, 3, 40)
PACKED = [".jsonl", ".jsonl.gz", ".csv.gz"]


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_halves_have_groups_of_their_own(tmp_path):
    z, y = np.zeros((3, 2)), np.array([0, 1, 1])
    arrays = {"val_logits": z, "val_labels": y, "test_logits": z[:2], "test_labels": y[:2]}
    np.savez(tmp_path / "both.npz", **arrays, val_region=["a", "b", "a"], test_region=["c", "a"], test_w=[1.0, 2.0])
    for split, groups in (("val", ["a", "b", "a"]), ("test", ["c", "a"])):
        assert load_table(tmp_path / "both.npz", split=split, groups="region").groups["region"].tolist() == groups
    assert load_table(tmp_path / "both.npz", split="test", sample_weight="w").sample_weight.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="must have w"):
        load_table(tmp_path / "both.npz", split="val", sample_weight="w")


@pytest.mark.parametrize("suffix", PACKED)
def test_values_survive_and_a_stream_is_the_whole(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    trueup.save((Z, Y), path)
    whole = trueup.load(path)
    assert np.array_equal(whole.logits, Z)
    assert np.array_equal(whole.labels, Y)
    parts = list(trueup.io.stream(path, rows=7))
    assert [len(part.labels) for part in parts] == [7, 7, 7, 7, 7, 5]
    assert np.array_equal(np.concatenate([part.logits for part in parts]), Z)
    assert os.listdir(tmp_path) == [f"a{suffix}"]
    if suffix.endswith("gz"):
        first = path.read_bytes()
        trueup.save((Z, Y), path)
        assert path.read_bytes() == first
        assert gzip.decompress(first)


def test_one_field_a_class_or_probabilities(tmp_path):
    path = lines(
        tmp_path / "a.jsonl", [{"logit_0": 1.5, "logit_1": -2, "label": 1}, {"logit_0": 0, "logit_1": 1, "label": 0}]
    )
    assert trueup.load(path).logits.tolist() == [[1.5, -2.0], [0.0, 1.0]]
    path = lines(tmp_path / "b.jsonl", [{"probs": [0.75, 0.25], "label": 1}])
    assert np.exp(trueup.load(path, probs=True).logits).tolist() == [[0.75, 0.25]]
    with pytest.raises(InputError, match="say probs=True"):
        trueup.load(path)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{oops", "line 3 is not JSON"),
        ("[1, 2]", "line 3 must be an object"),
        ('{"logits": [1, 2, 3], "label": 0}', "line 3, logits must have 2 numbers, as before, got 3"),
        ('{"logits": [1, null], "label": 0}', "logits must have at least 2 options in each row, got 1 in row 1"),
        ('{"logits": [1, true], "label": 0}', "line 3, logits must be numbers, got true"),
        ('{"label": 0}', "line 3, logits must be a list of numbers, got null"),
        ('{"logits": [1, 2], "label": "cat"}', "line 3, label must be whole numbers, got 'cat'"),
        ('{"logits": [1, 2], "label": [0]}', "line 3, label must be whole numbers"),
        ('{"logits": [1, NaN], "label": 0}', "logits must be finite"),
    ],
)
def test_bad_lines_are_named(tmp_path, bad, said):
    path = tmp_path / "a.jsonl"
    good = '{"logits": [1, 2], "label": 0}'
    path.write_text(f"{good}\n\n{bad}\n{good}\n")
    with pytest.raises(ValueError, match="^" + str(path)) as caught:
        trueup.load(path)
    assert said in str(caught.value)


def test_a_cut_gzip_is_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    trueup.save((Z, Y), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: not a readable \.jsonl\.gz file"):
        trueup.load(path)


# What a file holds beyond the pair


@pytest.fixture(params=[".csv", ".jsonl", ".parquet"])
def answers(request, tmp_path):
    """Stated confidences with gaps, whether they were right, weights and groups."""
    import pandas as pd

    frame = pd.DataFrame(
        {
            "id": ["a", "b", "c", "d", "e"],
            "stated": [0.9, 0.25, None, 0.6, 0.7],
            "right": [1, 0, 1, 1, None],
            "w": [1.0, 2.0, 1.0, 0.5, 1.0],
            "region": ["eu", "us", "eu", "eu", "us"],
        }
    )
    path = tmp_path / f"answers{request.param}"
    if request.param == ".csv":
        frame.to_csv(path, index=False)
    elif request.param == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    return path


def test_confidences_weights_and_groups_by_column(answers):
    with pytest.warns(UserWarning, match="2 rows were left out, without a label or a confidence"):
        table = load_table(
            answers, confidence="stated", correct="right", sample_weight="w", groups="region", columns=["id"]
        )
    np.testing.assert_allclose(np.exp(table.logits), [[0.1, 0.9], [0.75, 0.25], [0.4, 0.6]])
    assert table.labels.tolist() == [1, 0, 1]
    assert table.sample_weight.tolist() == [1.0, 2.0, 0.5]
    assert table.groups["region"].tolist() == ["eu", "us", "eu"]
    assert table.columns["id"].tolist() == ["a", "b", "d"]
    assert table.skipped == 2
    with pytest.warns(UserWarning, match="2 rows"):
        pair = trueup.load(answers, confidence="stated", correct="right")
    assert np.array_equal(pair.logits, table.logits)
    with pytest.warns(UserWarning, match="2 rows"):
        parts = list(trueup.io.stream(answers, rows=2, confidence="stated", correct="right"))
    assert np.array_equal(np.concatenate([part.logits for part in parts]), table.logits)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"confidence": "statd", "correct": "right"}, "did you mean stated?"),
        ({"confidence": "stated"}, "must have correct, got 'id'"),
        ({"confidence": "w", "correct": "right"}, "w must lie in [0, 1], got 0.5..2"),
        ({"confidence": "stated", "correct": "w"}, "w must be 0 or 1, wrong or right, got"),
        ({"confidence": "stated", "correct": "right", "groups": "regoin"}, "did you mean region?"),
        ({"confidence": "stated", "correct": "right", "sample_weight": "stated2"}, "must have stated2"),
        ({"correct": "right"}, "correct must come with confidence"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_bad_columns_are_one_clear_error(answers, options, said):
    with pytest.raises(InputError) as caught:
        load_table(answers, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_labels_may_be_names(tmp_path, suffix):
    import pandas as pd

    frame = pd.DataFrame({"logit_0": [1.0, 2.0, 0.0], "logit_1": [0.0, 1.0, 3.0], "label": ["dog", "cat", None]})
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        frame.to_parquet(path)
    elif suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True)
    with pytest.warns(UserWarning, match="1 row was left out"):
        assert trueup.load(path, class_names=["cat", "dog"]).labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match="class_names="):
        trueup.load(path)
    with pytest.raises(ValueError, match="be classes"):
        trueup.load(path, class_names=["cat", "dogs"])


def test_names_that_are_numbers_are_names(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, logits=Z[:3, :2], labels=[3, 8, 3])
    assert trueup.load(path, class_names=["3", "8"]).labels.tolist() == [0, 1, 0]


# Samples of lm-evaluation-harness, and rows of Hugging Face datasets


def sample(scores, target, texts=True, **more):
    pairs = [[str(score), "False"] if texts else [score, False] for score in scores]
    return {
        "doc_id": 0,
        "doc": {"question": "?", "category": "law"},
        "target": str(target) if texts else target,
        "arguments": {f"gen_args_{i}": {"arg_0": "?", "arg_1": f" option {i}"} for i in range(len(scores))},
        "resps": [[pair] for pair in pairs],
        "filtered_resps": pairs,
        "acc": float(np.argmax(scores) == target) if isinstance(target, int) else 1.0,
        **more,
    }


@pytest.mark.parametrize("texts", [True, False])
def test_logged_samples_are_logits_of_the_options(tmp_path, texts):
    scores = [[-1.5, -0.5, -3.0], [-2.0, -2.5, -0.25]]
    path = lines(tmp_path / "samples_arc.jsonl", [sample(s, t, texts) for s, t in zip(scores, (1, 0), strict=True)])
    table = load_table(path, groups="doc.category")
    assert table.logits.tolist() == scores
    assert table.labels.tolist() == [1, 0]
    assert table.groups["doc.category"].tolist() == ["law", "law"]


def test_a_target_may_be_the_text_of_an_option(tmp_path):
    records = [sample([-1.0, -2.0], "option 1")]
    del records[0]["filtered_resps"]
    path = lines(tmp_path / "samples_x.jsonl", records)
    pair = trueup.load(path)
    assert pair.labels.tolist() == [1]
    assert pair.logits.tolist() == [[-1.0, -2.0]]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (sample([-1.0, -2.0], 5), "line 2, target must be one of the 2 options, got '5'"),
        ({**sample([-1.0, -2.0], 0), "filtered_resps": ["a text"]}, "line 2, filtered_resps must be a log-likelihood"),
    ],
)
def test_samples_that_cannot_be_read_are_refused_by_line(tmp_path, second, said):
    path = lines(tmp_path / "samples_x.jsonl", [sample([-1.0, -2.0], 0), second])
    with pytest.raises(InputError) as caught:
        trueup.load(path)
    assert said in str(caught.value)


class Feature:
    names = ("no", "yes")


class Rows(list):
    @property
    def features(self):
        return {"label": Feature()}


def test_rows_of_a_data_set():
    rows = Rows(
        [
            {"logits": np.array([1.0, 2.0]), "label": 1, "lang": "de"},
            {"logits": [0.5, 0.25], "label": "no", "lang": "fr"},
        ]
    )
    table = from_rows(rows, groups="lang")
    assert table.labels.tolist() == [1, 0]
    assert table.class_names == ("no", "yes")
    assert table.groups["lang"].tolist() == ["de", "fr"]
    assert from_rows(iter(rows[:1])).logits.tolist() == [[1.0, 2.0]]
    with pytest.raises(InputError, match="row 1, logits must have 2 numbers"):
        from_rows([rows[0], {"logits": [1.0], "label": 0}])


def test_the_names_that_datasets_stores_in_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    info = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    table = pa.table({"logits": [[1.0, 2.0]], "label": [1]}).replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert load_table(tmp_path / "a.parquet").class_names == ("no", "yes")


# Written again with other logits


@pytest.mark.parametrize("target", [".csv", ".jsonl", ".parquet", ".jsonl.gz"])
def test_rewriting_keeps_the_other_columns(answers, tmp_path, target):
    out = tmp_path / f"out{target}"
    with open_predictions(answers, confidence="stated", correct="right") as file:
        assert rewrite(file, out, lambda z: z / 2) == (5, 2)
    with open_predictions(out, confidence="stated_calibrated", correct="right") as file:
        assert [*file.source.columns] == ["id", "stated", "stated_calibrated", "right", "w", "region"]
    with pytest.warns(UserWarning, match="2 rows"):
        before = load_table(answers, confidence="stated", correct="right", columns=["id", "region"])
    with pytest.warns(UserWarning, match="2 rows"):
        after = load_table(out, confidence="stated_calibrated", correct="right", columns=["id", "region"])
    odds = (after.logits[:, 1] - after.logits[:, 0]), (before.logits[:, 1] - before.logits[:, 0])
    np.testing.assert_allclose(odds[0], odds[1] / 2, rtol=1e-12)
    for name in ("id", "region"):
        assert after.columns[name].tolist() == before.columns[name].tolist()


def test_types_of_parquet_survive(tmp_path):
    import pandas as pd

    stamps = pd.date_range("2026-01-01", periods=40)
    frame = pd.DataFrame({"when": stamps, "logits": Z.tolist(), "label": Y, "id": range(40)})
    frame.to_parquet(tmp_path / "in.parquet")
    with open_predictions(tmp_path / "in.parquet") as file:
        rewrite(file, tmp_path / "out.parquet", lambda z: z / 2)
    after = pd.read_parquet(tmp_path / "out.parquet")
    assert (after["when"] == stamps).all()
    assert after["when"].dtype == pd.read_parquet(tmp_path / "in.parquet")["when"].dtype
    assert np.array_equal(np.stack(after["logits"]), Z / 2)
    assert np.array_equal(trueup.load(tmp_path / "out.parquet").labels, Y)


def test_a_failed_rewriting_leaves_nothing(tmp_path):
    trueup.save((Z, Y), tmp_path / "a.csv")

    def fails(z):
        raise ValueError("no")

    with open_predictions(tmp_path / "a.csv") as file, pytest.raises(ValueError, match="no"):
        rewrite(file, tmp_path / "out.csv", fails)
    assert os.listdir(tmp_path) == ["a.csv"]


# Shards


def test_partitions_are_groups(tmp_path):
    for i, region in enumerate(("eu", "us%2Fwest")):
        (tmp_path / f"region={region}").mkdir()
        trueup.save((Z[i::2], Y[i::2]), tmp_path / f"region={region}" / "0.npz")
    shards = Shards.of(tmp_path, groups=("region",))
    assert len(shards) == 2
    table = shards.load(progress=False)
    assert sorted(set(table.groups["region"].tolist())) == ["eu", "us/west"]
    assert len(table.labels) == 40
    assert partitions_of("a/b.csv") == {}
    with pytest.raises(ValueError, match="did you mean region"):
        Shards.of(tmp_path, groups=("regoin",)).load(progress=False)


def test_many_rows_are_drawn_at_random(tmp_path):
    for i in range(4):
        trueup.save((np.tile(Z, (25, 1)), np.tile(Y, 25)), tmp_path / f"{i}.npz")
    with pytest.warns(UserWarning, match="4,000 rows do not fit in memory"):
        some = Shards.of(tmp_path).load(most=3000, progress=False)
    assert 300 < len(some.labels) <= 1000
    again = Shards.of(tmp_path, rows=7)
    with pytest.warns(UserWarning, match="do not fit"):
        assert np.array_equal(again.load(most=3000, progress=False).logits, some.logits)
    assert len(Shards.of(tmp_path).load(progress=False).labels) == 4000


def test_shards_without_labels_are_counted(tmp_path):
    from trueup.metrics import evaluate_shards

    for i in range(2):
        lines(
            tmp_path / f"{i}.jsonl",
            [{"logits": z.tolist(), "label": int(y), "g": "ab"[y % 2], "w": 1} for z, y in zip(Z, Y, strict=True)]
            + [{"logits": [1, 2, 3], "label": None}],
        )
    with pytest.warns(UserWarning, match="2 shards: 2 rows were left out"):
        scores = evaluate_shards(Shards.of(tmp_path, groups=("g",), sample_weight=None), progress=False, n_resamples=50)
    assert scores.rows == 80
    whole = trueup.evaluate(
        np.tile(Z, (2, 1)), np.tile(Y, 2), groups=np.tile(np.array(["a", "b"])[Y % 2], 2), n_resamples=50
    )
    for row in whole.groups.rows:
        assert scores.groups["g", row.group].rows == row.rows
        assert scores.groups["g", row.group].observed == pytest.approx(row.observed)


# Addresses


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".csv", ".jsonl.gz", ".parquet", ".safetensors"])
def test_addresses_are_saved_to_and_loaded_from(suffix):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    address = f"memory://addresses/a{suffix}"
    trueup.save((Z, Y), address, storage_options={"skip_instance_cache": True})
    pair = trueup.load(address)
    assert np.array_equal(pair.logits, Z)
    assert np.array_equal(pair.labels, Y)
    with pytest.raises(FileNotFoundError, match=r"memory://addresses/no\.npz: no such file"):
        trueup.load("memory://addresses/no.npz")
    fsspec.filesystem("memory").rm("/addresses", recursive=True)


def test_an_address_of_files_is_written_by_renaming(tmp_path):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    trueup.save((Z, Y), f"file://{tmp_path}/a.csv")
    assert os.listdir(tmp_path) == ["a.csv"]
    assert np.array_equal(trueup.load(tmp_path / "a.csv").logits, Z)
