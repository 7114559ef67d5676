import gzip
import pickle
import struct
import sys
import types

import numpy as np
import pytest
import torch
from scipy.io import savemat

from small_datasets import CodeInPickle, FakeSplit, fake_hugging_face, image_numbers, numbered_images, split_sizes
from trueup.models import image_data
from trueup_studies.training.data import image_folder as folder
from trueup_studies.training.data import load_data, sources
from trueup_studies.training.data.class_names import HUNDRED
from trueup_studies.training.data.readers import cifar_pickle

pytestmark = pytest.mark.usefixtures("offline")


@pytest.mark.parametrize("place", [".", "images", "fashion_mnist"])
def test_arrays_with_their_own_split(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    arrays = {}
    for key, n, first in (("train", 6, 0), ("val", 3, 100), ("test", 2, 200)):
        arrays |= {
            f"{key}_images": numbered_images(n, 28, 28, first=first),
            f"{key}_labels": np.arange(n, dtype=np.uint8),
        }
    np.savez(tmp_path / place / "fashion_mnist.npz", **arrays)
    data = load_data("fashion_mnist", tmp_path, seed=5)
    assert [image_numbers(p) for p in (data.train, data.val, data.test)] == [[*range(6)], [100, 101, 102], [200, 201]]
    assert data.val.tensors[1].tolist() == [0, 1, 2]
    assert data.train.tensors[0].shape == (6, 1, 28, 28)


def as_idx(array):
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize(("inner", "ending"), [("", ".gz"), ("FashionMNIST/raw", ""), ("fashion_mnist", ".gz")])
def test_fashion_in_its_own_format(tmp_path, inner, ending):
    place = tmp_path / inner
    place.mkdir(parents=True, exist_ok=True)
    for name, n, first in (("train", 24, 0), ("t10k", 4, 200)):
        for what, array in (
            ("images-idx3", numbered_images(n, 28, 28, first=first)),
            ("labels-idx1", np.arange(n, dtype=np.uint8) % 10),
        ):
            content = as_idx(array)
            (place / f"{name}-{what}-ubyte{ending}").write_bytes(gzip.compress(content) if ending else content)
    data = load_data("fashion_mnist", tmp_path)
    assert split_sizes(data) == [22, 2, 4]
    assert sorted(image_numbers(data.train) + image_numbers(data.val)) == [*range(24)]
    assert image_numbers(data.test) == [200, 201, 202, 203]
    for image, label in data.train:
        assert round(float(image[0, 0, 0]) * 255) % 10 == label


def test_strange_idx_files_are_refused(tmp_path):
    for name in ("train", "t10k"):
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(as_idx(numbered_images(2, 28, 28))[:-1])
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(b"\x01" + as_idx(np.zeros(2, np.uint8))[1:])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte: the sizes \(2, 28, 28\) need 1568 bytes, got 1567"):
        load_data("fashion_mnist", tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(as_idx(numbered_images(2, 28, 28)))
    with pytest.raises(ValueError, match="labels-idx1-ubyte: an IDX file of bytes must begin with 0 0 8, got"):
        load_data("fashion_mnist", tmp_path)


def planes(n, first):
    """Rows of red, green and blue planes: red all the image's number, green its rows, blue its columns."""
    grid = np.arange(32, dtype=np.uint8)
    red = numbered_images(n, 32, 32, first=first)
    green, blue = (np.broadcast_to(g, (n, 32, 32)) for g in (grid[:, None], grid[None]))
    return np.stack([red, green, blue], axis=1).reshape(n, 3072).astype(np.uint8)


def check_cifar(data, total):
    assert sorted(image_numbers(data.train) + image_numbers(data.val)) == [*range(total)]
    image, label = data.test[0]
    torch.testing.assert_close(image[1, :, 0] * 255, torch.arange(32.0))
    torch.testing.assert_close(image[2, 0] * 255, torch.arange(32.0))
    assert label == 7


def python_batch(rows, labels, key, protocol):
    return pickle.dumps({"batch_label": "a batch", "data": rows, key: labels, "filenames": ["a.png"]}, protocol)


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar10_in_its_own_formats(tmp_path, form):
    inner = tmp_path / ("cifar-10-batches-bin" if form == "binary" else "cifar-10-batches-py")
    inner.mkdir()
    for name, n, first in (*((f"data_batch_{i}", 4, 4 * i - 4) for i in range(1, 6)), ("test_batch", 2, 200)):
        rows = planes(n, first)
        labels = [7] * n if name == "test_batch" else [(first + i) % 10 for i in range(n)]
        if form == "binary":
            (inner / f"{name}.bin").write_bytes(b"".join(bytes([y]) + r.tobytes() for y, r in zip(labels, rows)))  # noqa: B905
        else:
            (inner / name).write_bytes(python_batch(rows, labels, "labels", 2))
    data = load_data("cifar10", tmp_path)
    assert split_sizes(data) == [18, 2, 2]
    check_cifar(data, 20)
    for image, label in data.train:
        assert round(float(image[0, 0, 0]) * 255) % 10 == label


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar100_takes_the_fine_labels(tmp_path, form):
    inner = tmp_path / "cifar100" / ("cifar-100-binary" if form == "binary" else "cifar-100-python")
    inner.mkdir(parents=True)
    for name, n, first, label in (("train", 10, 0, 99), ("test", 2, 200, 7)):
        rows = planes(n, first)
        if form == "binary":
            (inner / f"{name}.bin").write_bytes(b"".join(bytes([19, label]) + r.tobytes() for r in rows))
        else:
            (inner / name).write_bytes(python_batch(rows, [label] * n, "fine_labels", 4))
    data = load_data("cifar100", tmp_path)
    check_cifar(data, 10)
    assert set(data.train.tensors[1].tolist()) == {99}
    assert len(data.classes) == len(set(data.classes)) == 100
    assert data.classes == HUNDRED


def test_cifar_as_python_2_pickled_it(tmp_path):
    """The files of 2009: byte strings throughout, and a module of NumPy by its old name."""
    rows = planes(2, 5)

    def text(value):
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        + b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + text(rows.tobytes())
        + b"tb"
    )
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02}(" + text(b"data") + array + text(b"labels") + b"](K\x03K\x04e" + b"u.")
    part = cifar_pickle(path)
    np.testing.assert_array_equal(part.inputs.transpose(0, 3, 1, 2).reshape(2, -1), rows)
    assert part.labels.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": CodeInPickle(), "labels": [1]}, "a batch must hold plain arrays, got a call of __builtin__.exec"),
        ({"data": np.array([CodeInPickle()], dtype=object), "labels": [1]}, "arrays must be of bytes, got type O8"),
        ({"data": np.zeros((1, 3072)), "labels": [1]}, "arrays must be of bytes, got type f8"),
        ({"data": np.zeros((1, 9), np.uint8), "labels": [1]}, r"data must have shape \(n, 3072\), got \(1, 9\)"),
        ({"data": [1, 2], "labels": [1]}, "a batch must be a mapping with data and labels"),
        ([1, 2], "a batch must be a mapping with data and labels"),
    ],
)
def test_pickles_run_nothing(tmp_path, content, message):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, 2))
    with pytest.raises(ValueError, match=message) as error:
        cifar_pickle(path)
    assert str(path) in str(error.value)
    assert "evil" not in sys.modules


