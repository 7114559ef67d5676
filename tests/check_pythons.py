"""Build both distributions, and try the wheels of trueup in a fresh environment of each Python: `make pythons`.

`--only 3.12` takes one; `--build-only` ends after the build; `--demo` runs `trueup demo` too.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
TORCH = "torch==2.13.0"


def run(*words, **options):
    """A command that must end well."""
    print("$", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, **options)


def copy_tree(folder):
    """What git would hand over: no build folders, no compiled files."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(dist, compilers=(None, "/bin/false"), project="."):
    """The sdist and a wheel by each compiler, of which /bin/false is none, from clean copies; their paths."""
    code = "from setuptools import build_meta as b; import sys; getattr(b, sys.argv[1])(sys.argv[2])"
    for kind, compiler in (("build_sdist", None), *(("build_wheel", compiler) for compiler in compilers)):
        with tempfile.TemporaryDirectory() as name:
            tree = copy_tree(Path(name) / "trueup")
            environment = os.environ | ({} if compiler is None else {"CC": compiler})
            run(sys.executable, "-c", code, kind, dist, cwd=tree / project, env=environment, stdout=subprocess.DEVNULL)
    return sorted(dist.iterdir())


def find_python(version):
    """A Python of this version that runs, on the path or among those of pyenv."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    for python in filter(None, (shutil.which(f"python{version}"), *map(str, kept))):
        if subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def try_wheel(python, wheel, folder, demo):
    """A fresh environment with the wheel in it, and what it must do there; what could be tried, in words."""
    run(python, "-m", "venv", folder)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    try:
        run(*pip, TORCH)
    except subprocess.CalledProcessError:
        run(*pip, "--no-deps", wheel)
        run(*pip, "typer", "rich")
        for words in (("--version",), ("--help",), ("methods",)):
            run(folder / "bin" / "trueup", *words, cwd=folder, stdout=subprocess.DEVNULL)
        return f"{TORCH} cannot be installed: only what needs no torch (--version, --help, methods)"
    run(*pip, f"trueup[cli,report] @ {wheel.as_uri()}")
    run(folder / "bin" / "python", ROOT / "tests" / "smoke.py", cwd=folder)
    if not demo:
        return "smoke script"
    run(*pip, "scikit-learn")
    run(folder / "bin" / "trueup", "demo", "-o", folder / "demo", cwd=folder)
    return "smoke script and demo"


def main():
    """Build, then try every Python that is here; each ends by itself, and any failure in code 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PYTHONS)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--demo", action="store_true")
    options = parser.parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    made = build(dist)
    print(*(f"dist/{path.name}" for path in build(dist, compilers=[None], project="studies")), sep="\n")
    if options.build_only:
        return
    results, failed = [], False
    for version in options.only or PYTHONS:
        python = find_python(version)
        if python is None:
            results.append(f"Python {version}: skipped, it is not here")
            continue
        for wheel in (path for path in made if path.suffix == ".whl"):
            with tempfile.TemporaryDirectory(prefix=f"trueup-python{version}-") as folder:
                try:
                    result = try_wheel(python, wheel, Path(folder), options.demo)
                except subprocess.CalledProcessError as error:
                    result, failed = f"FAILED, {error}", True
            results.append(f"Python {version}, {wheel.name}: {result}")
    print(*results, sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
