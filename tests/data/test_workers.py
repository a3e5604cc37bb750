"""Tasks in several processes: every result is returned, and no task starts after the caller stops."""

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
def test_a_single_worker_runs_in_this_process_and_keeps_the_order(number):
    with Workers(number) as pool:
        results = list(pool.each(squared, range(5)))
    assert results == [(item, (item * item, os.getpid())) for item in range(5)]


def test_a_single_item_starts_no_process():
    with Workers(8) as pool:
        assert list(pool.each(squared, [3])) == [(3, (9, os.getpid()))]
        assert list(pool.each(squared, [])) == []


def test_no_task_starts_after_the_caller_stops():
    started_items = []
    with Workers(1) as pool:
        for item, _ in pool.each(started_items.append, range(9)):
            if item == 3:
                break
    assert started_items == [0, 1, 2, 3]


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="workers must be 0 or more; got -1"):
        Workers(-1)


def test_the_default_is_one_worker_per_available_cpu():
    assert Workers().number == len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_two_workers_process_every_item_and_survive_an_error_and_a_dead_process():
    with Workers(2) as pool:
        results = dict(pool.each(squared, range(9)))
        assert {item: square for item, (square, _) in results.items()} == {n: n * n for n in range(9)}
        assert os.getpid() not in {process for _, process in results.values()}
        with pytest.raises(ZeroDivisionError, match="no"):
            list(pool.each(fails, range(4)))
        with pytest.raises(WorkerDiedError) as died:
            list(pool.each(dies_at_5, range(20)))
        assert 5 in died.value.items
        assert len(died.value.items) <= 2
        # new processes replace the dead ones
        assert {item for item, _ in pool.each(squared, range(4))} == set(range(4))
    assert multiprocessing.active_children() == []
