"""How a command ends when it cannot do what was asked."""

import json
import re
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import trueup
from trueup.cli import app
from trueup.cli.verbs import describe_error


def line_of(result):
    assert result.stdout == ""
    assert result.stderr.startswith("trueup: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate"], "Missing argument 'FILE' (see trueup evaluate --help)"),
        (["evalute", "x.npz"], "No such command 'evalute'"),
        (["evaluate", "test.npz", "--colour"], "No such option: --colour"),
        (["evaluate", "test.npz", "--bins", "many"], "Invalid value for '--bins'"),
        (["evaluate", "test.npz", "--bins", "0"], "bins must"),
        (["evaluate", "test.npz", "--metric", "ecce"], "no metric is called 'ecce'; did you mean ece"),
        (["evaluate", "nowhere.npz"], "nowhere.npz: no such file"),
        (["evaluate", "."], "both.npz: the file must have logits and labels, got 'val_logits'"),
        (["evaluate", "."], "choose --split val or test"),
        (["evaluate", "net.pkl"], "pickles are never read"),
        (["evaluate", "both.npz", "--logits", "z"], "got 'val_logits' (300, 3) float32"),
        (["rank", "val.npz", "-m", "temprature"], "no method is called 'temprature'; did you mean temperature"),
        (["rank", "val.npz", "--n-folds", "1"], "--n-folds must be a whole number of at least 2, got 1"),
        (["rank", "val.npz", "-m", "qqq"], "choose from: identity, temperature"),
        (["fit", "val.npz"], "Missing option '--output'"),
        (["fit", "val.npz", "-o", "cal.pt"], "cal.pt: the suffix must be .safetensors, got '.pt'"),
        (["fit", "val.npz", "-o", "no/cal.safetensors"], "there is no folder no"),
        (["apply", "val.npz", "test.npz", "-o", "out.npz"], "val.npz"),
        (["clamp", "x:y", "-o", "c.safetensors"], "--data must name a .npz file, a folder of images"),
        (["repair", "x:y", "-o", "r.safetensors"], "--data must name a .npz file, a folder of images"),
    ],
)
def test_bad_input_is_one_line_and_code_2(folder, command, words, said):
    assert said in line_of(command(*words, code=2))


def test_no_name_is_offered_twice(folder, command):
    offered = line_of(command("evaluate", "test.npz", "--metric", "qqq", code=2)).partition("choose from: ")[2]
    names = offered.strip().split(", ")
    assert len(names) == len(set(names)) > 10


def test_probabilities_without_probs_are_rejected(folder, command):
    logits, labels = trueup.load("test.npz")
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.savez("p.npz", logits=p, labels=labels)
    np.savez("less.npz", logits=p - 1, labels=labels)
    refused = line_of(command("evaluate", "p.npz", "--quiet", code=2))
    assert "p.npz: logits must not be probabilities" in refused
    assert "read probabilities with --probs" in refused
    assert "insist on logits with --no-probs" in refused
    assert command("evaluate", "p.npz", "--probs").stderr == command("evaluate", "test.npz").stderr == ""
    insisted = command("evaluate", "p.npz", "--no-probs", "--metric", "nll").stdout
    assert insisted == command("evaluate", "less.npz", "--metric", "nll").stdout


def test_probabilities_in_shards_or_without_labels_are_rejected(folder, command):
    logits, labels = trueup.load("test.npz")
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for name, rows in (("1", 0), ("2", 300)):
        (folder / "parts").mkdir(exist_ok=True)
        np.savez(f"parts/{name}.npz", logits=p[:rows], labels=labels[:rows])
    (folder / "parts" / "0.npz").write_bytes(b"nothing")
    command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors")
    fit = ("fit", "parts", "-m", "temperature", "-o", "x.safetensors", "--skip-bad")
    for words in (("evaluate", "parts", "--skip-bad"), fit):
        command(*words, code=2)
        assert "not be probabilities" not in command(*words, "--probs").stderr
    np.savez("new.npz", logits=p)
    apply = ("apply", "cal.safetensors", "new.npz", "-o", "out.npz")
    assert "new.npz: logits must not be probabilities" in line_of(command(*apply, code=2))
    assert command(*apply, "--probs").stderr == ""


