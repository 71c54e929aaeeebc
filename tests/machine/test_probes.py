"""Trials are real, and what hangs or dies in one is a result."""

import ctypes
import http.server
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from pretrain.machine import doctor, probes

multiprocessing.set_forkserver_preload(
    ["pretrain.machine.probes", "pretrain.model.build", "pretrain.machine.doctor", "pytest"]
)
STEP = {"make": doctor.tiny_model, "device": "cpu"}


class Bigram(nn.Module):
    """The smallest model with a loss: what follows a token."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 16)

    def forward(self, inputs_BT, targets_BT):
        return nn.functional.cross_entropy(self.table(inputs_BT).flatten(0, 1), targets_BT.flatten())


class Broken(Bigram):
    """Its loss is not finite."""

    def forward(self, inputs_BT, targets_BT):
        return super().forward(inputs_BT, targets_BT) * float("nan")


SMALL = {"device": "cpu", "precision": "no"}


def hang(seconds: float = 60) -> dict:
    time.sleep(seconds)
    return {}


def hang_with_a_child(note: str) -> dict:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(note, "w") as file:
        file.write(str(child.pid))
    return hang()


def crash() -> dict:
    ctypes.string_at(0)
    return {}


def leave(status: int) -> dict:
    print("the last words")
    sys.stdout.flush()
    os._exit(status)


def one_dies(rank: int) -> dict:
    return hang() if rank else leave(3)


def refuse() -> dict:
    raise ValueError("no, because\nof details")


def without_compiler(**given) -> dict:
    import torch._inductor.config

    torch._inductor.config.cpp.cxx = (None, "no-such-g++")
    return probes.training_step(**given)


def answer(number: int) -> dict:
    return {"number": number}


def test_work_is_done_in_another_process_and_the_first_ones_answer_is_returned():
    assert probes.attempt(answer, [{"number": 7}, {"number": 8}], 60) == probes.Result({"number": 7})


def test_a_hang_is_a_result_within_its_time_and_leaves_no_process(tmp_path):
    probes.attempt(answer, [{"number": 7}], 60)  # starts the server of processes, which takes longer than 3 s
    start = time.monotonic()
    result = probes.attempt(hang_with_a_child, [{"note": str(tmp_path / "pid")}], 3)
    assert result == probes.Result({}, "no answer in 3 s") and time.monotonic() - start < 30  # of its 60
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not os.path.exists(f"/proc/{pid}") or " Z " in open(f"/proc/{pid}/stat").read():
            return
        time.sleep(0.1)
    pytest.fail("the trial's child still runs")


def test_a_crash_an_exit_and_an_exception_are_results():
    assert "SIGSEGV" in probes.attempt(crash, [{}], 60).problem
    assert probes.attempt(one_dies, [{"rank": 1}, {"rank": 0}], 60).problem.endswith("exit status 3: the last words")
    assert probes.attempt(refuse, [{}], 60).problem == "ValueError: no, because"


def test_two_processes_sum_over_gloo_and_measure_their_bandwidth():
    result = probes.together(2, "gloo", 60, megabytes=4)
    assert not result.problem and result.value["bytes_per_second"] > 1e6


def test_steps_train_gpt2_in_fp32_and_half_precision_and_what_is_not_finite_is_a_problem():
    result = probes.attempt(probes.training_step, [STEP | {"precision": "no", "compiled": False}], 120)
    assert 0 < result.value["seconds"] <= result.value["first_seconds"] and 0 < result.value["loss"] < 7
    half = SMALL | {"make": Bigram, "precision": "bf16", "compiled": False}
    assert 0 < probes.attempt(probes.training_step, [half], 60).value["loss"] < 5
    broken = SMALL | {"make": Broken, "compiled": False}
    assert probes.attempt(probes.training_step, [broken], 60).problem.endswith("not finite")


@pytest.mark.slow
def test_a_compiled_step_is_really_compiled(tmp_path):
    result = probes.attempt(probes.training_step, [STEP | {"precision": "no", "compiled": True}], 300)
    assert not result.problem and result.value["first_seconds"] > 10 * result.value["seconds"]


@pytest.mark.slow
def test_without_a_compiler_the_compiled_step_fails_with_the_compilers_name():
    result = probes.attempt(without_compiler, [SMALL | {"make": Bigram, "compiled": True}], 120)
    assert "no-such-g++" in result.problem and "compiler" in result.problem.lower()


def test_a_disk_is_written_and_left_as_it_was(tmp_path):
    assert probes.write_speed(tmp_path, 16) > 1e5 and not list(tmp_path.iterdir())
    with pytest.raises(OSError):
        probes.write_speed(tmp_path / "none", 8)


def test_addresses_answer_refuse_hang_or_are_not_there():
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/slow":
                over.wait(60)
            self.send_response(404 if self.path == "/none" else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    over = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        dead, wrong = "http://127.0.0.1:9", "nonsense"
        found = probes.reach([url, f"{url}/none", f"{url}/slow", dead, wrong], 2)
    finally:
        over.set()
        server.shutdown()
        server.server_close()
    assert found[url] == "" and found[f"{url}/none"] == "HTTP 404 Not Found"
    assert "timed out" in found[f"{url}/slow"] and found[dead] and "unknown url type" in found[wrong]


def test_a_load_is_bounded_and_measures_its_rate():
    readings = list(probes.load(["cpu"], 0.5, "bf16", size=64, interval=0.2))
    assert 1 <= len(readings) <= 3
    assert readings[-1]["cpu"]["flops_per_second"] > 0 and readings[-1]["cpu"]["watts"] is None
    with pytest.raises(RuntimeError):
        list(probes.load(["nothing"], 2, "bf16", size=64, interval=0.2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
def test_a_card_attends_and_multiplies():
    precision = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
    result = probes.attempt(probes.attention, [{"device": "cuda", "precision": precision}], 120)
    assert not result.problem and "math" in result.value and result.value["training"] in result.value
    assert list(probes.load(["cuda:0"], 3, precision, interval=1.0))[-1]["cuda:0"]["flops_per_second"] > 1e12
