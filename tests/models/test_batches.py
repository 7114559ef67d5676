from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from trueup.models.batches import LABELS, Batch, batches, logits_of, replace_at, tensors_in, with_logits

X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([1, 0, 2])
Z, NEW = torch.ones(3, 4), torch.zeros(3, 4)


@dataclass
class Record:
    x: Tensor
    label: Tensor


class Named(NamedTuple):
    x: Tensor
    target: Tensor


def one(batch, **options):
    (parsed,) = batches([batch], **options)
    assert isinstance(parsed, Batch)
    return parsed


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_ends_in_its_labels(kind):
    args, kwargs, labels = one(kind([X, Y]))
    assert args[0] is X
    assert (len(args), kwargs) == (1, {})
    assert torch.equal(labels, Y)
    args, kwargs, labels = one(kind([X, "text", X + 1, Y]))
    assert args[0] is X
    assert args[1] == "text"
    assert torch.equal(args[2], X + 1)
    assert (len(args), kwargs) == (3, {})


@pytest.mark.parametrize(
    "batch",
    [
        {"x": X, "labels": Y},
        OrderedDict(targets=Y, x=X),
        UserDict(x=X, y=Y),
        MappingProxyType({"x": X, "label": Y}),
        Record(X, Y),
        Named(X, Y),
        namedtuple("Other", "labels x")(Y, X),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_names_make_keywords(batch):
    args, kwargs, labels = one(batch)
    assert args == ()
    assert list(kwargs) == ["x"]
    assert kwargs["x"] is X
    assert torch.equal(labels, Y)


@pytest.mark.parametrize("name", LABELS)
def test_each_name_of_labels(name):
    assert torch.equal(one({"x": X, name: Y}).labels, Y)


def test_of_two_names_the_first_is_meant_and_the_other_is_an_input():
    _, kwargs, labels = one({"y": X, "x": X, "labels": Y})
    assert list(kwargs) == ["y", "x"]
    assert torch.equal(labels, Y)


def test_the_batch_of_the_loader_is_not_changed():
    batch = {"x": X, "labels": Y}
    one(batch)
    assert list(batch) == ["x", "labels"]


@pytest.mark.parametrize(
    "labels",
    [[1, 0, 2], (1, 0, 2), np.array([1, 0, 2]), Y.to(torch.int32), Y.to(torch.uint8)],
    ids=["list", "tuple", "numpy", "int32", "uint8"],
)
def test_labels_become_int64(labels):
    result = one((X, labels)).labels
    assert result.dtype == torch.int64
    assert result.tolist() == [1, 0, 2]


def test_numpy_inputs_become_tensors_and_other_things_stay():
    things = [object(), None, 3, np.array(["a", "b", "c"])]
    args, _, _ = one((X.numpy(), *things, Y))
    assert torch.equal(args[0], X)
    assert all(a is b for a, b in zip(args[1:], things, strict=True))


def test_numpy_arrays_of_any_layout(recwarn):
    x = np.arange(6.0).reshape(3, 2)[::-1]
    x.flags.writeable = False
    y = np.array([1, 0, 2])
    y.flags.writeable = False
    parsed = one((x, y))
    assert parsed.args[0].tolist() == [[4, 5], [2, 3], [0, 1]]
    assert parsed.labels.tolist() == [1, 0, 2]
    assert not recwarn


def test_tensors_move_wherever_they_are():
    packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    nested = {"inner": (X, [X, "text"]), "named": Named(X, Y), "plain": 2}
    args, _, labels = one((X, nested, packed, Y), device="meta")
    assert args[0].is_meta
    assert labels.is_meta
    moved = args[1]
    assert moved["inner"][0].is_meta
    assert moved["inner"][1][0].is_meta
    assert moved["inner"][1][1] == "text"
    assert isinstance(moved["named"], Named)
    assert moved["named"].x.is_meta
    assert moved["plain"] == 2
    assert args[2].data.is_meta
    assert not nested["inner"][0].is_meta
    assert one({"x": UserDict(a=X), "labels": Y}, device="meta").kwargs["x"]["a"].is_meta


def test_without_a_device_tensors_stay_where_they_are():
    meta = X.to("meta")
    assert one((meta, Y)).args[0] is meta


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "answer": Y}, "labels must be under one of labels, label, targets, target, y, got 'x', 'answer'"),
        (X, r"must be a tuple or list that ends in the labels, .* got Tensor of shape \(3, 2\); a loader of one batch"),
        ((X,), "a tuple must hold the inputs and then the labels, got 1 in it"),
        ([], "a list must hold the inputs and then the labels, got 0 in it"),
        (3, "got int; a loader of one batch"),
        (Record, "got type;"),
        ((X, Y.float()), "labels must be integers, got float32"),
        ((X, Y[:, None]), r"labels must have shape \(n,\), got \(3, 1\)"),
        ((X, 3), r"labels must have shape \(n,\), got \(\)"),
        ((X, "cat"), "labels must be an array of integers, got str"),
        ((X, ["cat", "dog"]), "labels must be an array of integers, got list"),
        ((X, [[1], [2, 3]]), "labels must be an array of integers, got list"),
        ((X, None), "labels must be an array of integers, got NoneType"),
    ],
)
def test_a_batch_that_cannot_be_parsed_is_named(batch, message):
    parsed = batches([(X, Y), batch])
    next(parsed)
    with pytest.raises(ValueError, match="^batch 1: .*" + message):
        next(parsed)


