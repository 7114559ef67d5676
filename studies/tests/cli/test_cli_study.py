"""A paper's experiments by one command, that goes on where it was stopped."""

import json
import re
import sys

import numpy as np
import pytest

from trueup_studies import STUDIES, Options, Store
from trueup_studies.cli.study import NAMES, _confirm
from trueup_studies.cost import Unknown, estimate

SMALL = ("--data", "overconfident", "--seeds", "1", "-m", "identity", "-m", "temperature", "-j", "1")


def test_the_names_are_those_of_the_room():
    assert tuple(STUDIES) == NAMES


def test_a_study_ends_in_a_page_and_is_not_run_twice(tmp_path, command):
    first = json.loads(command("study", "post-hoc", *SMALL, "-o", tmp_path, "--json").stdout)
    assert (first["finished"], first["failed"], first["cells"]) == (2, {}, 2)
    page = tmp_path / "post-hoc"
    assert first["output"].startswith(str(page))
    assert list(page.glob("*.html"))
    assert list(page.glob("*.csv"))
    again = json.loads(command("study", "post-hoc", *SMALL, "-o", tmp_path, "--json").stdout)
    assert again["finished"] == 0
    only = command("study", "report", "post-hoc", *SMALL, "-o", tmp_path).stdout
    assert only.startswith("Written: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("post-hock",), "no study is called 'post-hock'; did you mean post-hoc?"),
        (("report",), "wanted one study of neural-clamping, rethinking, clue, post-hoc, calarena, got none"),
        (("post-hoc", "-j", "2", "--scheduler", "local"), "give either --workers or --scheduler"),
        (("calarena",), "calarena needs --data-dir"),
        (("report", "clue"), "no results yet; `trueup study clue` makes them"),
        (("clue", "--device", "cuda:77"), "--device must be one that this machine has, got 'cuda:77'"),
        (
            ("neural-clamping", "-m", "nc_code_augmented"),
            "nc_code_augmented is for cifar10, cifar100, imagenet, like the released code, got digits",
        ),
        (("clue", "--network", "resnet8"), "network is no option of clue, got 'resnet8'"),
        (("clue", "--retrain"), "retrain is no option of clue"),
        (("post-hoc", "--preset", "paper"), "post-hoc has no presets, got 'paper'"),
        (("rethinking", "--network", "resnet9"), "network must be one of resnet8, resnet20, "),
        (("rethinking", "--network", "text_cnn"), "text_cnn is not for images such as digits"),
        (
            ("rethinking", "--preset", "paper", "--network", "resnet110"),
            "it goes with --data svhn or --data cifar10 or --data cifar100 or --preset paper-resnet110",
        ),
        (("clue", "--data", "digits", "-m", "gaussian"), 'nothing to run: no cell of clue has data "digits", methods'),
    ],
)
def test_what_cannot_be_is_one_line(folder, command, words, message):
    assert message in command("study", *words, code=2).stderr
    assert not list(folder.glob("study/*.sqlite"))


def test_the_list_shows_presets_and_missing_files(command, tmp_path):
    shown = command("study", "list", "--data-dir", str(tmp_path)).stdout
    line = "rethinking --preset trec: 75 runs; trec; networks alone: less than 0.1 min at 10 TFLOP/s, "
    assert re.search(re.escape(line) + r"[\d.]+ (min|h) on the cores of this machine; files missing", shown)
    assert "Hours are for whole data sets" in shown
    assert "  trec: TREC.train.all + TREC.test.all" in shown
    assert "  weights/cifar10_resnet20.th: published weights, or others with weights/cifar10_resnet20.json" in shown
    assert "  calibration_benchmarks/*.h5: the benchmark's predictions" in shown
    also = shown.partition("Optional files:")[2]
    assert "  weights/cifar100_resnet110.th: with weights/cifar100_resnet110.json" in also
    assert "  digits: comes with scikit-learn" in shown
    (tmp_path / "tinyshakespeare.txt").write_text("to be or not to be")
    listed = json.loads(command("study", "list", "--data-dir", str(tmp_path), "--json").stdout)
    presets = {(line["study"], line["preset"]): line for line in listed["presets"]}
    assert presets["clue", "tinyshakespeare"]["files"] == []
    assert presets["clue", "tinyshakespeare"]["present"] == [f"tinyshakespeare: {tmp_path}"]
    assert len(presets["neural-clamping", "cifar10"]["files"]) == 3  # the images and two files of weights
    assert presets["clue", "trec"]["files"]


def test_what_is_unknown_or_missing_is_refused_before_anything_is_written(command, tmp_path):
    for options, words in (
        (["--preset", "x"], "preset must be one of digits"),
        (["--preset", "paper", "--data", "svhn", "--data-dir", str(tmp_path)], "svhn: wanted svhn.npz"),
        (["--data-dir", str(tmp_path / "none")], "none: no such folder"),
    ):
        result = command("study", "rethinking", *options, "-o", str(tmp_path / "out"), code=2)
        assert words in result.stderr
        assert not (tmp_path / "out").exists()


