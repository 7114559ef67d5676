"""What can be done to any bytes."""

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
DEEP = 3000
"""Levels of nesting: past what a parser that calls itself can take."""


def span(content, dice, longest=64):
    start = dice.randrange(len(content) + 1)
    return start, min(len(content), start + dice.randint(1, longest))


def put(content, start, piece):
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
    start, stop = span(content, dice)
    piece = dice.choice((bytes(stop - start), b"\xff" * (stop - start), dice.randbytes(stop - start)))
    return put(content, start, piece)


def number(content, dice):
    """A number that some header may hold, in either order of bytes."""
    width = dice.choice((1, 2, 4, 8))
    value = dice.choice(SIZES) % 256**width
    return put(content, dice.randrange(len(content) + 1), value.to_bytes(width, dice.choice(("little", "big"))))


def splice(content, dice):
    (start, stop), (to, _) = span(content, dice), span(content, dice)
    return put(content, to, content[start:stop])


def repeat(content, dice):
    start, stop = span(content, dice)
    return content[:stop] + content[start:stop] * dice.choice((1, 2, 50)) + content[stop:]


def remove(content, dice):
    start, stop = span(content, dice)
    return content[:start] + content[stop:]


def insert_nul(content, dice):
    start, _ = span(content, dice)
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
