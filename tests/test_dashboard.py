"""The dashboard, from recorded figures. `python tests/test_dashboard.py --regenerate` rewrites the golden files:
read their diff, and look at the picture, before committing them.

The same tests with the widgets that Colab has:

    python -m venv .venv-colab-widgets
    .venv-colab-widgets/bin/pip install ipywidgets==7.7.1 ipykernel==6.17.1 IPython==7.34.0 pillow==11.3.0
    .venv-colab-widgets/bin/pip install nbclient pytest
    .venv-colab-widgets/bin/python -m pytest tests/test_dashboard.py
"""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
import threading
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import stand_in_run  # noqa: E402

from colab_kit.dashboard import Dashboard, Report, picture, text  # noqa: E402
from colab_kit.dashboard.completions import completions  # noqa: E402
from colab_kit.dashboard.live import bundle  # noqa: E402
from colab_kit.dashboard.svg import axis, smooth, style_of, thin, ticks  # noqa: E402

DATA = Path(__file__).parent / "data" / "dashboard"
nbformat = pytest.importorskip("nbformat")


class Clock:
    """Seconds that pass only when told, or a little at each reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Front:
    """Stands where the widgets are, and counts."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, str]] = []
        self.final: dict[str, str] | None = None

    def show(self, figures: str, completions: str) -> None:
        self.frames.append((figures, completions))

    def replace(self, final: dict[str, str]) -> None:
        self.final = final


@pytest.fixture
def front(monkeypatch):
    made = Front()
    monkeypatch.setattr("colab_kit.dashboard.live._Widgets", lambda: made)
    return made


def recorded(steps: int | None = None) -> Report:
    """The recorded run, after all or some of its steps, with a fixed time."""
    report = Report.load(DATA)
    if steps is not None:
        report.steps, report.status, report._savings = report.steps[:steps], "running", None
    if steps == 0:
        report.memory, report.completions = None, None
        report._samples.clear()
        report._samples_peak = None
    report._seconds = sum(row["step_time"] for row in report.steps)
    return report


def drawings() -> dict[str, str]:
    """Every golden file's text. A line a tag, so that a diff can be read; the PNG's bytes vary with Pillow."""
    now = picture.Now("generating", 5, 16, "completions", 1.5)
    made = {
        "waiting.html": picture.figures(recorded(0), picture.Now()),
        "running.html": picture.figures(recorded(12), now) + completions(recorded(12)),
        "final.html": re.sub(r"base64,[\w+/=]+", "base64,...", bundle(recorded())["text/html"]),
    }
    made = {name: html.replace("><", ">\n<") + "\n" for name, html in made.items()}
    made["final.txt"] = text.final(recorded()) + "\n"
    made["lines.txt"] = "".join(text.line(recorded(n)) + "\n" for n in (1, 2, 3, 12, 30))
    return made


@pytest.mark.parametrize("name", ["waiting.html", "running.html", "final.html", "final.txt", "lines.txt"])
def test_golden(name):
    assert drawings()[name] == (DATA / name).read_text(encoding="utf-8"), f"{name}: see this file's docstring"


@pytest.mark.parametrize("steps", [0, None])
def test_html_is_well_formed_and_plain(steps):
    html = picture.figures(recorded(0), picture.Now()) if steps == 0 else bundle(recorded())["text/html"]
    closed = re.sub(r"<(img)([^>]*?)/?>", r"<\1\2/>", html.replace("&nbsp;", " "))
    ElementTree.fromstring(f"<all>{closed}</all>")
    assert not re.search(r"<(script|style|link)|\son\w+=|https?://", unescape(html))
    # the page's own text colour: nothing black or white is written down
    assert not re.search(r"#000|#fff|:(black|white)\b", html, re.I)
    for tag in re.findall(r"<svg[^>]*>", html):
        assert 'role="img"' in tag and re.search(r'aria-label="[^"]+', tag) or 'aria-hidden="true"' in tag