class Output(SimpleNamespace):
    pass


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    hidden: str = "hidden"
    made: int = field(default=7, init=False)


@dataclass(slots=True)
class Slotted:
    hidden: str
    logits: Tensor


class ModelOutput(OrderedDict):
    """Entries that are attributes too, as transformers has them."""

    def __init__(self, **entries):
        super().__init__(entries)
        for name, value in entries.items():
            super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        return lambda: ModelOutput(**self), ()


Pair = namedtuple("Pair", "aux logits")
Nameless = namedtuple("Nameless", "text scores state")

OUTPUTS = {
    "tuple": (Z, "hidden"),
    "later in a tuple": (None, "loss", Z, torch.ones(1)),
    "list": [Z, "hidden"],
    "named tuple": Pair(torch.full((1,), 5.0), Z),
    "named tuple without the name": Nameless("hidden", Z, None),
    "dict": {"loss": None, "logits": Z},
    "OrderedDict": OrderedDict(hidden="hidden", logits=Z),
    "UserDict": UserDict(hidden="hidden", logits=Z),
    "mapping that cannot change": MappingProxyType({"hidden": "hidden", "logits": Z}),
    "entries and attributes": ModelOutput(loss=None, logits=Z),
    "object": Output(hidden="hidden", logits=Z),
    "frozen dataclass": Frozen(Z),
    "dataclass with slots": Slotted("hidden", Z),
    "torch's own": torch.max(Z, dim=1, keepdim=True),
}


def contents(output):
    if isinstance(output, tuple | list):
        return list(output)
    if hasattr(output, "items"):
        return list(output.items())
    if hasattr(output, "__slots__"):
        return [output.hidden, output.logits]
    return list(vars(output).items())


@pytest.mark.parametrize("kind", OUTPUTS)
def test_logits_are_found_and_only_they_are_replaced(kind):
    output = OUTPUTS[kind]
    before = contents(output)
    z = logits_of(output)
    if kind != "torch's own":
        assert z is Z
    new = torch.full_like(z, -3.0)
    changed = with_logits(output, new)
    assert type(changed) is type(output)
    assert logits_of(changed) is new
    assert repr(contents(changed)) == repr(before).replace(repr(z), repr(new)) != repr(before)
    assert logits_of(output) is z, "the given output was changed"
    assert repr(contents(output)) == repr(before)


def test_an_output_with_entries_and_attributes_changes_both():
    changed = with_logits(OUTPUTS["entries and attributes"], NEW)
    assert changed.logits is changed["logits"] is NEW


def test_a_tensor_is_its_own_logits():
    assert logits_of(Z) is Z
    assert with_logits(Z, NEW) is NEW


@pytest.mark.parametrize(
    ("output", "fact"),
    [
        ({"out": Z, "aux": Z}, "got dict with keys 'out', 'aux';"),
        ({}, "got dict with keys nothing;"),
        ({"logits": [1.0]}, "got dict whose logits are of type list;"),
        (("a", [Z]), "got tuple of str, list;"),
        ([], "got list of nothing;"),
        (Output(logits=None), "got Output whose logits are of type NoneType;"),
        (Output(scores=Z), "got Output;"),
        (None, "got NoneType;"),
        (np.ones((2, 2)), "got ndarray;"),
    ],
    ids=repr,
)
def test_an_output_without_logits_says_what_it_is(output, fact):
    for call in (lambda: logits_of(output), lambda: with_logits(output, NEW)):
        with pytest.raises(ValueError, match="the model's output must be a tensor, .*, got ") as caught:
            call()
        assert fact in str(caught.value)


def test_tensors_are_found_in_the_order_of_the_arguments():
    inputs = ((X, "text", [X, {"a": X}]), {"b": Named(X, Y), "c": None})
    keys = [keys for keys, _ in tensors_in(inputs)]
    assert keys == [(0, 0), (0, 2, 0), (0, 2, 1, "a"), (1, "b", 0), (1, "b", 1)]


def test_one_tensor_is_changed_and_the_rest_is_shared():
    inputs = ((X, [X, {"a": X}]), {"b": Named(X, Y)})
    for keys, tensor in tensors_in(inputs):
        changed = replace_at(inputs, keys, lambda x: x + 10)
        for place, result in tensors_in(changed):
            assert torch.equal(result, tensor + 10) if place == keys else any(result is t for t in (X, Y))
    assert torch.equal(X, torch.arange(6.0).reshape(3, 2))
    assert isinstance(replace_at(inputs, (1, "b", 0), lambda x: x + 1)[1]["b"], Named)
