"""A hook of mkdocs: the front page is the README, and the foot of every page names the version and the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import trueup

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> None:
    """Write the version, and the commit if there is one, below every page."""
    command = ["git", "log", "-n1", "--format=%h of %cs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    commit = f", commit {done.stdout.strip()}" if done.returncode == 0 else ""
    config.copyright = f"trueup {trueup.__version__}{commit}. MIT licence."


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Take the text of index.md from the README, whose links begin with docs/."""
    if page.file.src_uri != "index.md":
        return markdown
    return (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
