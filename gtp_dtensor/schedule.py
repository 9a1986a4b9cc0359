"""The recorded schedule of weight uses, and the prediction of what comes next.

A *use* is one consumption of a weight: (weight, kind). All uses go into one history. A pointer follows the history one
period behind the present: as long as the program repeats itself (microbatches, pipeline interleavings, tied or
repeated weights, recomputed blocks alike), the entry after the pointer is the next use. When a use differs from
the prediction, the pointer moves to the earlier occurrence of that use whose preceding uses agree best. So no step
boundary has to be declared, and a wrong guess costs time, never correctness.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a weight is used for. Numbers are stable: they enter the history."""

    FORWARD = 0  # a forward that records a graph
    INFERENCE = 1  # a forward that records none (no_grad; also the first pass of reentrant checkpointing)
    RECOMPUTE = 2  # a forward re-run inside a backward by activation checkpointing
    BACKWARD = 3  # the gradient of a weight's input


IN_BACKWARD = (Kind.RECOMPUTE, Kind.BACKWARD)


class Use(NamedTuple):
    """One entry of the history."""

    weight: int  # index of the weight in its runtime
    kind: Kind
    starts_pass: bool  # whether the root's forward, or a backward, was entered since the previous use


def is_out_of_reach(use: Use, is_backward: bool, is_microbatch: bool = False) -> bool:
    """Whether ``use`` lies beyond what may be gathered ahead from a forward, or from a backward.

    Beyond the end of a pass lies the user's code, perhaps an optimizer step. But the backward after a forward may find
    its first weights gathered, and so may the forward of the next microbatch its first one, where it is known that no
    optimizer steps before (``is_microbatch``).
    """
    if use.kind in IN_BACKWARD:
        return use.starts_pass and is_backward
    if is_backward:
        return not (is_microbatch and use.starts_pass and use.kind is Kind.FORWARD)
    return use.starts_pass


def block_distance(
    peek: Callable[[int], Use | None], role_of: Callable[[int], str | None], role: str, num_blocks: int, farthest: int
) -> int:
    """How many uses ahead the weight with ``role`` in the ``num_blocks``-th block from here is: that use included.

    Gathers of experts are issued as far ahead, so that each has a whole block's computation to hide behind, and of each
    role at most ``num_blocks`` + 1 weights are in memory. Where the role does not occur again, 1.

    Args:
        peek: the use that follows so many others, see :meth:`Schedule.peek`.
        role_of: of a weight's index.
        farthest: how many uses are looked at.
    """
    for ahead in range(farthest):
        use = peek(ahead)
        if use is None:
            break
        if role_of(use.weight) == role:
            num_blocks -= 1
            if num_blocks == 0:
                return ahead + 1
    return 1


def role_of_fqn(fqn: str) -> str:
    """What a weight is in its block: its name without the block's number ("layers.*.moe.experts.w1")."""
    segments = fqn.split(".")
    place = next((place for place, segment in enumerate(segments) if segment.isdigit()), None)
    if place is not None:
        segments[place] = "*"
    return ".".join(segments)


