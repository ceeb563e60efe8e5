"""Formats a job as text for the screen of ``ft-transport top``; replicas that need attention are listed first."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from rich.text import Text

from ft_transport.cli.job import JobError, JobProcess, JobRecord, JobState
from ft_transport.cli.output import escape
from ft_transport.telemetry.process_state import KeptStatus, ManagerStatus, MembershipChange, ProcessState, StepStatus

_LEAST_ROWS: Final = 3
_LOST: Final = " THE LIGHTHOUSE DOES NOT ANSWER: without it no quorum is formed "
_STALLED: Final = 10.0
"""A step counts as stalled after ten times the usual length of a step, and at least ten seconds."""
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_RANKS: Final = {"gone": 0, "silent": 1, "partial": 2, "stalled": 3, "healing": 4, "waiting": 5, "starting": 6}
_STYLES: Final = {
    "gone": "bold red",
    "silent": "bold red",
    "partial": "bold red",
    "stalled": "yellow",
    "healing": "yellow",
    "waiting": "cyan",
    "starting": "cyan",
    "idle": "cyan",
}


class _Row(NamedTuple):
    condition: str
    words: str
    process: JobProcess
    title: str


def is_well(job: JobState) -> bool:
    """Return whether all processes responded, and the Lighthouse too if the job has one."""
    return (
        not _is_unread(job)
        and bool(job.processes)
        and all(process.presence in ("here", "coming") for process in job.processes)
    )


def screen(job: JobState, *, width: int, height: int) -> Text:
    """Return the job in at most ``height`` lines of ``width`` columns."""
    several_ranks = any(process.group_rank for process in job.processes)
    rows = []
    for process in job.processes:
        rank = f"/{process.group_rank}" if several_ranks else ""
        rows.append(_Row(*_condition(process), process, escape(process.name, 11) + rank))
    rows.sort(key=lambda row: (_RANKS.get(row.condition, 9), row.process.name, row.process.group_rank))
    lines = [_headline(job, rows), _summary(rows)]
    if _is_lighthouse_lost(job, rows):
        # Replace the summary of an empty table: without the Lighthouse, replicas may exist.
        lines[1 : 1 if rows else 2] = [Text(_LOST, style="bold white on red")]
    below = [
        *_section("joined, left, healed", [_change_line(each, job.unix_s) for each in job.changes[-4:]]),
        *_section("recoveries, saves", [_record_line(each, job.unix_s) for each in job.records[-4:]]),
        *_section("errors", [_error_line(each, job.unix_s) for each in job.errors[-3:]]),
    ]
    # Three lines are the heading of the table and two blank lines; replicas fill the rest.
    room = height - len(lines) - 3
    while below and room - len(below) < min(len(rows), _LEAST_ROWS):
        below.pop()
    num_rows = max(1, room - len(below))
    lines += [Text(), *_table(rows, flows_of(job), num_rows)]
    if below:
        lines += [Text(), *below]
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    for index, line in enumerate(lines[:height]):
        line.truncate(width, overflow="ellipsis")
        text.append("\n" if index else "").append_text(line)
    return text


def flows_of(job: JobState) -> dict[tuple[str, int], str]:
    """Describe the current transfers of each process. The keys are its name and rank."""
    names = {_netloc(process.address): process.name for process in job.processes if process.address}
    flows: dict[tuple[str, int], list[str]] = {}
    for process in job.processes:
        transport = process.state.transport if process.state is not None and process.presence == "here" else None
        if transport is None:
            continue
        lines = flows.setdefault((process.name, process.group_rank), [])
        lines += [
            f"← {_name(names.get(flow.peer, flow.peer))} {num_bytes(flow.bytes_per_s)}/s" for flow in transport.receives
        ]
        lines += [
            f"→ {_name(flow.replica or flow.peer)} {num_bytes(flow.bytes_per_s)}/s"
            for flow in transport.sends
            if flow.is_running
        ]
    return {key: ", ".join(lines) for key, lines in flows.items()}


def num_bytes(count: float) -> str:
    """Format a size in three or four digits."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.{0 if count >= 100 * size else 1}f} {unit}"
    return f"{count:.0f} B"


def seconds(length_s: float) -> str:
    """Format a duration in a few characters."""
    if length_s < 1:
        return f"{1e3 * length_s:.0f} ms"
    if length_s < 100:
        return f"{length_s:.1f} s"
    return f"{length_s / 60:.0f} min" if length_s < 7200 else f"{length_s / 3600:.1f} h"


