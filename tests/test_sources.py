"""A model that can't be fetched: each cause is said in words that help, by the plan as by the load."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from colab_kit.sources import _from_hub, config_source, resolve_model


class Hub(BaseHTTPRequestHandler):
    """Refuses everything, as the hub refuses what is gated, or not there."""

    code, reason = 403, "GatedRepo"

    def do_HEAD(self):
        self.send_response(self.code)
        self.send_header("X-Error-Code", self.reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


def refused(endpoint, tmp_path, function):
    """What a fresh process says whose hub is at `endpoint`."""
    code = (
        f"from colab_kit.sources import {function} as f\ntry: f('owner/model')\nexcept FileNotFoundError as e: print(e)"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout or done.stderr


@pytest.mark.parametrize("function", ["config_source", "resolve_model"])
@pytest.mark.parametrize(
    "answer, words", [((403, "GatedRepo"), "licence has to be accepted"), ((401, "RepoNotFound"), "check the spelling")]
)
def test_a_gated_and_an_unknown_model_say_what_to_do(answer, words, function, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "code", answer[0])
    monkeypatch.setattr(Hub, "reason", answer[1])
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said = refused(f"http://127.0.0.1:{server.server_port}", tmp_path, function)
    finally:
        server.shutdown()
        server.server_close()
    assert "model_name_or_path='owner/model'" in said and words in said and "HF_TOKEN" in said


def test_no_network_is_said_so(tmp_path):
    said = refused("http://127.0.0.1:9", tmp_path, "config_source")
    assert "model_name_or_path='owner/model'" in said and "no network" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_a_full_disk_is_said_so():
    def fetch(_):
        with open("/dev/full", "w") as file:
            file.write("weights")

    with pytest.raises(FileNotFoundError, match="the disk is full"):
        _from_hub("owner/model", fetch)


@pytest.mark.parametrize("find", [config_source, resolve_model])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(find):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        find("./no/such/folder")
