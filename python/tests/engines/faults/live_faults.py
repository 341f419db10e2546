"""Faults of updates of a real `vllm serve`: `python live_faults.py [--faults 50] [--tp 2] [--seed 0]`, in this folder,
in an environment with vLLM for CPU, transformers and pytest. The package and its entry point must be on PYTHONPATH.

After each fault the server's tokens are those that transformers generates from the version that it says it serves,
/health and /weight_info are right, and the next update works. Requests run all the while.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":
    _engines, _tests = pathlib.Path(__file__).resolve().parents[1:3]
    sys.path[:0] = map(str, (_engines, _engines / "with_vllm", _tests))

import torch
from fault_campaign import Campaign, cases, table
from fault_servers import free_port
from fault_vllm import LLAMA
from jobs import Jobs
from vllm_configs import save_configuration

HERE = pathlib.Path(__file__).resolve().parent
POOL = 8  # contents with known tokens, which differ from each other
PROMPT = [5, 17, 200, 33, 8]
TOKENS = 6
MARGIN = 0.02  # of the largest logit, by which greedy choices must be clear
START_SECONDS = 900
REQUEST_SECONDS = 240.0


def write_pool(folder: pathlib.Path) -> list[list[int]]:
    """A model's folder, and files of other contents of it; returns the tokens of each."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    save_configuration(LLAMA, folder)
    configuration = AutoConfig.from_pretrained(folder)
    tokens: list[list[int]] = []
    for seed in itertools.count():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configuration, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(4)
        found = clear_tokens(model)
        if found is None or found in tokens:
            continue
        saved = folder if not tokens else folder / "saved"
        model.save_pretrained(saved)
        torch.save(load_file(saved / "model.safetensors"), folder / f"contents-{len(tokens):02}.pt")
        tokens.append(found)
        if len(tokens) == POOL:
            return tokens
    raise AssertionError


def clear_tokens(model: Any) -> list[int] | None:
    """What it generates; None if a choice is near a tie."""
    answer = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for logits in answer.logits:
        first, second = logits[0].float().topk(2).values.tolist()
        if first - second < MARGIN * abs(first):
            return None
    found: list[int] = answer.sequences[0, len(PROMPT) :].tolist()
    return found


class LiveServer:
    """A `vllm serve`, with what a Campaign asks of a server."""

    def __init__(self, folder: pathlib.Path, world: int, tokens: list[list[int]], model: pathlib.Path) -> None:
        self.world, self.tokens = world, tokens
        self.requests = 0  # that were answered meanwhile
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(HERE.parent / "with_vllm"), os.environ.get("PYTHONPATH", "")]
            ),
            "TESSERA_RUNTIME_DIR": str(folder / "run"),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "tessera",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it wants a NUMA node for each rank
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        }
        options = [
            "--skip-tokenizer-init",
            "--enforce-eager",
            "--max-model-len",
            "128",
            "--dtype",
            "bfloat16",
            "--max-num-seqs",
            "4",
        ]
        options += ["--port", str(port), "--tensor-parallel-size", str(world), "--served-model-name", "m"]
        options += ["--weight-transfer-config", '{"backend": "tessera"}']
        options += ["--worker-extension-cls", "fault_vllm.FaultyExtension"]
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [pathlib.Path(sys.executable).parent / "vllm", "serve", str(model), *options],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START_SECONDS
        while not self.healthy():
            assert self._process.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.5)
        self._pids = [found[0] for found in self.call("process_id")]
        self._over = threading.Event()
        self._client = threading.Thread(target=self._ask)
        self._client.start()

    def _http(self, path: str, body: Any = None, timeout: float = REQUEST_SECONDS) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"{}")

    def healthy(self) -> bool:
        try:
            self._http("health", timeout=30)
        except OSError:
            return False
        return True

    def generate(self) -> list[int]:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        found: list[int] = self._http("v1/completions", body)["choices"][0]["token_ids"]
        return found

    def _ask(self) -> None:
        while not self._over.wait(0.05):
            assert len(self.generate()) == TOKENS
            self.requests += 1

    def pid(self, rank: int) -> int:
        pid: int = self._pids[rank]
        return pid

    def call(self, method: str, *args: Any) -> list[Any]:
        found: list[Any] = self._http("collective_rpc", {"method": method, "args": args})["results"]
        return found

    @property
    def paused(self) -> bool:
        return bool(self._http("is_paused")["is_paused"])

    @property
    def shown(self) -> str:
        return str(self._http("weight_info")["weight_version"])

    def serves(self, runs: Mapping[str, int]) -> int:
        """The number of the contents that all ranks say they have, if it generates their tokens."""
        while True:
            (said,) = self._said()
            run, version, torn = said
            assert not torn, said
            number = runs[run] + version if version else 0
            found = None if self.paused else self.generate()
            if self._said() == {said}:  # what a dead trainer had asked for is done
                break
        assert found in (None, self.tokens[number % POOL]), (said, number, found)
        assert self.healthy()
        return number

    def _said(self) -> set[tuple[str, int, bool]]:
        return {(each["run"], each["version"], each["torn"]) for each in self.call("tessera_status")}

    def close(self) -> None:
        self._over.set()
        self._client.join(REQUEST_SECONDS)
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera-") as name, Jobs(pathlib.Path(name), 36000.0, True) as jobs:
        folder = pathlib.Path(name)
        model = folder / "model"
        model.mkdir()
        tokens = write_pool(model)
        print(f"{POOL} versions with known tokens after {time.monotonic() - began:.0f} s", flush=True)
        server = LiveServer(folder, given.tp, tokens, model)
        print(f"up after {time.monotonic() - began:.0f} s", flush=True)
        campaign = Campaign(jobs, folder, given.tp, 1, timeout=10.0, model=str(model), server=server)
        try:
            assert server.serves(campaign.runs) == 0
            assert not campaign.meet()
            campaign.check_next()
            drawn = cases(random.Random(given.seed), campaign, interrupts=False)
            for number, case in enumerate(itertools.islice(drawn, given.faults), 1):
                outcome = campaign.run(case)
                print(f"{number:4} tp{given.tp} {case} {outcome.what} {outcome.error[:100]}", flush=True)
            campaign.leave()
            print(table(campaign.outcomes))
            print(f"{time.monotonic() - began:.0f} s, {server.requests} requests meanwhile; one server, alive")
        except BaseException:
            print(server.log.read_text()[-6000:])
            raise
        finally:
            campaign.close()


if __name__ == "__main__":
    main()
