"""What ``ft-transport top`` shows, on screens of a fixed size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from ft_transport.cli.job import JobError, JobProcess, JobRecord, JobState, Presence
from ft_transport.cli.top_screen import is_well, screen
from ft_transport.telemetry.process_state import (
    Activity,
    Change,
    ErrorStatus,
    KeptStatus,
    ManagerStatus,
    MembershipChange,
    ProcessState,
    StepStatus,
    TransferStatus,
    TransportStatus,
)
from ft_transport.telemetry.record import Phase, Record

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e[bold]" + "x" * 10_000


CHANGES: list[tuple[Change, str]] = [
    ("left", "left: all stood still for 5.3 s; last in a quorum 5.4 s ago"),
    ("healed", "healed to step 41 in 0.5 s, from a"),
]


def process(
    name: str,
    *,
    step: int = 41,
    presence: Presence = "here",
    activity: Activity = "training",
    activity_s: float = 0.1,
    flows: tuple[TransferStatus, ...] = (),
    running: tuple[Record, ...] = (),
    **fields: object,
) -> JobProcess:
    steps = tuple(StepStatus(step=index, length_s=0.25, is_committed=index != 38) for index in range(step - 9, step))
    manager = ManagerStatus(step=step, activity=activity, activity_s=activity_s, steps=steps, num_refused=1)
    told = ProcessState(manager=manager, transport=TransportStatus(receives=flows), running=running)
    return JobProcess(
        name=name,
        replica_id=f"{name}:1",
        address=f"http://{name.lower()[:1]}:1/checkpoint/",
        presence=presence,
        since_s=12.0,
        state=told,
        **fields,  # type: ignore[arg-type]
    )


def heal(name: str) -> JobRecord:
    phases = (Phase(name="quorum", start_s=0.0, length_s=0.5), Phase(name="transfer", start_s=0.5, length_s=1.5))
    record = Record(kind="heal", begun_unix_s=970.0, length_s=2.0, outcome="ok", step=40, phases=phases)
    return JobRecord(name=name, group_rank=0, record=record)


def job(*processes: JobProcess, **fields: object) -> JobState:
    return JobState(
        unix_s=1000.0,
        lighthouse="http://lh:1",
        is_lighthouse_read=True,
        processes=processes,
        **fields,  # type: ignore[arg-type]
    )


def drawn(state: JobState, *, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(screen(state, width=width, height=height))
    lines = captured.get().rstrip("\n").split("\n")
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    return lines


def test_what_needs_attention_comes_first() -> None:
    healing = Record(
        outcome="running",
        kind="heal",
        begun_unix_s=999.0,
        length_s=1.0,
        phases=(Phase(name="transfer", start_s=0.0, length_s=1.0),),
    )
    flow = TransferStatus(peer="a:1", num_bytes=10**9, bytes_per_s=2.5e8)
    lines = drawn(
        job(
            process("Alpha"),
            process("Beta", presence="gone"),
            process("Gamma", activity="healing", flows=(flow,), running=(healing,)),
            process("Delta", activity_s=120.0),
            records=(heal("Beta"),),
            errors=(
                JobError(name="Alpha", group_rank=0, error=ErrorStatus(unix_s=990.0, about="x", text="no quorum")),
            ),
        )
    )
    assert "1 gone, 1 stalled, 1 healing, 1 training" in lines[1]
    assert "step 41, 250 ms each" in lines[1]
    first = next(index for index, line in enumerate(lines) if line.startswith("replica ")) + 1
    assert [line.split()[0] for line in lines[first : first + 4]] == ["Beta", "Delta", "Gamma", "Alpha"]
    assert "gone 12.0 s" in lines[first]
    assert "heals transfer" in lines[first + 2]
    assert "← Alpha 250 MB/s" in lines[first + 2]
    assert "×" in lines[first + 3]
    assert any("Beta heal at 40 2.0 s, 28.0 s ago: transfer 1.5 s, quorum 500 ms" in line for line in lines)
    assert any("no quorum" in line for line in lines)


@pytest.mark.parametrize(("num", "height"), [(1, 24), (17, 24), (18, 24), (512, 24), (5, 12), (40, 12)])
def test_any_number_fits(num: int, height: int) -> None:
    processes = [process(f"rep_{index}", presence="silent" if index == num - 1 else "here") for index in range(num)]
    lines = drawn(job(*processes, records=tuple(heal("r") for _ in range(30))), height=height)
    shown = [line for line in lines if line.startswith("rep_")]
    assert f"rep_{num - 1} " in shown[0]
    rest = [line for line in lines if line.startswith("… and")]
    assert rest == ([f"… and {num - len(shown)} more: {num - len(shown)} training"] if len(shown) < num else [])


def test_text_of_peers_moves_nothing() -> None:
    error = ErrorStatus(unix_s=1.0, about=HOSTILE, text=HOSTILE)
    hostile_heal = heal(HOSTILE)
    lines = drawn(
        job(
            process(HOSTILE, presence="silent", error=HOSTILE),
            process("fine"),
            records=(hostile_heal,),
            errors=(JobError(name=HOSTILE, group_rank=0, error=error),),
            status=HOSTILE,
            changes=(MembershipChange(unix_s=1e308, kind="left", replica_id=HOSTILE, step=2**62, text=HOSTILE),),
        )
    )
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<img src=x one" in text


@pytest.mark.parametrize(
    ("figure", "address"), [(1e308, "http://["), (-1e308, "http://\u2100/"), (-5.0, "\x1b"), (0.0, "")]
)
def test_no_figure_and_no_address_ends_it(figure: float, address: str) -> None:
    steps = tuple(StepStatus(step=-(2**62), length_s=figure) for _ in range(9))
    flow = TransferStatus(peer=address, bytes_per_s=figure, num_bytes=2**62, length_s=figure)
    told = ProcessState(
        unix_s=figure,
        manager=ManagerStatus(step=2**62, activity="training", activity_s=figure, steps=steps, num_refused=2**62),
        transport=TransportStatus(receives=(flow,), sends=(flow,)),
    )
    hostile = JobProcess(name="x", replica_id="x:1", address=address, presence="here", since_s=figure, state=told)
    phases = tuple(Phase(name="transfer", start_s=figure, length_s=figure) for _ in range(3))
    record = Record(kind="heal", begun_unix_s=figure, length_s=figure, outcome="ok", phases=phases)
    error = ErrorStatus(unix_s=figure, about="x", text="x")
    lines = drawn(
        job(
            hostile,
            process("fine"),
            records=(JobRecord(name="x", group_rank=0, record=record),),
            errors=(JobError(name="x", group_rank=0, error=error),),
        )
    )
    assert any(line.startswith("fine ") for line in lines)
    assert max(map(cell_len, lines)) <= 80


def test_what_keepers_hold_is_shown_where_there_is_room() -> None:
    kept = KeptStatus(step=40, age_s=3.0, num_bytes=2_000_000, partners=(2,), copied_ranks=(1,), copied_step=40)
    member = process("a")
    assert member.state is not None
    member = replace(member, state=replace(member.state, kept=kept))
    assert any("kept: step 40, 3.0 s ago, copied by rank 2" in line for line in drawn(job(member), width=120))
    many = replace(kept, step=2**60, age_s=float("inf"), partners=tuple(range(5000)))
    drawn(job(replace(member, state=replace(member.state, kept=many))))


def test_a_narrow_screen_and_a_job_without_anybody() -> None:
    assert "no replica is known" in "\n".join(drawn(job(), width=50))
    drawn(job(process("a" * 100)), width=30)


def test_a_death_is_shown_after_it_with_its_cost() -> None:
    changes = tuple(
        MembershipChange(unix_s=960.0 + 10 * at, kind=kind, replica_id="b:3f2c", step=41, text=text)
        for at, (kind, text) in enumerate(CHANGES)
    )
    lines = drawn(job(process("a"), process("b"), changes=changes), width=120)
    first = lines.index("joined, left, healed") + 1
    assert lines[first : first + 2] == [
        "  30.0 s ago: b healed to step 41 in 0.5 s, from a",
        "  40.0 s ago: b left: all stood still for 5.3 s; last in a quorum 5.4 s ago",
    ]


LOST = ProcessState(manager=ManagerStatus(activity="training", is_lighthouse_lost=True))


@pytest.mark.parametrize(
    "state",
    [
        JobState(lighthouse="http://lh:1"),
        JobState(lighthouse="http://lh:1", processes=(process("a", activity="waiting"),)),
        job(JobProcess(name="a", replica_id="a:1", presence="here", state=LOST)),
    ],
    ids=["nobody", "waiting", "a process says so"],
)
def test_a_dead_lighthouse_is_a_line_of_its_own(state: JobState) -> None:
    lines = drawn(state)
    assert "THE LIGHTHOUSE DOES NOT ANSWER" in lines[1]
    assert not any("no replica is known" in line for line in lines)
    # One without a page is not dead where replicas train.
    lines = drawn(JobState(lighthouse="http://lh:1", processes=(process("a"),)))
    assert "its page cannot be read" in lines[0]
    assert not any("DOES NOT ANSWER" in line for line in lines)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (job(process("a"), process("b")), True),
        (job(process("a"), process("b", presence="coming")), True),
        (job(process("a"), process("b", presence="silent")), False),
        (job(process("a"), process("b", presence="gone")), False),
        (job(), False),
        (JobState(lighthouse="http://lh:1", processes=(process("a"),)), False),
        (JobState(processes=(process("a"),)), True),
    ],
)
def test_what_is_well(state: JobState, expected: bool) -> None:
    assert is_well(state) is expected