def test_cifar_binary_of_a_wrong_size(tmp_path):
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (inner / f"{name}.bin").write_bytes(bytes(3072))
    with pytest.raises(ValueError, match=r"data_batch_1.bin: a batch must have 3073 bytes an image, got 3072 bytes"):
        load_data("cifar10", tmp_path)


def test_cifar10_in_numbered_arrays(tmp_path):
    for name, first in (("train1", 0), ("train2", 10), ("test", 200)):
        np.savez(
            tmp_path / f"cifar10_{name}.npz", images=numbered_images(10, 32, 32, 3, first=first), labels=np.arange(10)
        )
    data = load_data("cifar10", tmp_path)
    assert split_sizes(data) == [18, 2, 10]
    assert sorted(image_numbers(data.train) + image_numbers(data.val)) == [*range(20)]
    other = load_data("cifar10", tmp_path, seed=1)
    assert image_numbers(other.val) != image_numbers(data.val)
    assert image_numbers(other.test) == image_numbers(data.test)


def test_svhn_keeps_the_last_tenth_and_ten_means_zero(tmp_path):
    for name, n, first in (("train", 20, 0), ("test", 3, 200)):
        images = np.moveaxis(numbered_images(n, 32, 32, 3, first=first), 0, 3)
        savemat(tmp_path / f"{name}_32x32.mat", {"X": images, "y": np.arange(1, n + 1).reshape(-1, 1) % 10 + 1})
    data = load_data("svhn", tmp_path)
    assert (image_numbers(data.train), image_numbers(data.val)) == ([*range(18)], [18, 19])
    assert data.test.tensors[1].tolist() == [2, 3, 4]
    assert data.train.tensors[1][8] == 0  # written as 10
    assert data.train.tensors[0].shape == (18, 3, 32, 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:200], "train_32x32.mat: "),
        (lambda whole: b"x" * len(whole), "train_32x32.mat: Unknown mat file type"),
        (lambda whole: whole.replace(b"X", b"Z"), r"wanted the arrays X \(height, width, 3, n\) and y, got y"),
    ],
)
def test_damaged_matlab_files_are_named(tmp_path, damage, message):
    for name in ("train", "test"):
        path = tmp_path / f"{name}_32x32.mat"
        savemat(path, {"X": np.moveaxis(numbered_images(20, 32, 32, 3), 0, 3), "y": np.ones((20, 1))})
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        load_data("svhn", tmp_path)
    assert str(tmp_path) in str(error.value)


