import io
import sys

import numpy as np
import pytest
import torch

from small_datasets import split_sizes
from trueup_studies.training.data import DATASETS, digest_files, load_data, sources

pytestmark = pytest.mark.usefixtures("offline")


def test_digits_need_no_folder_and_split_by_seed():
    one, two = load_data("digits", seed=1), load_data(seed=2)
    assert split_sizes(one) == [1078, 360, 359]
    for part in (one.train, one.val, one.test):
        x, y = part.tensors
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert x.shape[1:] == (1, 8, 8)
        assert 0 <= x.min() < x.max() <= 1
    assert one.test.tensors[0].equal(two.test.tensors[0])
    assert not one.val.tensors[0].equal(two.val.tensors[0])
    assert one.train.tensors[0].equal(load_data("digits", seed=1).train.tensors[0])
    mean, std = one.normalisation
    assert float(one.train.tensors[0].mean()) == pytest.approx(mean[0], abs=0.01)
    assert float(one.train.tensors[0].std()) == pytest.approx(std[0], abs=0.01)


def test_global_random_state_is_untouched():
    before, state = torch.random.get_rng_state(), np.random.mtrand._rand.get_state()[1].copy()
    load_data("digits", seed=3)
    assert torch.random.get_rng_state().equal(before)
    assert (np.random.mtrand._rand.get_state()[1] == state).all()


def test_names_and_seeds_are_checked():
    with pytest.raises(ValueError, match=r"name must be one of digits, fashion_mnist, .*, got 'mnist'"):
        load_data("mnist")
    for seed in (-1, 1.5, True):
        with pytest.raises(ValueError, match="seed must be a whole number"):
            load_data("digits", seed=seed)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_what_is_missing_is_told(tmp_path, monkeypatch, name):
    for module in ("torchvision", "torchvision.datasets", "medmnist"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("sklearn.datasets.fetch_20newsgroups", lambda **_: sources.urlopen("news"))
    with pytest.raises(FileNotFoundError, match=f"^{name}: wanted ") as error:
        load_data(name, tmp_path)
    assert str(tmp_path / name) in str(error.value)
    assert not list(tmp_path.iterdir())
    why = str(error.value).rpartition("none is there, ")[2]
    assert why.startswith(
        (
            "and torchvision, which would download them, cannot be imported: ",
            "and medmnist, which would download them, cannot be imported: ",
            "and there is no library to download them",
            "and downloading them by scikit-learn failed: <urlopen error there is no network>",
            "and downloading them by https from raw.githubusercontent.com failed: <urlopen error there is no network>",
        )
    )


def test_the_folder_is_an_argument_or_a_variable(tmp_path, monkeypatch):
    (tmp_path / "tinyshakespeare.txt").write_text("to be or not " * 1000)
    monkeypatch.setenv("TRUEUP_DATA", str(tmp_path))
    assert len(load_data("tinyshakespeare").train) == 91
    with pytest.raises(FileNotFoundError, match="tinyshakespeare: wanted"):
        load_data("tinyshakespeare", tmp_path / "elsewhere")
    monkeypatch.delenv("TRUEUP_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / ".cache" / "trueup" / "data")):
        load_data("tinyshakespeare")


def test_files_are_fetched_whole_or_not_at_all(tmp_path, monkeypatch):
    asked = []

    def answered(url, **options):
        asked.append(url)
        return io.BytesIO(b"to be or not " * 1000)

    monkeypatch.setattr(sources, "urlopen", answered)
    assert len(load_data("tinyshakespeare", tmp_path).train) == 91
    assert asked == ["https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"]
    assert [p.name for p in (tmp_path / "tinyshakespeare").iterdir()] == ["input.txt"]
    load_data("tinyshakespeare", tmp_path)
    assert len(asked) == 1

    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise ConnectionResetError("gone")

    monkeypatch.setattr(sources, "urlopen", lambda url, **_: Broken())
    with pytest.raises(
        FileNotFoundError, match="downloading them by https from raw.githubusercontent.com failed: gone"
    ):
        load_data("sst5", tmp_path)
    assert not (tmp_path / "sst5").exists() or not list((tmp_path / "sst5").iterdir())


def table(n=40):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 5, size=(n, 4))
    x[:, 2] = 1.0
    return x, x[:, 0] * 2 + 7


def check_table(data, x, y):
    assert split_sizes(data) == [29, 7, 4]
    train, targets = data.train.tensors
    assert train.dtype == targets.dtype == torch.float32
    torch.testing.assert_close(train.mean(dim=0), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.std(dim=0, correction=0), torch.tensor([1.0, 1, 0, 1]))
    assert float(targets.std(correction=0)) == pytest.approx(1, abs=1e-5)
    back = torch.cat([p.tensors[1] for p in (data.train, data.val, data.test)]) * data.target_std + data.target_mean
    np.testing.assert_allclose(np.sort(back.numpy()), np.sort(y), rtol=1e-4, atol=1e-4)
    assert (data.classes, data.kind) == ((), "tabular")


def test_tables_as_arrays_and_their_splits(tmp_path):
    x, y = table()
    np.savez(tmp_path / "uci_bostonHousing.npz", x=x, y=y)
    check_table(load_data("uci_boston", tmp_path), x, y)
    tests = {tuple(load_data("uci_boston", tmp_path, seed=s).test.tensors[1].tolist()) for s in range(5)}
    assert len(tests) == 5


@pytest.mark.parametrize("inner", ["yacht/data", "UCI_Datasets/yacht/data"])
def test_tables_with_numbered_columns(tmp_path, inner):
    x, y = table()
    place = tmp_path / inner
    place.mkdir(parents=True)
    np.savetxt(place / "data.txt", np.column_stack([y, x, -y]))
    np.savetxt(place / "index_features.txt", [1, 2, 3, 4])
    np.savetxt(place / "index_target.txt", [0])
    check_table(load_data("uci_yacht", tmp_path), x, y)


def test_tables_of_the_repository(tmp_path):
    x, y = table()
    rows = np.column_stack([x, y])
    np.savetxt(tmp_path / "winequality-red.csv", rows, delimiter=";", header='"a";"b";"c";"d";"quality"', comments="")
    np.savetxt(tmp_path / "housing.data", rows)
    np.savetxt(tmp_path / "yacht_hydrodynamics.data", rows)
    for name in ("uci_wine", "uci_boston", "uci_yacht"):
        check_table(load_data(name, tmp_path), x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros(39)}, r"uci_energy: wanted columns \(n, columns\) and targets \(n,\), got"),
        ({"y": np.full(40, np.nan)}, "uci_energy: columns and targets must be finite"),
        ({"y": np.zeros(1), "x": np.zeros((1, 2))}, "a part to split must have at least 2 samples, got 1"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, change, message):
    x, y = table()
    np.savez(tmp_path / "uci_energy.npz", **{"x": x, "y": y, **change})
    with pytest.raises(ValueError, match=message):
        load_data("uci_energy", tmp_path)


