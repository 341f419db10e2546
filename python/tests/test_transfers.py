"""Tensors as they really are, from one job's process into another's: every bit, wherever it lies."""

from __future__ import annotations

import numpy
import pytest
import torch
from jobs import Jobs, Rank

import tessera


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def send_once(rank: Rank, make: object, *arguments: object, **options: object) -> object:
    tensors = make(*arguments)
    with rank.connect("weights", peer="inference") as bus, bus.register(tensors) as batch:
        batch.send(timeout=60)
        return batch.skipped


def take_once(rank: Rank, make: object, *arguments: object) -> object:
    tensors = make(*arguments)
    with rank.connect("weights", peer="trainer") as bus, bus.register(tensors) as batch:
        batch.recv(timeout=60)
    return tensors

def odd(filled):
    a = numpy.frombuffer(bytearray(4*12+1), numpy.uint8)[1:].view(numpy.float32).reshape(3,4)
    b = torch.zeros(3,4,dtype=torch.float32)
    if filled: a[:] = numpy.arange(12).reshape(3,4); b += 5; return {"a": a, "b": b, "c":a.copy()}
    return {"a": b, "b": a, "c": numpy.frombuffer(bytearray(2*12+1), numpy.uint8)[1:].view(numpy.float16).reshape(3,4)}

def test_odd(jobs):
    jobs.start("trainer", send_once, odd, True)
    jobs.start("inference", take_once, odd, False)
    print(jobs.results())
