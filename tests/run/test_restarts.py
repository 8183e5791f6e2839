"""Which ends of an inference server are made good, and how often."""

import sys

import pytest

from buckeye.config.supervision import SupervisionConfig
from buckeye.errors import RunError
from buckeye.launch.plan import Role
from buckeye.launch.processes import Processes
from buckeye.launch.restarts import Restarts
from buckeye.transport.inference_servers import request_restart
from tests.waiting import wait_for

LIMITS = SupervisionConfig(max_restarts=3)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def processes(tmp_path):
    started = Processes(tmp_path, {})
    yield started
    started.stop_all()


def server(code, index=0):
    return Role(
        kind="inference",
        index=index,
        argv=(sys.executable, "-c", code),
        port=4000 + index,
        config_name="unused",
        log_name=f"inference_{index}",
    )


def tend_until(restarts, condition):
    def tended():
        restarts.tend(0)
        return condition()

    wait_for(tended)


def test_the_fourth_end_is_the_last(processes, tmp_path):
    processes.start(server("print('out of luck'); raise SystemExit(1)"))
    noted = []
    restarts = Restarts(processes, tmp_path, LIMITS, first_delay=0.02, note=noted.append)
    with pytest.raises(RunError, match=r"(?s)Inference 0 failed with exit code 1.*out of luck.*3 times"):
        tend_until(restarts, lambda: False)
    assert [(e.title, e.cause) for e in noted] == [("inference 0", "Inference 0 failed with exit code 1")] * 3
    assert (tmp_path / "logs" / "inference_0.stdout").read_text() == "out of luck\n" * 4


def test_wrong_settings_are_not_tried_again(processes, tmp_path):
    processes.start(server("print('no such model'); raise SystemExit(2)"))
    restarts = Restarts(processes, tmp_path, LIMITS, first_delay=0.02)
    with pytest.raises(RunError, match=r"(?s)exit code 2.*no such model"):
        tend_until(restarts, lambda: False)
    assert (tmp_path / "logs" / "inference_0.stdout").read_text() == "no such model\n"


def test_a_server_is_ended_on_request_and_the_others_stay(processes, tmp_path):
    request_restart(tmp_path, "http://127.0.0.1:4000", "of an earlier attempt")
    first, second = (processes.start(server(SLEEP, index)) for index in range(2))
    restarts = Restarts(processes, tmp_path, LIMITS, first_delay=0.02)
    restarts.tend(0)
    assert first.running
    request_restart(tmp_path, "http://127.0.0.1:4001", "it is silent")
    request_restart(tmp_path, "http://127.0.0.2:4000", "another machine")
    tend_until(restarts, lambda: second not in processes.children and len(processes.children) == 2)
    assert first.running
    assert [child.role.index for child in processes.children] == [0, 1]
    assert processes.children[1].running


def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(processes, tmp_path):
    processes.start(server("print('RuntimeError: the same again'); raise SystemExit(1)"))
    restarts = Restarts(processes, tmp_path, LIMITS, first_delay=0.02)
    with pytest.raises(RunError, match=r"(?s)the same again.*in the same way before, also at step 0"):
        tend_until(restarts, lambda: False)
    log = (tmp_path / "logs" / "inference_0.stdout").read_text()
    assert log == "RuntimeError: the same again\n" * 2


def test_without_restarts_the_first_end_is_the_last(processes, tmp_path):
    processes.start(server("raise SystemExit(1)"))
    limits = SupervisionConfig(restart=False)
    with pytest.raises(RunError, match="exit code 1"):
        tend_until(Restarts(processes, tmp_path, limits, first_delay=0.02), lambda: False)
