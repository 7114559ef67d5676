import warnings

import numpy as np
import pytest

from optional import torch
from trueup import from_probs
from trueup._core import arrays
from trueup._core.arrays import as_arrays, as_logits, as_matrix, as_pair, as_vector, subtract_one
from trueup._core.errors import Hint, InputError
from trueup.convert import flatten, from_log_odds


def refused(message, call, *args, **options):
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    assert message in str(error.value), str(error.value)


Z = np.zeros((3, 4))
Y = np.array([0, 1, 3])


@pytest.mark.parametrize(
    ("message", "logits", "labels"),
    [
        ("logits must have shape (n, classes), got (3,); a binary score goes through from_log_odds", Z[:, 0], Y),
        ("logits must have shape (n, classes), got (3, 4, 1); tokens or pixels go through flatten", Z[..., None], Y),
        ("logits must have at least 2 classes, got shape (3, 1)", Z[:, :1], Y),
        ("logits must be floating point, got int64", Z.astype(np.int64), Y),
        ("logits must be an array of real numbers", Z.astype(complex), Y),
        ("logits must be an array of real numbers", np.array([["a", "b"]]), [0]),
        ("logits must be a rectangular array", [[1.0, 2.0], [1.0]], [0, 1]),
        (
            "logits must be finite, got nan at [1, 2] and 1 such in all",
            np.where(np.arange(12).reshape(3, 4) == 6, np.nan, 0.0),
            Y,
        ),
        ("come through from_probs", np.where(np.arange(12).reshape(3, 4) % 4 > 0, -np.inf, 0.0), Y),
        ("labels must have shape (3,), got (3, 1)", Z, Y[:, None]),
        ("labels must have 3 entries, one for each row of logits, got 2", Z, Y[:2]),
        ("labels must be integers, got 0.5 in row 0", Z, Y + 0.5),
        ("got 1..4; subtract 1 if classes are numbered from 1", Z, Y + 1),
        ("(labels > 0).astype(int) turns -1 and 1", Z[:, :2], np.array([-1, 1, 1])),
        ("labels.squeeze(1) has one dimension", Z, Y[:, None]),
        ("labels.argmax(axis=1) numbers one-hot labels", Z, np.eye(4)[Y]),
        ("transpose logits of shape (classes, n)", Z, np.array([0, 1, 0, 1])),
        ("leave out the 1 rows without a label", Z, ["cat", None, "dog"]),
        ("convert.number_labels(labels, class_names) numbers the names", Z, ["cat", "dog", "cat"]),
        ("logits must come first, then labels", Y, Z),
        ("labels must lie in 0..3, got -100..1; flatten leaves out an ignore_index", Z, np.array([0, 1, -100])),
        ("labels must lie in 0..3, got 0..255; flatten leaves out an ignore_index", Z, np.array([0, 1, 255])),
        ("soft labels are defined for nll and brier only", Z, np.full((3, 4), 0.25)),
    ],
)
def test_refusals_name_argument_wish_and_fact(message, logits, labels):
    refused(message, as_pair, logits, labels)
    if all(isinstance(x, np.ndarray) and x.dtype.kind in "fiuc" for x in (logits, labels)):
        refused(message, as_pair, torch.tensor(logits), torch.tensor(labels))