def blood(path):
    arrays = {}
    for key, n in (("train", 9), ("val", 3), ("test", 4)):
        arrays |= {f"{key}_images": numbered_images(n, 28, 28, 3), f"{key}_labels": np.arange(n).reshape(-1, 1) % 8}
    np.savez(path, **arrays)


def test_bloodmnist(tmp_path):
    blood(tmp_path / "bloodmnist.npz")
    data = load_data("bloodmnist", tmp_path)
    assert split_sizes(data) == [9, 3, 4]
    assert data.train.tensors[1].shape == (9,)
    assert len(data.classes) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_labels": np.full((4, 1), 8)}, r"bloodmnist: labels of test must lie in 0..7, got 8..8"),
        ({"val_labels": np.zeros((2, 1), int)}, "bloodmnist: val must have a label for each of its 3 inputs, got 2"),
        ({"val_labels": np.zeros((3, 2), int)}, r"bloodmnist.npz: labels must have shape \(n,\) or \(n, 1\), got"),
        (
            {"train_images": np.zeros((9, 3))},
            r"images must have shape \(n, H, W\), \(n, H, W, C\) or \(n, C, H, W\), got \(9, 3\)",
        ),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, change, message):
    blood(tmp_path / "bloodmnist.npz")
    with np.load(tmp_path / "bloodmnist.npz") as file:
        arrays = {**dict(file), **change}
    np.savez(tmp_path / "bloodmnist.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_data("bloodmnist", tmp_path)


def test_arrays_that_are_pickles_are_refused(tmp_path):
    np.savez(
        tmp_path / "bloodmnist.npz", train_images=np.array([CodeInPickle()], dtype=object), train_labels=np.zeros(1)
    )
    with pytest.raises(ValueError, match="bloodmnist.npz: train_images holds pickled Python objects"):
        load_data("bloodmnist", tmp_path)
    assert "evil" not in sys.modules


def test_medmnist_fetches(tmp_path, monkeypatch):
    def make(*, split, root, download):
        assert (split, download) == ("train", True)
        blood(f"{root}/bloodmnist.npz")

    monkeypatch.setitem(sys.modules, "medmnist", types.SimpleNamespace(BloodMNIST=make))
    assert split_sizes(load_data("bloodmnist", tmp_path)) == [9, 3, 4]
    monkeypatch.setitem(sys.modules, "medmnist", None)
    assert split_sizes(load_data("bloodmnist", tmp_path)) == [9, 3, 4]  # it is there now


def test_a_failed_fetch_leaves_nothing(tmp_path, monkeypatch):
    def make(root, **options):
        raise RuntimeError("Error downloading\n  train_32x32.mat")

    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", types.SimpleNamespace(SVHN=make))
    with pytest.raises(
        FileNotFoundError, match="downloading them by torchvision failed: Error downloading train_32x32"
    ):
        load_data("svhn", tmp_path)
    assert not list(tmp_path.iterdir())


def test_torchvision_fetches(tmp_path, monkeypatch):
    def make(root, *, train, download):
        assert download
        inner = sources.Path(root) / "cifar-100-python"
        inner.mkdir(exist_ok=True)
        n, first, label = (10, 0, 3) if train else (2, 200, 7)
        (inner / ("train" if train else "test")).write_bytes(
            python_batch(planes(n, first), [label] * n, "fine_labels", 2)
        )

    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", types.SimpleNamespace(CIFAR100=make))
    check_cifar(load_data("cifar100", tmp_path), 10)
    assert (tmp_path / "cifar100" / "cifar-100-python" / "train").exists()


def test_saved_datasets_of_images(tmp_path, monkeypatch):
    def part(n, first):
        return FakeSplit({"img": list(numbered_images(n, 32, 32, 3, first=first)), "label": [1] * n}, "label", None)

    fake_hugging_face(monkeypatch, tmp_path, "cifar10", {"train": part(20, 0), "test": part(3, 200)})
    data = load_data("cifar10", tmp_path)
    assert split_sizes(data) == [18, 2, 3]
    assert image_numbers(data.test) == [200, 201, 202]


def test_imagenet_folders(tmp_path, monkeypatch):
    for key, n in (("train", 3), ("val", 4)):
        for name in ("n02", "n01"):
            (tmp_path / key / name).mkdir(parents=True)
            for i in range(n):
                (tmp_path / key / name / f"{name}_{i}.JPEG").write_bytes(b"picture")
    (tmp_path / "train" / "n01" / "notes.txt").write_text("no picture")
    data = load_data("imagenet", tmp_path, seed=1)
    assert split_sizes(data) == [6, 4, 4]
    assert data.classes == ("n01", "n02")
    files = {path for part in (data.val, data.test) for path in part.files}
    assert len(files) == 8
    assert data.test.files == load_data("imagenet", tmp_path, seed=2).test.files

    def opened(path):
        grey = int(path.stem[-1]) + 100 * int(path.parent.name == "n02")
        return np.full((300, 500, 3), grey, np.uint8)

    monkeypatch.setattr(image_data, "decode", opened)
    for part in (data.train, data.val, data.test):
        for (image, label), file in zip((part[i] for i in range(len(part))), part.files, strict=True):
            assert image.shape == (3, 224, 224)
            assert label == int(file.parent.name == "n02")
            assert round(float(image.mean()) * 255) == int(file.stem[-1]) + 100 * label
    (tmp_path / "val" / "n03").mkdir()
    (tmp_path / "val" / "n03" / "x.png").write_bytes(b"picture")
    with pytest.raises(ValueError, match=r"x.png: there is no class n03 in"):
        load_data("imagenet", tmp_path)


def test_imagenet_without_the_images_to_train_on(tmp_path, monkeypatch):
    for name in ("n02", "n01"):
        (tmp_path / "val" / name).mkdir(parents=True)
        for i in range(4):
            (tmp_path / "val" / name / f"{i}.png").write_bytes(b"picture")
    data = load_data("imagenet", tmp_path)
    assert (split_sizes(data), data.classes) == ([0, 4, 4], ("n01", "n02"))
    (tmp_path / "train" / "n01").mkdir(parents=True)
    (tmp_path / "train" / "n02").mkdir()
    listed = []
    real = folder.list_files
    monkeypatch.setattr(folder, "list_files", lambda place, *more: listed.append(place.name) or real(place, *more))
    (tmp_path / "train" / "n01" / "x.png").write_bytes(b"picture")
    data = load_data("imagenet", tmp_path)
    assert listed == ["val"]  # a million files are listed only for whoever asks for them
    assert (len(data.train), listed) == (1, ["val", "train"])


def test_drafts_of_a_process_that_was_killed_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(image_data, "decode", lambda path: np.full((300, 300, 3), 7, np.uint8))
    (tmp_path / "a.png").write_bytes(b"picture")
    pictures = folder.Pictures([tmp_path / "a.png"], [0])
    decoded = folder.decode_once(pictures, tmp_path / "cache").path
    drafts = [decoded.with_name(f".{name}.0123456789abcdef.tmp") for name in (decoded.name, "pictures-other.bin")]
    for draft in drafts:
        draft.write_bytes(b"half of it")
    assert torch.equal(folder.decode_once(pictures, tmp_path / "cache")[0][0], torch.full((3, 224, 224), 7 / 255))
    assert [draft.exists() for draft in drafts] == [False, True]  # the other may be in use


def test_pictures_without_pillow(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"picture")
    for name in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs pillow: pip install pillow"):
        image_data.decode(tmp_path / "a.png")


@pytest.mark.parametrize("shape", [(256, 256), (300, 500), (511, 257), (64, 100), (1000, 225)])
def test_crops_are_centred(shape):
    grid = np.linspace(0, 255, shape[1])[None, :, None] * np.ones((shape[0], 1, 3))
    out = folder.center_crop(grid.astype(np.uint8))
    assert out.shape == (3, 224, 224)
    middle = (out[0, 0] + out[0, 0].flip(0)) / 2  # what is symmetric about the middle stays so
    assert (middle - 0.5).abs().max() < 0.02
