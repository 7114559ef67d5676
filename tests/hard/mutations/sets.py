"""The formats in which data sets are distributed, broken where it hurts most."""

import gzip
import io
import struct
import tarfile

from mutations.anything import OF_ANY, SIZES, put, splice


def idx_head(content, dice):
    """Sizes that are not those of the bytes, negative ones, and any number of them."""
    if dice.random() < 0.3:
        return content[:3] + bytes([dice.choice((0, 1, 4, 33, 65, 255))]) + content[4:]
    size = dice.choice((-1, -(2**31), 0, 1, 7, 10**6, 2**31 - 1))
    return put(content, 4 + 4 * dice.randrange(content[3]), struct.pack(">i", size))


def packed(content, dice):
    """Something wrong inside, packed again so that its checksum is right."""
    inside = gzip.decompress(content)
    own = (tar_entry, tar_entry, tar_extra) if inside[257:262] == b"ustar" else (idx_head, idx_head, followed)
    return gzip.compress(dice.choice((*own, *OF_ANY))(inside, dice), mtime=0)


def followed(content, dice):
    """Tens of megabytes more than was said."""
    return content + bytes(40 << 20)


# Pickles. What they call is harmless, but would be noticed.


def _text(words):
    return b"U" + bytes([len(words)]) + words


EVIL = _text(b"import sys; sys.modules['evil'] = 1")
CALLS = (
    b"cbuiltins\nexec\n" + EVIL + b"\x85R",
    b"c__builtin__\neval\n" + _text(b"__import__('sys').modules.update(evil=1)") + b"\x85R",
    b"\x8c\x08builtins\x8c\x04exec\x93" + EVIL + b"\x85R",
    b"(" + EVIL + b"ibuiltins\nexec\n",
    b"(cnumpy\nndarray\n" + EVIL + b"o",
    b"cnumpy\nload\n" + _text(b"evil.npy") + b"\x85R",
    b"cnumpy.core.multiarray\nscalar\n)R",
    b"cnumpy.core.multiarray\n_reconstruct\n}" + EVIL + b"Nsb",
    b"cnumpy\ndtype\n" + EVIL + b"\x85R}b",
)
DAG = b")" + b"2\x86" * 60
"""Tuples of tuples: sixty steps stand for 2⁶⁰ entries."""
RIDDLES = (DAG, b"}" + DAG + b"Ns", b"}(" + DAG + b"Nu", b"(" + DAG + b"Nd", b"\x8f(" + DAG + b"\x90", b"(" * 50_000)
PROMISES = (
    *(b"T" + struct.pack("<i", 2**31 - 1), b"B" + struct.pack("<I", 2**32 - 1), b"X" + struct.pack("<I", 2**32 - 1)),
    *(code + struct.pack("<Q", size) for code in (b"\x8e", b"\x8d", b"\x96") for size in (2**33, 2**62, 2**64 - 1)),
    *(b"Nr" + struct.pack("<I", 2**32 - 1), b"Np999999999999\n", b"j" + struct.pack("<I", 2**31)),
    *(b"\x95" + struct.pack("<Q", 2**62), b"\x8b" + struct.pack("<i", 2**31 - 1), b"L" + b"9" * 5000 + b"L\n"),
)


def pickle_step(content, dice):
    """A call, a promise or a riddle among the values, or in place of the array or the labels."""
    piece = dice.choice(dice.choice((CALLS, RIDDLES, PROMISES)))
    if dice.random() < 0.5:
        at = dice.randrange(2, len(content))
        return content[:at] + piece + dice.choice((b"", b"0")) + content[at:]
    array = content[content.index(b"data") + 4 : content.index(b"labels") - 5]
    parts = dice.choice(((array, piece), (piece, b"](K\x03K\x04e")))
    return b"\x80\x02}(" + _text(b"data") + parts[0] + _text(b"labels") + parts[1] + b"u."


