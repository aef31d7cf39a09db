"""What a recommendation rests on is tried, of trials made by hand."""

from gradwire.experiments.advice import Choice, Forecast, Rule
from gradwire.experiments.advice.candidates import BACKWARD, PRIORITY, Candidate
from gradwire.experiments.advice.predict import Prediction
from gradwire.experiments.advice.trials import Tried, confirmed

LONG, SLOW = 1e6, 100.0  # seconds; what a failure takes


def choice(spec, step, order=BACKWARD, loss=0.0):
    return Choice(Candidate(spec), order, Prediction(step, 0.0, 0.0), loss)


def forecast(*choices):
    return Forecast.ranked(4, 1, choices, Rule())


def after(given, real, seconds=LONG):
    """The forecast after trials that take `real` seconds, by specification and order, its failures, and which there were."""
    ran = []

    def run(choice, steps):
        ran.append((choice.spec, choice.order))
        answer = real[choice.spec, choice.order]
        return Tried(None, SLOW, answer) if isinstance(answer, str) else Tried(answer, answer * steps)

    return *confirmed(given, Rule(), run, seconds), ran


GIVEN = forecast(choice("none", 1.0), choice("bf16", 0.6), choice("int8", 0.3), choice("int8", 0.25, PRIORITY))
AS_TOLD = {("none", BACKWARD): 1.0, ("bf16", BACKWARD): 0.6, ("int8", BACKWARD): 0.3, ("int8", PRIORITY): 0.25}


def test_what_is_recommended_what_it_is_compared_with_and_none_are_tried():
    found, failures, ran = after(GIVEN, AS_TOLD)
    assert ran == [("int8", PRIORITY), ("bf16", BACKWARD), ("none", BACKWARD)]
    assert (found.best.spec, found.best.order, found.best.tried) == ("int8", PRIORITY, 0.25)
    assert failures == []


def test_what_is_slower_than_told_gives_way_to_the_next_one_which_is_tried_then():
    found, _, ran = after(GIVEN, AS_TOLD | {("int8", PRIORITY): 0.4})
    assert ran[:2] == [("int8", PRIORITY), ("int8", BACKWARD)]
    assert (found.best.order, found.best.tried) == (BACKWARD, 0.3)
    assert [each.step for each in found.choices] == [0.3, 0.4, 0.6, 1.0]


def test_what_is_told_to_be_nearly_as_fast_is_tried_too():
    given = forecast(
        choice("none", 1.0), choice("int8", 0.3), choice("int8:seed=1", 0.32), choice("onebit", 0.31, loss=0.5)
    )
    real = {("none", BACKWARD): 1.0, ("int8", BACKWARD): 0.3, ("int8:seed=1", BACKWARD): 0.25}
    found, _, ran = after(given, real)
    assert ran == [("int8", BACKWARD), ("none", BACKWARD), ("int8:seed=1", BACKWARD)]
    assert found.best.spec == "int8:seed=1"


def test_the_next_step_is_tried_too():
    given = forecast(choice("none", 1.0), choice("int8", 0.5), choice("int4", 0.4, loss=0.012))
    real = {("none", BACKWARD): 1.0, ("int8", BACKWARD): 0.48, ("int4", BACKWARD): 0.45}
    found, _, ran = after(given, real)
    assert ran == [("int8", BACKWARD), ("int4", BACKWARD), ("none", BACKWARD)]
    assert (given.beyond.spec, found.best.spec, found.beyond) == ("int4", "int8", None)


def test_what_turns_out_not_worth_it_is_not_recommended():
    found, _, _ = after(GIVEN, AS_TOLD | {("int8", PRIORITY): 0.7, ("int8", BACKWARD): 0.58})
    assert found.best.spec == "bf16"


def test_none_that_is_faster_than_told_is_not_tried_alone():
    given = forecast(choice("none", 1.0), choice("int8", 0.92), choice("int4", 0.94, loss=0.01))
    real = {("none", BACKWARD): 0.7, ("int8", BACKWARD): 0.69}
    found, _, ran = after(given, real)
    assert ran == [("none", BACKWARD), ("int8", BACKWARD)]
    assert found.best.is_none
    assert found.sentence.endswith(
        "none takes 700 ms per step, and int8, the fastest of the others that were tried, 690 ms."
    )


