import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import nn

import trueup
from fitted import CLASSES, fitted, sample
from trueup import METHODS, decisions, load, save
from trueup._core.optimize import Certificate
from trueup._core.registry import CALIBRATORS
from trueup.calibrators import Calibrator, Temperature
from trueup.io import artifacts, load_artifact, read_header
from trueup.models import as_module

pytestmark = pytest.mark.filterwarnings("ignore:.*a file of an older version has no hash:UserWarning")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "net.safetensors"


def equal(a, b):
    """The same kind and the same bits."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
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
    save(before, file, n_classes=CLASSES)
    found = load(file)
    assert equal(before, found)
    np.testing.assert_array_equal(found(z), before(z))
    assert equal(dict(as_module(before).state_dict()), dict(as_module(found).state_dict()))
    about = read_header(file)
    assert (about.kind, about.class_name, about.n_classes) == ("calibrator", type(before).__name__, CLASSES)
    assert about.versions == {"trueup": trueup.__version__, "numpy": np.__version__}


class Nest(Calibrator):
    """Holds anything that a configuration may hold."""

    def __init__(self, anything, steps=()):
        self.anything = anything
        self.steps = tuple(steps)

    def map(self, xp, z):
        for step in self.steps:
            z = step.forward(xp, z)
        return z


def with_nest():
    calibrator = artifacts.ARTIFACTS["calibrator"]
    classes = {**calibrator.classes, "Nest": f"{Nest.__module__}:Nest"}
    return {**artifacts.ARTIFACTS, "calibrator": calibrator._replace(classes=classes)}


@pytest.fixture
def nest(monkeypatch):
    monkeypatch.setattr(artifacts, "ARTIFACTS", with_nest())


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
        patch.setattr(artifacts, "ARTIFACTS", with_nest())
        file = tmp_path_factory.mktemp("plain") / "x.safetensors"
        save(Nest(anything), file, summary={"same": anything})
        assert equal(load(file).anything, anything)
        assert equal(read_header(file).summary, {"same": anything})


def test_chains_come_back_whole(nest, file):
    first, second = Temperature(math.pi), Temperature(0.1)
    first = first.with_certificate(Certificate("converged", 1e-9, 3, 5, math.nan))
    odd = np.array([math.nan, -0.0, 5e-324])
    both = Nest({"w": odd, "inner": [Nest(None, [second])]}, [first, Nest(odd, [second])])
    save(both, file)
    found = load(file)
    assert found.steps[0].temperature == math.pi
    assert found.steps[0].certificate.iterations == 3
    assert math.isnan(found.steps[0].certificate.loss)
    assert equal(found.steps[1], both.steps[1])
    assert equal(found.anything["w"], odd)
    assert equal(found.anything["inner"][0].steps[0], second)
    z = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_array_equal(found(z), both(z))
    with safe_open(file, framework="pt") as stored:
        assert "steps.1.anything" in stored.keys()  # noqa: SIM118


def test_views_and_shared_memory_are_stored_apart(nest, file):
    whole = torch.arange(6.0).reshape(2, 3)
    save(Nest([whole.T, whole, whole[:, 1]]), file)
    for found, expected in zip(load(file).anything, [whole.T, whole, whole[:, 1]], strict=True):
        np.testing.assert_array_equal(found, expected.numpy())


def test_what_cannot_be_saved_is_refused_and_nothing_written(nest, file):
    for bad, message in (
        (Nest(lambda: 0), "anything must be plain data to be saved, got function"),
        (Nest({"a": [{(1, 2): object()}]}), r"anything\.a\.0\.0 must be plain data to be saved, got object"),
        (nn.Linear(2, 2), "obj must be predictions or one of trueup's own: .*, got Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            save(bad, file)
    with pytest.raises(ValueError, match="summary must be plain data to be saved, got Tensor"):
        save(Temperature(1.0), file, summary=torch.ones(1))
    with pytest.raises(ValueError, match=r"suffix must be \.safetensors, got '\.pkl'"):
        save(Temperature(1.0), file.with_suffix(".pkl"))
    assert list(file.parent.iterdir()) == []


def test_strangers_are_not_saved(file):
    with pytest.raises(ValueError, match="obj must be .*trueup's own: calibrator, .* got Nest"):
        save(Nest(None), file)

    class Other(Temperature):
        pass

    Other.__name__ = "Temperature"
    with pytest.raises(ValueError, match="obj must be .*trueup's own"):
        save(Other(1.0), file)


def test_an_interrupted_save_leaves_the_old_file(file, monkeypatch):
    save(Temperature(1.5), file)
    before = file.read_bytes()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save(Temperature(2.5), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def content():
    """A header of schema 1, which has no hash."""
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
        load_artifact(file, "calibrator")
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
    assert load(file).temperature == 2.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change(schema=3), "the schema must be 1 or 2, got 3; a newer version of trueup may read it"),
        (change(schema=None), "the schema must be 1 or 2, got None"),
        ([], "the schema must be 1 or 2, got None"),
        ("{", "the header is not JSON"),
        (change(calibrator__method="Temprature"), "no class .* is called 'Temprature'; there are: .*Temperature"),
        (change(calibrator__method="os.system"), "no class .* is called 'os.system'"),
        (change(calibrator__method="Calibrator"), "no class .* is called 'Calibrator'"),
        (change(calibrator__method=["Temperature"]), "a stored value must have class, config and certificate"),
        (change(calibrator="Temperature"), "instead of a value"),
        (change(calibrator__config={}), "Temperature does not take the parameters of the file: .*temperature"),
        (change(calibrator__config__other=1), "does not take the parameters of the file: .*other"),
        (change(calibrator__config__temperature=2.0), "no parameter refers to temperature"),
        (change(calibrator__config__temperature={"tensor": "T"}), "the tensor T is missing"),
        (change(calibrator__config__temperature={"python": "os"}), "instead of a value"),
        (change(calibrator__config__temperature={"float": "2"}), "instead of a value"),
        (change(calibrator__config__temperature=[1]), "instead of a value"),
        (change(calibrator__config=7), "instead of a value"),
        (
            change(calibrator__certificate={"dict": {"status": "converged"}}),
            "the certificate of Temperature is not one",
        ),
        (change(classes="ten"), "n_classes must be a whole number of 2..16777216, got 'ten'"),
        (change(classes=10**12), "n_classes must be a whole number of 2..16777216"),
    ],
)
def test_other_headers_are_refused(file, changed, message):
    write(file, changed)
    refused(file, message)


def rewrite(file, **changes):
    """Change entries of a header of schema 2, without its hash."""
    with safe_open(file, framework="np") as stored:
        arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        header = json.loads(stored.metadata()["trueup"]) | changes
    save_arrays(arrays, file, metadata={"trueup": json.dumps(header)})


@pytest.mark.parametrize(
    "changes", [{"n_classes": 5}, {"class_names": ["b", "a"]}, {"summary": 1}, {"versions": {}}, {"sha256": None}]
)
def test_a_changed_header_does_not_match_its_hash(file, changes):
    save(Temperature(2.0), file, class_names=["a", "b"])
    rewrite(file, **changes)
    refused(file, "the content does not match its SHA-256 hash: the file is damaged or was changed")


def test_changed_numbers_do_not_match_the_hash(file):
    save(fitted("vector"), file)
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 1
    file.write_bytes(whole)
    refused(file, "does not match its SHA-256 hash")


def test_entries_and_kinds_of_headers_are_checked(file):
    save(Temperature(2.0), file)
    rewrite(file, more=1)
    refused(file, "the header must have .*, got .*more")
    rewrite(file, more=1)
    save(Temperature(2.0), file)
    rewrite(file, kind="os.system")
    refused(file, "no kind of artifact is called 'os.system'; there are: calibrator, ")


def test_class_names_are_kept(file):
    save(Temperature(2.0), file, class_names=["cat", "dog", "bird"])
    assert load(file).class_names == ("cat", "dog", "bird")
    assert read_header(file)[2:4] == (("cat", "dog", "bird"), 3)
    save(load(file), file)
    assert load(file).class_names == ("cat", "dog", "bird")
    with pytest.raises(ValueError, match="class_names must name the 4 classes, got 3 names"):
        save(Temperature(2.0), file, class_names=["cat", "dog", "bird"], n_classes=4)
    with pytest.raises(ValueError, match="the 4 classes of the fit, got 3"):
        save(fitted("vector"), file, class_names=["cat", "dog", "bird"])


def test_options_of_predictions_and_of_artifacts_do_not_mix(file):
    save(Temperature(2.0), file)
    with pytest.raises(ValueError, match="must hold predictions, to be read with options, got an artifact"):
        load(file, probs=True)
    with pytest.raises(ValueError, match="model must be left out for a calibrator, got Linear"):
        load(file, model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="summary must be left out for predictions"):
        save(([[1.0, 2.0]], [0]), file, summary="note")
    with pytest.raises(TypeError, match="load_table also reads sample_weight"):
        load("net.npz", sample_weight="w")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("threshold", {}),
        ("threshold", {"groups": np.array([2, 0, 1, 0] * 50)}),
        ("calibrated_threshold", {"method": "temperature"}),
    ],
)
def test_thresholds_come_back(file, make, options):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 3)) * 3
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    before = getattr(decisions, make)(z, y, max_risk=0.4, **options)
    save(before, file)
    after = load(file)
    assert type(after) is type(before)
    assert str(after) == str(before)
    assert after.to_dict() == before.to_dict()


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
    save(Temperature(1.5), file)
    whole = file.read_bytes()
    for part in (whole[:4], whole[: len(whole) // 2], whole[:-1], whole + b"\0", b"PK\x03\x04" + whole):
        file.write_bytes(part)
        refused(file, "not a readable .safetensors file")
    file.write_bytes(b"")
    refused(file, "the file is empty")
    trueup.save(([[1.0, 2.0]], [0]), file)
    refused(file, "the file must hold a calibrator, got .*logits")
    write(file, content(), key="format")
    refused(file, "the file must hold a calibrator, got temperature")
    with pytest.raises(FileNotFoundError, match="other: no such file"):
        load_artifact(tmp_path / "other")


@given(st.data())
def test_any_changed_byte_is_read_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    save(Temperature(1.5), file)
    bytes_ = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        bytes_[data.draw(st.integers(0, len(bytes_) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes_)
    try:
        assert load(file).temperature == 1.5
    except ValueError as error:
        assert str(error).startswith(f"{file}: ")  # noqa: PT017


def test_classes_are_checked_where_the_calibrator_knows_them(file):
    vector = fitted("vector")
    with pytest.raises(ValueError, match="the 4 classes of the fit, got 5"):
        save(vector, file, n_classes=5)
    save(vector, file, n_classes=4)
    assert load(file).config().keys() == vector.config().keys()


def test_every_concrete_calibrator_can_be_in_a_file():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    for name in CALIBRATORS:
        CALIBRATORS[name]  # imports its module

    def abstract(kind):
        return any(
            getattr(getattr(kind, name, None), "__isabstractmethod__", False)
            for name in ("map", "map_confidence", "curve")
        )

    kinds = below(Calibrator)
    ours = {kind for kind in kinds if kind.__module__.startswith("trueup.") and not abstract(kind)}
    assert {kind.__name__: kind for kind in ours} == dict(CALIBRATORS)
