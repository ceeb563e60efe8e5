"""Random memberships and deaths, without processes: whatever happens, a step number stands for one state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from property_examples import num_examples

from manager.errors import QuorumError
from manager.quorum.decision import Decision, Heals, Rules, StandsBy, UpToDate, WorldSizeMode, decide, next_lineage
from manager.quorum.reports import NO_WHOLE_STATE, Member

IDS = st.text("abcdef", min_size=1, max_size=3)


@st.composite
def members(draw: st.DrawFn) -> list[Member]:
    ids = draw(st.lists(IDS, min_size=1, max_size=6, unique=True))
    groups = st.sampled_from(["", "1-x", "2-x", "3-x"])
    return [
        Member(
            replica_id=replica_id,
            step=draw(st.integers(NO_WHOLE_STATE, 3)),
            lineage=draw(st.sampled_from(["", "p", "q"])),
            store_address=replica_id,
            addresses=(replica_id,),
            group=draw(groups),
            num_groups=draw(st.integers(0, 2)),
            can_serve=draw(st.booleans()),
            may_heal=draw(st.booleans()),
            announced_to=draw(st.frozensets(st.sampled_from(ids))),
        )
        for replica_id in ids
    ]


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    return Rules(
        min_replica_size=draw(st.integers(1, 4)),
        world_size_mode=draw(st.sampled_from(WorldSizeMode)),
        init_sync=draw(st.booleans()),
    )


@given(members(), rules())
def test_members_decide_alike_and_each_role_fits_the_others(quorum: list[Member], agreed: Rules) -> None:
    if all(each.step == NO_WHOLE_STATE for each in quorum):
        with pytest.raises(QuorumError):
            decide(quorum, quorum[0].replica_id, agreed)
        return
    found = {each.replica_id: decide(quorum, each.replica_id, agreed) for each in quorum}
    first = next(iter(found.values()))
    for decision in found.values():
        assert (decision.step, decision.lineage, decision.group, decision.group_members, decision.num_participants) == (
            first.step, first.lineage, first.group, first.group_members, first.num_participants,
        )  # fmt: skip
        assert decision.store_address == first.store_address
    holders = {name for name, each in found.items() if isinstance(each.role, UpToDate)}
    healing = {name for name, each in found.items() if isinstance(each.role, Heals)}
    aside = {name for name, each in found.items() if isinstance(each.role, StandsBy)}
    by_id = {each.replica_id: each for each in quorum}
    assert holders
    assert set(first.group_members) == holders | healing
    assert {by_id[name].step for name in holders} == {max(each.step for each in quorum)}
    for name, decision in found.items():
        match decision.role:
            case Heals(sources=sources):
                assert {source.replica_id for source in sources} <= holders
                # Nobody waits for a snapshot that its source cannot take.
                assert all(s.can_serve or s.replica_id in by_id[name].announced_to for s in sources)
            case UpToDate(serves_now=now, serves_next=following):
                assert set(now) == healing
                assert set(following) == {name for name in aside if by_id[name].may_heal}
            case StandsBy(announced_to=announced):
                assert announced == holders
    ranks = sorted(each.participating_rank for each in found.values() if each.participating_rank is not None)
    assert ranks == list(range(first.num_participants))


@dataclass
class Replica:
    """A replica as far as the decisions go: what it holds is named, not stored."""

    member: Member
    contents: tuple[str, ...]
    decision: Decision | None = None


class QuorumHistory(RuleBasedStateMachine):
    """Replicas that start, die, stop for a while, fail to meet, fail to heal, and see errors that others do not see.

    ``contents`` is the history of averages that the state results from: two replicas hold the same state if and only if
    it is equal. A step commits with the average of all members of the process group, once per meeting of these.
    """

    @initialize(number=st.integers(1, 4))
    def begin(self, number: int) -> None:
        self.num_starts = 0
        self.replicas: dict[str, Replica] = {}
        self.stopped: dict[str, Replica] = {}
        self.highest = 0
        for _ in range(number):
            self.start_one()

    @rule()
    def start_one(self) -> None:
        if len(self.replicas) + len(self.stopped) >= 5:
            return
        self.num_starts += 1
        name = f"r{self.num_starts:03}"
        fresh = Member(replica_id=name, step=0, lineage="", store_address=name, addresses=(name,))
        self.replicas[name] = Replica(fresh, (f"fresh {name}",))

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.replicas.pop(data.draw(st.sampled_from(sorted(self.replicas))))

    @precondition(lambda self: self.stopped)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.stopped)))
        self.replicas[name] = self.stopped.pop(name)

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        taking_part = sorted(self.replicas)
        missing = data.draw(st.sets(st.sampled_from(taking_part), max_size=len(taking_part) - 1))
        quorum = [self.replicas[name].member for name in taking_part if name not in missing]
        agreed = Rules(min_replica_size=1)
        try:
            decided = {each.replica_id: decide(quorum, each.replica_id, agreed) for each in quorum}
        except QuorumError:
            assert all(each.step == NO_WHOLE_STATE for each in quorum)
            return
        before = {name: self.replicas[name].contents for name in decided}
        holding = {before[name] for name, decision in decided.items() if isinstance(decision.role, UpToDate)}
        assert len(holding) == 1, "who counts as up to date holds the same state"
        joined: list[str] = []
        broken: set[str] = set()
        for name, decision in decided.items():
            replica = self.replicas[name]
            match decision.role:
                case UpToDate():
                    replica.member = replace(replica.member, lineage=decision.lineage)
                    joined.append(name)
                case StandsBy(announced_to=announced):
                    replica.member = replace(replica.member, announced_to=announced, may_heal=True)
                case Heals(sources=sources):
                    replica.member = replace(replica.member, announced_to=frozenset())
                    if data.draw(st.booleans(), label="heals"):
                        source = sources[0].replica_id
                        replica.contents = before[source]
                        replica.member = replace(replica.member, step=decision.step, lineage=decision.lineage)
                        joined.append(name)
                    else:
                        replica.member = replace(replica.member, step=NO_WHOLE_STATE)
                        broken.add(name)
        self._meet(decided, joined, broken)
        # If one member is missing nobody's collective ends well; else each may or may not see an error.
        group = next(iter(decided.values())).group
        saw_error = set(joined)
        if not broken and set(joined) == set(next(iter(decided.values())).group_members):
            saw_error = data.draw(st.sets(st.sampled_from(joined)), label="saw an error")
        step = next(iter(decided.values())).step + 1
        can_serve = data.draw(st.booleans(), label="holds its state at the boundary")
        for name in joined:
            replica = self.replicas[name]
            if name in saw_error:
                replica.member = replace(replica.member, group="", can_serve=True, may_heal=True)
            elif data.draw(st.booleans(), label="is stopped before it commits") and len(self.replicas) > 1:
                # It wakes up later, and commits what nobody may remember then.
                self._commit(replica, group, step, can_serve)
                self.stopped[name] = self.replicas.pop(name)
            else:
                self._commit(replica, group, step, can_serve)
                self.highest = max(self.highest, step)

    def _meet(self, decided: dict[str, Decision], joined: list[str], broken: set[str]) -> None:
        for name in joined:
            replica, decision = self.replicas[name], decided[name]
            if replica.member.group != decision.group:
                replica.member = replace(
                    replica.member, group="" if broken else decision.group, num_groups=replica.member.num_groups + 1
                )

    def _commit(self, replica: Replica, group: str, step: int, can_serve: bool) -> None:
        lineage = next_lineage(replica.member.lineage, group, step)
        replica.contents = (*replica.contents, f"{group} {step}")
        # It need not wait for the next quorum, and may have gone past the boundary when that comes.
        replica.member = replace(replica.member, step=step, lineage=lineage, can_serve=can_serve, may_heal=False)

    @invariant()
    def a_step_and_its_lineage_stand_for_one_state(self) -> None:
        held: dict[tuple[int, str], tuple[str, ...]] = {}
        for replica in [*getattr(self, "replicas", {}).values(), *getattr(self, "stopped", {}).values()]:
            key = (replica.member.step, replica.member.lineage)
            if key[0] != NO_WHOLE_STATE and key[1]:
                assert held.setdefault(key, replica.contents) == replica.contents


QuorumHistory.TestCase.settings = settings(max_examples=num_examples(150), stateful_step_count=40, deadline=None)
TestQuorumHistory = QuorumHistory.TestCase
