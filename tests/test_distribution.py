"""What is built: a wheel for this platform or, without a compiler, for every one, and an sdist that is whole."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import trueup
from check_pythons import ROOT, build

DATA = (
    "trueup/py.typed",
    "trueup/_core/_native.c",
    "trueup/reports/page.css",
    "trueup/reports/page.js",
    "trueup/serve/static/index.html",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if not (ROOT / ".git").exists():
        pytest.skip("the files are listed by git")
    return build(tmp_path_factory.mktemp("dist"), compilers=["/bin/false"])  # the compiled one is what is installed


def test_a_wheel_without_a_compiler_is_for_every_platform(built):
    version = trueup.__version__
    (wheel,) = [path for path in built if path.suffix == ".whl"]
    assert wheel.name == f"trueup-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = archive.read(next(name for name in names if name.endswith("/WHEEL"))).decode()
    assert set(DATA) <= set(names)
    assert not [name for name in names if name.startswith("trueup_studies/")]
    assert not [name for name in names if name.startswith("tests/")]
    assert not [name for name in names if name.endswith((".so", ".pyd"))]
    assert "Root-Is-Purelib: true" in about


def test_the_sdist_holds_everything_to_test_it(built):
    (sdist,) = [path for path in built if path.name.endswith(".tar.gz")]
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", "CHANGELOG.md", "CITATION.cff", "constraints.txt", "setup.py", "tests/reference.py"}
    wanted |= {"docs/index.md", "mkdocs.yml", "benchmarks/requirements.txt", "src/trueup/_core/_native.c"}
    assert wanted <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_all_brings_no_test_tools():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    parts = re.findall(r"\[(.*)\]", extras["all"][0])[0].split(",")
    brought = " ".join(need for part in parts for need in extras[part])
    for tool in ("pytest", "hypothesis", "mypy", "ruff", "playwright", "import-linter", "httpx"):
        assert tool not in brought


def test_versions_agree():
    pytest.importorskip("yaml", reason="the citation is YAML")
    import yaml

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == trueup.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    changes = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changes, re.MULTILINE)
    assert heads[0] == ("Unreleased", "")
    assert heads[1] == (trueup.__version__, str(cited["date-released"]))
    assert set(re.findall(r"^### (\w+)$", changes, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }


def test_the_version_tells_whether_it_is_compiled():
    said = subprocess.run(
        [sys.executable, "-c", "from trueup.cli import main; import sys; sys.argv = ['trueup', '--version']; main()"],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout
    compiled = any(Path(trueup.__path__[0], "_core").glob("_native*.so"))
    assert said.startswith(f"trueup {trueup.__version__}, {'compiled' if compiled else 'not compiled'}")
