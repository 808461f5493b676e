"""What only Google Colab has, with the same calls meaning something sensible everywhere else."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path

from .presets import in_ci

SECRET = "HF_TOKEN"


def in_colab() -> bool:
    """Whether this kernel is Colab's."""
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ


class Token(str):
    """A token that a cell's output never shows."""

    def __repr__(self) -> str:
        return "<a Hugging Face token, hidden>"


def hub_token(timeout: float = 30.0) -> Token | None:
    """The Hugging Face token: Colab's secret `HF_TOKEN`, else the environment's, else None. Never waits for long.

    A token that is found is put into the environment of this process, where the hub's libraries look for it. It is not
    printed and not stored. `timeout`: seconds that Colab's question whether this notebook may read the secret may take.
    """
    token = _colab_secret(timeout) or os.environ.get(SECRET, "").strip()
    if not token:
        return None
    os.environ[SECRET] = token
    return Token(token)


def _colab_secret(timeout: float) -> str:
    try:
        if find_spec("google.colab") is None:
            return ""
    except (ImportError, ValueError):  # no package `google`, or a broken one
        return ""
    found: list[str] = []

    def ask() -> None:
        try:
            from google.colab import userdata

            found.append(userdata.get(SECRET) or "")
        except Exception:  # no such secret, no access granted, no browser attached: all mean "none"
            pass

    # Colab's call waits for the browser without a limit of its own, so it gets a thread that may be left behind.
    thread = threading.Thread(target=ask, name="hub token", daemon=True)
    thread.start()
    thread.join(timeout)
    return found[0].strip() if found else ""


def run_folder(name: str, drive: bool = True) -> str:
    """Where a run's checkpoints go: `colab_kit/NAME` on Google Drive (in Colab, with `drive`), else `outputs/NAME`.

    On Drive a checkpoint outlives the session: run the notebook again, in a new one, and training goes on from it.
    Colab asks for permission; if it is not given, the folder on this machine is used and said so. With COLAB_KIT_CI=1
    it is a new folder each time.
    """
    if in_ci():
        return tempfile.mkdtemp(prefix=f"{name}-")
    folder = Path("outputs") / name
    if drive and in_colab():
        try:
            from google.colab import drive as google_drive

            google_drive.mount("/content/drive")
            folder = Path("/content/drive/MyDrive/colab_kit") / name
        except Exception as error:  # permission not given, or no browser attached
            print(f"Google Drive is not available ({type(error).__name__}): {folder} is lost with this session")
    print(f"folder of this run: {folder}")
    return str(folder)