def test_a_thousand_updates_stay_small_and_slow(front):
    clock = Clock(0.004)
    report = Report(stand_in_run.SETTINGS, None, 1000, clock=clock)
    drawn: list[float] = []
    with Dashboard(report, mode="widget", clock=clock) as dash:
        show = front.show
        front.show = lambda *frame: (drawn.append(clock.now), show(*frame))
        stand_in_run.play(dash, report)
    assert len(report.steps) == 1000 and len(drawn) > 100
    assert dash.redraws == len(front.frames)
    assert all(later - first >= 1 for first, later in zip(drawn, drawn[2:], strict=False)), "three within a second"
    sizes = [len("".join(frame)) for frame in front.frames]
    assert max(sizes[len(sizes) // 2 :]) < 1.1 * max(sizes[: len(sizes) // 2]) and max(sizes) < 80_000
    assert len(report.samples) == 300


def test_a_phase_shows_at_once_even_while_progress_draws(front):
    clock = Clock()
    report = Report({}, None, 10, clock=clock)
    with Dashboard(report, mode="widget", clock=clock) as dash:
        for _ in range(400):
            clock.now += 0.01
            dash.progress(1, 16, "completions")
        dash.phase("training")
        assert "training" in re.sub(r"<[^>]+>", " ", front.frames[-1][0]).split("time gone")[0]


def test_only_the_opening_thread_draws(front):
    clock = Clock(5)
    report = Report({}, None, 10, clock=clock)
    with Dashboard(report, mode="widget", clock=clock) as dash:
        before = dash.redraws
        thread = threading.Thread(target=dash.phase, args=("training",))
        thread.start()
        thread.join()
        assert dash.redraws == before
        dash.phase("syncing")
        assert dash.redraws == before + 1


def test_completions_are_escaped_folded_and_bounded():
    report = Report({}, None, 1)
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    row = {"completion": evil * 3000, "reward": 1.0, "advantage": math.nan, "rewards": {evil: None}}
    rows = [row | {"extra": {evil: evil * 3000, "extracted": 7}}] * 40
    Dashboard(report, mode="off").completions(evil, rows)
    html = completions(report)
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html
    assert "<details>" in html and "and 24 more" in html and len(html) < 300_000
    assert "extracted <bdi>7</bdi>" in html  # what a reward gave to log_extra
    report.reward_names = [evil]
    report.error = evil
    assert "<script" not in picture.figures(report) and "<script" not in bundle(report)["text/html"]


NOTHING = dict.fromkeys(["reward", "reward_std", "frac_reward_zero_std", "kl", "completions/mean_length"], math.nan)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, None])
def test_figures_that_are_not_finite(odd, tmp_path, front):
    report = Report({}, tmp_path, 4)
    with Dashboard(report, mode="widget") as dash:
        dash.memory(used_gib={"weights": odd, "other": 1.0}, free_gib=odd, total_gib=odd)
        report.memory_sample(0.0, odd if odd is not None else math.nan, "awake")
        dash.completions("?", [{"completion": "", "reward": odd, "advantage": odd, "rewards": {"a": odd}}])
        for step in range(1, 5):
            metrics = dict.fromkeys(NOTHING, odd) | {"rewards/a/mean": odd, "step_time": odd, "time/training": odd}
            dash.step(step, metrics if step != 2 else {"reward": 0.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert not re.search(r"\b(nan|inf|None)\b", front.final["text/html"])
    assert report.status == "done" and "image/png" in front.final


def test_torch_and_numpy_like_scalars(tmp_path):
    class Scalar:
        def __float__(self):
            return 0.25

    report = Report({"dtype": object}, tmp_path, 1)
    report.add_step(1, {"reward": Scalar()})
    assert report.steps == [{"step": 1, "reward": 0.25}]
    assert Report.load(tmp_path).steps == report.steps


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), "interrupted", "Interrupted after step 5 of 30"),
        (ValueError("lost\n<b>it</b>"), "failed", "Failed after step 5 of 30 (ValueError: lost <b>it</b>)"),
    ],
)
def test_interrupt_and_failure(error, status, said, tmp_path, front):
    report = Report({}, tmp_path, 30)
    with pytest.raises(type(error)), Dashboard(report, mode="widget") as dash:
        stand_in_run.play(dash, report, until=6)
        raise error
    assert front.final["text/plain"].startswith(said) and "<b>" not in front.final["text/html"]
    loaded = Report.load(tmp_path)
    assert loaded.status == status and loaded.error == report.error and loaded.step == 5
    dash.close("done")  # a second end changes nothing
    assert report.status == status


def test_a_fault_in_drawing_never_ends_a_run(front, monkeypatch):
    said: list[str] = []
    report = Report({}, None, 3)
    with Dashboard(report, mode="widget", write=said.append) as dash:
        monkeypatch.setattr(picture, "figures", lambda *_, **__: 1 / 0)
        dash._drawn.clear()
        stand_in_run.play(dash, report)
    faults = [words for words in said if "ZeroDivisionError" in words]
    assert len(faults) == 1 and "goes on as text" in faults[0]
    assert report.status == "done" and said[-1].startswith("Done: 3 steps")
    assert front.final == {"text/plain": text.final(report)}, "no dead widget stays behind"


