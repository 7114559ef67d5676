"""Example files come from a folder of one's own, or from a server once, and are checked."""

import hashlib
import io
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from trueup import examples

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(256, size=(5, 32, 32, 3), dtype=np.uint8), RNG.integers(10, size=5, dtype=np.uint8)


class Handler(SimpleHTTPRequestHandler):
    """Counts what it serves."""

    served: list[str]

    def log_message(self, *_):
        self.served.append(self.path)


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Serve a file under the name of an example; returns the paths that were asked for."""
    pytest.importorskip("pooch")
    import pooch

    monkeypatch.delenv("TRUEUP_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda _: tmp_path / "cache")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = type("Counting", (Handler,), {"served": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def add(name, content, sha256=None):
            (folder / "file").write_bytes(content)
            address = f"http://127.0.0.1:{server.server_port}/file"
            example = replace(
                examples.EXAMPLES[name], url=address, sha256=sha256 or hashlib.sha256(content).hexdigest()
            )
            monkeypatch.setattr(examples, "EXAMPLES", {name: example})
            return handler.served

        yield add
        server.shutdown()


def archive():
    """An archive of five images in CIFAR's binary form: a byte for the label, then the three colour planes."""
    planes = IMAGES.transpose(0, 3, 1, 2).reshape(5, -1)
    content = np.concatenate([LABELS[:, None], planes], axis=1).tobytes()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        member = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def test_a_file_is_downloaded_once_and_its_licence_is_printed(publish, capsys):
    served = publish("cifar10_resnet20", b"weights")
    path = examples.load("cifar10_resnet20")
    printed = capsys.readouterr()
    assert path.read_bytes() == b"weights"
    assert printed.out == ""
    assert "Licence: BSD 2-clause" in printed.err
    assert "akamaster" in printed.err
    assert examples.load("cifar10_resnet20") == path
    assert len(served) == 1
    assert capsys.readouterr().err == ""


def test_images_are_unpacked_from_the_archive(publish):
    publish("cifar10_test", archive())
    with np.load(examples.load("cifar10_test")) as arrays:
        assert (arrays["images"] == IMAGES).all()
        assert (arrays["labels"] == LABELS).all()


def test_another_file_than_the_published_one_is_rejected(publish, tmp_path):
    publish("cifar10_resnet20", b"weights", sha256="0" * 64)
    with pytest.raises(ValueError, match="hash"):
        examples.load("cifar10_resnet20")
    assert not list((tmp_path / "cache").rglob("*.th"))


def test_a_failed_download_says_where_to_put_the_file(publish, tmp_path):
    publish("cifar10_resnet20", b"weights")
    (tmp_path / "served" / "file").unlink()
    with pytest.raises(OSError, match=r"weights/cifar10_resnet20\.th.*TRUEUP_DATA"):
        examples.load("cifar10_resnet20")


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_the_folder_of_the_variable_comes_first(name, tmp_path, monkeypatch):
    path = tmp_path / examples.EXAMPLES[name].path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    monkeypatch.setenv("TRUEUP_DATA", str(tmp_path))
    assert examples.load(name) == path


def test_a_file_without_an_address_says_what_it_was_made_from(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUEUP_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="LLM-Calibration-Study.*MIT.*TRUEUP_DATA"):
        examples.load("mmlu_pro_Qwen3-14B")


def test_unknown_names_are_listed():
    with pytest.raises(ValueError, match=r"name.*cifar10_test.*'cifar'"):
        examples.load("cifar")


def test_every_download_has_a_checksum():
    assert all(len(example.sha256 or "") == 64 for example in examples.EXAMPLES.values() if example.url)
