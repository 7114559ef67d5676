"""Arrays of NumPy, alone and in archives, broken where it hurts most."""

import io
import struct
import zipfile

import numpy as np

from mutations.anything import DEEP, OF_ANY, SIZES, put

SHAPES = (
    "(-1, 3)",
    "(10**9, 3)",
    "(1000000000000, 3)",
    "(0, 3)",
    "(0, 99999999999999999999)",
    "(3, 0)",
    "()",
    "(6,)",
    "(1, 2, 3)",
    "(True, 3)",
    "(2.0, 3)",
    "('2', 3)",
    "[2, 3]",
    "None",
    "(9223372036854775807, 9223372036854775807)",
    "(" + "1, " * 70 + ")",
    "-" * 9000 + "1",
    "[" * 190 + "]" * 190,
    "1" + "+1" * 3000,
)
KINDS = (
    "'|O'",
    "'O'",
    "'<U5'",
    "'|S8'",
    "'|V0'",
    "'|V8'",
    "'<c16'",
    "'<M8[s]'",
    "'>f4'",
    "'<f2'",
    "'<f16'",
    "'|b1'",
    "'|u1'",
    "[('a', '<f4'), ('b', '|O')]",
    "[('a', '<f4', (1000000, 1000000))]",
    "('<f4', (2,))",
    "'<f8, <f8'",
    "'x' * 100",
    "3",
    "None",
    "'" + "(" * 3000 + "'",
)


def npy_header(content, dice):
    """Another kind or shape, or none, written as NumPy would."""
    size = struct.unpack("<H", content[8:10])[0]
    kind, fortran, shape = _described(content[10 : 10 + size].decode("latin-1"))
    what = dice.randrange(4)
    if what == 0:
        shape = dice.choice(SHAPES)
    elif what == 1:
        kind = dice.choice(KINDS)
    elif what == 2:
        fortran = dice.choice(("True", "1", "None", "[]"))
    else:
        shape, kind = dice.choice(SHAPES), dice.choice(KINDS)
    text = f"{{'descr': {kind}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode("latin-1")
    text = dice.choice((text, text, text, text + b"\n" * 20000, text[:-1], b"{" * DEEP))
    if dice.random() < 0.2:
        length = dice.choice(SIZES) % 2**32
        return (
            b"\x93NUMPY" + bytes((dice.choice((2, 3, 9)), 0)) + struct.pack("<I", length) + text + content[10 + size :]
        )
    return content[:8] + struct.pack("<H", len(text) % 2**16) + text + content[10 + size :]


def _described(text):
    def after(word, ends):
        start = text.index(f"'{word}': ") + len(word) + 4
        return text[start : text.index(ends, start) + len(ends) - 1]

    return after("descr", "',")[:-1] + "'", after("fortran_order", ","), after("shape", "),") + ""


def npy_values(content, dice):
    """NaN, infinities and numbers of any size among the values."""
    value = dice.choice((np.nan, np.inf, -np.inf, 1e308, -1.0, 2**53))
    start = 128 + 8 * dice.randrange(max(1, (len(content) - 128) // 8))
    return put(content, start, np.float64(value).tobytes() if dice.random() < 0.7 else np.int64(-7).tobytes())


def _members(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(member, archive.read(member)) for member in archive.infolist()]


def _zipped(members, method=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return file.getvalue()


def npz_member(content, dice):
    """A broken member in an archive whose checksums are right."""
    members = [(member.filename, data) for member, data in _members(content)]
    at = dice.randrange(len(members))
    way = dice.choice((npy_header, npy_header, npy_values, *OF_ANY))
    members[at] = (members[at][0], way(members[at][1], dice))
    return _zipped(members, dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def npz_names(content, dice):
    """Members renamed, doubled, dropped or joined by strange ones."""
    members = [(member.filename, data) for member, data in _members(content)]
    strange = dice.choice(("../logits.npy", "logits.npy", "", "\0.npy", "a" * 5000 + ".npy", "val_logits.npy", "x/"))
    what = dice.randrange(3)
    if what == 0:
        members[dice.randrange(len(members))] = (strange, members[0][1])
    elif what == 1:
        members.pop(dice.randrange(len(members)))
    else:
        members.append((strange, dice.choice((b"", dice.randbytes(100), members[0][1]))))
    dice.shuffle(members)
    return _zipped([(name, data) for name, data in members if name])


def npz_directory(content, dice):
    """Sizes, methods, flags and offsets in the directory that are not those of the members."""
    places = [i for i in range(len(content)) if content.startswith((b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"), i)]
    start, width = dice.choice(places) + 4, dice.choice((2, 4))
    value = dice.choice((*SIZES, 8, 12, 14, 99)) % 256**width
    return put(content, start + 2 * dice.randrange(20), value.to_bytes(width, "little"))


def npz_promise(content, dice):
    """Header and directory agree on gigabytes of rows that are not there."""
    rows = dice.choice((10**8, 17 * 10**7))
    head = promised((rows, 3), "<f8")
    body = _zipped([("logits.npy", head), ("labels.npy", npy(np.zeros(2, int)))], zipfile.ZIP_STORED)
    size = struct.pack("<I", len(head) + 24 * rows)
    for magic, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        start = body.index(magic) + offset
        body = body[:start] + size + body[start + 4 :]
    return body


def promised(shape, dtype):
    """The header of an array that is not there."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()
