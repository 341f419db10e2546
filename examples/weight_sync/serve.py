"""The inference job: embeds sentences over HTTP on 2 tensor-parallel ranks, with the newest weights of the trainer.

    python examples/weight_sync/serve.py
    curl -d '{"sentences": ["A cat sleeps.", "A kitten naps."]}' http://127.0.0.1:8000/embed

It starts with random weights, takes each version between two requests, and says which one it used, and which trainer's:
trainers are counted, since the next one may start over with its versions. Ctrl-C ends it.
"""

import argparse
import asyncio
import contextlib
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import tessera
import torch
import torch.distributed as dist
import uvicorn
from engine import Engine, join, parallel_model
from model import tokenize
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

RANKS = 2
LARGEST = 64  # sentences in a request
PATIENCE = 60  # seconds for an answer
DAY = 86400  # seconds to wait for a trainer, or for its next version
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def follow(engine: Engine) -> None:
    """Takes every version that a trainer sends. Each rank runs it in its main thread, until Ctrl-C."""
    with tessera.connect(
        "weights", role="inference", peer="trainer", rank=engine.rank, world=RANKS, timeout=DAY
    ) as bus:
        batch = bus.register(engine.model, mode="staged")
        while True:
            try:
                handle = batch.stage(blocking=False, timeout=DAY)
                handle.wait()  # requests are answered in the meantime, with the old weights
                trainer = batch.stats.sessions  # one that registers again counts as the next
                engine.swap(batch, trainer)  # batch.commit(), between two requests
                report(engine, f"took version {engine.version.number} of trainer {engine.version.trainer}")
            except tessera.PeerLostError as error:
                report(engine, f"{error}: version {engine.version.number} stays until the next trainer comes")


def report(engine: Engine, text: str) -> None:
    if engine.rank == 0:
        print(text, flush=True)


def application(engine: Engine) -> Starlette:
    async def embed(request: Request) -> JSONResponse:
        try:
            sentences = (await request.json())["sentences"]
            if not isinstance(sentences, list) or not 0 < len(sentences) <= LARGEST:
                raise ValueError(f"a list of 1 to {LARGEST}")
            if not all(isinstance(sentence, str) for sentence in sentences):
                raise ValueError("strings")
            tokens = tokenize(sentences)
        except (ValueError, TypeError, KeyError) as error:
            return JSONResponse({"error": f'give {{"sentences": ["...", ...]}}: {error}'}, status_code=400)
        try:
            version, vectors = await asyncio.wait_for(asyncio.wrap_future(engine.embed(tokens)), PATIENCE)
        except TimeoutError:
            return JSONResponse({"error": f"not answered within {PATIENCE} s"}, status_code=503)
        answer = {"version": version.number, "trainer": version.trainer, "embeddings": vectors.tolist()}
        return JSONResponse(answer)

    async def status(_: Request) -> JSONResponse:
        return JSONResponse(engine.status())

    return Starlette(routes=[Route("/embed", embed, methods=["POST"]), Route("/status", status)])


@contextlib.contextmanager
def serving(engine: Engine, port: int) -> Iterator[None]:
    """On rank 0: HTTP, in a separate thread."""
    config = uvicorn.Config(
        application(engine), host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    listener.listen()
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    print(f"serving on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@contextlib.contextmanager
def joined(port: int | None) -> Iterator[int]:
    """This rank among the two. Rank 0 starts the other one, with its own arguments and the port where they join."""
    store = dist.TCPStore("127.0.0.1", port or 0, RANKS, is_master=port is None, wait_for_workers=False)
    if port is not None:
        join(store, 1, RANKS)
        yield 1
        dist.destroy_process_group()
        return
    # In a session of its own: Ctrl-C is for rank 0, which then ends the other.
    command = [sys.executable, *sys.argv, "--join", str(store.port)]
    with subprocess.Popen(command, start_new_session=True) as other:
        try:
            join(store, 0, RANKS)
            yield 0
            dist.destroy_process_group()
            other.wait(PATIENCE)
        finally:
            other.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights here; the trainer has fp32")
    parser.add_argument("--check", type=pathlib.Path, help="folder of the trainer's --check, to compare every version")
    parser.add_argument("--join", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # SIGTERM as Ctrl-C; SIGINT, too: a shell script that starts a job in the background lets it ignore that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    torch.set_num_threads(1)

    with contextlib.suppress(KeyboardInterrupt), joined(options.join) as rank:
        engine = Engine(parallel_model(DTYPES[options.dtype]), options.check)
        try:
            with serving(engine, options.port) if rank == 0 else contextlib.nullcontext():
                follow(engine)
        except KeyboardInterrupt:
            if engine.failure:
                sys.exit(f"rank {rank}: {engine.failure}")
        finally:
            if rank == 0:
                engine.close()


if __name__ == "__main__":
    main()
