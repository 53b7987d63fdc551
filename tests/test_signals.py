import os
import signal
import subprocess
import sys

import pytest

from gpt.training.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_only_remembered_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.stop == 0
        os.kill(os.getpid(), number)
        assert signals.stop == number
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_the_process_at_once():
    script = (
        "import os, signal\n"
        "from gpt.training.signals import Signals\n"
        "with Signals():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('too late', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == "still here\n"
