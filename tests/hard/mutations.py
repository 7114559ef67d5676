"""How good files are broken: any bytes in any way, and each format where it hurts most.

`broken(content, suffix, dice)` gives a broken copy and says what was done to it; the same dice give the same copy.
"""

import io
import json
import random
import struct
import zipfile

import numpy as np

MAGICS = (
    b"\x93NUMPY\x01\x00",
    b"PK\x03\x04",
    b"PAR1",
    b"SQLite format 3\0",
    b"\x1f\x8b\x08",
    b"\xff\xd8\xff",
    b"{",
    b"",
)
SIZES = (0, 1, 2, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 10**12, 2**62, 2**63 - 1, 2**64 - 1)
WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
DEEP = 3000
"""Levels of nesting: past what a parser that calls itself can take."""


def broken(content, suffix, dice):
    """What was done, and the broken copy."""
    own = OF_FORMAT.get(suffix, ())
    ways = OF_ANY if not own or dice.random() < 0.5 else own
    name, result = "", content
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        way = dice.choice(ways)
        try:
            changed = way(result, dice)
        except Exception:  # what an earlier step broke may not be understood any more, and is broken all the same
            way, changed = flip, flip(result, dice)
        name, result = f"{name}+{way.__name__}" if name else way.__name__, changed
    return name, result


# Any bytes.


def _span(content, dice, longest=64):
    start = dice.randrange(len(content) + 1)
    return start, min(len(content), start + dice.randint(1, longest))


def _put(content, start, piece):
    """Overwrite, without making it longer."""
    return (content[:start] + piece + content[start + len(piece) :])[: len(content)]


def truncate(content, dice):
    return content[: dice.randrange(len(content) + 1)]


def lose_the_beginning(content, dice):
    return content[dice.randrange(len(content) + 1) :]


def empty(content, dice):
    return b""


def flip(content, dice):
    bits = bytearray(content or b"\0")
    for _ in range(dice.choice((1, 1, 2, 8))):
        bits[dice.randrange(len(bits))] ^= 1 << dice.randrange(8)
    return bytes(bits)


def overwrite(content, dice):
    start, stop = _span(content, dice)
    piece = dice.choice((bytes(stop - start), b"\xff" * (stop - start), dice.randbytes(stop - start)))
    return _put(content, start, piece)


def number(content, dice):
    """A number that some header may hold, in either order of bytes."""
    width = dice.choice((1, 2, 4, 8))
    value = dice.choice(SIZES) % 256**width
    return _put(content, dice.randrange(len(content) + 1), value.to_bytes(width, dice.choice(("little", "big"))))


def splice(content, dice):
    (start, stop), (to, _) = _span(content, dice), _span(content, dice)
    return _put(content, to, content[start:stop])


def repeat(content, dice):
    start, stop = _span(content, dice)
    return content[:stop] + content[start:stop] * dice.choice((1, 2, 50)) + content[stop:]


def remove(content, dice):
    start, stop = _span(content, dice)
    return content[:start] + content[stop:]


def insert_nul(content, dice):
    start, _ = _span(content, dice)
    return content[:start] + bytes(dice.choice((1, 4, 64))) + content[start:]


def append(content, dice):
    return content + dice.choice((b"\0" * 100, content, dice.randbytes(50), b"\n"))


def swap_magic(content, dice):
    magic = dice.choice(MAGICS)
    return magic + content[len(magic) :]


def other_encoding(content, dice):
    return content.decode("latin-1").encode(dice.choice(("utf-16", "utf-8-sig", "utf-32-le", "cp037")), "replace")


def shuffle_blocks(content, dice):
    size = dice.choice((16, 64, 256))
    blocks = [content[i : i + size] for i in range(0, len(content), size)]
    dice.shuffle(blocks)
    return b"".join(blocks)


OF_ANY = (
    truncate,
    lose_the_beginning,
    flip,
    flip,
    overwrite,
    number,
    number,
    splice,
    repeat,
    remove,
    insert_nul,
    append,
    swap_magic,
    other_encoding,
    shuffle_blocks,
    empty,
)


# Arrays of NumPy.

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
    return _put(content, start, np.float64(value).tobytes() if dice.random() < 0.7 else np.int64(-7).tobytes())


# Archives.


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
    return _put(content, start + 2 * dice.randrange(20), value.to_bytes(width, "little"))


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


# Tables.


def _lines(content):
    return content.decode("utf-8").splitlines(keepends=True)


