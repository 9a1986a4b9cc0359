"""The predictor alone: what it expects next for programs that repeat, change, and come back."""

from gtp_dtensor.schedule import Kind, Schedule

F, I, R, B = Kind.FORWARD, Kind.INFERENCE, Kind.RECOMPUTE, Kind.BACKWARD


def play(schedule: Schedule, uses) -> int:
    """Record uses; the number of mispredictions."""
    return sum(not schedule.record(weight, kind, False) for weight, kind in uses)


def step(num_weights: int):
    return [(w, F) for w in range(num_weights)] + [(w, B) for w in reversed(range(num_weights))]


def test_the_first_pass_has_no_mispredictions_and_predicts_nothing():
    schedule = Schedule()
    assert play(schedule, step(4)) == 0
    assert schedule.peek(0) is None


def test_a_repeated_step_is_predicted_whole():
    schedule = Schedule()
    play(schedule, step(4))
    for _ in range(3):
        for position, use in enumerate(step(4)):
            assert schedule.record(*use, False)
            coming = step(4) + step(4)
            assert schedule.peek(0)[:2] == coming[position + 1]
            if position + 2 < len(step(4)):
                assert schedule.peek(1)[:2] == coming[position + 2]


def test_pipeline_interleaving_needs_the_whole_history():
    """F F B F B F B B: after the last forward weight comes now a forward, now a backward."""
    forward, backward = [(w, F) for w in range(3)], [(w, B) for w in (2, 1, 0)]
    one_step = forward + forward + backward + forward + backward + forward + backward + backward
    schedule = Schedule()
    play(schedule, one_step * 2)
    assert play(schedule, one_step * 3) == 0


def test_a_pipeline_of_many_microbatches_settles():
    """Warm-up, 1F1B and cool-down of 40 microbatches, with an evaluation that breaks the rhythm once."""
    forward, backward = [(w, F) for w in range(3)], [(w, B) for w in (2, 1, 0)]
    one_step = forward * 3 + (forward + backward) * 37 + backward * 3
    schedule = Schedule()
    play(schedule, one_step * 2 + [(w, I) for w in range(3)] * 2 + one_step)
    play(schedule, one_step * 2)
    assert play(schedule, one_step * 2) == 0


def test_a_weight_used_many_times_a_step_settles():
    one_step = [(0, F)] * 45 + [(1, F), (1, B)] + [(0, B)] * 45
    schedule = Schedule()
    play(schedule, one_step * 3)
    assert play(schedule, one_step * 2) == 0


def test_repeated_tied_and_recomputed_weights_settle():
    one_step = [(0, F), (1, F), (1, F), (1, F), (2, F), (0, F), (0, B), (2, R), (1, R), (1, B), (2, B), (1, B), (1, B)]
    schedule = Schedule()
    play(schedule, one_step * 3)
    assert play(schedule, one_step * 3) == 0


def test_an_evaluation_between_costs_a_few_and_training_is_found_again():
    evaluation = [(w, I) for w in range(5)] * 3
    schedule = Schedule()
    play(schedule, step(5) * 3)
    for _ in range(2):
        play(schedule, evaluation + step(5) * 2)
    assert play(schedule, evaluation) <= 2
    assert play(schedule, step(5) * 4) <= 3  # the way back, and that no evaluation comes after two steps this time
    assert play(schedule, step(5) * 2) == 0


def test_a_branch_costs_at_most_two_mispredictions_each_time():
    with_layer = [(0, F), (1, F), (2, F), (2, B), (1, B), (0, B)]
    without = [(0, F), (2, F), (2, B), (0, B)]
    schedule = Schedule()
    play(schedule, with_layer * 2 + without * 2)
    for branch in (with_layer, without, with_layer, without):
        assert play(schedule, branch) <= 2
        play(schedule, branch * 2)
        assert play(schedule, branch * 2) == 0


def test_the_period_is_the_last_step():
    schedule = Schedule()
    for _ in range(3):
        play(schedule, step(3))
        schedule.mark_step()
    assert [use[:2] for use in schedule.period()] == step(3)
    unmarked = Schedule()
    play(unmarked, step(3) * 3)
    play(unmarked, step(3)[:2])  # in the middle of a step
    assert [use[:2] for use in unmarked.period()] == step(3)


def test_history_is_bounded():
    schedule = Schedule(capacity=50)
    play(schedule, step(4) * 100)
    assert len(schedule._history) < 100
    assert play(schedule, step(4) * 20) == 0
