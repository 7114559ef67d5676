import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import trueup
from fitted import CLASSES, fitted, sample
from trueup import METHODS
from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature import Temperature
from trueup.core.optimize import Certificate
from trueup.io import artifacts
from trueup.io.artifacts import load_calibrator, read_header, save_calibrator
from trueup.registry import CALIBRATORS


@pytest.fixture
def file(tmp_path):
    return tmp_path / "net.safetensors"


def equal(a, b):
    """The same kind and the same bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, Calibrator):
        return type(a) is type(b) and a.certificate == b.certificate and equal(a.config(), b.config())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, nn.ModuleList)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_comes_back_bit_for_bit(method, file):
    (z, _), before = sample(), fitted(method)
    save_calibrator(before, file, classes=CLASSES)
    found = load_calibrator(file)
    assert equal(before, found)
    np.testing.assert_array_equal(found(z), before(z))
    assert equal(dict(before.state_dict()), dict(found.state_dict()))
    about = read_header(file)
    assert (about.method, about.classes) == (type(before).__name__, CLASSES)
    assert about.versions == {"trueup": trueup.__version__, "torch": str(torch.__version__)}


class Nest(Calibrator):
    """Holds anything that a configuration may hold."""

    def __init__(self, anything, steps=()):
        super().__init__()
        self.anything = anything
        self.steps = nn.ModuleList(steps)

    def map(self, logits):
        for step in self.steps:
            logits = step(logits)
        return logits


@pytest.fixture
def nest(monkeypatch):
    monkeypatch.setattr(artifacts, "CALIBRATORS", dict(CALIBRATORS) | {"Nest": Nest})


numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))
plain = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5, alphabet="abc.$"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(anything=plain)
def test_plain_data_comes_back_as_it_was(tmp_path_factory, anything):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "CALIBRATORS", {"Nest": Nest})
        file = tmp_path_factory.mktemp("plain") / "x.safetensors"
        save_calibrator(Nest(anything), file, summary={"same": anything})
        assert equal(load_calibrator(file).anything, anything)
        assert equal(read_header(file).summary, {"same": anything})


def test_chains_come_back_whole(nest, file):
    first, second = Temperature(math.pi), Temperature(0.1)
    first.certificate = Certificate("converged", 1e-9, 3, 5, math.nan)
    odd = torch.tensor([math.nan, -0.0, 5e-324])
    both = Nest({"w": odd, "inner": [Nest(None, [second])]}, [first, Nest(odd, [second])])
    save_calibrator(both, file)
    found = load_calibrator(file)
    assert found.steps[0].temperature == math.pi
    assert found.steps[0].certificate.iterations == 3
    assert math.isnan(found.steps[0].certificate.loss)
    assert equal(found.steps[1], both.steps[1])
    assert equal(found.anything["w"], odd)
    assert equal(found.anything["inner"][0].steps[0], second)
    z = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_array_equal(found(z), both(z))
    with safe_open(file, framework="pt") as stored:
        assert "steps.1.steps.0.temperature" in stored.keys()  # noqa: SIM118


def test_views_and_shared_memory_are_stored_apart(nest, file):
    whole = torch.arange(6.0).reshape(2, 3)
    save_calibrator(Nest([whole.T, whole, whole[:, 1]]), file)
    for found, expected in zip(load_calibrator(file).anything, [whole.T, whole, whole[:, 1]], strict=True):
        assert torch.equal(found, expected)


def test_what_cannot_be_saved_is_refused_and_nothing_written(nest, file):
    for bad, message in (
        (Nest(lambda: 0), "anything must be plain data to be saved, got function"),
        (Nest({"a": [{1: 2}]}), r"anything\.a\.0 must be plain data to be saved, got dict"),
        (nn.Linear(2, 2), "calibrator must be a Calibrator, got Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            save_calibrator(bad, file)
    with pytest.raises(ValueError, match="summary must be plain data to be saved, got Tensor"):
        save_calibrator(Temperature(1.0), file, summary=torch.ones(1))
    with pytest.raises(ValueError, match=r"suffix must be \.safetensors, got '\.pkl'"):
        save_calibrator(Temperature(1.0), file.with_suffix(".pkl"))
    assert list(file.parent.iterdir()) == []


def test_strangers_are_not_saved(file):
    with pytest.raises(ValueError, match="only calibrators of trueup itself can be saved.* got Nest"):
        save_calibrator(Nest(None), file)

    class Other(Temperature):
        pass

    Other.__name__ = "Temperature"
    with pytest.raises(ValueError, match="only calibrators of trueup itself"):
        save_calibrator(Other(1.0), file)


def test_an_interrupted_save_leaves_the_old_file(file, monkeypatch):
    save_calibrator(Temperature(1.5), file)
    before = file.read_bytes()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_calibrator(Temperature(2.5), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def content():
    return {
        "schema": 1,
        "calibrator": {
            "method": "Temperature",
            "config": {"temperature": {"tensor": "temperature"}},
            "certificate": None,
        },
        "classes": None,
        "versions": {},
        "summary": None,
    }


def write(file, changed, tensors=None, key="trueup"):
    tensors = {"temperature": torch.tensor(2.0)} if tensors is None else tensors
    save_file(tensors, file, metadata={key: changed if isinstance(changed, str) else json.dumps(changed)})


def refused(file, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_calibrator(file)
    sentence = str(caught.value)
    assert sentence.startswith(f"{file}: ")
    assert "\n" not in sentence


def change(**parts):
    changed = content()
    for path, value in parts.items():
        at = changed
        *steps, last = path.split("__")
        for step in steps:
            at = at[step]
        at[last] = value
    return changed


def test_the_handmade_file_is_a_good_one(file):
    write(file, content())
    assert load_calibrator(file).temperature == 2.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change(schema=2), "the schema must be 1, got 2; a newer version of trueup may read it"),
        (change(schema=None), "the schema must be 1, got None"),
        ([], "the schema must be 1, got None"),
        ("{", "the header is not JSON"),
        (change(calibrator__method="Temprature"), "no calibrator is called 'Temprature'; there are: .*Temperature"),
        (change(calibrator__method="os.system"), "no calibrator is called 'os.system'"),
        (change(calibrator__method="Calibrator"), "no calibrator is called 'Calibrator'"),
        (change(calibrator__method=["Temperature"]), "unhashable"),
        (change(calibrator="Temperature"), "the calibrator must have certificate, config, method, got str"),
        (change(extra=1), "the header must have .*, got .*extra"),
        (change(calibrator__config={}), "Temperature does not take the parameters of the file: .*temperature"),
        (change(calibrator__config__other=1), "does not take the parameters of the file: .*other"),
        (change(calibrator__config__temperature=2.0), "no parameter refers to temperature"),
        (change(calibrator__config__temperature={"tensor": "T"}), "the tensor T is missing"),
        (change(calibrator__config__temperature={"python": "os"}), "where a value was wanted"),
        (change(calibrator__config__temperature={"float": "2"}), "where a value was wanted"),
        (change(calibrator__config__temperature=[1]), "where a value was wanted"),
        (change(calibrator__config=7), "where a value was wanted"),
        (change(calibrator__certificate={"dict": {"status": "converged"}}), "the certificate of Temperature is none"),
        (change(classes="ten"), "classes must be a whole number of 2..16777216, got 'ten'"),
        (change(classes=10**12), "classes must be a whole number of 2..16777216"),
    ],
)
def test_other_headers_are_refused(file, changed, message):
    write(file, changed)
    refused(file, message)


def test_very_deep_headers_are_refused(file):
    write(file, '{"schema": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001)
    refused(file, "recursion")
    deep = '{"list": [' * 20_000 + "1" + "]}" * 20_000
    write(file, json.dumps(content()).replace('"summary": null', f'"summary": {deep}'))
    with pytest.raises(ValueError, match="net.safetensors: .*recursion"):
        read_header(file)


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(-1.0), torch.tensor(math.nan)])
def test_other_shapes_and_values_are_refused(file, value):
    write(file, content(), {"temperature": value})
    refused(file, "Temperature does not take the parameters of the file: temperature must be one positive number")


def test_other_files_are_refused(file, tmp_path):
    save_calibrator(Temperature(1.5), file)
    whole = file.read_bytes()
    for part in (whole[:4], whole[: len(whole) // 2], whole[:-1], whole + b"\0", b"PK\x03\x04" + whole):
        file.write_bytes(part)
        refused(file, "not a readable .safetensors file")
    file.write_bytes(b"")
    refused(file, "the file is empty")
    trueup.save(file, ([[1.0, 2.0]], [0]))
    refused(file, "the file must hold a calibrator, got .*logits")
    write(file, content(), key="format")
    refused(file, "the file must hold a calibrator, got temperature")
    with pytest.raises(FileNotFoundError, match="other: no such file"):
        load_calibrator(tmp_path / "other")


@given(st.data())
def test_any_changed_byte_is_read_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    save_calibrator(Temperature(1.5), file)
    bytes_ = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        bytes_[data.draw(st.integers(0, len(bytes_) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes_)
    try:
        load_calibrator(file)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = f"{file}: none"
    assert refusal.startswith(f"{file}: ")


def test_classes_are_checked_where_the_calibrator_knows_them(file):
    vector = fitted("vector")
    with pytest.raises(ValueError, match="the 4 classes of the fit, got 5"):
        save_calibrator(vector, file, classes=5)
    save_calibrator(vector, file, classes=4)
    with safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        text = stored.metadata()["trueup"]
    write(file, json.loads(text) | {"classes": 5}, tensors)
    refused(file, "the 4 classes of the fit, got 5")


def test_every_concrete_calibrator_can_be_in_a_file():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    for method in METHODS:
        METHODS[method]  # imports its module

    def abstract(kind):
        return any(
            getattr(getattr(kind, name, None), "__isabstractmethod__", False) for name in ("map", "map_confidence")
        )

    ours = {kind for kind in below(Calibrator) if kind.__module__.startswith("trueup.") and not abstract(kind)}
    assert {kind.__name__: kind for kind in ours} == dict(CALIBRATORS)
