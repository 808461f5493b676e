"""The trial on this very machine: all that a run does, by a real small engine, or exactly what failed."""

import os
import signal
import threading

import psutil
import pytest

import colab_kit as kit
from colab_kit.benchmark import in_fresh_process as benchmark
from colab_kit.trial import trial

CHECKS = ["engine", "generating", "sleep", "wake", "training step", "10 cycles"]


def test_a_machine_that_can_train_passes_every_check(in_fresh_process):
    code = """
import json, contextlib, io, colab_kit as kit
with contextlib.redirect_stdout(io.StringIO()) as shown:
    checked = kit.preflight("t4", deep=True)
rows = [row.what for row in checked.rows]
print(json.dumps([checked.ok, repr(checked), rows, shown.getvalue()]))
"""
    ok, table, rows, shown = in_fresh_process(code)
    assert ok, table
    assert rows[-len(CHECKS) :] == CHECKS
    assert "not applicable without a GPU" in table
    assert shown.count("training step: loss") == 1, "each check is printed when it is done"


def test_what_failed_is_named_with_its_reason_and_a_text_for_a_report(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # an engine elsewhere can't share its weights
    found, report = trial("cpu")
    assert [what for what, _, problem in found if problem] == ["engine"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING must be 0" in found[-1][2] and found[-1][2] in capsys.readouterr().out
    for part in ("FAILED  engine: ValueError", "Python 3", "torch ", "Traceback"):
        assert part in report


def test_a_trial_that_hangs_is_ended_and_said_to_be(capsys):
    found, report = trial("cpu", seconds=0.5)
    assert found[-1][1] == "ended at once" and "not done in 0.5 s" in found[-1][2]
    assert "FAILED  trial" in report


@pytest.mark.parametrize(
    "call",
    [lambda: trial("cpu"), lambda: list(benchmark(["measure", "--model", "tiny_llama"], standby=1, timeout=900))],
    ids=["trial", "benchmark"],
)
def test_the_stop_button_leaves_no_process_that_holds_the_card(call):
    before, threads = psutil.Process().children(), threading.active_count()
    timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT))  # to the kernel alone, not to its children
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    assert psutil.Process().children() == before and threading.active_count() == threads


def test_it_does_not_compete_with_an_engine_that_is_loaded(tiny_policy):
    checked = kit.preflight("t4", imports=False, deep=True)
    assert "not run: this kernel's own engine" in checked.rows[-1].found
