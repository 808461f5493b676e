"""Pictures of a notebook's dashboard in a real JupyterLab, in headless Chromium, while the notebook runs.

    apt-get install chromium chromium-driver; python -m venv .venv-shots; .venv-shots/bin/pip install selenium
    .venv-shots/bin/python docs/screenshots.py notebooks/quickstart.ipynb --jupyter .venv/bin/jupyter --out docs/images

Runs all cells of a copy, and saves dashboard-start.png (first step done), dashboard-middle.png (half of the steps),
dashboard-end.png (the output that stays) and dashboard-narrow.png (that output 400 px wide). With --dark the names
end in -dark. --reopen opens the saved copy again without a kernel, and --untrusted does so as a stranger would
see it, with JupyterLab's sanitizer on. The saved copy is left in --out's folder as executed.ipynb.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
BAR = "document.querySelector('.jp-Notebook [role=progressbar][aria-label=steps]')"
STEP = f"Number({BAR}?.getAttribute('aria-valuenow') ?? -1)"
STEPS = f"Number({BAR}?.getAttribute('aria-valuemax') ?? 0)"
LIVE = f"({BAR}?.closest('.widget-html') ?? null) !== null"
BOX = f"""
const inside = {BAR} ?? document.querySelector('.jp-Notebook .jp-RenderedHTML');
const area = inside.closest('.jp-OutputArea-child');
area.scrollIntoView();
const box = (area.querySelector('.jp-OutputArea-output') ?? area).getBoundingClientRect();
return [box.x + window.scrollX, box.y + window.scrollY, box.width, box.height];
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--jupyter", default="jupyter", help="the jupyter whose kernel runs the notebook")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--chromedriver", default="/usr/bin/chromedriver")
    parser.add_argument("--width", type=int, default=900, help="of the dashboard, pixels")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--reopen", action="store_true")
    parser.add_argument("--untrusted", action="store_true")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the whole run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(options.notebook, Path(folder) / "run.ipynb")
        server, url = serve(options, Path(folder))
        try:
            shoot(options, url, Path(folder))
        finally:
            server.terminate()
            server.wait(20)
        shutil.copy(Path(folder) / "run.ipynb", options.out / "executed.ipynb")


def serve(options: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen, str]:
    """JupyterLab with the chosen theme, on a free port."""
    theme = folder / "settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
    theme.parent.mkdir(parents=True)
    theme.write_text(json.dumps({"theme": f"JupyterLab {'Dark' if options.dark else 'Light'}"}))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    token = secrets.token_hex(16)
    places = {name: str(folder / name) for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    environment = os.environ | places | {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    arguments = [options.jupyter, "lab", "--no-browser", "--allow-root", f"--port={port}", "--expose-app-in-browser"]
    arguments += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    arguments += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log)
    return server, f"http://127.0.0.1:{port}/doc/tree/run.ipynb?token={token}"


def shoot(options: argparse.Namespace, url: str, folder: Path) -> None:
    chrome = webdriver.ChromeOptions()
    chrome.binary_location = options.chromium
    for flag in [*FLAGS.split(), f"--user-data-dir={folder / 'browser'}", f"--window-size={options.width + 160},2400"]:
        chrome.add_argument(flag)
    browser = webdriver.Chrome(options=chrome, service=Service(options.chromedriver))
    suffix = "-dark" if options.dark else ""

    def wait(condition: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not browser.execute_script(f"return {condition}"):
            if time.monotonic() > until:
                browser.save_screenshot(str(options.out / "gave-up.png"))
                raise TimeoutError(f"{condition} did not come true; see gave-up.png")
            time.sleep(0.25)

    def save(name: str) -> None:
        time.sleep(0.6)
        x, y, width, height = browser.execute_script(BOX)
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        target = options.out / f"dashboard-{name}{suffix}.png"
        target.write_bytes(base64.b64decode(shot["data"]))
        print(f"{target}: {width:.0f} x {height:.0f} px, {target.stat().st_size / 1024:.0f} KiB")

    def fit(width: int) -> None:
        for _ in range(2):  # the margins beside the output depend on the window's width
            time.sleep(1)
            found, size = browser.execute_script(BOX)[2], browser.get_window_size()
            browser.set_window_size(size["width"] + width - round(found), 2400)

    def opened() -> None:
        for _ in range(60):
            try:
                browser.get(url)
                break
            except Exception:  # the server is still starting
                time.sleep(1)
        wait("window.jupyterapp?.shell?.currentWidget?.context?.isReady === true", 90)

    try:
        opened()
        wait("window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.connectionStatus=='connected'", 90)
        browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        wait(LIVE, options.timeout)
        fit(options.width)
        for name, reached in (("start", f"{STEP} >= 1"), ("middle", f"{STEP} >= {STEPS} / 2")):
            wait(f"{reached} || !({LIVE})", options.timeout)
            save(name)
        wait(f"!({LIVE}) && {STEP} >= 0", options.timeout)
        save("end")
        browser.execute_script("return window.jupyterapp.commands.execute('docmanager:save')")
        time.sleep(2)
        if options.reopen or options.untrusted:
            browser.execute_script("return window.jupyterapp.serviceManager.sessions.shutdownAll()")
        if options.untrusted:
            for store in folder.rglob("nbsignatures.db"):
                store.unlink()
            changed = json.loads((folder / "run.ipynb").read_text())
            changed["metadata"]["opened_by"] = "a stranger"  # another content, so no signature fits it
            (folder / "run.ipynb").write_text(json.dumps(changed))
        if options.reopen or options.untrusted:
            opened()
            time.sleep(4)
            save("untrusted" if options.untrusted else "reopened")
        fit(400)
        save("narrow")
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