def csv_lines(content, dice):
    """Lines lost, doubled, swapped, cut or joined."""
    lines = _lines(content)
    at, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    what = dice.randrange(5)
    if what == 0:
        lines.pop(at)
    elif what == 1:
        lines.insert(other, lines[at])
    elif what == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif what == 3:
        lines[at] = lines[at][: dice.randrange(len(lines[at]))]
    else:
        lines[at] = lines[at].rstrip("\n")
    return "".join(lines).encode()


FIELDS = (
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-1e999",
    "9" * 5000,
    "0x10",
    "1,5",
    '"',
    '"1"',
    "'1'",
    "1.5",
    "-1",
    "99999999999999999999",
    "None",
    "\0",
    "٣",
    "1_0",
    "=1+1",
    "a" * 200_000,
    "\r",
    "\ufeff1",
)


def csv_field(content, dice):
    lines = _lines(content)
    at = dice.randrange(len(lines))
    fields = lines[at].rstrip("\n").split(",")
    fields[dice.randrange(len(fields))] = dice.choice(FIELDS)
    lines[at] = ",".join(fields) + "\n"
    return "".join(lines).encode()


def csv_columns(content, dice):
    """A header of doubled, misnumbered, missing or very many columns."""
    lines = _lines(content)
    header = lines[0].rstrip("\n").split(",")
    what = dice.randrange(4)
    if what == 0:
        header[-1] = header[0]
    elif what == 1:
        header[0] = f"logit_{dice.choice(SIZES)}"
    elif what == 2:
        header[dice.randrange(len(header))] = dice.choice(("", "label", "labels", "logits", "prob_0", "x" * 9999))
    else:
        header += [f"x{i}" for i in range(30_000)] + ["x29999"]
    return (",".join(header) + "\n" + "".join(lines[1:])).encode()


def parquet_footer(content, dice):
    """Something wrong in the footer alone, where the sizes are, or in its length."""
    length = int.from_bytes(content[-8:-4], "little")
    start = len(content) - 8 - length
    if dice.random() < 0.1:
        return content[:-8] + struct.pack("<I", dice.choice(SIZES) % 2**32) + content[-4:]
    changed = dice.choice((flip, number, splice, overwrite))(content[start:-8], dice)
    return content[:start] + changed + content[-8:]


def parquet_pages(content, dice):
    """Something wrong in the pages alone."""
    length = int.from_bytes(content[-8:-4], "little")
    start = len(content) - 8 - length
    return dice.choice((flip, number, splice, overwrite))(content[:start], dice) + content[start:]


# Tensors, and what our own files keep in their header.

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
    return _safe(header, _put(data, at, np.array(value, dice.choice(("<f8", "<f8", "<f4"))).tobytes()))


# Databases.


def sqlite_page(content, dice):
    """Something wrong in the file's own facts, or at the head of a page."""
    size = int.from_bytes(content[16:18], "big") or 4096
    # The size of a page, who may write, what is reserved, how many pages, the schema's format, the encoding.
    fact = dice.choice((16, 18, 18, 19, 20, 28, 44, 56, dice.randrange(16, 100)))
    head = size * dice.randrange(max(1, len(content) // size)) + dice.randrange(16)
    width = dice.choice((1, 2, 4))
    return _put(content, dice.choice((fact, head)), (dice.choice(SIZES) % 256**width).to_bytes(width, "big"))


def sqlite_text(content, dice):
    """The statements and the rows' own text, changed in place."""
    words = (
        b"CREATE TABLE",
        b"TEXT",
        b"PRIMARY KEY",
        b"schema",
        b"settings",
        b"finished",
        b'{"',
        b"seed",
        b"ece",
        b"0.0",
    )
    found = [word for word in words if word in content]
    word = dice.choice(found)
    places = [i for i in range(len(content)) if content.startswith(word, i)]
    return _put(content, dice.choice(places), dice.randbytes(len(word)) if dice.random() < 0.5 else b"\xff" * len(word))


OF_FORMAT = {
    ".npy": (npy_header, npy_values),
    ".npz": (npz_member, npz_member, npz_names, npz_directory, npz_directory, npz_promise),
    ".csv": (csv_lines, csv_field, csv_columns),
    ".parquet": (parquet_footer, parquet_pages),
    ".safetensors": (safetensors_header, safetensors_metadata, safetensors_metadata, safetensors_values),
    ".sqlite": (sqlite_page, sqlite_text),
}


def dice_of(*words):
    """Dice that fall the same way for the same words, on every machine."""
    return random.Random(" ".join(map(str, words)))