def test_at_least_names_the_number_needed():
    refused("logits must have at least 5 rows, got 3", as_arrays, Z, Y, min_rows=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_torch_stays_torch_with_its_dtype_and_memory(dtype):
    logits = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    z, y = as_pair(logits, torch.tensor(Y, dtype=torch.uint8))
    assert z.dtype == dtype
    assert z.data_ptr() == logits.data_ptr()
    assert not z.requires_grad
    assert y.dtype == torch.int64


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_stays_numpy_with_its_dtype_and_memory(dtype):
    logits = Z.astype(dtype)
    z, y = as_pair(logits, Y.astype(np.int16))
    assert isinstance(z, np.ndarray)
    assert z.dtype == dtype
    assert np.shares_memory(z, logits)
    assert y.dtype == np.int64


def test_odd_memory_is_read_right_and_without_a_warning(tmp_path):
    base = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    np.save(tmp_path / "z.npy", base)
    odd = {
        "transposed": np.asfortranarray(base),
        "reversed": base[::-1][:, ::-1][::-1][:, ::-1],
        "strided": np.repeat(base, 2, axis=1)[:, ::2],
        "big-endian": base.astype(">f4"),
        "memory map": np.load(tmp_path / "z.npy", mmap_mode="r"),
        "list": base.tolist(),
    }
    for name, logits in odd.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            z, _ = as_arrays(logits, np.zeros(6, dtype=int))
        assert np.array_equal(z, base), name


def test_what_was_read_only_stays_so():
    frozen = np.zeros((3, 4))
    frozen.flags.writeable = False
    assert not as_pair(frozen, Y)[0].flags.writeable
    assert as_pair(Z, Y)[0].flags.writeable


PROBS = np.random.default_rng(1).dirichlet(np.ones(3), size=50)
LOOK_LIKE_PROBABILITIES = {
    "probabilities": PROBS,
    "float32": PROBS.astype(np.float32),
    "two decimals": PROBS.round(2),
    "per cent": 100 * PROBS,
    "five rows": PROBS[:5],
    "some one-hot rows": np.concatenate([np.eye(3), PROBS]),
    "uniform": np.full((20, 4), 0.25),
    "tensor": torch.tensor(PROBS),
    "list": PROBS.tolist(),
}
LOGITS = {
    "four rows": PROBS[:4],
    "one-hot": np.eye(3)[[0, 1, 2, 0, 1, 2]],
    "shifted": PROBS - 1,
    "one other row": np.concatenate([PROBS, [[0.5, 0.6, 0.7]]]),
    "log-probabilities": np.log(PROBS),
    "sum of one": PROBS + np.array([1.0, -0.5, -0.5]),
    "zeros": np.zeros((9, 3)),
    "no rows": np.zeros((0, 3)),
}


@pytest.mark.parametrize("name", LOOK_LIKE_PROBABILITIES)
def test_probabilities_are_rejected_as_logits(name):
    with pytest.raises(InputError, match=r"logits must not be probabilities.* from_probs .* subtract 1") as e:
        as_logits(LOOK_LIKE_PROBABILITIES[name])
    assert e.value.hint is Hint.PROBABILITIES


@pytest.mark.parametrize("name", LOGITS)
def test_real_logits_are_accepted(name):
    np.testing.assert_array_equal(as_logits(LOGITS[name]), LOGITS[name])


def test_subtracting_one_insists_on_logits():
    z = as_logits(subtract_one(PROBS.astype(np.float32)))
    np.testing.assert_allclose(z, PROBS - 1, atol=1e-7)
    assert z.dtype == np.float32
    assert subtract_one(Z) is Z


def test_huge_finite_logits_are_not_mistaken_for_infinite_ones():
    huge = np.full((3, 4), 3e38, dtype=np.float32)
    assert as_pair(huge, Y)[0].shape == (3, 4)
    assert as_pair(np.full((3, 4), 6e4, dtype=np.float16), Y)[0].shape == (3, 4)


def test_soft_labels_are_distributions():
    as_arrays(Z, np.full((3, 4), 0.25), soft=True)
    refused(
        "soft labels must have the logits' shape (3, 4), got (3, 3)", as_arrays, Z, np.full((3, 3), 1 / 3), soft=True
    )
    refused("soft labels must be distributions", as_arrays, Z, np.full((3, 4), 0.3), soft=True)
    refused("soft labels must be distributions", as_arrays, Z, np.tile([1.5, -0.5, 0, 0], (3, 1)), soft=True)


class TestFromProbs:
    def test_round_trip(self):
        p = np.random.default_rng(0).dirichlet(np.ones(5), size=20)
        for kind in (p, p.astype(np.float32), torch.tensor(p), torch.tensor(p, dtype=torch.float32)):
            z = from_probs(kind)
            assert type(z) is type(kind)
            assert z.dtype == kind.dtype
            back = torch.softmax(torch.as_tensor(z).double(), dim=1).numpy()
            assert np.allclose(back, p, atol=1e-6)

    def test_zeros_get_half_the_resolution_and_one_warning_counts_them(self):
        with pytest.warns(UserWarning, match="3 exact zeros among 6 .* raised to 0.25, about half") as caught:
            z = from_probs(np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]))
        assert len(caught) == 1
        assert z[0, 1] == np.log(0.25)
        with pytest.warns(UserWarning, match="raised to 1e-06, as no other one is below a half"):
            from_probs(np.array([[1.0, 0.0], [0.0, 1.0]]))
        with pytest.warns(UserWarning, match="raised to 5e-10, about half"):
            z = from_probs(np.array([[1.0, 0.0], [1 - 1e-9, 1e-9]]))
        assert z[:, 1] == pytest.approx(np.log([5e-10, 1e-9]))

    @pytest.mark.filterwarnings("ignore:.*exact zeros")
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_zeros_stay_the_least_of_all(self, dtype):
        for tiny in (1e-4, 1e-7) if dtype == np.float16 else (1e-4, 1e-30, 1.5e-45):
            z = from_probs(np.array([[1.0, 0.0], [1 - tiny, tiny]], dtype))
            assert np.isfinite(z).all()
            assert z[0, 1] <= z[1, 1] < -5

    def test_a_floor_of_ones_own_holds_for_all_and_is_not_told(self):
        z = from_probs(np.array([[0.999, 0.001], [1.0, 0.0]]), floor=0.01)
        assert np.allclose(z[:, 1], np.log(0.01))
        refused("floor must lie between 0 and 0.5, got 0", from_probs, np.array([[0.5, 0.5]]), floor=0)

    def test_rounding_is_tolerated_and_worse_is_not(self):
        from_probs(np.array([[0.5 + 9e-7, 0.5]]))
        with pytest.warns(UserWarning, match="1 exact zeros"):
            from_probs(np.array([[1.0 + 5e-7, -5e-7]]))
        refused(
            "probs must sum to 1 in each row, got 1.000002 in row 1",
            from_probs,
            np.array([[0.5, 0.5], [0.500002, 0.5]]),
        )
        refused(
            "probs must lie in [0, 1], got -0.1..1.1; logits need no from_probs", from_probs, np.array([[1.1, -0.1]])
        )
        refused("probs must be finite, got inf", from_probs, np.array([[np.inf, 1.0]]))
        refused("probs must have at least 2 options in each row", from_probs, np.array([[np.nan, 1.0]]))
        refused("probs must have shape (n, classes)", from_probs, np.array([[[0.5, 0.5]]]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_judged_by_its_own_rounding(self, dtype):
        p = torch.softmax(torch.randn(50, 10, generator=torch.Generator().manual_seed(0)), dim=1).to(dtype)
        z = from_probs(p)
        assert z.dtype == dtype
        assert torch.allclose(torch.softmax(z.float(), dim=1), p.float(), atol=0.02)


def test_from_log_odds_is_the_log_odds_of_class_one():
    x = torch.tensor([0.3, -2.0])
    z = from_log_odds(x)
    assert torch.allclose(torch.softmax(z, dim=1)[:, 1], torch.sigmoid(x))
    assert np.array_equal(from_log_odds(np.array([[1.0], [2.0]])), [[0, 1], [0, 2]])
    refused("scores must have shape (n,) or (n, 1), got (1, 2)", from_log_odds, np.zeros((1, 2)))


class TestFlatten:
    def test_first_and_last_agree(self):
        rng = np.random.default_rng(0)
        last = rng.normal(size=(2, 3, 4, 5))
        labels = rng.integers(0, 5, (2, 3, 4))
        labels[0, 1] = 255
        z1, y1 = flatten(last, labels, class_axis="last", ignore_index=255)
        z2, y2 = flatten(np.moveaxis(last, -1, 1), labels, class_axis="first", ignore_index=255)
        assert z1.shape == (20, 5)
        assert np.array_equal(z1, z2)
        assert np.array_equal(y1, y2)
        expected = [(last[i], labels[i]) for i in np.ndindex(2, 3, 4) if labels[i] != 255]
        assert np.array_equal(z1, [z for z, _ in expected])
        assert np.array_equal(y1, [y for _, y in expected])

    def test_texts_of_one_token_are_clusters_of_their_own(self):
        labels = np.array([[0], [-100], [1]])
        assert flatten(np.zeros((3, 1, 4)), labels, class_axis="last", clusters=True)[2].tolist() == [0, 2]

    def test_torch_stays_torch(self):
        z, y = flatten(
            torch.zeros(2, 3, 4, dtype=torch.float16), torch.zeros(2, 3, dtype=torch.int64), class_axis="last"
        )
        assert z.dtype == torch.float16
        assert z.shape == (6, 4)
        assert isinstance(y, torch.Tensor)

    def test_refusals(self):
        refused(
            'class_axis must be "first" (n, K, …) or "last" (n, …, K)',
            flatten,
            np.zeros((2, 3, 4)),
            np.zeros((2, 3), int),
        )
        refused(
            "labels must have shape (2, 3) to match the logits, got (2, 4)",
            flatten,
            np.zeros((2, 3, 4)),
            np.zeros((2, 4), int),
            class_axis="last",
        )
        refused("labels must lie in 0..3, got -1..0", flatten, np.zeros((2, 4)), np.array([0, -1]))


def test_vectors_and_matrices():
    assert as_vector([1, 0, True], "hits").dtype == np.float64
    refused("hits must have shape (n,), got (1, 2)", as_vector, [[1, 2]], "hits")
    refused("hits must have 3 entries, one per row, got 2", as_vector, [1, 2], "hits", length=3)
    refused("hits must be finite, got inf", as_vector, [1, np.inf], "hits")
    refused("features must have shape (3, width), got (2, 5)", as_matrix, np.zeros((2, 5)), "features", rows=3)


@pytest.mark.parametrize("decimals", [2, 4, 6])
def test_rounded_rows_are_divided_by_their_sum(decimals):
    probs = np.random.default_rng(0).dirichlet(np.ones(5), 200).round(decimals) + 10.0**-decimals
    probs[:, 0] -= 5 * 10.0**-decimals * (probs[:, 0] > 6 * 10.0**-decimals)
    probs = probs[np.abs(probs.sum(axis=1) - 1) <= 2.5 * 10.0**-decimals]
    with pytest.warns(UserWarning, match=f"probs are rounded to {decimals} decimal"):
        logits = from_probs(probs)
    assert np.allclose(np.exp(logits), probs / probs.sum(axis=1, keepdims=True))
    probs[3, 1] += 6 * 10.0**-decimals  # more than rounding explains
    refused("probs must sum to 1 in each row", from_probs, probs)


def test_a_float32_softmax_of_a_vocabulary_is_taken():
    # The sum of so many float32 numbers is off by more than 1e-6 through no fault of the user's.
    probs = np.full((1, 100_000), 1e-5)
    probs[0, 0] += 5e-5
    assert from_probs(probs).shape == (1, 100_000)
    probs[0, 0] += 1e-3
    refused("probs must sum to 1 in each row", from_probs, probs)
    refused("probs must sum to 1 in each row", from_probs, np.array([[0.5, 0.5 + 5e-6]]))


def test_whole_numbers_in_lists_are_numbers():
    assert from_log_odds([1, -2]).tolist() == [[0, 1], [0, -2]]
    with pytest.warns(UserWarning, match="1 exact zeros among 2"):
        assert from_probs([[1, 0]])[0, 0] == 0


def test_fields_of_a_record_array_are_taken():
    records = np.zeros(3, dtype=[("id", "i1"), ("logits", "f8", 4), ("label", "i2")])
    records["label"] = Y
    logits, labels = as_pair(records["logits"], records["label"])
    assert np.array_equal(logits, Z)
    assert np.array_equal(labels, Y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_checked_without_a_copy(dtype):
    z = torch.full((1000, 100), 6e4, dtype=dtype)  # whose sum overflows
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        as_arrays(z, torch.zeros(1000, dtype=torch.int64))
    if dtype == torch.float16:  # NumPy has no bfloat16, which becomes float32
        assert max(event.self_cpu_memory_usage for event in profile.key_averages()) < z.numel()
    for bad in (torch.nan, torch.inf):
        z[7, 3] = bad
        refused(f"logits must be finite, got {bad} at [7, 3] and 1 such in all", as_arrays, z, torch.zeros(1000).long())


@pytest.fixture
def scans(monkeypatch):
    """The shapes of all arrays that are searched for what is not finite."""
    shapes = []
    within = arrays.native.all_within
    monkeypatch.setattr(arrays.native, "all_within", lambda x, least: shapes.append(tuple(x.shape)) or within(x, least))
    return shapes


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_checked_pair_is_not_checked_again(scans, kind):
    z, y = as_arrays(kind([[2.0, 1.0, 0.0]]), kind([2]))
    for _ in range(3):
        again = as_arrays(z, y, min_rows=1)
        assert again[0] is z
        assert again[1] is y
    assert arrays.as_logits(z) is z
    assert scans == [(1, 3)]


def test_the_callers_own_tensors_are_never_trusted(scans):
    mine = torch.tensor([[2.0, 1.0]]), torch.tensor([1])
    z, _ = as_arrays(*mine)
    assert z is not mine[0]
    as_arrays(*mine)
    as_arrays(*as_pair(*mine))
    assert len(scans) == 4


def test_what_was_changed_is_checked_again():
    mine, labels = torch.tensor([[2.0, 1.0]]), torch.tensor([1])
    as_arrays(mine, labels)
    labels[0] = 7
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.1, got 7\.\.7"):
        as_arrays(mine, labels)
    mine[0, 0] = torch.nan
    with pytest.raises(ValueError, match="logits must be finite"):
        as_arrays(mine, torch.tensor([1]))


def test_checked_labels_must_fit_the_logits_they_come_with():
    _, y = as_arrays(np.zeros((2, 9)), [8, 0])
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2, got 0\.\.8"):
        as_arrays(np.zeros((2, 3)), y)
    with pytest.raises(ValueError, match="labels must have 3 entries"):
        as_arrays(np.zeros((3, 9)), y)
    z, soft = as_arrays(np.zeros((2, 2)), [[0.5, 0.5], [1.0, 0.0]], soft=True)
    assert as_arrays(z, soft, soft=True)[1] is soft
    with pytest.raises(ValueError, match="soft labels are defined for nll and brier only"):
        as_arrays(z, soft)
    with pytest.raises(ValueError, match="logits must have at least 3 rows, got 2"):
        as_arrays(z, y, min_rows=3)


def test_tensors_of_inference_are_checked_once(scans):
    with torch.inference_mode():
        z, y = as_arrays(torch.zeros(2, 2), torch.tensor([0, 1]))
        as_arrays(z, y)
    assert len(scans) == 1
