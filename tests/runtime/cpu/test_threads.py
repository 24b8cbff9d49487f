"""Test that the number of threads follows the load of the machine, and nothing else."""

import subprocess
import sys

import pytest
import torch

from greedynas.runtime.cpu.threads import LOOK_SECONDS, ThreadKeeper, cpu_seconds

CPUS = 4


class Machine:
    """A clock and a load that a test sets. This process uses all CPUs that others leave."""

    def __init__(self):
        self.now, self.everything, self.ours = 0.0, 0.0, 0.0

    def clock(self):
        return self.now

    def read(self):
        return self.everything, self.ours

    def run(self, keeper, others, looks):
        """Let time pass and return the numbers of threads after each look."""
        numbers = []
        for _ in range(looks):
            self.now += LOOK_SECONDS
            self.everything += CPUS * LOOK_SECONDS
            self.ours += (CPUS - others) * LOOK_SECONDS
            keeper.look()
            numbers.append(torch.get_num_threads())
        return numbers


@pytest.fixture
def four_threads(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(CPUS)
    yield
    torch.set_num_threads(before)


def make_keeper(machine, read=None):
    keeper = ThreadKeeper(read or machine.read, machine.clock, CPUS)
    keeper.look()
    return keeper


@pytest.mark.usefixtures("four_threads")
def test_threads_leave_busy_cpus_alone_and_come_back():
    machine = Machine()
    keeper = make_keeper(machine)
    assert machine.run(keeper, 0, 10) == [4] * 10
    assert machine.run(keeper, 1.0, 3) == [4, 3, 3]
    assert machine.run(keeper, 3.9, 3) == [3, 1, 1]
    assert machine.run(keeper, 0, 6) == [1, 1, 1, 1, 4, 4]


@pytest.mark.usefixtures("four_threads")
def test_a_short_disturbance_changes_nothing():
    machine = Machine()
    keeper = make_keeper(machine)
    for _ in range(5):
        assert machine.run(keeper, 3, 1) == machine.run(keeper, 0, 1) == [4]


@pytest.mark.usefixtures("four_threads")
def test_a_number_that_the_user_fixed_stays(monkeypatch):
    machine = Machine()
    keeper = make_keeper(machine)
    keeper.fix(3)
    assert machine.run(keeper, 3, 10) == [3] * 10
    torch.set_num_threads(4)
    keeper = make_keeper(machine)
    torch.set_num_threads(2)  # by the user, in the middle of a training
    assert machine.run(keeper, 4, 10) == [2] * 10
    torch.set_num_threads(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert machine.run(make_keeper(machine), 3, 10) == [4] * 10


@pytest.mark.usefixtures("four_threads")
def test_a_system_that_does_not_tell_its_load_keeps_all_threads():
    machine = Machine()
    assert machine.run(make_keeper(machine, lambda: None), 3, 5) == [4] * 5


WATCHER = """
import os, sys, time
from pathlib import Path
from greedynas.runtime.cpu.threads import cpu_seconds
def busy():
    fields = Path(f"/proc/{sys.argv[1]}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
busy_before, first, start = busy(), cpu_seconds(), time.process_time()
while time.process_time() - start < 0.5:
    pass
everything, ours = (new - old for new, old in zip(cpu_seconds(), first))
print(everything - ours, busy() - busy_before, ours)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell their load")
def test_the_load_of_others_is_measured_without_our_own_and_that_of_children():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            watcher = [sys.executable, "-c", WATCHER, str(busy.pid)]
            told = subprocess.run(watcher, capture_output=True, text=True, check=True)
        finally:
            busy.kill()
    others, by_busy, ours = map(float, told.stdout.split())
    assert others > by_busy - 0.05  # the busy process is no child of the watcher
    assert by_busy > 0
    assert 0.45 < ours < 0.6
    before = cpu_seconds()
    child = "import time\nstart = time.process_time()\nwhile time.process_time() - start < 0.5: pass"
    subprocess.run([sys.executable, "-c", child], check=True)
    assert cpu_seconds()[1] - before[1] > 0.45