def test_load_brings_everything_back(tmp_path):
    clock = Clock(0.01)
    report = Report(stand_in_run.SETTINGS, tmp_path, 6, clock=clock)
    with Dashboard(report, mode="off", clock=clock) as dash:
        stand_in_run.play(dash, report)
        report.savings = stand_in_run.SAVINGS
    loaded = Report.load(tmp_path)
    for name in ("steps", "settings", "savings", "completions", "memory", "status", "seconds", "samples", "step"):
        got, want = getattr(loaded, name), getattr(report, name)
        assert json.loads(json.dumps(got)) == json.loads(json.dumps(want)), name
    assert text.final(loaded) == text.final(report)
    assert picture.figures(loaded) == picture.figures(report)


def test_load_passes_over_a_torn_line_and_so_does_the_next_run(tmp_path):
    report = Report({}, tmp_path, 9)
    for step in (1, 2, 3):
        report.add_step(step, {"reward": step / 10, "step_time": 2.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-12])
    loaded = Report.load(tmp_path)
    assert [row["step"] for row in loaded.steps] == [1, 2] and loaded.status == "unfinished"
    assert "Unfinished: step 2 of 9" in text.final(loaded) and loaded.seconds == 4.0
    resumed = Report({}, tmp_path, 9, resume_from=2)
    resumed.add_step(3, {"reward": 0.7})
    assert [row["step"] for row in resumed.steps] == [1, 2, 3] and resumed.seconds >= 4.0
    assert Report.load(path).finite("reward") == [0.1, 0.2, 0.7]
    with pytest.raises(FileNotFoundError, match="output_dir"):
        Report.load(tmp_path / "nowhere")


def test_a_second_run_in_the_folder_replaces_the_first(tmp_path):
    for rewards in ((0.1, 0.2, 0.3), (0.8, 0.9)):
        report = Report({}, tmp_path, len(rewards))
        for step, reward in enumerate(rewards, 1):
            report.add_step(step, {"reward": reward})
        report.finish("done")
    assert Report.load(tmp_path).finite("reward") == [0.8, 0.9]


def test_a_full_disk_does_not_end_a_run(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    report = Report({}, tmp_path / "file", 2)
    report.add_step(1, {"reward": 1.0})
    assert report.step == 1 and capsys.readouterr().out.count("no longer written") == 1


def test_final_bundle_has_three_forms():
    found = bundle(recorded())
    assert set(found) == {"text/html", "text/plain", "image/png"}
    png = base64.b64decode(found["image/png"])
    assert png.startswith(b"\x89PNG") and len(png) < 100_000
    assert found["image/png"] in found["text/html"], "for viewers that strip SVG"
    assert recorded()._repr_mimebundle_()["text/plain"] == found["text/plain"]


def test_text_mode_is_one_line_a_step(capsys, monkeypatch):
    monkeypatch.setenv("COLAB_KIT_DASHBOARD", "text")
    report = Report(stand_in_run.SETTINGS, None, 5)
    with Dashboard(report) as dash:
        stand_in_run.play(dash, report)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[1:6]] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    assert lines[6] == "Done: 5 steps" and "\r" not in out and "\x1b" not in out
    assert max(map(len, lines)) < 300
    with pytest.raises(ValueError, match="COLAB_KIT_DASHBOARD"):
        Dashboard(report, mode="fancy")


