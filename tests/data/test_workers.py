"""Tasks in several processes: every answer comes, and nothing is started that nobody will read."""

import multiprocessing
import os

import pytest

from semidice.data.prepare.workers import WorkerDiedError, Workers


def squared(number):
    return number * number, os.getpid()


def fails(number):
    raise ZeroDivisionError(f"no {number}")


def dies_at_5(number):
    if number == 5:
        os._exit(1)
    return number


@pytest.mark.parametrize("number", [0, 1])
def test_one_worker_is_this_process_and_keeps_the_order(number):
    with Workers(number) as pool:
        done = list(pool.each(squared, range(5)))
    assert done == [(item, (item * item, os.getpid())) for item in range(5)]


def test_one_item_starts_no_process():
    with Workers(8) as pool:
        assert list(pool.each(squared, [3])) == [(3, (9, os.getpid()))]
        assert list(pool.each(squared, [])) == []


def test_nothing_is_begun_after_the_caller_stops():
    begun = []
    with Workers(1) as pool:
        for item, _ in pool.each(begun.append, range(9)):
            if item == 3:
                break
    assert begun == [0, 1, 2, 3]


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="workers must be 0 or more; got -1"):
        Workers(-1)


def test_by_default_there_is_one_for_each_cpu_this_process_may_use():
    assert Workers().number == len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_two_workers_answer_for_every_item_then_survive_an_error_and_a_death():
    with Workers(2) as pool:
        answers = dict(pool.each(squared, range(9)))
        assert {item: square for item, (square, _) in answers.items()} == {n: n * n for n in range(9)}
        assert os.getpid() not in {process for _, process in answers.values()}
        with pytest.raises(ZeroDivisionError, match="no"):
            list(pool.each(fails, range(4)))
        with pytest.raises(WorkerDiedError) as died:
            list(pool.each(dies_at_5, range(20)))
        assert 5 in died.value.items
        assert len(died.value.items) <= 2
        # new processes take the place of those that are gone
        assert {item for item, _ in pool.each(squared, range(4))} == set(range(4))
    assert multiprocessing.active_children() == []
