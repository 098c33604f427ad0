"""Sample ranges: random joins, deaths, restarts and lost messages."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from peralta_zmq import wire
from peralta_zmq.generator.trainer_link import HeldRanges
from peralta_zmq.trainer.generator_registry import Sender
from peralta_zmq.trainer.sample_ranges import MAX_SAMPLES_AHEAD, SampleRanges

NUM_SAMPLES = 5  # samples


class Run:
    """A trainer and up to three generators whose messages arrive late or never."""

    def __init__(self) -> None:
        self.sample_ranges, self.journaled = SampleRanges(), 0
        self.known: dict[str, Sender] = {}  # by the trainer
        self.held: dict[str, HeldRanges] = {}  # by sender
        self.senders = ["", "", ""]  # the newest start of each generator; "": not running
        self.drawn: list[int] = []
        self.num_starts, self.num_trainers = 0, 1
        # Messages on the way, oldest first.
        self.statuses: deque[wire.GeneratorStatus] = deque()
        self.announcements: dict[str, deque[range]] = {}

    def start(self, number: int) -> None:
        """Start a generator; one that runs is killed."""
        self.num_starts += 1
        status = wire.GeneratorStatus("run", f"g{number}", bytes([self.num_starts]) * 8)
        self.senders[number] = status.sender
        self.held[status.sender], self.announcements[status.sender] = HeldRanges(), deque()

    def kill(self, number: int) -> None:
        self.senders[number] = ""

    def draw(self, number: int) -> None:
        held = self.held.get(self.senders[number])
        if held and (sample_index := held.draw()) is not None:
            self.drawn.append(sample_index)

    def send_status(self, number: int) -> None:
        if sender := self.senders[number]:
            name, _, incarnation = sender.partition("/")
            held = self.held[sender]
            self.statuses.append(
                wire.GeneratorStatus(
                    "run", name, bytes.fromhex(incarnation),
                    needs_range=held.needs_range, next_sample_index=held.next_index,
                )
            )  # fmt: skip

    def grant(self, _: int) -> None:
        """Receive the oldest status; a range is in the journal when this returns."""
        self._receive_status()
        self.journaled = self.sample_ranges.next_index

    def die_before_the_commit(self, number: int) -> None:
        self._receive_status()
        self.restart_trainer(number)

    def _receive_status(self) -> None:
        if self.statuses:
            status = self.statuses.popleft()
            sender = self.known.setdefault(status.sender, Sender(status.sender))
            sender.status = status
            self.sample_ranges.grant(self.sample_ranges.requests([sender]), NUM_SAMPLES)

    def restart_trainer(self, _: int) -> None:
        self.sample_ranges = SampleRanges()
        self.sample_ranges.next_index = self.journaled
        self.known = {}
        self.num_trainers += 1

    def lose_status(self, _: int) -> None:
        if self.statuses:
            self.statuses.popleft()

    def announce(self, _: int) -> None:
        for sender in self.known.values():
            if sender.sample_range and sender.id in self.senders:  # live
                self.announcements[sender.id].append(sender.sample_range)

    def receive_announcement(self, number: int) -> None:
        sender = self.senders[number]
        if self.announcements.get(sender):
            self.held[sender].add(self.announcements[sender].popleft())

    def lose_announcement(self, number: int) -> None:
        if self.announcements.get(self.senders[number]):
            self.announcements[self.senders[number]].popleft()


FREQUENT = ("draw", "draw", "send_status", "grant", "announce", "receive_announcement")
RARE = ("start", "kill", "restart_trainer", "die_before_the_commit", "lose_status",
        "lose_announcement")  # fmt: skip
OPERATIONS = st.tuples(st.sampled_from([*FREQUENT * 3, *RARE]), st.integers(0, 2))


@given(st.lists(OPERATIONS, max_size=300))
def test_no_sample_is_drawn_twice_and_few_are_skipped(operations: list[tuple[str, int]]) -> None:
    run = Run()
    for number in range(3):
        run.start(number)
    for operation, number in operations:
        getattr(run, operation)(number)
    assert len(set(run.drawn)) == len(run.drawn)

    num_drawn = len(run.drawn)
    living = [number for number, sender in enumerate(run.senders) if sender]
    run.statuses.clear()
    for operation in ("send_status", "grant", "announce", "receive_announcement", "draw"):
        for number in living:
            for _ in range(100 if operation == "receive_announcement" else 1):
                getattr(run, operation)(number)
    assert len(set(run.drawn)) == len(run.drawn) == num_drawn + len(living)  # all continue

    # What is neither drawn nor held is skipped: two ranges for each death of a generator, and for
    # each death of the trainer one range of each generator, which it has not received.
    num_skipped = run.sample_ranges.next_index - len(run.drawn)
    for name in living:
        while run.held[run.senders[name]].draw() is not None:  # a sample that it holds
            num_skipped -= 1
    deaths = run.num_starts - len(living)
    assert num_skipped <= NUM_SAMPLES * (2 * deaths + 3 * (run.num_trainers - 1))


def sender_with(status: wire.GeneratorStatus) -> Sender:
    return Sender(status.sender, status=status)


def test_samples_that_were_drawn_without_a_range_are_not_granted() -> None:
    sample_ranges = SampleRanges()
    ann = sender_with(wire.GeneratorStatus("run", "ann", bytes(8), next_sample_index=7))
    bob = sender_with(wire.GeneratorStatus("run", "bob", bytes(8), needs_range=True))
    assert sample_ranges.requests([ann, bob]) == [bob]
    sample_ranges.grant([bob], 3)
    assert (ann.sample_range, bob.sample_range) == (range(0), range(7, 10))
    sample_ranges.advance(10 + MAX_SAMPLES_AHEAD + 1)
    assert sample_ranges.next_index == 10
