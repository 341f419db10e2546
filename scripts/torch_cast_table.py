#!/usr/bin/env python3
"""Writes what torch makes of casts between f32 and smaller floats, as the tables of src/codec/float/float_bits_test.cc.

Needs torch 2.13 (its E4M3 saturates). Run from the repository's root:

    python3 scripts/torch_cast_table.py
"""

import pathlib
import random
import struct

import torch

OUT = pathlib.Path("src/codec/testdata")


def bits_of(values: torch.Tensor, unsigned: torch.dtype) -> list[int]:
    return values.view(unsigned).tolist()


def inputs() -> list[int]:
    """f32 bit patterns: edges of every format, their neighbours, and random ones of every magnitude."""
    edges = [0.0, 2**-149, 2**-126, 2**-133, 2**-24, 2**-25, 2**-14, 2**-9, 2**-10, 2**-16, 2**-17, 2**-6]
    edges += [1.0, 1.0625, 1.1875, 1.125, 240.0, 448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0, 65520.0, 65536.0]
    edges += [struct.unpack("f", struct.pack("I", bits))[0] for bits in (0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF)]
    patterns = set()
    for edge in edges:
        centre = struct.unpack("I", struct.pack("f", edge))[0]
        patterns.update(p for p in range(centre - 1, centre + 2) if p >= 0)
    patterns.update([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    draw = random.Random(2025)
    for exponent in list(range(100, 146)) * 4:
        patterns.add(exponent << 23 | draw.getrandbits(23))
        patterns.add(exponent << 23 | draw.getrandbits(4) << 19)  # ties of the 8-bit formats
    return sorted(p | sign for p in patterns for sign in (0, 1 << 31))


def write(name: str, lines: list[str]) -> None:
    header = f"// Made by scripts/torch_cast_table.py with torch {torch.__version__.split('+')[0]}.\n"
    (OUT / name).write_text(header + "".join(line + "\n" for line in lines))


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    patterns = inputs()
    x = torch.tensor(patterns, dtype=torch.int64).to(torch.uint32).view(torch.float32)
    columns = [
        bits_of(x.to(torch.float16), torch.uint16),
        bits_of(x.to(torch.bfloat16), torch.uint16),
        bits_of(x.to(torch.float8_e4m3fn), torch.uint8),
        bits_of(x.to(torch.float8_e5m2), torch.uint8),
    ]
    write("torch_encode.inc", [
        f"{{0x{f32:08X}, 0x{f16:04X}, 0x{bf16:04X}, 0x{e4m3:02X}, 0x{e5m2:02X}}},"
        for f32, f16, bf16, e4m3, e5m2 in zip(patterns, *columns)
    ])
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("e8m0", torch.float8_e8m0fnu)):
        decoded = bits_of(codes.view(dtype).to(torch.float32), torch.uint32)
        write(f"torch_{name}.inc",
              [" ".join(f"0x{bits:08X}," for bits in decoded[i:i + 8]) for i in range(0, 256, 8)])


if __name__ == "__main__":
    main()
