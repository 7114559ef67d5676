"""One table of the arrays that people have, and one of those that are refused."""

import array
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from optional import torch
from trueup import METHODS, metrics
from trueup._core.arrays import as_arrays
from trueup.calibrators import Temperature

Z = np.random.default_rng(0).normal(size=(12, 3)) * 2
Y = np.arange(12) % 3


class HasArray:
    """As polars, xarray and JAX: only `__array__`."""

    def __init__(self, a):
        self.a = a

    def __array__(self, dtype=None, copy=None):
        return self.a


class HasDlpack:
    """As an array of a library that does not know NumPy."""

    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **options):
        return self.a.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


class OnDevice(HasDlpack):
    """As CuPy: it refuses to become NumPy, but is handed over by DLPack."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("implicit conversion is not allowed")


class Bfloat16(HasDlpack):
    """As JAX's bfloat16, which NumPy knows only as bytes."""

    def __array__(self, dtype=None, copy=None):
        return self.a.view(torch.int16).numpy().view("V2")


class HasArrow:
    """Only `__arrow_array__`."""

    def __init__(self, a):
        self.a = a

    def __arrow_array__(self, type=None):
        return pa.array(self.a)


class HasArrowStream:
    """Only Arrow's C stream, as polars' Series has."""

    def __init__(self, a):
        self.a = a

    def __arrow_c_stream__(self, requested_schema=None):
        return pa.chunked_array([self.a]).__arrow_c_stream__(requested_schema)


def unaligned(a):
    return np.frombuffer(b"\0" + a.tobytes(), dtype=a.dtype, offset=1).reshape(a.shape)


ROWS = pa.FixedSizeListArray.from_arrays(pa.array(Z.ravel()), 3)
TAKEN = {
    "lists": (Z.tolist(), Y.tolist()),
    "a list of arrays": (list(Z), list(Y)),
    "a list of tensors": ([torch.tensor(z) for z in Z], [torch.tensor(y) for y in Y]),
    "pandas": (pd.DataFrame(Z), pd.Series(Y)),
    "pandas, nullable": (pd.DataFrame(Z).astype("Float64"), pd.Series(Y, dtype="Int64")),
    "pandas, Arrow": (pd.DataFrame(Z).astype("double[pyarrow]"), pd.Series(Y, dtype="int64[pyarrow]")),
    "pandas, mixed widths": (pd.DataFrame({i: Z[:, i].astype("f4" if i else "f8") for i in range(3)}), Y),
    "pandas, categories": (Z, pd.Series(Y).astype("category")),
    "__array__": (HasArray(Z), HasArray(Y)),
    "__dlpack__": (HasDlpack(Z), HasDlpack(Y)),
    "__dlpack__ of torch": (HasDlpack(torch.tensor(Z)), HasDlpack(torch.tensor(Y))),
    "on a device": (OnDevice(torch.tensor(Z)), OnDevice(torch.tensor(Y))),
    "__arrow_array__": (Z, HasArrow(Y)),
    "Arrow's stream": (Z, HasArrowStream(Y)),
    "Arrow": (ROWS, pa.array(Y)),
    "Arrow, lists of any length": (ROWS.cast(pa.list_(pa.float64())), pa.array(Y)),
    "Arrow, chunks": (pa.chunked_array([ROWS[:5], ROWS[5:]]), pa.chunked_array([Y[:5], Y[5:]])),
    "an Arrow table": (pa.table({str(i): Z[:, i] for i in range(3)}), Y),
    "masked nowhere": (np.ma.array(Z, mask=False), np.ma.array(Y)),
    "long double": (Z.astype(np.longdouble), Y),
    "big-endian": (Z.astype(">f8"), Y.astype(">i4")),
    "rows backwards": (Z[::-1], Y[::-1]),
    "columns backwards": (Z[:, ::-1], 2 - Y),
    "unaligned": (unaligned(Z), unaligned(Y)),
    "memory views": (memoryview(Z), memoryview(Y)),
    "array.array": (Z, array.array("q", Y.tolist())),
    **{
        f"labels of {kind.__name__}": (Z, Y.astype(kind))
        for kind in (np.int8, np.uint8, np.uint16, np.uint32, np.uint64, np.ulonglong, np.longlong)
    },
    "torch's uint64": (torch.tensor(Z), torch.tensor(Y.astype(np.uint64))),
    "with a gradient": (torch.tensor(Z, requires_grad=True), torch.tensor(Y)),
}


@pytest.mark.parametrize("what", TAKEN)
def test_what_holds_the_same_numbers_is_the_same(what):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(metrics.nll(*TAKEN[what])) == pytest.approx(float(metrics.nll(Z, Y)), abs=1e-6)