REAL = {
    "fashion_mnist": (20_000, 5_000, 10_000),
    "cifar10": (18_000, 2_000, 10_000),
    "trec": (4_907, 545, 500),
    "sst5": (8_544, 1_101, 2_210),
    "tinyshakespeare": (7_842, 435, 435),
    "uci_boston": (364, 91, 51),
    "uci_concrete": (742, 185, 103),
    "uci_energy": (553, 138, 77),
    "uci_wine": (1_151, 288, 160),
    "uci_yacht": (222, 55, 31),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(data, name):
    found = load_data(name, data)
    assert tuple(split_sizes(found)) == REAL[name]
    x = found.train.tensors[0]
    if found.kind == "image" and name == "fashion_mnist":
        mean, std = found.normalisation
        assert float(x.mean()) == pytest.approx(mean[0], abs=0.005)
        assert float(x.std()) == pytest.approx(std[0], abs=0.005)
    if found.kind == "text":
        assert sorted(set(found.train.tensors[1].tolist())) == [*range(len(found.classes))]
        assert (x > 1).float().sum() / (x > 0).float().sum() > 0.85  # most words are known
    if found.kind == "characters":
        assert len(found.vocabulary) == 65
        assert "".join(found.vocabulary[c] for c in x[0]).startswith("First Citizen:\nBefore we proceed")


def test_a_folder_that_is_a_file_is_named(tmp_path):
    file = tmp_path / "data.txt"
    file.write_text("x")
    with pytest.raises(NotADirectoryError, match=r"data_dir must be a folder, got the file .*data\.txt"):
        load_data("trec", file)


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        (
            "uci_yacht",
            {"x": np.zeros((5, 2)), "z": np.zeros(5)},
            r"uci_yacht\.npz: wanted the arrays x and y, got x, z",
        ),
        (
            "bloodmnist",
            {"train_images": np.zeros((5, 28, 28, 3), np.uint8)},
            r"bloodmnist\.npz: wanted the arrays train_images, train_labels, got train_images",
        ),
        ("svhn", {"other": np.zeros(3)}, r"wanted the arrays train_images … or images, labels, got other"),
        (
            "fashion_mnist",
            {"train_images": np.zeros((50, 8, 8), np.uint8), "train_labels": np.zeros(50, int)},
            "must have the parts train and test, got train",
        ),
        (
            "svhn",
            {"train_images": np.zeros((50, 32, 32, 3), np.uint8), "train_labels": np.zeros(50, int)},
            "must have the parts train and test, got train, val",
        ),
    ],
)
def test_arrays_that_are_missing_are_named(tmp_path, name, arrays, message):
    np.savez(tmp_path / f"{name}.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_data(name, tmp_path)


def test_a_file_that_is_no_archive_is_never_recommended_for_unpickling(tmp_path):
    (tmp_path / "fashion_mnist.npz").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"fashion_mnist\.npz: not an \.npz file") as found:
        load_data("fashion_mnist", tmp_path)
    assert "pickle" not in str(found.value)


def test_files_are_told_from_others_by_what_is_read_of_them(tmp_path):
    assert digest_files("digits") is None
    assert digest_files("uci_yacht", tmp_path) is None
    digests = []
    for y in (np.zeros(5), np.ones(5), np.zeros(5)):
        np.savez(tmp_path / "uci_yacht.npz", x=np.zeros((5, 2)), y=y)
        digests.append(digest_files("uci_yacht", tmp_path))
    assert digests[0] == digests[2] != digests[1]
    (tmp_path / "val" / "cat").mkdir(parents=True)
    (tmp_path / "val" / "cat" / "a.JPEG").write_bytes(b"a")
    one = digest_files("imagenet", tmp_path)
    (tmp_path / "val" / "cat" / ".DS_Store").write_bytes(b"a")
    (tmp_path / "val" / "cat" / "lost.jpeg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "b.jpeg").write_bytes(b"b")
    assert digest_files("imagenet", tmp_path) == one
    (tmp_path / "val" / "cat" / "c.JPEG").write_bytes(b"c")
    assert digest_files("imagenet", tmp_path) != one
    saved = tmp_path / "sst5" / "train"
    saved.mkdir(parents=True)
    (tmp_path / "sst5" / "dataset_dict.json").write_text("{}")
    texts = []
    for content in (b"a", b"b"):
        (saved / "data-00000-of-00001.arrow").write_bytes(content)
        texts.append(digest_files("sst5", tmp_path))
    assert texts[0] != texts[1]