def test_bad_files_are_one_line(folder, command):
    logits, labels = trueup.load("test.npz")
    strange = np.where(np.arange(logits.size).reshape(logits.shape) == 5, np.nan, logits)
    np.savez("nan.npz", logits=strange, labels=labels)
    np.savez("range.npz", logits=logits, labels=labels + 1)
    np.savez("one.npz", logits=logits[:, :1], labels=0 * labels)
    np.savez("short.npz", logits=logits, labels=labels[:-1])
    np.savez("pickled.npz", logits=np.full(logits.shape, {}, dtype=object), labels=labels)
    (folder / "cut.npz").write_bytes((folder / "test.npz").read_bytes()[:500])
    (folder / "empty.npz").write_bytes(b"")
    (folder / "noise.csv").write_bytes(b"\xff\x00\x01\n" * 20)
    with zipfile.ZipFile("words.npz", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    for name, said in {
        "nan": "logits must be finite",
        "range": "labels must lie in 0..2, got 1..3",
        "one": "at least 2 classes",
        "short": "as many rows as each other",
        "pickled": "pickles are never read",
        "cut": "not a readable .npz file",
        "empty": "the file is empty",
        "words": "the file must have logits and labels, got nothing",
    }.items():
        assert said in line_of(command("evaluate", f"{name}.npz", code=2))
    assert "noise.csv" in line_of(command("evaluate", "noise.csv", code=2))


def test_a_file_without_rows_is_told(folder, command):
    np.savez("none.npz", logits=np.zeros((0, 3)), labels=np.zeros(0, int))
    assert line_of(command("evaluate", "none.npz", code=2)) == "trueup: none.npz: there are no rows\n"


@pytest.fixture
def idle(monkeypatch):
    """Whatever begins to work fails."""

    def begun(*args, **options):
        raise AssertionError("the work has begun")

    for work in (
        "trueup.reports.audit.run_audit",
        "trueup.io.predictions.open_predictions",
        "trueup.cli.resolve.load_model",
    ):
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


OUTPUTS = {
    "report": ["report", "val.npz", "-o", "{}.html"],
    "report -c": ["report", "val.npz", "-c", "{}.safetensors"],
    "fit": ["fit", "val.npz", "-m", "temperature", "-o", "{}.safetensors"],
    "apply": ["apply", "cal.safetensors", "val.npz", "-o", "{}.npy"],
    "clamp": ["clamp", "models:make", "--data", "digits.npz", "-o", "{}.safetensors"],
    "repair": ["repair", "models:make", "--data", "digits.npz", "-o", "{}.safetensors"],
}


@pytest.mark.parametrize("verb", OUTPUTS)
def test_a_file_that_cannot_be_written_is_noticed_before_the_work(folder, command, idle, sealed, verb):
    def refused(name):
        words = [word.format(name) for word in OUTPUTS[verb]]
        said = line_of(command(*words, code=2))
        assert said.startswith(f"trueup: {next(word for word in words if name in word)}: ")
        return said

    (folder / f"taken{Path(OUTPUTS[verb][-1].format('x')).suffix}").mkdir()
    assert "it cannot be written: Permission denied" in refused("sealed/out")
    assert "there is no folder no" in refused("no/out")
    assert "must be a file, but is a folder" in refused("taken")
    assert "it cannot be written: File name too long" in refused("x" * 240)
    assert not list((folder / "sealed").iterdir())


def test_what_is_asked_wrongly_is_noticed_before_the_work(folder, command, monkeypatch):
    def begun(*args, **options):
        raise AssertionError("the work has begun")

    monkeypatch.setattr("trueup.reports.audit.run_audit", begun)
    for classes, names in (("cat,dog", 2), ("a,b,c,d", 4)):
        said = line_of(command("report", "val.npz", "--class-names", classes, code=2))
        assert f"--class-names must name the 3 classes, got {names} names" in said
    said = line_of(command("rank", "val.npz", "--metric", "skce", code=2))
    assert "no metric of the comparison is called 'skce'" in said


def test_errors_name_options_and_no_functions(folder, command):
    z, y = trueup.load("test.npz")
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    files = {
        "score": ({"logits": z[:, 0], "labels": y}, [], "needs two columns in the file, 0 and x"),
        "column": ({"logits": z[:, :1], "labels": y}, [], "needs two columns in the file, 0 and x"),
        "tokens": (
            {"logits": z[:, None], "labels": y[:, None]},
            [],
            "name the axis of classes of tokens or pixels with --class-axis",
        ),
        "ignored": (
            {"logits": z, "labels": np.where(y == 1, -100, y)},
            [],
            "remove rows to be ignored from the file",
        ),
        "logits": ({"logits": z, "labels": y}, ["--probs"], "leave out --probs for logits"),
        "zeros": ({"logits": np.where(z > 2, -np.inf, z), "labels": y}, [], "use --probs for probabilities with"),
        "probs": ({"probs": p, "labels": y}, [], "read probabilities with --probs"),
        "halves": ({"val_logits": z, "val_labels": y}, [], "choose --split val"),
    }
    python = re.compile(r"from_|flatten|probs=|split=|True|\(path\)|load_")
    for name, (arrays, words, wanted) in files.items():
        np.savez(f"{name}.npz", **arrays)
        (folder / f"of_{name}").mkdir()
        np.savez(f"of_{name}/one.npz", **arrays)
        for where in (f"{name}.npz", f"of_{name}"):
            said = line_of(command("evaluate", where, *words, code=2))
            assert wanted in said
            assert not python.search(said)


def test_files_of_another_kind_name_the_verb_that_reads_them(folder, command):
    from trueup import save
    from trueup.calibrators import VarianceScaling
    from trueup.monitor import Monitor

    save(VarianceScaling(1.5), "re.safetensors")
    save(Monitor(3), "watch.safetensors")
    command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors")

    def applied(name):
        return line_of(command("apply", name, "test.npz", "-o", "out.npz", code=2)).partition("must hold ")[2]

    assert "`trueup apply --mean COLUMN --std COLUMN` reads it" in applied("re.safetensors")
    assert applied("watch.safetensors") == "a calibrator, got a monitor; `trueup monitor --state` reads it\n"
    said = line_of(command("monitor", "val.npz", "--state", "cal.safetensors", code=2))
    assert said.endswith("the file must hold a monitor, got a calibrator; `trueup apply` reads it\n")


def test_other_failures_are_code_1(folder, command, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("the disk\nis gone")

    monkeypatch.setattr("trueup.metrics.table.evaluate", broken)
    line = line_of(command("evaluate", "test.npz", code=1))
    assert line == "trueup: RuntimeError: the disk is gone; TRUEUP_DEBUG=1 shows where\n"


def test_debugging_shows_where(folder, monkeypatch):
    monkeypatch.setenv("TRUEUP_DEBUG", "1")
    result = CliRunner().invoke(app, ["evaluate", "nowhere.npz"])
    assert isinstance(result.exception, FileNotFoundError)


def test_a_stop_is_code_130(folder, command, monkeypatch):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("trueup.io.predictions.open_predictions", stopped)
    assert line_of(command("evaluate", "test.npz", code=130)) == "trueup: interrupted\n"


def test_a_signal_stops_the_process():
    code = (
        "import sys, time, types\n"
        "def run(**options):\n    print('here', flush=True)\n    time.sleep(60)\n"
        "sys.modules['trueup.demo'] = types.SimpleNamespace(run=run)\n"
        "sys.argv = ['trueup', 'demo']\nfrom trueup.cli import main\nmain()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=1200)
    assert (process.returncode, stderr) == (130, "trueup: interrupted\n")


def test_a_reader_may_leave_early():
    done = subprocess.run(
        f"{sys.executable} -m trueup --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_warnings_are_one_line_on_stderr(folder, command):
    shares = np.array([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]] * 20)
    np.savez("zeros.npz", probs=shares, labels=np.arange(40) % 2)
    words = ("evaluate", "zeros.npz", "--probs", "--json")
    done = command(*words)
    assert done.stderr == (
        "trueup: warning: 40 exact zeros among 120 probabilities were raised to 0.1, "
        "about half the smallest positive one\n"
    )
    message = done.stderr.strip().removeprefix("trueup: warning: ")
    quiet = command(*words, "--quiet")
    assert quiet.stderr == ""
    for result in (done, quiet):
        assert json.loads(result.stdout)["warnings"] == [message]
    assert json.loads(command("evaluate", "test.npz", "--json").stdout)["warnings"] == []


def test_the_callers_warnings_are_as_before(folder, command):
    before = list(warnings.filters), warnings.showwarning
    command("evaluate", "test.npz")
    assert (list(warnings.filters), warnings.showwarning) == before


def test_what_is_told_of_failures():
    assert describe_error(FileNotFoundError(2, "No such file or directory", "x.npz")) == (
        2,
        "x.npz: No such file or directory",
    )
    assert describe_error(OSError(28, "No space left on device", "x.npz")) == (1, "x.npz: No space left on device")
    missing = ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure")
    assert describe_error(missing) == (2, "matplotlib is not installed: pip install 'trueup[report]'")
    assert describe_error(ModuleNotFoundError("No module named 'other'", name="other")) == (
        2,
        "No module named 'other'",
    )
    assert describe_error(ZeroDivisionError("division by zero"))[0] == 1


def test_names_of_arrays_and_columns_are_suggested(folder, command):
    np.savez("names.npz", scores=np.eye(3), truth=[0, 1, 2])
    Path("shares.csv").write_text("cat,dog,label\n0.2,0.8,1\n0.7,0.3,0\n")
    assert "such as --logits scores --labels truth" in line_of(command("evaluate", "names.npz", code=2))
    assert "such as --logits cat,dog --labels label" in line_of(command("evaluate", "shares.csv", "--probs", code=2))


def test_a_calibrator_and_predictions_in_each_others_place(folder, command):
    trueup.save(trueup.calibrators.Temperature(2.0), "t.safetensors")
    said = line_of(command("apply", "test.npz", "t.safetensors", "-o", "x.npz", code=2))
    assert said.endswith("the calibrator comes first: trueup apply t.safetensors test.npz\n")
    assert "`trueup fit` saves one" in line_of(command("apply", "test.npz", "test.npz", "-o", "x.npz", code=2))
    said = line_of(command("evaluate", "t.safetensors", code=2))
    assert said == (
        "trueup: t.safetensors: the file must hold predictions, got a calibrator; `trueup apply` reads it\n"
    )
