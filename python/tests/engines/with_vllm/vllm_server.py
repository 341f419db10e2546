"""A real `vllm serve` of a small model, and what transformers would answer in its place."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import torch
import vllm_models as models

LIMIT = 900.0  # seconds, for it to start and for an answer
HERE = str(pathlib.Path(__file__).resolve().parent)
MARGIN = 0.03  # of the largest logit: in bf16 two tokens that are nearer may change places
SHAKEN, SHAKES = 2**-7, 6  # of a weight, twice the step of bf16; and how often


class Server:
    """Until close(). `folder` holds the model, and gets the log. `options`: further ones of `vllm serve`."""

    def __init__(
        self,
        folder: pathlib.Path,
        ranks: int = 1,
        *,
        in_place: bool = True,
        options: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        port = models.free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--weight-transfer-config", '{"backend": "tessera"}'),
            *("--worker-extension-cls", "vllm_counting.Counting", "--tensor-parallel-size", str(ranks)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", "--skip-tokenizer-init"),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"),
            *options,
        ]
        found = os.environ.get("PYTHONPATH")
        surroundings = {
            "VLLM_PLUGINS": "tessera",
            "VLLM_SERVER_DEV_MODE": "1",  # for collective_rpc
            "VLLM_LOGGING_LEVEL": "INFO",
            "TESSERA_VLLM_CPU_IN_PLACE": str(int(in_place)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": HERE if found is None else f"{HERE}:{found}",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | surroundings | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await()
        except BaseException:
            self.close()
            raise

    def _await(self) -> None:
        end = time.monotonic() + LIMIT
        while True:
            try:
                self.get("/health")
                return
            except (OSError, RuntimeError, http.client.HTTPException):
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server does not start: {self.log.read_text()[-3000:]}") from None
                time.sleep(0.5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, with all its processes."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=LIMIT)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                log = self.log.read_text()[-3000:]
                raise RuntimeError(f"{path} answered {answer.status}: {answer.read()[:500]!r}; its log ends: {log}")
        except BaseException:
            connection.close()
            raise
        return connection, answer

    def get(self, path: str) -> Any:
        connection, answer = self._ask("GET", path)
        found = answer.read()
        connection.close()
        return json.loads(found) if found else None

    def post(self, path: str, body: Any) -> Any:
        connection, answer = self._ask("POST", path, body)
        found = answer.read()
        connection.close()
        return json.loads(found) if found else None

    def counts(self) -> list[dict[str, Any]]:
        """By rank; see vllm_counting."""
        return list(self.post("/collective_rpc", {"method": "tessera_counts"})["results"])

    def tokens(self, prompt: list[int], length: int) -> list[int]:
        """The most likely ones."""
        found: list[int] = self.post("/v1/completions", _asked(prompt, length))["choices"][0]["token_ids"]
        return found

    def shown(self, prompt: list[int]) -> str:
        """The version in the header of an answer."""
        connection, answer = self._ask("POST", "/v1/completions", _asked(prompt, 1))
        answer.read()
        connection.close()
        return str(answer.getheader("X-Weight-Version"))

    def stream(self, prompt: list[int], length: int) -> Iterator[int]:
        """The number of tokens in each part of an answer, as it arrives."""
        connection, answer = self._ask("POST", "/v1/completions", _asked(prompt, length) | {"stream": True})
        try:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield sum(len(each.get("token_ids") or ()) for each in json.loads(line[6:])["choices"])
        finally:
            connection.close()


def _asked(prompt: list[int], length: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


class Reference:
    """A model of transformers, with new random weights for each version."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.model: Any = models.hf_model(folder)
        self._exact: Any = models.hf_model(folder, torch.float32)

    @torch.no_grad()
    def fill(self, seed: int) -> dict[str, torch.Tensor]:
        """New weights, of which answers depend enough to tell them apart; returns the checkpoint."""
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        return models.checkpoint_of(self.model)

    def certain(
        self, seed: int, length: int, candidates: int = 128, width: int = 6
    ) -> list[tuple[list[int], list[int]]]:
        """Prompts and their answers that rounding does not decide: bf16 and fp32 agree, no two tokens are nearly
        equally likely, and none changes with weights that are off by SHAKEN: experts are chosen by numbers that may be
        nearly equal, too. The surest first."""
        generator = torch.Generator().manual_seed(seed)
        words = self.model.config.vocab_size
        prompts = torch.randint(3, words, (candidates, width), generator=generator)
        answers, margins = self._generate(self.model, prompts, length)
        same = torch.ones(candidates, dtype=torch.bool)
        for k in range(1 + SHAKES):
            self._shake(generator, SHAKEN if k > 0 else 0)
            exact, exact_margins = self._generate(self._exact, prompts, length)
            same &= (answers == exact).all(1)
            margins = torch.minimum(margins, exact_margins)
        sure = [
            (float(margins[k]), prompts[k].tolist(), answers[k].tolist())
            for k in range(candidates)
            if same[k] and margins[k] >= MARGIN
        ]
        return [(prompt, answer) for _, prompt, answer in sorted(sure, reverse=True)]

    @torch.no_grad()
    def _shake(self, generator: torch.Generator, share: float) -> None:
        """Gives the model in fp32 the weights, each off by up to that share of it."""
        for exact, parameter in zip(self._exact.parameters(), self.model.parameters(), strict=True):
            exact.copy_(parameter)
            exact.mul_(1 + share * (2 * torch.rand(exact.shape, generator=generator) - 1))

    @staticmethod
    def _generate(model: Any, prompts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The answers, and the smallest margin of each."""
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        first, second = torch.stack(made.logits).float().topk(2).values.unbind(-1)
        return made.sequences[:, prompts.shape[1] :], ((first - second) / first.abs()).amin(0)