def test_half_precision_of_jax_comes_by_dlpack():
    z = torch.tensor(Z).bfloat16()
    assert np.array_equal(as_arrays(Bfloat16(z), Y)[0], z.float().numpy())
    assert Temperature(2.0)(Bfloat16(z)).dtype == np.float32  # NumPy has no bfloat16


def of_polars():
    polars = pytest.importorskip("polars", reason="polars is not installed")
    return polars.DataFrame(Z), polars.Series(Y)


def of_xarray():
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    return xarray.DataArray(Z), xarray.DataArray(Y)


def of_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    return jax.numpy.asarray(Z), jax.numpy.asarray(Y)


def of_half_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    return jax.numpy.asarray(Z, dtype=jax.numpy.bfloat16), jax.numpy.asarray(Y)


@pytest.mark.parametrize("make", [of_polars, of_xarray, of_jax, of_half_jax])
def test_the_real_libraries_where_they_are_installed(make):
    z, y = make()
    close = 0.02 if make is of_half_jax else 1e-6
    assert metrics.nll(z, y) == pytest.approx(metrics.nll(Z, Y), abs=close)
    calibrated = Temperature(2.0)(z)
    assert isinstance(calibrated, type(z) if make in (of_jax, of_half_jax) else np.ndarray)
    np.testing.assert_allclose(np.asarray(calibrated, np.float64), Z / 2, atol=close)


def test_yes_and_no_are_labels_of_two_classes():
    assert metrics.accuracy(Z[:, :2], Y > 0) == metrics.accuracy(Z[:, :2], (Y > 0).astype(int))


def test_a_calibrator_takes_them_too():
    scaled = METHODS["histogram"](*TAKEN["pandas"])(TAKEN["pandas"][0])
    assert isinstance(scaled, np.ndarray)
    assert scaled.shape == Z.shape


class Lazy:
    """As a LazyFrame of polars."""

    def collect(self):
        return Z


MISSING = pd.Series([None, *Y[1:]], dtype="Int64")
REFUSED = {
    "logits must hold a number everywhere, got 3 masked entries": (np.ma.array(Z, mask=np.arange(36) < 3), Y),
    "labels must hold a number everywhere, got 4 masked": (Z, np.ma.array(Y, mask=Y == 1)),
    "labels must be integers, got 1 missing; leave out those rows": (Z, MISSING),
    "logits must hold a number everywhere, got 2 missing": (pd.DataFrame({"a": MISSING, "b": MISSING}).iloc[:1], [0]),
    "logits must hold a number everywhere, got 1 missing": (pa.array([[1.0, None]]), [0]),
    "labels must hold a number everywhere, got 1 missing": (Z[:2], pa.array([0, None])),
    "logits must have rows of one length, got lists of 1 to 2": (pa.array([[1.0, 2.0], [1.0]]), [0, 1]),
    "labels must be an array of real numbers, got an Arrow array of string": (Z[:2], pa.array(["a", "b"])),
    "logits must be an array of real numbers, got an ndarray of Python objects; .astype(float) makes": (
        Z.astype(object),
        Y,
    ),
    "labels must be an array of real numbers, got an ndarray of Python objects; .astype(int)": (Z, Y.astype(object)),
    "labels must be an array of real numbers, got texts; convert.number_labels(labels, class_names) numbers": (
        Z,
        Y.astype(str),
    ),
    "logits must be an array of real numbers, got a DataFrame of dtype object": (pd.DataFrame({0: ["a"], 1: [1.0]}), Y),
    "logits must be an array of real numbers, got dtype datetime64[s]": (Z.astype("M8[s]"), Y),
    "logits must be an array of real numbers, got dtype complex128": (Z + 0j, Y),
    "logits must be an array of real numbers, got one dict": ({"logits": Z}, Y),
    "logits must be an array of real numbers, got one Lazy; .collect() makes a table of it": (Lazy(), Y),
    "logits must be an array of real numbers, got one generator": ((z for z in Z), Y),
    "labels must be an array of real numbers, got one NoneType": (Z, None),
    "logits must have at least 16 bits a number, got float8_e4m3fn": (torch.tensor(Z).to(torch.float8_e4m3fn), Y),
    "logits must be a dense tensor, got layout torch.sparse_coo": (torch.tensor(Z).to_sparse(), Y),
    "logits must hold numbers, got a tensor of the meta device": (torch.empty(12, 3, device="meta"), Y),
    "labels must be at most 9223372036854775807": (Z, np.full(12, 2**64 - 1, dtype=np.ulonglong)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_array_of_numbers_is_refused_by_name(message):
    with pytest.raises(ValueError) as error:
        metrics.nll(*REFUSED[message])
    assert message in str(error.value)
