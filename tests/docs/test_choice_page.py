"""The benchmark of the automatic choice runs from beginning to end, and its page holds its numbers."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("h5py", reason="the benchmark's files need h5py")
pytest.importorskip("sklearn", reason="its models are scikit-learn's")

ROOT = Path(__file__).parents[2]


def test_a_small_run_writes_the_page_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import choice
    import choice_peers

    sklearn_alone = {name: "" if name.startswith("scikit-learn") else "not used here" for name in choice_peers.PEERS}
    monkeypatch.setattr(choice_peers, "present", lambda: sklearn_alone)
    monkeypatch.setattr(choice, "MORE_CLASSES", ("identity", "temperature"))
    monkeypatch.setattr(choice, "TWO_CLASSES", ("identity", "temperature"))
    arguments = ["--small", "--folder", str(tmp_path / "kept"), "--out", str(tmp_path)]
    choice.main(arguments)
    page = (tmp_path / "choice.md").read_text("utf-8")
    assert "Models of scikit-learn, two classes (2 files)" in page
    assert "Made from trueup " in page
    methods = (tmp_path / "choice-methods.csv").read_text("utf-8")
    for words in ("trueup auto,", "scikit-learn sigmoid,"):
        assert words in methods
    assert ",wine,forest," in (tmp_path / "choice-files.csv").read_text("utf-8")
    assert (tmp_path / "images/choice.svg").is_file()
    choice.main(arguments)
    assert (tmp_path / "choice.md").read_text("utf-8") == page
    for name in ("choice", "choice_peers", "choice_experiments", "measured", "peers"):
        sys.modules.pop(name, None)