# Archives of tapes.


def tar_entry(content, dice):
    """A header that says something else, with a checksum that is right."""
    blocks = [i for i in range(0, len(content), 512) if content[i + 257 : i + 262] == b"ustar"]
    at = dice.choice(blocks)
    head = bytearray(content[at : at + 512])
    what = dice.randrange(4)
    if what == 0:  # a size, in digits or, of any sign, in bytes
        size = dice.choice((-512, -1024, -1, 0, 3, 10**9, 2**33, 2**62))
        digits = f"{size:011o}\0".encode() if 0 <= size < 8**11 else None
        head[124:136] = digits or bytes([255 if size < 0 else 128]) + (size % 256**11).to_bytes(11, "big")
    elif what == 1:
        head[156:157] = dice.choice(
            (b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"L", b"K", b"S", b"x", b"g", b"X", b"D")
        )
    elif what == 2:
        name = dice.choice((b"", b"../" * 30, b"\xff\n/\n/x", b"20news-bydate-train/rec.cooking/1", b"a" * 100))
        head[:100] = name[:100].ljust(100, b"\0")
    else:
        head[dice.randrange(512)] ^= 1 << dice.randrange(8)
    return content[:at] + _summed(head) + content[at + 512 :]


def tar_extra(content, dice):
    """An entry before the others: records that take over, names of any length, holes of a terabyte."""
    records = dice.choice(
        (b"19 size=-1000000000\n", b"18 size=999999999\n", b"9999999999 a=b\n", b"0 a=b\n", b"12 path=\n\n\n\n\n")
    )
    kind, data = dice.choice(((b"x", records), (b"g", records), (b"L", b"x/" * 3000), (b"S", b""), (b"K", records)))
    info = tarfile.TarInfo("20news-bydate-train/sci.med/9")
    info.size, info.type = len(data), kind
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if kind == b"S":  # where it has bytes, none, and how long it is with its holes
        head[386:410] = b"00000000000\0" * 2
        head[483:495] = bytes([128]) + dice.choice((2**30, 2**33, 2**40)).to_bytes(11, "big")
    entry = _summed(head) + data.ljust(-(-len(data) // 512) * 512, b"\0")
    return entry * dice.choice((1, 1, 500)) + content


def _summed(head):
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return bytes(head)


# Files of MATLAB: the tags of its elements are pairs of numbers, a kind and a length.


def mat_tag(content, dice):
    at = 128 + 8 * dice.randrange(max(1, min(12, (len(content) - 128) // 8)))
    kind = struct.pack("<I", dice.choice((1, 2, 5, 9, 12, 14, 15, 16, 17, 18, 99)))
    length = struct.pack("<I", dice.choice(SIZES) % 2**32)
    return put(content, at + dice.choice((0, 4)), dice.choice((kind, length)))


def mat_cells(content, dice):
    """Cells within cells within cells, by the thousand."""
    inner = b""
    for _ in range(dice.choice((3, 2000))):
        body = (
            struct.pack("<IIII", 6, 8, 1, 0)
            + struct.pack("<IIii", 5, 8, 1, 1)
            + struct.pack("<HH4s", 1, 1, b"X")
            + inner
        )
        inner = struct.pack("<II", 14, len(body)) + body
    return content[:128] + inner


# Lines.


def text_lines(content, dice):
    """Labels of any kind, lines joined, doubled or lost."""
    lines = content.split(b"\n")
    at = dice.randrange(len(lines))
    label = dice.choice(
        (b"-1", b"9" * 30, b"9" * 5000, b"1.5", b"", "²".encode(), "٣".encode(), b"\xff", b"DESC:", b"\0")
    )
    lines[at] = label + b" " + lines[at].partition(b" ")[2]
    return splice(b"\n".join(lines), dice) if dice.random() < 0.2 else b"\n".join(lines)


def archive_of(files):
    """A tape of files by name, packed."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()
