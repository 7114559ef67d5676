"""Full disks, missing permissions and places that are not there: an error names the file, and the old one is whole."""

import errno
import os
import resource
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from commands import invoke, overconfident
from saves import SAVES, WRITTEN, file_contents

import trueup
from trueup_studies import STUDIES, Cell, Options, Store, run
from trueup_studies import study_page as study_page

PAGE = 4096
NOBODY = 65534


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A disk of its own, of 16 MB."""
    folder = tmp_path_factory.mktemp("disk")
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no `mount` here to make a small disk with")
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@contextmanager
def filled(disk, pages):
    """The disk with only so many pages left."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            with suppress(OSError):
                while True:
                    file.write(bytes(PAGE))
            file.truncate(max(0, os.path.getsize(filler) - PAGE * pages))
        yield
    finally:
        filler.unlink()


@contextmanager
def limited(bytes):
    """No file may grow beyond so many bytes; Python has the signal ignored, so a write fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_is_refused(kind, path, cramped):
    """Save the next version where there is too little space; True if it was refused, as it should be."""
    before = file_contents(path)
    old = kind.read(path)
    refusal = None
    try:
        with cramped:
            kind.write(path, old + 1)
    except OSError as error:
        refusal = error
    if refusal is None:
        assert kind.read(path) == old + 1
        assert set(file_contents(path)) == set(before)
        return False
    assert refusal.errno in (errno.ENOSPC, errno.EFBIG, errno.EIO), refusal
    assert refusal.filename == str(path), f"the error does not name the file: {refusal}"
    assert file_contents(path) == before, "the old file changed, or a draft is left"
    return True


def free_space(most, effort):
    """How much space to leave: none, and as much as takes the writer to some other place of its work."""
    return [0, *np.random.default_rng(effort).integers(1, max(2, most), size=3 * effort)]


def test_full_disk(disk, effort, tell):
    """Every kind of file is saved over an older one on a disk (mounted for it, 16 MB) that is full or fills midway."""
    tried = refused = 0
    for name, kind in WRITTEN.items():
        path = disk / kind.file
        kind.write(path, 1)
        size = sum(map(len, file_contents(path).values()))
        for pages in free_space(size // PAGE, effort):
            full = save_is_refused(kind, path, filled(disk, int(pages)))
            assert full or pages, f"{name} was saved where there was no space"
            tried, refused = tried + 1, refused + full
        for file in file_contents(path):
            (disk / file).unlink()
    tell(
        "faults",
        f"{len(WRITTEN)} kinds of file, {tried} saves: {refused} refused with “No space left on device” and the file's "
        f"name, old file the same byte for byte, no draft left; {tried - refused} found room and are whole",
    )


def test_file_size_limit(tmp_path, effort, tell):
    """Every kind of file is saved over an older one where files may not grow beyond a limit: it stops midway."""
    tried = refused = 0
    for name, kind in WRITTEN.items():
        folder = tmp_path / name
        folder.mkdir()
        path = folder / kind.file
        kind.write(path, 1)
        for size in free_space(path.stat().st_size - 1, effort):
            full = save_is_refused(kind, path, limited(int(size)))
            assert full, f"{name} was saved beyond the limit"
            tried, refused = tried + 1, refused + full
    tell("faults", f"{tried} saves of {len(WRITTEN)} kinds, {refused} refused by name, every old file byte for byte")


def test_study_on_a_full_disk(disk, tmp_path, tell):
    """A study writes to its store, its tables and its page on a full disk."""
    study, options = STUDIES["post-hoc"], Options(data="overconfident", seeds=1, methods=("identity", "temperature"))
    store, page = Store(disk / "results.sqlite"), disk / "page" / "index.html"
    run(study, store, options=options, progress=False)
    study_page.save_page(study, store, options, page.parent)
    shutil.copy(store.path, tmp_path / "copy.sqlite")  # from which the page is made where the store cannot be opened
    cells, files = study.cells(options), file_contents(page)
    rows, long, refused = store.rows(cells), [{"text": "x" * 1000}] * 100, 0
    for pages in (0, 3, 12):
        with filled(disk, pages), pytest.raises(OSError, match="results.sqlite"):
            store.finish(Cell("other", 1, {"n": 0}), long, seconds=0)
        with filled(disk, min(pages, 2)), pytest.raises(OSError, match="No space left on device") as caught:
            study_page.save_page(study, Store(tmp_path / "copy.sqlite"), options, page.parent)
        assert Path(caught.value.filename).name in files
        refused += 2
        assert store.rows(cells) == rows
        assert store.known("other") == []
        assert file_contents(page) == files
    assert store.finish(Cell("other", 1, {"n": 0}), long, seconds=0)
    study_page.save_page(study, store, options, page.parent)
    assert file_contents(page) == files
    tell("faults", f"{refused} writes refused by name, all {len(rows)} rows and {len(files)} files as before; with "
         "space again it goes on")  # fmt: skip
    for file in (*page.parent.iterdir(), *disk.glob("results.sqlite*")):
        file.unlink()


def test_commands_on_a_full_disk(disk, tmp_path, tell):
    """`trueup fit`, `apply`, `report` and `monitor` write over older results on a full disk."""
    trueup.save(overconfident(300), tmp_path / "val.npz")
    fit, out = tmp_path / "calibrator.safetensors", disk / "out"
    out.mkdir()
    commands = {
        f"{out}/fit.safetensors": ["fit", "{val}", "-m", "temperature", "-o", "{out}"],
        f"{out}/applied.npz": ["apply", str(fit), "{val}", "-o", "{out}"],
        f"{out}/report.html": ["report", "{val}", "-m", "temperature", "-o", "{out}"],
        f"{out}/watch.safetensors": ["monitor", "{val}", "--state", "{out}"],
    }
    invoke("fit", tmp_path / "val.npz", "-m", "temperature", "-o", fit)
    for path, words in commands.items():
        line = [word.format(val=tmp_path / "val.npz", out=path) for word in words]
        first = invoke(*line)
        assert first.exit_code in (0, 3), first.output
        before = file_contents(Path(path))
        with filled(disk, 0):
            told = invoke(*line)
        assert told.exit_code == 1, told.output
        assert told.stderr == f"trueup: {path}: No space left on device\n"
        assert file_contents(Path(path)) == before
    tell("faults", f"{len(commands)} commands: code 1 and one line that names the file; old results byte for byte")
    for file in out.iterdir():
        file.unlink()
    out.rmdir()


@contextmanager
def powerless():
    """As a user who owns nothing, since modes mean nothing to root."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared():
    """A folder that everybody may look into; those of pytest are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_no_permission_to_write(shared, tell):
    """Every kind of file is saved in a folder where one may not write."""
    for name, kind in WRITTEN.items():
        path = shared / kind.file
        kind.write(path, 1)
        before = file_contents(path)
        os.chmod(shared, 0o555)
        with powerless(), pytest.raises(PermissionError) as caught:
            kind.write(path, 2)
        os.chmod(shared, 0o755)
        assert caught.value.filename == str(path), name
        assert file_contents(path) == before
    tell("faults", f"{len(WRITTEN)} kinds: PermissionError that names the file; old files byte for byte, no draft")


def test_no_permission_to_read(shared, tell):
    """Every kind of file is read by somebody who may not."""
    kinds = {name: kind for name, kind in SAVES.items() if name != "report"}
    for name, kind in kinds.items():
        path = shared / kind.file
        kind.write(path, 1)
        path.chmod(0)
        with powerless(), pytest.raises(PermissionError) as caught:
            kind.read(path)
        assert str(path) in str(caught.value), f"{name}: {caught.value}"
        path.chmod(0o644)
    pair_file, store = shared / "net.npz", shared / "results.sqlite"
    Store(store)
    for path in (pair_file, store):
        path.chmod(0)
    with powerless():
        told = invoke("evaluate", pair_file)
        with pytest.raises(PermissionError, match="results.sqlite"):
            Store(store)
    assert (told.exit_code, told.stderr) == (2, f"trueup: {pair_file}: Permission denied\n")
    tell("faults", f"{len(kinds)} kinds, a store and `trueup evaluate`: PermissionError (code 2) that names the file")


def test_no_such_place(tmp_path, tell):
    """Every kind of file is saved where a folder is in its place, and in a folder that is not there."""
    for name, kind in WRITTEN.items():
        folder = tmp_path / name / kind.file
        folder.mkdir(parents=True)
        with pytest.raises(OSError) as caught:
            kind.write(folder, 1)
        assert str(folder) in str(caught.value), name
        assert isinstance(caught.value, IsADirectoryError)
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            kind.write(tmp_path / "nowhere" / kind.file, 1)
        assert [file.name for file in folder.parent.iterdir()] == [kind.file]
        assert not list(folder.iterdir())
    tell("faults", f"{2 * len(WRITTEN)} saves: an error that names the place, nothing written")
