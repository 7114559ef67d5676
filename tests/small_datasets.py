"""Data sets small enough to write in a test, and what came out of them."""

import sys
import types

import numpy as np


def numbered_images(n, *shape, first=0):
    """Images that tell which they are: every pixel of image i is first + i."""
    return np.broadcast_to((first + np.arange(n, dtype=np.uint8)).reshape(n, *(1 for _ in shape)), (n, *shape)).copy()


def image_numbers(part):
    """Which of the numbered images a part holds."""
    return sorted(round(float(image.flatten()[0]) * 255) for image, _ in part)


def split_sizes(data):
    return [len(part) for part in (data.train, data.val, data.test)]


class CodeInPickle:
    """An object whose pickle runs code when it is read."""

    def __reduce__(self):
        return exec, ("import sys; sys.modules['evil'] = 1",)


def fake_hugging_face(monkeypatch, tmp_path, name, parts):
    """A folder of the Hugging Face library, and a library that reads these parts from it."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "dataset_dict.json").write_text("{}")

    def load_from_disk(path):
        assert path == str(tmp_path / name)
        return parts

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_from_disk=load_from_disk))


class FakeSplit:
    """A part as that library gives it."""

    def __init__(self, columns, label, label_names):
        self.columns = columns
        self.features = {label: types.SimpleNamespace(names=label_names)}

    def __getitem__(self, key):
        return self.columns[key]

    def __len__(self):
        return len(next(iter(self.columns.values())))
