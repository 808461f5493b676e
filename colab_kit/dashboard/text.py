"""Figures as words: numbers with units, one sentence, one line a step, and the final figures."""

from __future__ import annotations

from statistics import fmean

from .report import Report, is_number

NONE = "–"


def number(value: float | None) -> str:
    """Two or three significant digits; a dash for None and for what is not finite."""
    if not is_number(value):
        return NONE
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.0995 or size == 0:
        return f"{value:.2f}"
    return f"{value:.2g}"


def signed(value: float | None) -> str:
    return f"{value:+.2f}".replace("-", "−") if is_number(value) else NONE


def percent(share: float | None) -> str:
    """A share of 1 as a whole percentage; what is not quite 0 or 1 is not shown as such."""
    if not is_number(share):
        return NONE
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{100 * share:.0f}%"


def gib(value: float | None) -> str:
    return f"{value:.1f} GiB" if is_number(value) else NONE


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 0.02 s, 4.2 s, 42 s, 4 min 05 s, 2 h 10 min, 1 d 03 h."""
    if not is_number(seconds):
        return NONE
    if seconds < 9.95:
        return f"{seconds:.2f} s" if 0.005 <= seconds < 0.095 else f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 24 else f"{hours // 24} d {hours % 24:02d} h"


def sentence(report: Report) -> str:
    """Whether it learns, in one plain sentence."""
    if not report.steps:
        return "Waiting for the first step."
    rewards, silent = report.finite("reward"), report.finite("frac_reward_zero_std")
    if not rewards:
        return "No completion has been scored yet."
    change = report.change()
    if change is None:
        said = f"Reward {number(rewards[-1])} so far"
    else:
        first, last, clear = change
        numbers = f"({number(first)} → {number(last)})"
        way = "up" if last > first else "down"
        said = f"No clear change in reward yet {numbers}"
        if clear:
            said = f"Reward {way} {number(abs(last - first))} since the start {numbers}"
    if silent:
        said += f"; {percent(fmean(silent))} of groups gave no signal"
        if fmean(silent[-5:]) > 0.9:
            said += ". Nearly every group's rewards are all the same: too hard, or already solved"
    cut = report.finite("completions/clipped_ratio")[-5:]
    if cut and fmean(cut) >= 0.5:
        said += f". {percent(fmean(cut))} of completions reach max_completion_length"
    return said + "."


def savings(report: Report) -> str:
    """What Standby saved, as measured for this run; empty when it was not measured."""
    found = report.savings or {}
    parts = [found.get(key) for key in ("with_gib", "without_gib", "saved_gib")]
    if not all(map(is_number, parts)):
        return ""
    saved = round(parts[1], 1) - round(parts[0], 1)  # of the figures as shown, so that the sum is right
    share = f", {percent(parts[2] / parts[1])}" if parts[1] else ""
    said = f"With Standby {gib(parts[0])} at peak; the same run without: {gib(parts[1])}; saved {gib(saved)}{share}."
    return said + (f" Reference: {found['reference']}." if found.get("reference") else "")


def status(report: Report) -> str:
    """Where the run stands."""
    n, whole = report.step, f"{report.total_steps} step{'' if report.total_steps == 1 else 's'}"
    if report.status == "done":
        return f"Done: {n} of {whole}" if n != report.total_steps else f"Done: {whole}"
    words = {"running": "Step", "interrupted": "Interrupted after step", "failed": "Failed after step"}
    return f"{words.get(report.status, 'Unfinished: step')} {n} of {report.total_steps}"


def left(report: Report, since_step: float = 0.0) -> str:
    found = report.seconds_left(since_step)
    return duration(found[0]) if found else "known from step 3"


def header(report: Report) -> str:
    return f"GRPO, {report.total_steps} steps" + (f"; figures go to {report.path}" if report.path else "")


def line(report: Report) -> str:
    """The last step on one line of plain text."""
    row = report.steps[-1]
    n = f"{row['step']:>{len(str(report.total_steps))}}"
    parts = [f"step {n}/{report.total_steps}", f"reward {number(row.get('reward'))}"]
    if is_number(row.get("reward_std")):
        parts[-1] += f" ± {number(row['reward_std'])}"
    for name in report.reward_names if len(report.reward_names) > 1 else ():
        parts.append(f"{name} {number(row.get(f'rewards/{name}/mean'))}")
    parts.append(f"no signal {percent(row.get('frac_reward_zero_std'))}")
    parts.append(f"length {number(row.get('completions/mean_length'))}")
    parts.append(f"truncated {percent(row.get('completions/clipped_ratio'))}")
    if is_number(row.get("kl")):
        parts.append(f"KL {number(row['kl'])}")
    phases = [f"{key[5:]} {duration(row[key])}" for key in row if key.startswith("time/") and is_number(row[key])]
    parts.append(duration(row.get("step_time")) + (f" ({', '.join(phases)})" if phases else ""))
    if is_number(row.get("memory/peak_gib")):
        parts.append(f"peak {gib(row['memory/peak_gib'])}")
    if row["step"] < report.total_steps and report.step_seconds() is not None:
        parts.append(f"left {left(report)}")
    return "  ".join(parts)


def figures(report: Report) -> list[tuple[str, str]]:
    """The figures that matter, as (name, value); what the run did not measure is left out."""
    rows = [("time", duration(report.seconds))]
    if report.step_seconds() is not None:
        split = ", ".join(f"{phase} {duration(spent)}" for phase, spent in report.phase_seconds().items())
        rows.append(("a step", duration(report.step_seconds()) + (f" ({split})" if split else "")))
    if speed := report.tokens_per_second():
        rows.append((f"tokens/s {speed[1]}", number(speed[0])))
    if rewards := report.finite("reward"):
        spread = report.last("reward_std")
        spread = f" ± {number(spread)}" if spread is not None else ""
        rows.append(
            ("reward", f"{number(rewards[-1])}{spread}; first {number(rewards[0])}, best {number(max(rewards))}")
        )
    for name in report.reward_names:
        if means := report.finite(f"rewards/{name}/mean"):
            rows.append((f"reward {name}", f"{number(means[-1])}; first {number(means[0])}"))
    if silent := report.finite("frac_reward_zero_std"):
        rows.append(("groups without signal", f"{percent(silent[-1])}; whole run {percent(fmean(silent))}"))
    if lengths := report.finite("completions/mean_length"):
        rows.append(("completion length", f"{number(lengths[-1])} tokens; first {number(lengths[0])}"))
    if cut := report.finite("completions/clipped_ratio"):
        rows.append(("truncated at the limit", f"{percent(cut[-1])}; whole run {percent(fmean(cut))}"))
    if kls := report.finite("kl"):
        rows.append(("KL", number(kls[-1])))
    if report.peak_gib() is not None:
        total = (report.memory or {}).get("total_gib")
        rows.append(("memory at peak", gib(report.peak_gib()) + (f" of {gib(total)}" if is_number(total) else "")))
    if said := savings(report):
        rows.append(("savings", said))
    return rows


def final(report: Report) -> str:
    """The end of the run in plain text, without its completions."""
    head = [status(report) + (f" ({report.error})" if report.error else ""), sentence(report)]
    rows = figures(report)
    width = max(len(name) for name, _ in rows)
    return "\n".join(head + [f"  {name:<{width}}  {value}" for name, value in rows])
