"""The demonstration: that it happens, that what it says is what it found, and that what it writes can be used."""

import contextlib
import io
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import trueup
from trueup import demo, metrics
from trueup._core.formatting import format_number
from trueup.io import read_header

pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from trueup.demo import camera, walkthrough
from trueup.demo.digits import N_CALIBRATION, N_TRAIN, digits, loader, train_network
from trueup.demo.walkthrough import FILES

METHODS = ("temperature", "svs", "histogram")


@dataclass(frozen=True)
class Told:
    """What a run printed, where it ran, and what it made on the way."""

    out: str
    place: Path
    path: Path
    touched: bool
    """Whether the global random state is another than before."""
    network: torch.nn.Module
    shifts: list[camera.ShiftResult]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Told:
    """A run with few methods, and with no way out of the machine."""

    def refused(*args, **kwargs):
        raise AssertionError("the demo asked for a connection")

    made = {"train_network": [], "evaluate_shift": []}

    def watched(function):
        def called(*args, **options):
            made[function.__name__].append(function(*args, **options))
            return made[function.__name__][-1]

        return called

    out, place = io.StringIO(), tmp_path_factory.mktemp("told")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(socket, "create_connection", refused)
        patch.setattr(socket.socket, "connect", refused)
        patch.setattr("trueup.demo.digits.train_network", watched(train_network))
        patch.setattr(camera, "evaluate_shift", watched(camera.evaluate_shift))
        patch.chdir(place)
        Path("demo").mkdir()
        state = torch.get_rng_state()
        path = walkthrough.run_demo(Path("demo"), methods=METHODS)
        touched = not torch.equal(torch.get_rng_state(), state)
    return Told(out.getvalue(), place, path, touched, *made["train_network"], made["evaluate_shift"])


@pytest.fixture(scope="module")
def network(told):
    return told.network


@pytest.fixture(scope="module")
def found(told):
    return told.shifts


def test_the_parts_are_disjoint_and_split_by_the_seed():
    one, two = digits(0), digits(1)
    assert [len(labels) for _, labels in (one.train, one.val, one.test)] == [
        N_TRAIN,
        N_CALIBRATION,
        1797 - N_TRAIN - N_CALIBRATION,
    ]
    together = torch.cat([images for images, _ in (one.train, one.val, one.test)]).flatten(1)
    other = torch.cat([images for images, _ in (two.train, two.val, two.test)]).flatten(1)
    assert torch.equal(together.sum(0), other.sum(0))  # the same digits, each once: sums of sixteenths are exact
    assert not torch.equal(one.train[0], two.train[0])
    assert float(together.min()) == 0
    assert float(together.max()) == 1


