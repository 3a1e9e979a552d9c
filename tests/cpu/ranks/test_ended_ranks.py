"""A rank that ends while others wait for it: they say so in seconds, and nothing hangs.

Processes of their own, because a set of processes does not outlive one of its ranks.
"""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from cpcompile.compile import attempts
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.one_call import Model, message_of, tokens

# For processes to start and to trace on a busy machine; the timeouts that would end a
# wait for another reason are longer.
PATIENCE_SECONDS = 110.0


def rank_main(rank: int, victim: int, connection) -> None:
    """Rank 0 holds the store. The victim sleeps where it compiles."""
    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        connection.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", connection.recv(), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    original = attempts.run_passes

    def sleeps(*args):
        if rank == victim:
            connection.send("compiles")
            time.sleep(3600)
        return original(*args)

    attempts.run_passes = sleeps
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    step = torch.compile(Model(), backend="cp", dynamic=True, options=options)
    connection.send(message_of(lambda: step(tokens())))
    os._exit(0)


def told_by_the_other(victim: int) -> str:
    """What the other rank raises if the victim is killed while it compiles."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    ranks = [
        spawn.Process(target=rank_main, args=(r, victim, pipes[r][1]), daemon=True)
        for r in range(2)
    ]
    ours = [pipe[0] for pipe in pipes]

    def heard(rank: int):
        assert ours[rank].poll(PATIENCE_SECONDS), f"nothing heard from rank {rank}"
        return ours[rank].recv()

    try:
        for process in ranks:
            process.start()
        ours[1].send(heard(0))
        assert heard(victim) == "compiles"
        ranks[victim].kill()
        return heard(1 - victim)
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("victim", "text"),
    [
        (1, "rank 0 of group '0' compiles forward, and rank 1 is gone: its process"),
        (
            0,
            "rank 1 of group '0' compiles forward, and the store through which the "
            "ranks talk does not answer",
        ),
    ],
)
def test_a_rank_that_is_killed_while_it_compiles(victim, text):
    assert text in told_by_the_other(victim)