def _netloc(address: str) -> str:
    """Return host and port of an unauthenticated address; empty if it is malformed."""
    try:
        return urlsplit(address).netloc
    except ValueError:
        return ""


def _name(text: str) -> str:
    return escape(text, 18)


def _condition(process: JobProcess) -> tuple[str, str]:
    match process.presence:
        case "gone" | "silent":
            return process.presence, f"{process.presence} {seconds(process.since_s)}"
        case "coming":
            return "starting", "starting"
        case "here":
            return _condition_of(process.state if process.state is not None else ProcessState())


def _condition_of(state: ProcessState) -> tuple[str, str]:
    manager = state.manager
    if manager is None:
        return "serving", "serving"
    if manager.partial:
        return "partial", "partial state"
    match manager.activity:
        case "healing":
            running = next((each for each in state.running if each.kind == "heal" and each.phases), None)
            phase = escape(running.phases[-1].name, 12) if running is not None else ""
            return "healing", f"heals {phase}".strip()
        case "waiting":
            return "waiting", f"waits {seconds(manager.activity_s)}"
        case "idle":
            return "idle", "not begun"
        case "training":
            usual_s = _usual_s(manager)
            if len(manager.steps) > 2 and manager.activity_s > _STALLED * max(1.0, usual_s):
                return "stalled", f"in step {seconds(manager.activity_s)}"
            return "training", "training"


def _usual_s(manager: ManagerStatus) -> float:
    periods = [_period_s(step) for step in manager.steps if step.is_committed]
    return median(periods) if periods else 0.0


def _period_s(step: StepStatus) -> float:
    """Return the time from the step's boundary to the next boundary, or to the commit if there is no next one yet."""
    return step.period_s or step.length_s


def _managers(rows: list[_Row]) -> list[ManagerStatus]:
    states = (row.process.state for row in rows if row.process.presence == "here")
    return [state.manager for state in states if state is not None and state.manager is not None]


def _headline(job: JobState, rows: list[_Row]) -> Text:
    text = Text()
    text.append("ft-transport top", style="bold").append(f"  {escape(job.lighthouse, 60)}")
    if _is_unread(job) and not _is_lighthouse_lost(job, rows):
        text.append("  its page cannot be read", style="yellow")
    elif not any(row.condition == "training" for row in rows) and job.status:
        text.append(f"  {escape(job.status, 80)}", style="yellow")
    if job.num_left_out:
        text.append(f"  {job.num_left_out} processes not shown", style="yellow")
    return text


def _is_unread(job: JobState) -> bool:
    return bool(job.lighthouse) and not job.is_lighthouse_read


def _is_lighthouse_lost(job: JobState, rows: list[_Row]) -> bool:
    """Return whether a process reports that the Lighthouse is lost, or its page is unreadable and no replica trains."""
    is_training = any(row.condition == "training" for row in rows)
    return (_is_unread(job) and not is_training) or any(manager.is_lighthouse_lost for manager in _managers(rows))


def _summary(rows: list[_Row]) -> Text:
    if not rows:
        return Text("no replica is known; replicas appear with their first quorum")
    counts = Counter(row.condition for row in rows)
    text = Text()
    ordered = sorted(counts.items(), key=lambda item: _RANKS.get(item[0], 9))
    for index, (condition, count) in enumerate(ordered):
        text.append(", " if index else "").append(f"{count} {condition}", style=_STYLES.get(condition, "green"))
    managers = _managers(rows)
    if managers:
        periods = [period_s for period_s in map(_usual_s, managers) if period_s]
        lengths = [step.length_s for manager in managers for step in manager.steps if step.is_committed]
        text.append(f"   step {max(manager.step for manager in managers)}")
        if periods:
            text.append(f", {seconds(median(periods))} each ({seconds(median(lengths))} to commit)")
        text.append(f", {sum(manager.num_refused for manager in managers)} refused")
        text.append(f", lock ≤ {seconds(max(manager.lock.longest_wait_s for manager in managers))}")
    return text