def test_training_is_repeatable_and_seeded():
    train = digits().train
    one, two, other = (train_network(train, epochs=2, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_the_network_is_good_but_too_sure(network):
    data = digits()
    assert metrics.accuracy(*trueup.collect(network, loader(data.train))) == 1
    scores = trueup.evaluate(*trueup.collect(network, loader(data.test)))
    assert 0.9 < scores["accuracy"].value < 0.96
    assert scores["accuracy"].high < scores["confidence"].low
    assert "overconfident" in scores.verdict()


RAW, KEPT, REFITTED = "no calibration", "calibrator fitted before the shift", "temperature scaling, refitted"
CLEAN, CLAMPED, REPAIRED = "no calibration, before the shift", "Neural Clamping, refitted", "repair"


def test_the_camera_damages_and_clamping_and_repair_mend_it(found):
    for each in found:
        accuracy = {name: each.scores[name, "accuracy"].value for name in each.scores.methods}
        assert accuracy[RAW] < 0.7 < 0.9 < accuracy[CLEAN]
        assert accuracy[RAW] == accuracy[REFITTED]
        assert accuracy[CLAMPED] > accuracy[RAW] + 0.2
        assert each.scores.changes[CLAMPED]["nll"].high < 0
        assert each.scores.changes[CLAMPED]["ece"].high < 0
        assert each.scores[REFITTED, "nll"].value < each.scores[KEPT, "nll"].value
        assert "input" in each.repaired.repair_record.parts
        assert accuracy[REPAIRED] > accuracy[CLAMPED]
        assert each.scores[REPAIRED, "nll"].value < each.scores[CLAMPED, "nll"].value


def test_shifted_scores_are_those_of_the_networks(network, found):
    data = digits()
    for each, setting in zip(found, ("(x − ½)·0.4 + ½", "x + 0.4"), strict=True):
        assert each.texts[0] == f"Every pixel x becomes {setting}, clipped to 0 … 1."
        pixels = data.test[0]
        seen = (pixels - 0.5) * 0.4 + 0.5 if each.corruption == "contrast" else (pixels + 0.4).clamp(max=1)
        with torch.no_grad():
            raw, clamped, repaired = network(seen), each.clamped(seen), each.repaired(seen)
        assert each.clamped.fit_record.samples == N_CALIBRATION
        val = trueup.collect(network, loader(camera.apply_shift(data.val, each.corruption, each.severity)))
        alone = trueup.METHODS["temperature"](*val)(raw)
        for name, logits in ((RAW, raw), (REFITTED, alone), (CLAMPED, clamped), (REPAIRED, repaired)):
            assert each.scores[name, "nll"].value == pytest.approx(metrics.nll(logits, data.test[1]), rel=1e-5)


def test_the_picture_shows_the_first_digit_of_each_class(network, found):
    import matplotlib.pyplot as plt

    images, labels = digits().test
    with torch.no_grad():
        axes = np.array(camera.draw(network, (images, labels), found).axes).reshape(5, 10)
    assert [row[0].texts[0].get_text() for row in axes] == ["clean", "contrast", "repaired", "brightness", "repaired"]
    shown = np.array([[ax.images[0].get_array() for ax in row] for row in axes])
    for k in range(10):
        first = images[int(np.flatnonzero(labels.numpy() == k)[0])]
        assert np.array_equal(shown[0, k], first[0].numpy())
        with torch.no_grad():
            p = torch.softmax(found[0].repaired((first[None] - 0.5) * 0.4 + 0.5), dim=1)[0]
        mark = "" if int(p.argmax()) == k else "≠ "
        assert axes[2, k].get_title() == f"{mark}{int(p.argmax())}, {100 * float(p.max()):.0f} %"
    np.testing.assert_allclose(shown[1], (shown[0] - 0.5) * 0.4 + 0.5, atol=1e-6)
    assert np.abs(shown[2] - shown[0]).mean() < np.abs(shown[1] - shown[0]).mean()
    assert plt.get_fignums() == []


def test_the_section_has_the_picture_and_the_scores(found, tmp_path):
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    heading, page = camera.section(found, tmp_path / "x.png")
    assert heading == "What if the camera changes?"
    assert 'src="data:image/png;base64,iVBORw=="' in page
    assert page.count("<table>") == page.count("Does the input shift of clamping help? Yes") == 2
    assert page.count("Was there anything to repair? Yes") == 2
    assert format_number(found[1].scores[CLAMPED, "ece"].value) in page


def test_the_global_random_state_is_left_alone(told):
    assert not told.touched


def test_everything_is_written(told):
    place = told.place
    assert told.path == Path("demo/report.html")
    names = {name for names in FILES for name in names.split(", ")}
    assert {file.name for file in (place / "demo").iterdir()} == names
    assert (place / "demo/repair.png").read_bytes().startswith(b"\x89PNG")
    page = (place / "demo/report.html").read_text(encoding="utf-8")
    assert "What if the camera changes?" in page
    assert "data:image/png;base64," in page
    assert read_header(place / "demo/calibrator.safetensors").n_classes == 10


def test_what_is_printed_fits_a_terminal(told):
    out = told.out
    assert max(map(len, out.splitlines())) <= 79
    for part in ("1. Train", "2. Calibrate", "3. Change", "4. Use"):
        assert f"\n{part}" in out
    assert "for 150 epochs on 200 handwritten digits" in " ".join(out.split())


def test_what_is_printed_is_what_the_files_hold(told):
    out, place = told.out, told.place
    line = out.split("\nmethod ")[1].splitlines()[1]
    name, loss, *values = line.replace("*", "").split()
    test = trueup.load(place / "demo/test.npz")
    calibrated = trueup.load(place / "demo/calibrator.safetensors")(test.logits)
    for metric, value in zip(walkthrough.METRICS, values, strict=True):
        assert trueup.METRICS[metric](calibrated, test.labels) == pytest.approx(float(value), abs=6e-5)
    assert f"Chosen without the test digits: {name}." in " ".join(out.split())
    held_out = trueup.calibrators.cross_fit(name)(*trueup.load(place / "demo/val.npz"))
    assert metrics.nll(held_out, trueup.load(place / "demo/val.npz").labels) == pytest.approx(float(loss), abs=6e-5)


def test_the_three_lines_run(told, monkeypatch):
    out, place = told.out, told.place
    after = out.split("The calibrator in three lines of Python:\n")[1].splitlines()[:3]
    lines = [line.removeprefix("    ") for line in after]
    assert lines == walkthrough.usage(Path("demo"))
    monkeypatch.chdir(place)
    names: dict = {}
    exec("\n".join(lines), names)
    assert metrics.nll(names["calibrated"], names["labels"]) < metrics.nll(names["logits"], names["labels"])


def test_the_table_goes_by_cross_validated_loss_after_the_chosen_and_the_raw_network(told):
    table = told.out.split("\nmethod ")[1].split("\n\n")[0].splitlines()[1:]
    names, losses = zip(*(line.split()[:2] for line in table), strict=True)
    assert sorted(names) == sorted(("raw", *METHODS))
    assert "raw" in names[:2]
    rest = [float(loss) for name, loss in zip(names[1:], losses[1:], strict=True) if name != "raw"]
    assert rest == sorted(rest)
    assert float(losses[0]) <= float(losses[names.index("raw")])


def test_the_front_door_passes_on_its_arguments(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr("trueup.demo.walkthrough.run_demo", lambda *args, **options: calls.append((args, options)))
    demo.run(tmp_path / "new" / "folder", seed=3, quiet=True)
    assert calls == [((tmp_path / "new" / "folder",), {"seed": 3, "quiet": True})]
    assert (tmp_path / "new" / "folder").is_dir()
    assert capsys.readouterr().out == ""
    demo.run(tmp_path)
    assert calls[1][1] == {"seed": 0, "quiet": False}
    assert capsys.readouterr().out.startswith("Is a network's confidence honest")


def test_quiet_is_quiet(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(camera, "SHIFTS", ())
    walkthrough.run_demo(tmp_path, quiet=True, epochs=1, methods=("temperature", "svs"))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_what_is_missing_is_told_before_anything_is_done(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "find_spec", lambda module: "torch" if module == "torch" else None)
    with pytest.raises(ImportError, match=r"needs sklearn, matplotlib: pip install 'trueup\[sklearn,report\]'"):
        demo.run(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "demo").write_text("")
    with pytest.raises(ValueError, match="demo: must be a folder, but .* is a file"):
        demo.run(tmp_path / "demo")


def test_without_torch_the_stored_predictions_are_shown(tmp_path, monkeypatch, told, capsys):
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['sklearn'] = None\n"
        "from trueup import demo; from trueup.demo import walkthrough; import functools\n"
        f"walkthrough.run_stored = functools.partial(walkthrough.run_stored, methods={METHODS})\n"
        "demo.find_spec = lambda module: None if module in ('torch', 'sklearn') else module\n"
        "demo.run('shown')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = " ".join(done.stdout.split())
    assert "the demo neither trains a network" in out
    assert "pip install 'trueup[torch]'" in out
    assert max(map(len, done.stdout.splitlines())) <= 79
    names = {name for names in FILES for name in names.split(", ")} - {"repair.png"}
    assert {file.name for file in (tmp_path / "shown").iterdir()} == names
    for name in ("val.npz", "test.npz"):
        stored, trained = trueup.load(tmp_path / "shown" / name), trueup.load(told.place / "demo" / name)
        assert np.array_equal(stored.labels, trained.labels)
        np.testing.assert_allclose(stored.logits, trained.logits, rtol=0.05, atol=2)  # training differs by machine
    monkeypatch.setattr(demo, "find_spec", lambda module: None if module == "torch" else module)
    with pytest.raises(ImportError, match="another seed needs another network"):
        demo.run(tmp_path / "new", seed=1)
