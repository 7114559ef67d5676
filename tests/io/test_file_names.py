"""Names of files that are not UTF-8 are rejected before the work, with the name."""

import os
import sys

import numpy as np
import pytest

from trueup import load, save
from trueup.calibrators import Temperature
from trueup.io.atomic import require_writable, require_writable_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")

NAME = os.fsdecode(b"caf\xe9")
SHOWN = r"caf\\xe9.*: the name of the file must be UTF-8; rename it"


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".safetensors"])
def test_files_of_odd_names_are_not_read(tmp_path, suffix):
    path = tmp_path / (NAME + suffix)
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=SHOWN):
        load(path)


def test_nothing_is_written_under_an_odd_name(tmp_path):
    for write in (
        lambda: save(Temperature(2.0), tmp_path / f"{NAME}.safetensors"),
        lambda: save((np.zeros((1, 2)), [0]), tmp_path / f"{NAME}.npz"),
        lambda: require_writable(tmp_path / NAME),
        lambda: require_writable_folder(tmp_path / NAME / "inner"),
    ):
        with pytest.raises(ValueError, match=SHOWN):
            write()
    assert not list(tmp_path.iterdir())


def test_other_letters_are_accepted(tmp_path):
    path = tmp_path / "café 表.npz"
    save((np.zeros((1, 2)), [0]), path)
    assert load(path).labels.tolist() == [0]
