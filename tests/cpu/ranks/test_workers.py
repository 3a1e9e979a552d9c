"""Bodies of tests on ranks: a lost case fails its own test alone, and says why."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.cpu.on_ranks import on_ranks
from tests.cpu.workers import ProcessFailedError, ProcessTimeoutError


@dataclass(frozen=True)
class Message:
    text: str


def identify(message):
    assert isinstance(message, Message)
    return dist.get_rank(), dist.get_world_size(), message, os.getpid()


def add_up():
    x = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(x)
    return x.item(), torch.get_num_threads()


def fail_on_rank_1_while_others_wait():
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    dist.barrier()


def sleep_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(60)


def die_on_rank_0():
    if dist.get_rank() == 0:
        os._exit(3)


def return_something_that_cannot_be_pickled():
    return lambda: None


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_are_ordered_by_rank_and_processes_stay(pools, world):
    results = [pools[world].run(identify, Message("hello")) for _ in range(2)]
    assert results[0] == results[1]
    expected = [(rank, world, Message("hello")) for rank in range(world)]
    assert [result[:3] for result in results[0]] == expected


def test_ranks_communicate_with_one_thread_each(pools):
    assert pools[3].run(add_up) == [(6, 1)] * 3


def test_an_exception_has_its_rank_and_traceback(pools):
    before = pools[2].run(identify, Message(""))
    with pytest.raises(ProcessFailedError) as caught:
        pools[2].run(fail_on_rank_1_while_others_wait)
    assert "rank 1 failed first" in str(caught.value)
    assert 'raise KeyError("the reason")' in str(caught.value)
    after = pools[2].run(identify, Message(""))
    assert {pid for *_, pid in before}.isdisjoint(pid for *_, pid in after)
    assert pools[2].run(add_up) == [(3, 1)] * 2


def test_a_timeout_names_the_ranks_that_gave_no_answer(pools):
    with pytest.raises(
        ProcessTimeoutError, match=r"on 2 ranks: no answer from ranks \[0\]"
    ):
        pools[2].run(sleep_on_rank_0, timeout=0.5)
    assert pools[2].run(add_up) == [(3, 1)] * 2


def test_a_process_that_ends_is_reported(pools):
    with pytest.raises(ProcessFailedError, match=r"(?s)rank 0 failed.*exit code 3"):
        pools[2].run(die_on_rank_0)


def test_a_result_that_cannot_be_pickled_is_a_failure(pools):
    with pytest.raises(ProcessFailedError, match="return_something"):
        pools[1].run(return_something_that_cannot_be_pickled)


@on_ranks(1)
def fails(number):
    assert number + 1 == 4


def test_a_failing_assertion_says_the_values(pools):
    with pytest.raises(ProcessFailedError, match=r"assert \(2 \+ 1\) == 4"):
        fails(pools, number=2)