def test_changed_data_are_not_mixed_with_old_results(command, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), rng.normal(size=60)
    words = ["study", "clue", "--data", "uci_yacht", "--data-dir", str(tmp_path), "--seeds", "1", "-m", "plain"]
    words += ["-j", "1", "-o", str(tmp_path / "out")]
    for labels, code in ((y, 0), (y, 0), (y[::-1], 2)):
        np.savez(tmp_path / "uci_yacht.npz", x=x, y=labels)
        result = command(*words, code=code)
    assert "results for uci_yacht come from other files" in result.stderr
    assert "results for uci_yacht come from other files" in command(*words, "-m", "batch_0.5", code=2).stderr


def test_a_refusal_leaves_nothing_behind(command, tmp_path):
    (tmp_path / "notes.sqlite").write_text("shopping")
    out = ["-o", str(tmp_path / "out")]
    for words, message in (
        (["report", "post-hoc", *out], "no results yet"),
        (["post-hoc", "--store", str(tmp_path / "notes.sqlite"), *out], "expected a store of results"),
        (["clue", "--device", "meta", *out], "--device must be one that this machine has"),
    ):
        assert message in command("study", *words, code=2).stderr
        assert not (tmp_path / "out").exists()


def test_all_missing_data_sets_are_named_at_once(command, tmp_path, monkeypatch):
    for name in ("torchvision", "medmnist"):
        monkeypatch.setitem(sys.modules, name, None)
    words = ["study", "neural-clamping", "--preset", "paper", "--data-dir", str(tmp_path), "-o", str(tmp_path / "out")]
    message = command(*words, code=2).stderr
    for name, file in (("bloodmnist", "bloodmnist.npz"), ("cifar100", "cifar100.npz"), ("imagenet", "train/")):
        assert f"{name}: wanted {file}" in message


def test_more_than_a_day_is_asked_about(command, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup_studies.cost.measure_rate", lambda device: 1e4)
    monkeypatch.setattr("trueup_studies.cost.SLOWEST", 1e4)
    small = ["study", "neural-clamping", "-m", "temperature", "--seeds", "1", "-o", str(tmp_path)]
    message = command(*small, "-j", "1", code=2).stderr
    assert "Runs left: 1, about 431 hours on this machine; --yes starts them" in message
    assert json.loads(command(*small, "-j", "1", "--yes", "--json").stdout)["finished"] == 1
    command(*small, "-j", "1")  # nothing is left, nothing is asked


@pytest.mark.parametrize(
    ("device", "workers", "units"),
    [(None, None, 4), ("cpu", 2, 2), ("cpu", 9, 4), ("cuda", None, 3), ("cuda", 8, 3), ("cuda:1", None, 1),
     ("cuda:1", 8, 1)],
)  # fmt: skip
def test_hours_are_those_of_what_works_at_the_same_time(device, workers, units, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup._core.executors.count_cores", lambda: 4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("trueup_studies.cost.measure_rate", lambda device: 1e6)
    monkeypatch.setattr("trueup_studies.cost.SLOWEST", 1e6)
    study, options = STUDIES["rethinking"], Options(seeds=1, device=device)
    whole = estimate(study, options).hours(1e6)
    assert whole / 4 > 24
    with pytest.raises(ValueError, match=rf"about {whole / units:,.0f} hours on this machine"):
        _confirm(study, Store(tmp_path / "results.sqlite"), options, workers)


def test_a_run_of_unknown_length_is_asked_about(command, tmp_path, monkeypatch):
    def unknown(*network):
        raise Unknown(f"{network[0]}: cannot be built")

    monkeypatch.setattr("trueup_studies.cost.forward_flops", unknown)
    small = ["study", "rethinking", "--seeds", "1", "-m", "cross_entropy", "-o", str(tmp_path)]
    message = command(*small, code=2).stderr
    assert "about 0 hours on this machine, and an unknown time for mlp: cannot be built; --yes starts" in message


def test_networks_of_timm_are_refused_without_it(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    words = ["study", "rethinking", "--network", "timm:resnet18", "-o", str(tmp_path)]
    assert "networks of timm need it: pip install 'trueup-studies[vision]'" in command(*words, "--yes", code=2).stderr
    assert not list(tmp_path.glob("*.sqlite"))


@pytest.mark.parametrize(
    ("gpu", "name", "given", "device"),
    [
        (True, "clue", (), "cuda"),
        (False, "clue", (), "cpu"),
        (True, "clue", ("--device", "cpu"), "cpu"),
        (True, "post-hoc", (), "cpu"),  # it has no networks
        (True, "clue", ("--scheduler", "tcp://host:1"), None),  # its workers may have others
        (True, "post-hoc", ("--scheduler", "tcp://host:1"), "cpu"),
    ],
)
def test_networks_are_on_a_gpu_where_there_is_one(gpu, name, given, device, command, tmp_path, monkeypatch):
    seen = []

    def stop(study, store, options, *more):
        seen.append(options.device)
        raise ValueError("far enough")

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("trueup_studies.cli.study._require_device", lambda *options: None)
    monkeypatch.setattr("trueup_studies.cli.study._run", stop)
    command("study", name, "--seeds", "1", "--yes", *given, "-o", str(tmp_path), code=2)
    assert seen == [device]
