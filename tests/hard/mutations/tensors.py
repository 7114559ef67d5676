"""Tensors, and what our own files keep in their header, broken where it hurts most."""

import json
import struct

import numpy as np

from mutations.anything import DEEP, SIZES, put

VALUES = (
    None,
    True,
    -1,
    0,
    1,
    3,
    10**6,
    10**9,
    10**12,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "nan",
    "Temperature",
    "\0",
    [],
    {},
    [1],
    {"tensor": "temperature"},
    {"tensor": []},
    {"float": "nan"},
    {"calibrator": None},
    {"list": [None]},
)


def _changed(value, dice):
    """One entry of nested plain data replaced, lost or added, anywhere."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        key = dice.choice(sorted(value))
        what = dice.random()
        if what < 0.1:
            return {name: entry for name, entry in value.items() if name != key}
        if what < 0.2:
            return {**value, dice.choice(("x", "", "__class__", key.upper())): dice.choice(VALUES)}
        return {**value, key: _changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        return [*value[:at], *([] if dice.random() < 0.1 else [_changed(value[at], dice)]), *value[at + 1 :]]
    return dice.choice(VALUES)


def _nested(dice):
    start, end = dice.choice((("[", "]"), ('{"list": [', "]}"), ('{"calibrator": ', "}"), ('{"a": ', "}")))
    return start * DEEP + "1" + end * DEEP


def _safe_parts(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _safe(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_header(content, dice):
    """Shapes, types, offsets and lengths that are not those of the data."""
    header, data = _safe_parts(content)
    what = dice.randrange(6)
    if what == 0:
        return struct.pack("<Q", dice.choice(SIZES)) + content[8:]
    if what == 1:
        return _safe(_nested(dice).encode(), data)
    if what == 2:
        text = json.dumps(header)
        return _safe((text[:-1] + ", " + text[1:]).encode(), data)
    name = dice.choice([name for name in header if name != "__metadata__"])
    if what == 3:
        kinds = ("F64", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "U16", "X9", "")
        return _safe({**header, name: {**header[name], "dtype": dice.choice(kinds)}}, data)
    if what == 4:
        shapes = ([], [2], [0, 3], [2**62, 4], [2**63, 2], [-1, 3], [6], [1, 1, 6], ["2", 3], None)
        return _safe({**header, name: {**header[name], "shape": dice.choice(shapes)}}, data)
    return _safe(_changed(header, dice), data)


def safetensors_metadata(content, dice):
    """What we say of ourselves in the header, wrong anywhere in it."""
    header, data = _safe_parts(content)
    metadata = header.get("__metadata__") or {"trueup": "{}"}
    key = dice.choice(sorted(metadata))
    if dice.random() < 0.1:
        text = dice.choice((_nested(dice), "", "[]", "null", "1" * 5000, '{"a": 1, "a": 2}', "\ud7ff"))
    else:
        inside = json.loads(metadata[key])
        for _ in range(dice.choice((1, 1, 2))):
            inside = _changed(inside, dice)
        text = json.dumps(inside)
    return _safe({**header, "__metadata__": {**metadata, key: text}}, data)


def safetensors_values(content, dice):
    """NaN, infinities and numbers of any size among the values."""
    header, data = _safe_parts(content)
    value = dice.choice((np.nan, np.inf, -np.inf, 0.0, -1.0, 1e308, 1e-308))
    at = 8 * dice.randrange(max(1, len(data) // 8))
    return _safe(header, put(data, at, np.array(value, dice.choice(("<f8", "<f8", "<f4"))).tobytes()))