def _table(rows: list[_Row], flows: dict[tuple[str, int], str], num_lines: int) -> list[Text]:
    shown = rows if len(rows) <= num_lines else rows[: num_lines - 1]
    top = max((manager.step for manager in _managers(rows)), default=0)
    heading = Text(f"{'replica':<15} {'state':<16} {'step':>7} {'step times':<17} traffic", style="dim")
    lines = [heading, *(_line(row, flows, top) for row in shown)]
    if len(shown) < len(rows):
        counts = Counter(row.condition for row in rows[len(shown) :])
        rest = ", ".join(f"{count} {condition}" for condition, count in counts.most_common())
        lines.append(Text(f"… and {len(rows) - len(shown)} more: {rest}", style="dim"))
    return lines


def _line(row: _Row, flows: dict[tuple[str, int], str], top: int) -> Text:
    process = row.process
    manager = process.state.manager if process.state is not None else None
    step = manager.step if manager is not None else process.step
    is_behind = manager is not None and process.presence == "here" and step is not None and top - step > 1
    text = Text(f"{row.title:<15.15} ")
    text.append(f"{row.words:<16.16} ", style=_STYLES.get(row.condition, "green"))
    text.append(f"{step if step is not None else '–':>7} ", style="yellow" if is_behind else "")
    steps = manager.steps if manager is not None else ()
    # Leave out the last step if its length from boundary to boundary is unknown.
    steps = tuple(step for step in steps if step.period_s) or steps
    last = f"{seconds(_period_s(steps[-1])):>7}" if steps else ""
    text.append(f"{_spark(steps):<9} {last:<7} ")
    kept = process.state.kept if process.state is not None else None
    text.append(flows.get((process.name, process.group_rank), "") or _remark(manager, process) or _kept(kept))
    return text


def _remark(manager: ManagerStatus | None, process: JobProcess) -> str:
    """Return the error of a process that does not respond, or the section that has held the state lock for over 1 s."""
    if process.error and process.presence != "here":
        return escape(process.error, 60)
    holders = manager.lock.holders if manager is not None else ()
    long = next((holder for holder in holders if holder.age_s > 1.0), None)
    return f"lock: {_name(long.what)} {seconds(long.age_s)}" if long is not None else ""


def _kept(kept: KeptStatus | None) -> str:
    """Describe the states that the keeper of a process holds."""
    if kept is None or kept.step is None:
        return ""
    partners = f", copied by rank {_ranks(kept.partners)}" if kept.partners else ""
    return f"kept: step {kept.step}, {seconds(kept.age_s)} ago{partners}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:3])) + (" …" if len(ranks) > 3 else "")


def _spark(steps: tuple[StepStatus, ...]) -> str:
    last = steps[-9:]
    if not last:
        return ""
    lengths = [_period_s(step) for step in last]
    longest_s = max(1e-9, min(max(lengths), 4 * median(lengths)))
    # Figures of peers are not trusted: clamp them.
    shares = (min(1.0, max(0.0, length_s / longest_s)) for length_s in lengths)
    bars = (_SPARKS[int(7 * share)] if step.is_committed else "×" for step, share in zip(last, shares, strict=True))
    return "".join(bars)


def _section(title: str, lines: list[Text]) -> list[Text]:
    return [Text(title, style="dim"), *reversed(lines)] if lines else []


def _record_line(each: JobRecord, now_unix_s: float) -> Text:
    record = each.record
    ago_s = max(0.0, now_unix_s - record.begun_unix_s - record.length_s)
    longest = sorted(record.phase_lengths().items(), key=lambda item: -item[1])[:3]
    phases = ", ".join(f"{escape(name, 12)} {seconds(length_s)}" for name, length_s in longest)
    step = f" at {record.step}" if record.step is not None else ""
    text = Text(f"  {_name(each.name)} {record.kind}{step} ")
    text.append("" if record.outcome == "ok" else f"{record.outcome} ", style="bold red")
    return text.append(f"{seconds(record.length_s)}, {seconds(ago_s)} ago: {phases}")


def _change_line(change: MembershipChange, now_unix_s: float) -> Text:
    name = _name(change.replica_id.rpartition(":")[0] or change.replica_id)
    text = escape(change.text, 200)
    style = "bold red" if change.kind == "left" else ""
    return Text(f"  {seconds(max(0.0, now_unix_s - change.unix_s))} ago: {name} {text}", style=style)


def _error_line(each: JobError, now_unix_s: float) -> Text:
    ago_s = max(0.0, now_unix_s - each.error.unix_s)
    count = f" {each.error.count}×" if each.error.count > 1 else ""
    text = escape(each.error.text, 200)
    return Text(f"  {_name(each.name)} {seconds(ago_s)} ago{count}: {text}", style="red")