def test_a_plain_python_process_gets_text_and_imports_nothing_heavy():
    code = """if True:
        import sys
        from colab_kit.dashboard import Dashboard, Report
        heavy = {"torch", "vllm", "numpy", "PIL", "IPython", "ipywidgets", "matplotlib"} & set(sys.modules)
        assert not heavy, heavy
        report = Report({}, None, 1)
        with Dashboard(report) as dash:
            dash.step(1, {"reward": 0.5})
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert "Done: 1 step" in done.stdout


def test_nothing_is_called_asleep_when_nothing_was_released():
    report = Report({}, None, 2)
    for at in range(4):
        report.memory_sample(at, 12.0, ("generating", "training")[at % 2])
    assert "asleep" not in picture.figures(report)
    report.add_step(1, {"memory/freed_gib": 7.2})
    assert "asleep: KV cache released" in picture.figures(report)
    dash = Dashboard(report, mode="off")
    dash.memory(None)
    assert report.memory is None


def test_settings_may_be_the_dataclass():
    from colab_kit.presets import QUICKSTART

    assert Report(QUICKSTART, None, 2).settings["per_device_train_batch_size"] == 16


def test_savings_are_shown_only_when_measured():
    report = recorded(12)
    assert "Standby" not in picture.figures(report) + text.final(report)
    report.savings = {"with_gib": 10.6, "without_gib": 12.6, "saved_gib": 2.0, "reference": "the same run, resident"}
    said = "With Standby 10.6 GiB at peak; the same run without: 12.6 GiB; saved 2.0 GiB, 16%."
    assert f"{said} Reference: the same run, resident." in text.final(report)
    assert said in picture.figures(report)


def test_sentence_says_what_the_figures_bear():
    def report(rewards, silent=0.04):
        made = Report({}, None, 100)
        for step, reward in enumerate(rewards, 1):
            made.add_step(step, {"reward": reward, "frac_reward_zero_std": silent})
        return text.sentence(made)

    rising = report([0.05 + 0.02 * step + 0.01 * (step % 2) for step in range(20)])
    assert rising == "Reward up 0.30 since the start (0.094 → 0.40); 4% of groups gave no signal."
    assert report([0.3, 0.1, 0.4, 0.2] * 5).startswith("No clear change in reward yet (0.26 → 0.24)")
    assert report([0.5 - 0.02 * step for step in range(20)]).startswith("Reward down 0.30")
    assert "too hard, or already solved" in report([0.0] * 8, silent=1.0)
    assert report([0.2]) == "Reward 0.20 so far; 4% of groups gave no signal."
    assert report([None, None]) == "No completion has been scored yet."
    assert text.sentence(Report({}, None, 3)) == "Waiting for the first step."


def test_time_left_is_a_median_from_step_3_split_by_phase():
    report = Report({}, None, 10)
    for step, seconds in ((1, 60.0), (2, 10.0)):
        report.add_step(
            step, {"step_time": seconds, "time/generating": 0.75 * seconds, "time/training": 0.25 * seconds}
        )
    assert report.seconds_left() is None
    report.add_step(3, {"step_time": 12.0, "time/generating": 9.0, "time/training": 3.0})
    assert report.seconds_left() == (84.0, {"generating": 63.0, "training": 21.0})
    assert report.seconds_left(since_step=4.0)[0] == 80.0
    assert report.seconds_left(since_step=400.0)[0] == 72.0  # a slow step does not eat those after it
    assert text.left(report) == "1 min 24 s"


def test_drawing_helpers():
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1] and ticks(-0.2, 0.35) == [-0.2, 0, 0.2, 0.4]
    assert ticks(3, 3) == [0, 1, 2, 3] and ticks(0, 0)[-1] == 1 and ticks(-2, -2)[0] == -2
    assert [axis(mark, ticks(0, 1)) for mark in ticks(0, 1)] == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert len(thin([(i, 1.0) for i in range(10_000)])) <= 160
    assert thin([(1, None), (2, 3.0)]) == [(1, None), (2, 3.0)]
    assert [y for _, y in smooth([(1, 2.0), (2, 2.0), (3, None)])] == pytest.approx([2, 2, 2])
    assert len({style_of(index) for index in range(18)}) == 18
    assert [text.number(x) for x in (None, 0, 0.1, 0.012, 3e-5, 12.34, 1234.5)] == (
        ["–", "0.00", "0.10", "0.012", "3e-05", "12.3", "1,234"]
    )
    assert [text.duration(x) for x in (0.02, 9.97, 59.6, 245, 7800, 97200)] == (
        ["0.02 s", "10 s", "1 min 00 s", "4 min 05 s", "2 h 10 min", "1 d 03 h"]
    )
    assert [text.percent(x) for x in (0, 0.001, 0.04, 0.999, 1)] == ["0%", "<1%", "4%", ">99%", "100%"]


# --- a real kernel --------------------------------------------------------------------------------
CELL = """
import sys; sys.path[:0] = {paths!r}
import stand_in_run
from colab_kit.dashboard import Dashboard, Report
report = Report(stand_in_run.SETTINGS, None, {steps})
with Dashboard(report, clock=lambda: clock.append(0) or len(clock) / 20) as dash:
    stand_in_run.play(dash, report, until={until})
    seen = dash._front.figures.value
    {end}
"""
AFTER = """import json
print(json.dumps({"redraws": dash.redraws, "seen": "Step" in seen, "mode": dash.mode,
                  "closed": dash._front is None}))
