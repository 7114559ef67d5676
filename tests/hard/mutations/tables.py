"""Tables of text, of Parquet and of SQLite, broken where it hurts most."""

import struct

from mutations.anything import SIZES, flip, number, overwrite, put, splice


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


def sqlite_page(content, dice):
    """Something wrong in the file's own facts, or at the head of a page."""
    size = int.from_bytes(content[16:18], "big") or 4096
    # The size of a page, who may write, what is reserved, how many pages, the schema's format, the encoding.
    fact = dice.choice((16, 18, 18, 19, 20, 28, 44, 56, dice.randrange(16, 100)))
    head = size * dice.randrange(max(1, len(content) // size)) + dice.randrange(16)
    width = dice.choice((1, 2, 4))
    return put(content, dice.choice((fact, head)), (dice.choice(SIZES) % 256**width).to_bytes(width, "big"))


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
    return put(content, dice.choice(places), dice.randbytes(len(word)) if dice.random() < 0.5 else b"\xff" * len(word))
