"""What the verbs of the studies refuse, before they begin to work."""

from importlib import import_module
from pathlib import Path

import pytest


def line_of(result):
    assert result.stdout == ""
    assert result.stderr.startswith("trueup: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def idle(monkeypatch):
    """Whatever begins to work fails."""

    def begun(*args, **options):
        raise AssertionError("the work has begun")

    for work in ("trueup_studies.training.data.load_data", "trueup_studies.run"):
        monkeypatch.setattr(work, begun)


@pytest.fixture
def sealed(folder, monkeypatch):
    """A folder in which no file can be made, whoever tries."""
    (folder / "sealed").mkdir()
    touch = Path.touch

    def refusing(self, *args, **options):
        if self.parent.name == "sealed":
            raise PermissionError(13, "Permission denied", str(self))
        touch(self, *args, **options)

    monkeypatch.setattr(Path, "touch", refusing)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--loss", "focl", "-o", "run"], "no loss is called 'focl'; did you mean focal"),
        (["train", "--network", "resnet21", "-o", "run"], "did you mean resnet"),
    ],
)
def test_bad_input_is_one_line_and_code_2(folder, command, words, said):
    assert said in line_of(command(*words, code=2))


def test_a_store_that_cannot_be_written_is_noticed_before_the_work(folder, command, idle, sealed):
    def refused(name):
        said = line_of(command("study", "post-hoc", "--store", f"{name}.sqlite", code=2))
        assert said.startswith(f"trueup: {name}.sqlite: ")
        return said

    (folder / "taken.sqlite").mkdir()
    assert "it cannot be written: Permission denied" in refused("sealed/out")
    assert "there is no folder no" in refused("no/out")
    assert "must be a file, but is a folder" in refused("taken")
    assert "it cannot be written: File name too long" in refused("x" * 240)
    assert not list((folder / "sealed").iterdir())


@pytest.mark.parametrize("verb", [["train", "--data", "digits"], ["study", "post-hoc"]])
def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(folder, command, idle, sealed, verb):
    def refused(name):
        return line_of(command(*verb, "-o", name, code=2))

    assert "it cannot be written: Permission denied" in refused("sealed")
    assert "sealed/new/deep" in refused("sealed/new/deep")
    assert f"must be a folder, but {folder / 'val.npz'} is a file" in refused("val.npz")
    assert "val.npz is a file" in refused("val.npz/run")
    assert not list((folder / "sealed").iterdir())


def test_the_page_of_a_study_needs_a_folder_too(folder, command, idle):
    (folder / "post-hoc").write_text("in the way")
    assert "post-hoc is a file" in line_of(command("study", "post-hoc", "-o", ".", code=2))


def test_a_study_whose_cells_all_fail_does_not_end_well(folder, command, monkeypatch):
    words = "study", "post-hoc", "--data", "overconfident", "--seeds", 1, "-m", "temperature", "--workers", 1
    module = import_module("trueup_studies.run")
    monkeypatch.setattr(module, "execute", lambda work, cell: module._CellResult([], "KeyError: broken", 0.0))
    result = command(*words, code=1)
    assert "failed: KeyError: broken" in result.stderr


def test_a_study_looks_for_its_folder_first(folder, command):
    assert "no such folder" in command("study", "rethinking", "--data-dir", "nowhere", code=2).stderr
