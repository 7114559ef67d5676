import sys
import tarfile
import types

import pytest

from small_datasets import FakeSplit, fake_hugging_face, split_sizes
from trueup_studies.training.data import load_data
from trueup_studies.training.data.class_names import GROUPS, QUESTIONS

pytestmark = pytest.mark.usefixtures("offline")


def test_trec_in_both_formats(tmp_path):
    lines = [(i % 6, f"What is caf\xe9 number {i} ?") for i in range(20)]
    for form in ("all", "label"):
        place = tmp_path / form
        place.mkdir()
        for name, rows in (("train", lines), ("test", lines[:3])):
            if form == "all":
                file, text = f"TREC.{name}.all", "".join(f"{y} {x}\n" for y, x in rows)
            else:
                file = "train_5500.label" if name == "train" else "TREC_10.label"
                text = "".join(f"{QUESTIONS[y]}:any {x}\n" for y, x in rows)
            (place / file).write_bytes(text.encode("latin-1"))
    one, two = (load_data("trec", tmp_path / form) for form in ("all", "label"))
    assert split_sizes(one) == [18, 2, 3]
    for a, b in ((one.train, two.train), (one.test, two.test)):
        assert all(x.equal(y) for x, y in zip(a.tensors, b.tensors, strict=True))
    assert one.vocabulary[:2] == ("<padding>", "<other>")
    assert set(one.vocabulary[2:]) == {"what", "is", "caf\xe9", "number", "?"}
    words, label = one.test[1]
    assert [one.vocabulary[w] for w in words] == ["what", "is", "caf\xe9", "number", "<other>", "?"]
    assert label == 1


def test_lines_without_label_are_named(tmp_path):
    (tmp_path / "TREC.train.all").write_text("0 what is it ?\nwhere is it ?\n")
    (tmp_path / "TREC.test.all").write_text("0 what is it ?\n")
    with pytest.raises(ValueError, match=r"TREC.train.all: line 2 must begin with its label, got 'where is it"):
        load_data("trec", tmp_path)
    for name in ("train_5500.label", "TREC_10.label"):
        (tmp_path / name).write_text("COLOUR:red what is it ?\n")
    (tmp_path / "TREC.train.all").unlink()
    with pytest.raises(ValueError, match=r"train_5500.label: line 1 must begin with one of DESC, .* got 'COLOUR:red"):
        load_data("trec", tmp_path)


def test_sst5_keeps_its_split_and_its_words(tmp_path):
    (tmp_path / "text").mkdir()
    rows = {"train": ["4 a good film", "0 a bad film"], "dev": ["2 the film with a long long title"], "test": ["1 no"]}
    for name, lines in rows.items():
        (tmp_path / "text" / f"stsa.fine.{name}").write_text("\n".join(lines) + "\n")
    data = load_data("sst5", tmp_path)
    assert split_sizes(data) == [2, 1, 1]
    assert data.vocabulary == ("<padding>", "<other>", "a", "film")  # of the training part, at least twice
    assert data.train.tensors[0].tolist() == [[2, 1, 3], [2, 1, 3]]
    assert data.val.tensors[0].tolist() == [[1, 3, 1]]  # cut to the longest text of the training part
    assert data.test.tensors[0].tolist() == [[1, 0, 0]]
    assert data.train.tensors[1].tolist() == [4, 0]


def news(tmp_path, packed):
    for name, n in (("train", 10), ("test", 2)):
        for group in (GROUPS[3], GROUPS[0]):
            place = tmp_path / f"20news-bydate-{name}" / group
            place.mkdir(parents=True)
            for i in range(n):
                (place / str(i)).write_bytes(f"Subject: It's \xe9 {group}\n\nWORDS and words {name}".encode("latin-1"))
    if packed:
        with tarfile.open(tmp_path / "20news-bydate.tar.gz", "w:gz") as archive:
            for name in ("train", "test"):
                archive.add(tmp_path / f"20news-bydate-{name}", f"20news-bydate-{name}")
        for name in ("train", "test"):
            (tmp_path / f"20news-bydate-{name}").rename(tmp_path / f"unpacked-{name}")


@pytest.mark.parametrize("packed", [False, True])
def test_newsgroups(tmp_path, packed):
    news(tmp_path, packed)
    data = load_data("newsgroups20", tmp_path)
    assert split_sizes(data) == [18, 2, 4]
    assert sorted(data.train.tensors[1].tolist() + data.val.tensors[1].tolist()) == [0] * 10 + [3] * 10
    assert data.test.tensors[1].tolist() == [0, 0, 3, 3]
    words = [data.vocabulary[w] for w in data.test.tensors[0][0]]
    assert words[:4] == ["subject", "it's", "alt", "atheism"]
    assert "words" in words


def test_newsgroups_refuse_other_folders(tmp_path):
    news(tmp_path, packed=False)
    other = tmp_path / "20news-bydate-test" / "rec.cooking"
    other.mkdir()
    (other / "1").write_text("soup")
    with pytest.raises(ValueError, match="20news-bydate-test: folders must be newsgroups, got rec.cooking"):
        load_data("newsgroups20", tmp_path)


def test_newsgroups_by_scikit_learn(tmp_path, monkeypatch):
    def fetch(*, subset, shuffle):
        assert not shuffle
        n = 10 if subset == "train" else 2
        return types.SimpleNamespace(data=["some words"] * n, target=[1] * n, target_names=["sci.space", "sci.med"])

    monkeypatch.setattr("sklearn.datasets.fetch_20newsgroups", fetch)
    data = load_data("newsgroups20", tmp_path)
    assert split_sizes(data) == [9, 1, 2]
    assert set(data.train.tensors[1].tolist()) == {GROUPS.index("sci.med")}


@pytest.mark.parametrize("file", ["tinyshakespeare.txt", "tinyshakespeare/input.txt", "text/tinyshakespeare.txt"])
def test_characters_predict_the_next(tmp_path, file):
    text = "".join(chr(97 + i % 7) for i in range(9000)) + "\n" + "ab" * 500
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    data = load_data("tinyshakespeare", tmp_path)
    assert data.kind == "characters"
    assert data.classes == tuple("\nabcdefg")
    assert split_sizes(data) == [70, 3, 3]
    read = "".join(data.vocabulary[c] for row, _ in data.train for c in row)
    assert text.startswith(read)
    for part in (data.train, data.val, data.test):
        x, y = part.tensors
        assert x.flatten()[1:].equal(y.flatten()[:-1])
    assert "".join(data.vocabulary[c] for c in data.val[0][0]) == text[9001 : 9001 + 128]


def test_short_books_are_refused(tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_text("to be " * 100)
    with pytest.raises(ValueError, match="each part of the book must have more than 128 characters, got 30"):
        load_data("tinyshakespeare", tmp_path)


def test_saved_datasets_keep_our_order_of_classes(tmp_path, monkeypatch):
    theirs = ["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"]
    texts = [f"what is {i}" for i in range(12)]
    part = FakeSplit({"text": texts, "coarse_label": [2] * 12}, "coarse_label", theirs)
    fake_hugging_face(monkeypatch, tmp_path, "trec", {"train": part, "test": part, "validation": part})
    data = load_data("trec", tmp_path)
    assert split_sizes(data) == [12, 12, 12]
    assert set(data.test.tensors[1].tolist()) == {QUESTIONS.index("DESC")}
    part.features["coarse_label"].names = ["no", "yes"]
    with pytest.raises(ValueError, match="coarse_label must have 6 classes, got 2"):
        load_data("trec", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="reading this data set needs datasets: pip install datasets"):
        load_data("trec", tmp_path)