class Schedule:
    """History and predictor of one runtime.

    Args:
        capacity: how many uses are remembered at least. A step with more uses than this is not predicted.
    """

    # A pipeline step has many microbatches that look alike: the occurrence in the step before lies far back. Only a
    # misprediction pays for the comparison.
    CONTEXT = 256  # how many preceding uses are compared when the pointer is moved
    CANDIDATES = 128  # how many earlier occurrences of a use are considered

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._most = 2 * capacity
        self._history: list[Use] = []
        self._pointer: int | None = None  # the entry that the newest use repeats
        self.next_use: Use | None = None  # as predicted
        # Occurrences of the same use form a chain: the newest one, and for each entry the one before it. Only moving
        # the pointer needs them, so they lag behind the history until then.
        self._newest: dict[tuple[int, Kind], int] = {}
        self._previous: list[int | None] = []
        self._aheads: list[int | None] | None = None  # planned, beside the history
        self.ahead: int | None = None  # the plan at the newest use, if there is one
        self._steps: deque[int] = deque(maxlen=2)  # history lengths at the last two optimizer steps
        self._step_starts: set[int] = set()  # entries before which an optimizer stepped
        self._has_stepped = False  # since the newest use

    def record(self, weight: int, kind: Kind, starts_pass: bool) -> bool:
        """Append a use. Returns False where a prediction existed and was another one."""
        history, predicted = self._history, self.next_use
        is_as_predicted = True
        if predicted is not None and predicted[0] == weight and predicted[1] is kind:
            pointer = self._pointer + 1
            if self._has_stepped:
                pointer = self._step_like(predicted, pointer)
            self._pointer = pointer
            history.append(predicted if predicted[2] == starts_pass else Use(weight, kind, starts_pass))
            self.next_use = history[pointer + 1]
        else:
            self._index()
            pointer = self._pointer = self._best_match((weight, kind))
            history.append(Use(weight, kind, starts_pass))
            self.next_use = None if pointer is None else history[pointer + 1]
            is_as_predicted = predicted is None
        self._has_stepped = False
        if self._aheads is not None:
            self.ahead = None if pointer is None else self._aheads[pointer]
            self._aheads.append(self.ahead)
        if len(history) >= self._most:
            self._forget_oldest()
        return is_as_predicted

    def peek(self, ahead: int) -> Use | None:
        """The predicted use that follows ``ahead`` others, or None."""
        if self._pointer is None:
            return None
        place = self._pointer + 1 + ahead
        return self._history[place] if place < len(self._history) else None

    def stays_in_step(self, ahead: int) -> bool:
        """Whether it is known that no optimizer steps before the predicted use that follows ``ahead`` others: what is
        predicted was seen in an earlier step than this, which tells where a step ends."""
        if not self._steps or self._pointer is None or self._pointer >= self._steps[-1]:
            return False
        first = self._pointer + 1
        return self._step_starts.isdisjoint(range(first, first + ahead + 1))

    def _step_like(self, use: Use, place: int) -> int:
        """The newest entry like ``use`` before which an optimizer stepped; ``place`` where there is none. Microbatches may be
        alike: but what follows the last one, only a whole step tells."""
        if place in self._step_starts:
            return place
        self._index()
        earlier = self._newest.get(use[:2])
        while earlier is not None and earlier not in self._step_starts:
            earlier = self._previous[earlier]
        return place if earlier is None else earlier

    def coming(self, num: int) -> list[Use]:
        """The uses that are predicted to follow, ``num`` of them at most."""
        if self._pointer is None:
            return []
        first = self._pointer + 1
        return self._history[first : first + num]

    def mark_step(self) -> bool:
        """An optimizer step happened here. False where another one did already, since the last use."""
        if self._steps and self._steps[-1] == len(self._history):
            return False
        self._steps.append(len(self._history))
        self._step_starts.add(len(self._history))
        self._has_stepped = True
        return True

    def period(self) -> list[Use]:
        """The uses of the last whole period: between the last two optimizer steps, else what the pointer lags."""
        return [self._history[place] for place in self._period()]

    def _period(self) -> list[int]:
        if len(self._steps) == 2:
            return list(range(*self._steps))
        history = self._history
        if self._pointer is None:
            return list(range(len(history)))
        last = list(range(self._pointer + 1, len(history)))
        for i in range(len(last)):  # turned so that it begins with a forward that follows a backward
            if history[last[i]].kind not in IN_BACKWARD and history[last[i - 1]].kind in IN_BACKWARD:
                return last[i:] + last[:i]
        return last

    # ---- planned look-ahead

    def plan(self, aheads: list[int]) -> None:
        """From now on, at each use of the last whole period, how many uses ahead gathers are issued; for as long as the
        program repeats it."""
        self._aheads = [None] * len(self._history)
        for place, ahead in zip(self._period(), aheads, strict=True):
            self._aheads[place] = ahead
        self.ahead = self._aheads[-1]

    def period_aheads(self) -> list[int | None]:
        """The plan at each use of :meth:`period`."""
        return [None if self._aheads is None else self._aheads[place] for place in self._period()]

    # ---- steps that never ran

    def state(self) -> dict[str, object]:
        """What :meth:`restore` takes back, as it is now."""
        return {name: copy.copy(value) for name, value in self.__dict__.items()}

    def restore(self, state: dict[str, object]) -> None:
        """Forget what happened since ``state``, of which nothing ran."""
        self.__dict__.update(state)

    def _index(self) -> None:
        """Bring the chains of occurrences up to date."""
        history, newest, previous = self._history, self._newest, self._previous
        for place in range(len(previous), len(history)):
            key = history[place][:2]
            previous.append(newest.get(key))
            newest[key] = place

    def _best_match(self, key: tuple[int, Kind]) -> int | None:
        history = self._history
        best, best_score = None, -1
        position = self._newest.get(key)
        for _ in range(self.CANDIDATES):
            if position is None:
                break
            score = 0
            while (
                score < self.CONTEXT
                and score < position
                and history[position - 1 - score] == history[len(history) - 1 - score]
            ):
                score += 1
            if score > best_score:
                best, best_score = position, score
            position = self._previous[position]
        return best

    def _forget_oldest(self) -> None:
        self._index()
        cut = len(self._history) - self._capacity

        def shifted(place: int | None) -> int | None:
            return None if place is None or place < cut else place - cut

        del self._history[:cut], self._previous[:cut]
        if self._aheads is not None:
            del self._aheads[:cut]
        self._previous = [shifted(place) for place in self._previous]
        self._newest = {key: place - cut for key, place in self._newest.items() if place >= cut}
        self._pointer = shifted(self._pointer)
        if self._pointer is None:
            self.next_use = None
        self._steps = deque((step - cut for step in self._steps if step >= cut), maxlen=2)
        self._step_starts = {step - cut for step in self._step_starts if step >= cut}
