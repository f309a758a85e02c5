"""A stop signal is a wish, the second interrupt is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlmca.run.signals import StopSignal


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_the_first_signal_is_a_wish_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.received == number
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_interrupt_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_in_another_thread_nothing_is_changed() -> None:
    seen = []

    def body() -> None:
        with StopSignal() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_process_ends_its_step_and_exits_by_itself() -> None:
    code = (
        "import time\nfrom rlmca.run.signals import StopSignal\n"
        "with StopSignal() as stop:\n    print('ready', flush=True)\n    while not stop.requested: time.sleep(0.01)\nprint('saved')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "saved\n" and process.returncode == 0