"""


@pytest.fixture(scope="module")
def executed():
    """A notebook with three runs (to the end, interrupted, failed), executed by a real kernel, and what it sent."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipywidgets")
    sent: list[dict] = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, index):
            sent.append({"cell": index, **message})
            return super().process_message(message, cell, index)

    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    ends = [("report.savings = stand_in_run.SAVINGS", 8), ("raise KeyboardInterrupt", 5), ("raise ValueError('no')", 5)]
    cells = []
    for end, until in ends:
        code = "clock = []" + CELL.format(paths=paths, steps=8, until=until, end=end)
        cells += [nbformat.v4.new_code_cell(code), nbformat.v4.new_code_cell(AFTER)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    Client(notebook, kernel_name="python3", allow_errors=True, timeout=120).execute()
    return json.loads(nbformat.writes(notebook)), sent


@pytest.mark.parametrize(("cell", "status"), [(0, "Done: 8 steps"), (2, "Interrupted after"), (4, "Failed after")])
def test_kernel_leaves_one_ordinary_output(executed, cell, status):
    notebook, sent = executed
    outputs = notebook["cells"][cell]["outputs"]
    shown = [output for output in outputs if output["output_type"] == "display_data"]
    assert len(shown) == 1 and outputs[0] is shown[0]
    assert set(shown[0]["data"]) == {"text/html", "image/png", "text/plain"}
    assert "".join(shown[0]["data"]["text/plain"]).startswith(status)
    errors = [output["ename"] for output in outputs if output["output_type"] == "error"]
    assert errors == {0: [], 2: ["KeyboardInterrupt"], 4: ["ValueError"]}[cell]
    (said,) = notebook["cells"][cell + 1]["outputs"]
    said = json.loads("".join(said["text"]))
    assert said["mode"] == "widget" and said["closed"] and said["seen"] and said["redraws"] > 3


def test_kernel_showed_a_live_widget_and_saved_no_broken_state(executed):
    notebook, sent = executed
    of_first = [message for message in sent if message["cell"] == 0]
    live = [m for m in of_first if m["msg_type"] == "display_data"]
    assert len(live) == 1 and "application/vnd.jupyter.widget-view+json" in live[0]["content"]["data"]
    updates = [
        m["content"]["data"]["state"]["value"]
        for m in of_first
        if m["msg_type"] == "comm_msg" and "value" in m["content"]["data"].get("state", {})
    ]
    assert any("Step 5 of 8" in value for value in updates) and updates[-1] == ""
    unfolding = [value for value in updates if "Latest completions" in value]
    assert 1 <= len(unfolding) <= 8, "redrawn within a step, it would shut what a reader has unfolded"
    assert any(m["msg_type"] == "update_display_data" for m in of_first)
    nbformat.validate(nbformat.from_dict(notebook))
    saved = notebook["metadata"].get("widgets", {})
    assert all("state" in part for part in saved.values())
    assert len(json.dumps(saved)) < 20_000, "the figures are in the output; the closed widgets hold none"
    models = [key for part in saved.values() for key in part["state"]]
    views = [data for c in notebook["cells"] for o in c["outputs"] for data in o.get("data", {}) if "widget" in data]
    assert views == [], models


def regenerate() -> None:
    """Writes the golden files; records the stand-in run first where there is no record."""
    DATA.mkdir(parents=True, exist_ok=True)
    if not (DATA / "metrics.jsonl").exists():
        report = Report(stand_in_run.SETTINGS, DATA, 30, clock=Clock())
        with Dashboard(report, mode="off") as dash:
            stand_in_run.play(dash, report)
            report.savings = stand_in_run.SAVINGS
    for name, content in drawings().items():
        (DATA / name).write_text(content, encoding="utf-8")


def test_a_real_run_is_told_in_a_sentence_and_in_figures():
    """The quickstart on two CPU cores, as its metrics.jsonl recorded it."""
    report = Report.load(DATA.parent / "quickstart")
    sentence = "Reward up 0.30 since the start (0.52 → 0.82); 23% of groups gave no signal."
    assert text.sentence(report) == sentence
    assert text.final(report).splitlines()[:4] == [
        "Done: 24 steps",
        sentence,
        "  time                    3 min 32 s",
        "  a step                  7.6 s (generating 3.5 s, scoring 0.0 s, training 3.9 s, syncing 0.02 s)",
    ]
    assert sentence in bundle(report)["text/html"]
    assert "the same run without" not in text.final(report), "no savings are claimed where none were measured"


if __name__ == "__main__":
    if "--regenerate" not in sys.argv:
        sys.exit(__doc__)
    regenerate()
