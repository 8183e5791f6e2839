"""Exits of an inference server after which it is restarted, and the limit of restarts."""

import pytest

from buckeye.config.supervision import SupervisionConfig
from buckeye.errors import RunError
from buckeye.launch import restarts
from buckeye.launch.restarts import Restarts
from buckeye.transport.restart_requests import request_restart
from tests.run.conftest import role
from tests.waiting import wait_for

LIMITS = SupervisionConfig(max_restarts=3)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def short_delay(monkeypatch):
    monkeypatch.setattr(restarts, "_FIRST_DELAY", 0.02)


def server(code, index=0):
    return role(code, kind="inference", index=index, port=4000 + index)


def tend_until(restarts, condition):
    def tended():
        restarts.tick(0)
        return condition()

    wait_for(tended)


def test_server_is_not_restarted_beyond_max_restarts(processes, tmp_path, refusal):
    processes.start(server("print('unlucky'); raise SystemExit(1)"))
    noted = []
    server_restarts = Restarts(processes, tmp_path, LIMITS, note=lambda title, cause: noted.append(title))
    with refusal(RunError):
        tend_until(server_restarts, lambda: False)
    assert noted == ["inference 0"] * 3
    assert (tmp_path / "logs" / "inference.stdout").read_text() == "unlucky\n" * 4


def test_usage_error_of_server_is_not_retried(processes, tmp_path, refusal):
    processes.start(server("print('unknown'); raise SystemExit(2)"))
    server_restarts = Restarts(processes, tmp_path, LIMITS, note=print)
    with refusal(RunError):
        tend_until(server_restarts, lambda: False)
    assert (tmp_path / "logs" / "inference.stdout").read_text() == "unknown\n"


def test_server_is_restarted_on_request(processes, tmp_path):
    request_restart(tmp_path, "http://127.0.0.1:4000", "of an earlier attempt")
    first, second = (processes.start(server(SLEEP, index)) for index in range(2))
    server_restarts = Restarts(processes, tmp_path, LIMITS, note=print)
    server_restarts.tick(0)
    assert first.running
    request_restart(tmp_path, "http://127.0.0.1:4001", "it is silent")
    request_restart(tmp_path, "http://127.0.0.2:4000", "another machine")
    tend_until(server_restarts, lambda: second not in processes.children and len(processes.children) == 2)
    assert first.running
    assert [child.role.index for child in processes.children] == [0, 1]
    assert processes.children[1].running


def test_server_is_not_restarted_after_equal_errors(processes, tmp_path, refusal):
    processes.start(server("print('RuntimeError: again'); raise SystemExit(1)"))
    server_restarts = Restarts(processes, tmp_path, LIMITS, note=print)
    with refusal(RunError):
        tend_until(server_restarts, lambda: False)
    log = (tmp_path / "logs" / "inference.stdout").read_text()
    assert log == "RuntimeError: again\n" * 2


def test_server_is_not_restarted_if_restarts_are_off(processes, tmp_path):
    processes.start(server("raise SystemExit(1)"))
    limits = SupervisionConfig(restart=False)
    with pytest.raises(RunError) as caught:
        tend_until(Restarts(processes, tmp_path, limits, note=print), lambda: False)
    assert caught.value.code == "BK-RUN-PROCESS"
