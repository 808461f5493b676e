"""Where the repository lives is written once, in pyproject.toml; this sets it in every badge and install cell.

python -m colab_kit.notebooks --repository OWNER/NAME   set it everywhere
python -m colab_kit.notebooks                           say where it is, and what disagrees (exit code 1)
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"


def repository(root: Path = ROOT) -> str:
    """OWNER/NAME, from [project.urls] of pyproject.toml."""
    address = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    return "/".join(address.removesuffix(".git").split("/")[-2:])


def badge(notebook: str, repo: str) -> str:
    """The Markdown of a notebook's badge."""
    link = f"https://colab.research.google.com/github/{repo}/blob/main/notebooks/{notebook}"
    return f"[![Open in Colab]({BADGE})]({link})"


def files(root: Path = ROOT) -> list[Path]:
    """What names the repository: pyproject.toml first, the notebooks, the README."""
    return [root / "pyproject.toml", *sorted((root / "notebooks").glob("*.ipynb")), *root.glob("README.md")]


def with_repository(text: str, old: str, new: str) -> str:
    """The text with every address of the repository `old` changed to `new`."""
    return re.sub(rf"(github\.com/|/github/){re.escape(old)}(?![\w-])", rf"\g<1>{new}", text)


def set_repository(new: str, root: Path = ROOT) -> list[Path]:
    """Set OWNER/NAME in all files; returns those that changed. Raises ValueError for anything but OWNER/NAME."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", new):
        raise ValueError(f"repository={new!r}: give OWNER/NAME, as in its address")
    old, changed = repository(root), []
    for file in files(root):
        before = file.read_text()
        after = with_repository(before, old, new)
        if after != before:
            file.write_text(after)
            changed.append(file)
    return changed


def disagreeing(root: Path = ROOT) -> list[str]:
    """Notebooks whose badge or install cell names another place than pyproject.toml."""
    repo, wrong = repository(root), []
    for file in files(root)[1:]:
        text = file.read_text()
        if file.suffix == ".ipynb" and badge(file.name, repo) not in text:
            wrong.append(f"{file.name}: no badge, or one that does not lead to {repo}/notebooks/{file.name}")
        for found in re.findall(r"git\+https://github\.com/([\w.-]+/[\w.-]+)", text):
            if found.removesuffix(".git") != repo:
                wrong.append(f"{file.name} installs from {found}, not from {repo}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", metavar="OWNER/NAME")
    options = parser.parse_args()
    if options.repository:
        for file in set_repository(options.repository):
            print(file.relative_to(ROOT))
    print(f"repository: {repository()}")
    wrong = disagreeing()
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