def test_speed_ups_compare_measured_steps_with_measured_ones_and_predicted_with_predicted():
    given = forecast(choice("none", 1.0), choice("int8", 0.5), choice("unknown", 0.8, loss=None))
    found, _, _ = after(given, {("none", BACKWARD): 0.6, ("int8", BACKWARD): 0.3})
    assert {each.spec: (each.tried, found.speed_up(each)) for each in found.choices} == {
        "none": (0.6, 1.0),
        "int8": (0.3, 2.0),
        "unknown": (None, 1.25),
    }


def test_a_training_that_fails_leaves_predictions():
    found, failures, ran = after(forecast(choice("none", 1.0)), {("none", BACKWARD): "rank 1: no such batch"})
    assert ran == [("none", BACKWARD)]
    assert found.best.tried is None
    assert failures == ["none: rank 1: no such batch"]


def test_a_training_that_fails_with_every_method_leaves_all_as_it_was():
    found, failures, ran = after(GIVEN, dict.fromkeys(GIVEN.rows, "rank 0: takes no wrapped model"))
    assert found == GIVEN
    assert ran == [("int8", PRIORITY), ("none", BACKWARD)]
    assert len(failures) == 2


def test_where_overlap_had_worked_a_failure_by_priority_is_the_method_s():
    given = forecast(choice("none", 1.0), choice("int8", 0.3, PRIORITY), choice("int8:seed=1", 0.32, PRIORITY))
    real = {("none", BACKWARD): 1.0, ("int8", PRIORITY): 0.3, ("int8:seed=1", PRIORITY): "rank 1: no memory"}
    found, _, _ = after(given, real)
    assert (found.best.spec, found.best.tried) == ("int8", 0.3)
    assert ("int8:seed=1", PRIORITY) not in found.rows


def test_where_overlap_fails_no_order_but_backward_is_recommended():
    found, failures, ran = after(GIVEN, AS_TOLD | {("int8", PRIORITY): "rank 0: not this optimizer"})
    assert found.best.order == BACKWARD
    assert {each.order for each in found.choices} == {BACKWARD}
    assert ("int8", BACKWARD) in ran
    assert failures == ["int8, by priority: rank 0: not this optimizer"]


def test_a_method_that_fails_is_not_recommended():
    given = forecast(
        choice("none", 1.0), choice("int8:seed=1", 0.4), choice("int8", 0.3), choice("int8", 0.5, PRIORITY)
    )
    real = AS_TOLD | {("int8", BACKWARD): "rank 0: no memory", ("int8:seed=1", BACKWARD): 0.4}
    found, failures, _ = after(given, real)
    assert found.best.spec == "int8:seed=1"
    assert ("int8", BACKWARD) not in found.rows
    assert ("int8", PRIORITY) in found.rows
    assert len(failures) == 1


def test_what_was_not_tried_is_not_recommended_over_none():
    given = forecast(choice("none", 1.0), choice("bf16", 0.7), choice("int8", 0.3))
    found, _, ran = after(given, {("int8", BACKWARD): 2.0}, seconds=10.0)
    assert (ran, found.best.is_none) == ([("int8", BACKWARD)], True)


def test_fewer_bits_are_not_the_answer_where_no_time_was_left_to_try_8_bits():
    given = forecast(choice("none", 6.0), choice("bf16", 4.0), choice("int8", 3.0), choice("int4", 1.5, loss=0.012))
    real = {("none", BACKWARD): 6.0, ("bf16", BACKWARD): 4.0, ("int8", BACKWARD): 3.0, ("int4", BACKWARD): 1.5}
    found, _, ran = after(given, real, seconds=20.0)
    assert ran == [("int4", BACKWARD)]
    assert (found.best.is_none, found.beyond.spec) == (True, "int4")


def test_what_no_time_was_left_to_try_is_not_recommended_over_what_was_tried():
    names = [f"int8:seed={number}" for number in range(6)]
    given = forecast(choice("none", 9.0), *(choice(name, 1 + number / 20) for number, name in enumerate(names)))
    real = {(name, BACKWARD): 1.4 * (1 + number / 20) for number, name in enumerate(names)} | {("none", BACKWARD): 9.0}
    found, _, ran = after(given, real, seconds=30)
    assert (names[-1], BACKWARD) not in ran
    assert found.best.spec == names[0]
    assert found.best.tried == 1.4
