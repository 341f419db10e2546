"""The `tessera` command as its users meet it: real processes, exit statuses, one clear line for each mistake.

    command_test.py PATH_OF_TESSERA [unittest arguments]

Uses the standard library alone; checkpoints are written and read by hand.
"""

import json
import math
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree

TESSERA = None
SIZES = {"F32": 4, "BF16": 2, "I64": 8, "F64": 8, "U8": 1}
HANG = 60  # seconds; sanitizers are slow
LAUNCHERS = ("TESSERA_RANK", "TESSERA_WORLD_SIZE", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


def write_safetensors(path, tensors, header=None):
    """tensors: name -> (dtype, shape, bytes)."""
    entries, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = header if header is not None else json.dumps(entries).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    metadata = header.pop("__metadata__", {})
    return metadata, {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()}


def floats(count, scale=1.0):
    return struct.pack(f"<{count}f", *(scale * i for i in range(count)))


class CommandTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="tessera-cli-")
        self.path = pathlib.Path(self.folder.name)
        self.environment = dict(os.environ, TESSERA_RUNTIME_DIR=str(self.path / "run"))
        for secret in ("TESSERA_TOKEN", "TESSERA_TOKEN_FILE"):
            self.environment.pop(secret, None)
        self.processes = []
        self.model = self.path / "model.safetensors"
        write_safetensors(self.model, {
            "w": ("F32", [6, 8], floats(48)),
            "bias": ("F32", [8], floats(8, 0.5)),
            "steps": ("I64", [], struct.pack("<q", 7)),
            "none": ("F32", [0, 4], b""),
        })

    def tearDown(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.folder.cleanup()

    def start(self, *arguments, program=None):
        process = subprocess.Popen([program or TESSERA, *map(str, arguments)], env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def finish(self, process):
        output, errors = process.communicate(timeout=HANG)
        return process.returncode, output, errors

    def run_command(self, *arguments):
        return self.finish(self.start(*arguments))

    def sender(self, rank=0, world=1, layout=".*=1:R", checkpoints=None, *more):
        files = [part for path in (checkpoints or [self.model]) for part in ("--checkpoint", path)]
        return self.start("send", "--job", "trainer", "--peer", "inference", "--rank", rank, "--world", world,
                          "--layout", layout, "--timeout", 20, "--json", *files, *more)

    def receiver(self, rank=0, world=1, layout=".*=1:R", *more):
        return self.start("recv", "--job", "inference", "--peer", "trainer", "--rank", rank, "--world", world,
                          "--layout", layout, "--timeout", 20, "--json", *more)

    def wait_for(self, folder, pattern):
        deadline = time.monotonic() + HANG
        while not list(folder.glob(pattern)):
            self.assertLess(time.monotonic(), deadline, f"no {pattern} in {folder}")
            time.sleep(0.01)

    def assert_one_line(self, result, status, *texts):
        code, _, errors = result
        self.assertEqual(code, status, errors)
        lines = [line for line in errors.splitlines() if line.startswith("tessera: ")]
        self.assertEqual(len(lines), 1, errors)
        for text in texts:
            self.assertIn(text, lines[0])


class Transfers(CommandTest):
    def test_rows_become_columns_and_files_say_what_they_hold(self):
        out = self.path / "out"
        processes = [self.sender(rank, 2, "(w|bias|none)=2:S0", None, "--layout", ".*=2:R")
                     for rank in range(2)]
        processes += [self.receiver(rank, 2, "w=tp=2:S1", "--layout", ".*=tp=2:R", "--out", out, "--verify", self.model)
                      for rank in range(2)]
        for process in processes:
            code, output, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
            self.assertEqual(json.loads(output)["bytes_moved"], json.loads(output)["bytes_lower_bound"])
        for rank in range(2):
            metadata, tensors = read_safetensors(out / f"rank-0000{rank}.safetensors")
            self.assertEqual(metadata["version"], "1")
            self.assertEqual(json.loads(metadata["tensors"])["w"],
                             {"shape": [6, 8], "dtype": "f32", "layout": "tp=2:S1"})
            values = struct.unpack("<24f", tensors["w"][2])
            self.assertEqual(list(values), [8.0 * r + 4 * rank + c for r in range(6) for c in range(4)])
            self.assertEqual(tensors["steps"], ("I64", [], struct.pack("<q", 7)))
        self.assertEqual(sorted(p.name for p in out.iterdir()), ["rank-00000.safetensors", "rank-00001.safetensors"])

    def test_a_cast_touches_floats_alone_and_several_versions_follow_each_other(self):
        second = self.path / "second.safetensors"
        write_safetensors(second, {
            "w": ("F32", [6, 8], floats(48, 2.0)),
            "bias": ("F32", [8], floats(8, 3.0)),
            "steps": ("I64", [], struct.pack("<q", 8)),
            "none": ("F32", [0, 4], b""),
        })
        out = self.path / "out"
        sender = self.sender(0, 1, ".*=1:R", [self.model, second], "--version", 5)
        receiver = self.receiver(0, 1, ".*=1:R", "--dtype", "bf16", "--count", 2, "--out", out,
                                 "--verify", self.model, "--verify", second)
        self.assertEqual(self.finish(sender)[0], 0)
        code, output, errors = self.finish(receiver)
        self.assertEqual(code, 0, errors)
        self.assertEqual([t["version"] for t in json.loads(output)["transfers"]], [5, 6])
        metadata, tensors = read_safetensors(out / "rank-00000.safetensors")
        self.assertEqual(metadata["version"], "6")
        self.assertEqual(tensors["w"][0], "BF16")
        self.assertEqual(tensors["steps"][2], struct.pack("<q", 8))

    def test_what_has_changed_alone_is_sent_where_both_sides_ask(self):
        second = self.path / "second.safetensors"
        values = [float(i) for i in range(4096)]
        write_safetensors(self.model, {"w": ("F32", [64, 64], struct.pack("<4096f", *values))})
        values[77] = -1.0
        write_safetensors(second, {"w": ("F32", [64, 64], struct.pack("<4096f", *values))})
        sender = self.sender(0, 1, ".*=1:R", [self.model, second], "--delta")
        receiver = self.receiver(0, 1, ".*=1:R", "--count", 2, "--delta", "--verify", self.model, "--verify", second)
        for process in (sender, receiver):
            code, output, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
            first, then = json.loads(output)["transfers"]
            self.assertNotIn("delta", first)
            self.assertEqual(then["delta"]["routes"], 1)
            self.assertEqual(then["delta"]["full_bytes"], 4 * 4096)
            self.assertLess(then["delta"]["bytes"], 64)

    def test_a_checkpoint_sent_as_partial_terms_adds_up(self):
        senders = [self.sender(rank, 2, ".*=2:Psum") for rank in range(2)]
        receiver = self.receiver(0, 1, ".*=1:R", "--verify", self.model)
        for process in [*senders, receiver]:
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)

    def test_verification_against_another_file_fails_with_status_1(self):
        other = self.path / "other.safetensors"
        write_safetensors(other, {
            "w": ("F32", [6, 8], floats(48, 1.5)),
            "bias": ("F32", [8], floats(8, 0.5)),
            "steps": ("I64", [], struct.pack("<q", 7)),
            "none": ("F32", [0, 4], b""),
        })
        self.sender()
        self.assert_one_line(self.finish(self.receiver(0, 1, ".*=1:R", "--verify", other)), 1, "w")

    def kill_in_mid_stream(self, victim, survivor, out):
        """Kills `victim` once a version has arrived; `survivor` stands still meanwhile, so that others are to come."""
        self.wait_for(out, "*.safetensors")
        survivor.send_signal(signal.SIGSTOP)
        victim.kill()
        self.assertEqual(self.finish(victim)[0], -signal.SIGKILL)
        survivor.send_signal(signal.SIGCONT)

    def start_stream(self, out):
        versions = 300
        return (self.sender(0, 1, ".*=1:R", [self.model] * versions),
                self.receiver(0, 1, ".*=1:R", "--count", versions, "--out", out))

    def assert_ended_by_death(self, result, name, out):
        self.assert_one_line(result, 4, name)
        self.assertNotIn("closed the batch", result[2])  # which is what a process says that ends well
        self.assertEqual([p.name for p in out.iterdir()], ["rank-00000.safetensors"])
        self.assertEqual(read_safetensors(out / "rank-00000.safetensors")[1], read_safetensors(self.model)[1])

    def test_a_killed_sender_ends_the_receiver_with_status_4_and_no_partial_file(self):
        out = self.path / "out"
        sender, receiver = self.start_stream(out)
        self.kill_in_mid_stream(sender, receiver, out)
        self.assert_ended_by_death(self.finish(receiver), "trainer/0", out)

    def test_a_killed_receiver_ends_the_sender_with_status_4_and_no_partial_file(self):
        out = self.path / "out"
        sender, receiver = self.start_stream(out)
        self.kill_in_mid_stream(receiver, sender, out)
        self.assert_ended_by_death(self.finish(sender), "inference/0", out)

    def test_skipped_tensors_are_not_received(self):
        out = self.path / "out"
        sender = self.sender()
        receiver = self.receiver(0, 1, ".*=1:R", "--skip", "bias|no.e", "--skip", "st", "--out", out)
        for process in (sender, receiver):
            code, output, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
            self.assertEqual((json.loads(output)["tensors"], json.loads(output)["skipped"]), (2, 2))
        self.assertEqual(set(read_safetensors(out / "rank-00000.safetensors")[1]), {"w", "steps"})  # whole names match

    def test_ranks_whose_layouts_disagree_are_told_so(self):
        matrix = self.path / "matrix.safetensors"
        write_safetensors(matrix, {"w": ("F32", [6, 8], floats(48))})
        processes = [self.sender(0, 2, ".*=2:S0", [matrix]), self.sender(1, 2, ".*=2:R", [matrix]), self.receiver()]
        results = [self.finish(process) for process in processes]
        for code, _, errors in results:
            self.assertIn(code, (2, 4), errors)
            self.assertNotIn("died", errors)
        self.assertTrue(any("disagree" in errors for _, _, errors in results), results)

    def test_jobs_that_ask_for_different_wire_formats_are_told_so(self):
        processes = [self.sender(0, 1, ".*=1:R", None, "--wire", "w=nvfp4"),
                     self.receiver(0, 1, ".*=1:R", "--wire", ".*=mxfp8")]
        for process in processes:
            self.assert_one_line(self.finish(process), 2,
                                 "tensor w: trainer asks for wire format nvfp4, inference for mxfp8")

    def test_what_either_side_asks_for_is_quantised_on_its_way(self):
        processes = [self.sender(), self.receiver(0, 1, ".*=1:R", "--wire", "none=none", "--wire", ".*=mxfp8")]
        for process in processes:
            status, _, errors = self.finish(process)
            self.assertEqual(status, 0, errors)

    def transfer_layers(self, model, wire):
        """What two senders of rows and two receivers of columns say of it; the receivers verify."""
        senders = [self.sender(rank, 2, "norm.*=2:R", [model], "--layout", ".*=2:S0", "--wire", wire)
                   for rank in range(2)]
        receivers = [self.receiver(rank, 2, "norm.*=2:R", "--layout", "(embed|q)=2:S1", "--layout", ".*=2:S2",
                                   "--dtype", "bf16", "--verify", model) for rank in range(2)]
        results = [self.finish(process) for process in senders + receivers]
        for code, _, errors in results:
            self.assertEqual(code, 0, errors)
        return [json.loads(output) for _, output, _ in results]

    def test_quantised_tensors_take_their_share_of_bf16_and_pass_verification(self):
        # A layer of a small model, whose values reach over many powers of two; its norms travel as they are.
        chosen = random.Random(5)
        def values(count):
            return struct.pack(f"<{count}f", *(chosen.gauss(0, 1) * 2.0 ** chosen.randint(-20, 6) for _ in range(count)))
        shapes = {"embed": [320, 64], "q": [64, 64], "experts.up": [4, 96, 64], "norm1": [64], "norm2": [64]}
        tensors = {name: ("F32", shape, values(math.prod(shape))) for name, shape in shapes.items()}
        model = self.path / "layers.safetensors"
        write_safetensors(model, tensors)
        matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
        norms = 2 * 64 * 4
        for wire, most in ((".*=nvfp4", 0.29), (".*=mxfp8", 0.52), (".*=fp8_e4m3", 0.52), (".*=fp8_block_128x128", 0.52)):
            with self.subTest(wire=wire):
                for side in self.transfer_layers(model, wire):
                    figures = side["quantized"]
                    self.assertEqual(figures["elements"], matrices // 2)
                    self.assertEqual(figures["source_bytes"], 4 * figures["elements"])
                    if side["command"] == "recv":
                        self.assertEqual(side["rank_bytes"], figures["bytes"] + norms)
                    self.assertLessEqual(figures["bytes"], most * 2 * figures["elements"])
                    self.assertEqual(figures["bf16_ratio"], figures["bytes"] / (2 * figures["elements"]))
                    self.assertEqual(figures["elements_moved"], matrices)
                    self.assertEqual(side["bytes_moved"], figures["bytes_moved"] + 2 * norms)
                    self.assertEqual(figures["batch_bf16_ratio"], side["bytes_moved"] / (2 * matrices + 2 * norms))
                    self.assertEqual(figures["amax_exchanges"], 1 if side["command"] == "send" else 0)

    def test_in_words_a_transfer_tells_what_is_quantised(self):
        ends = {"send": ("trainer", "inference", "--checkpoint", self.model, "--wire", "w=mxfp8"),
                "recv": ("inference", "trainer")}
        processes = [self.start(command, "--job", job, "--peer", peer, "--rank", 0, "--world", 1, "--layout", ".*=1:R",
                                "--timeout", 20, *more) for command, (job, peer, *more) in ends.items()]
        for process in processes:
            code, output, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
            # 48 codes behind a scale for each of 6 rows; 49 bytes and a half are planned, and bias and steps
            self.assertEqual(output.splitlines()[-1],
                             "quantised: 64 B of 96 B as bf16 (0.667); the whole batch: 89 B (0.654)")

    def test_a_quantised_transfer_is_not_verified_against_another_file(self):
        other = self.path / "other.safetensors"
        tensors = {"w": ("F32", [6, 8], floats(48)), "bias": ("F32", [8], floats(8, 0.5)),
                   "steps": ("I64", [], struct.pack("<q", 7)), "none": ("F32", [0, 4], b"")}
        write_safetensors(other, tensors | {"w": ("F32", [6, 8], floats(48, 1.5))})
        self.sender(0, 1, ".*=1:R", None, "--wire", "w=nvfp4")
        self.assert_one_line(self.finish(self.receiver(0, 1, ".*=1:R", "--verify", other)), 1, "as nvfp4: [0,2] is 3.9")

    def test_an_interrupted_command_ends_with_status_130(self):
        sender = self.sender()
        self.wait_for(self.path / "run", "p-*")
        sender.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(sender)[0], 130)

    def test_a_command_that_waits_for_the_other_job_is_interrupted_and_leaves_nothing(self):
        run = self.path / "run"
        for sent in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=sent):
                receiver = self.receiver()
                self.wait_for(run, "p-*/agent")  # its socket: what is left to do is to wait
                receiver.send_signal(sent)
                self.assert_one_line(self.finish(receiver), 130, "interrupted")
                self.assertEqual(list(run.iterdir()), [])

    def test_the_time_out_holds_for_the_store_as_well(self):
        begin = time.monotonic()
        result = self.run_command("recv", "--store", "tcp://127.0.0.1:1", "--job", "a", "--peer", "b", "--rank", 0,
                                  "--world", 1, "--layout", ".*=1:R", "--timeout", 1)
        self.assert_one_line(result, 2, "127.0.0.1:1", "waited 1 s")
        self.assertLess(time.monotonic() - begin, 8)

    def test_nobody_there_ends_with_status_3_naming_who_is_missing(self):
        result = self.run_command("send", "--job", "trainer", "--peer", "inference", "--rank", 0, "--world", 1,
                                  "--checkpoint", self.model, "--layout", ".*=1:R", "--timeout", 0.5)
        self.assert_one_line(result, 3, "inference")


class Mistakes(CommandTest):
    def test_unmatched_tensors_are_listed(self):
        result = self.run_command("send", "--job", "a", "--peer", "b", "--rank", 0, "--world", 1, "--checkpoint",
                                  self.model, "--layout", "w=1:R")
        self.assert_one_line(result, 2, "bias", "steps")

    def test_bad_layouts_checkpoints_and_ranks(self):
        cases = [
            (["--layout", ".*=2:S0,S1", "--checkpoint", self.model], "placement"),
            (["--layout", "(=1:R", "--checkpoint", self.model], "("),
            (["--layout", ".*=1:R", "--checkpoint", self.path / "missing.safetensors"], "missing.safetensors"),
            (["--layout", ".*=1:S5", "--checkpoint", self.model], "5"),
            (["--layout", ".*=1:R", "--wire", "w=fp4", "--checkpoint", self.model], "nvfp4, or none"),
            (["--layout", ".*=1:R", "--wire", "w", "--checkpoint", self.model], "no '='"),
            (["--layout", ".*=1:R", "--wire", "(=nvfp4", "--checkpoint", self.model], "bad regex"),
        ]
        for arguments, text in cases:
            with self.subTest(text=text):
                result = self.run_command("send", "--job", "a", "--peer", "b", "--rank", 0, "--world", 1, "--timeout", 2,
                                          *arguments)
                self.assert_one_line(result, 2, text)
        result = self.run_command("send", "--job", "a", "--peer", "b", "--rank", 3, "--world", 2, "--checkpoint",
                                  self.model, "--layout", ".*=2:R")
        self.assertEqual(result[0], 2, result[2])

    def test_hostile_headers(self):
        file = self.path / "hostile.safetensors"
        headers = {
            "deep": b"[" * 100_000,
            "overlap": json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                                   "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode(),
            "overflow": json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}}).encode(),
            "outside": json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [1000, 1016]}}).encode(),
        }
        for name, header in headers.items():
            with self.subTest(name=name):
                write_safetensors(file, {"a": ("F32", [2], floats(2))}, header)
                result = self.run_command("plan", "--checkpoint", file, "--src", ".*=1:R", "--dst", ".*=1@1:R")
                self.assert_one_line(result, 2, "hostile.safetensors")
        file.write_bytes(struct.pack("<Q", 2**60) + b"{}")
        result = self.run_command("plan", "--checkpoint", file, "--src", ".*=1:R", "--dst", ".*=1@1:R")
        self.assert_one_line(result, 2, "hostile.safetensors")

    def test_a_cast_goes_to_floats_alone(self):
        self.assert_one_line(self.finish(self.receiver(0, 1, ".*=1:R", "--dtype", "i64")), 2, "--dtype i64", "bf16")


class Plans(CommandTest):
    def test_json_has_the_documented_form(self):
        code, output, errors = self.run_command("plan", "--shape", "4096x4096", "--dtype", "bf16", "--src",
                                                "dp=2,fsdp=4@0-7:R,S0", "--dst", "tp=4@8-11:S1", "--json")
        self.assertEqual(code, 0, errors)
        plan = json.loads(output)
        self.assertEqual(plan["shape"], [4096, 4096])
        self.assertEqual(plan["stats"]["bytes_moved"], 4096 * 4096 * 2)
        self.assertEqual(plan["stats"]["max_egress"], plan["stats"]["max_egress_lower_bound"])
        self.assertEqual(sum(route["bytes"] for route in plan["routes"]), plan["stats"]["bytes_delivered"])
        for route in plan["routes"]:
            self.assertEqual(set(route), {"src", "dsts", "kind", "region", "bytes"})

    def test_a_picture_and_an_explanation(self):
        picture = self.path / "plan.svg"
        code, output, errors = self.run_command("plan", "--shape", "64x64", "--dtype", "f32", "--src", "4:S0", "--dst",
                                                "2@4-5:S1", "--svg", picture)
        self.assertEqual(code, 0, errors)
        self.assertIn("lower bound", output)
        svg = xml.etree.ElementTree.parse(picture)
        texts = [element.text for element in svg.iter() if element.tag.endswith("}text")]
        self.assertIn("64x64 f32:  4:S0  →  2@4-5:S1", texts)
        ranks = [f"{rank}  ({size} KiB)" for rank, size in enumerate((4, 4, 4, 4, 8, 8))]
        self.assertEqual([text for text in texts if text in ranks], ranks)
        bands = [element for element in svg.iter() if element.get("fill-opacity") == ".45"]
        self.assertEqual(len(bands), 4 * 2)  # each source has columns for both destinations

    def test_invalid_layouts_give_one_line_and_status_2(self):
        cases = {
            "dp=2@0-7:R": "8 ranks for a mesh of 2",
            "2:S0,S1": "2 placements for a mesh of 1",
            "2:X": 'expected a placement (R, S<dim>, S<dim>*<factor>, G<dim>[<bound>;...], Psum|Pavg|Pmin|Pmax|Pproduct), '
                   'got "X"',
            "dp=2:S9": 'at 7: expected a dim from -8 to 7, got "9"',
            "0:R": "at 1: expected an axis",
            "2@0-99999999999:R": 'at 5: expected a rank from 0 to 2147483647, got "99999999999"',
        }
        for source, text in cases.items():
            with self.subTest(source=source):
                result = self.run_command("plan", "--shape", "8x8", "--dtype", "f32", "--src", source, "--dst", "1@9:R")
                self.assert_one_line(result, 2, json.dumps(source), text)

    def test_a_whole_model(self):
        arguments = ["plan", "--checkpoint", self.model, "--src", ".*=1:R", "--dst", "w=2@1-2:S1", "--dst", ".*=2@1-2:R"]
        code, output, errors = self.run_command(*arguments)
        self.assertEqual(code, 0, errors)
        self.assertIn("4 tensors of 4 kinds", output)
        code, output, errors = self.run_command(*arguments, "--json")
        self.assertEqual(code, 0, errors)
        plan = json.loads(output)
        moved = {tensor["name"]: (tensor["dst"], tensor["bytes_moved"]) for tensor in plan["tensors"]}
        self.assertEqual(moved, {"w": ("2@1-2:S1", 6 * 8 * 4), "bias": ("2@1-2:R", 2 * 8 * 4),
                                 "steps": ("2@1-2:R", 2 * 8), "none": ("2@1-2:R", 0)})
        self.assertEqual(plan["stats"]["bytes_moved"], sum(size for _, size in moved.values()))
        self.assertEqual(plan["stats"]["bytes_lower_bound"], plan["stats"]["bytes_moved"])


class Others(CommandTest):
    def test_an_unknown_command_is_named_with_those_there_are(self):
        code, output, errors = self.run_command("bogus")
        self.assertEqual((code, output), (2, ""))
        self.assertIn("'bogus'", errors)
        self.assertIn("recv", errors)
        self.assertEqual(len(errors.splitlines()), 1)

    def test_every_command_has_help_with_examples(self):
        for command in ("store", "send", "recv", "plan", "bench", "doctor"):
            with self.subTest(command=command):
                code, output, errors = self.run_command(command, "--help")
                self.assertEqual((code, errors), (0, ""))
                self.assertIn("tessera " + command, output.partition("Example")[2])

    def test_the_minimal_example_runs(self):
        minimal = pathlib.Path(TESSERA).with_name("minimal")
        if not minimal.exists():
            self.skipTest(f"{minimal} is not built")
        trainers = [self.start("trainer", rank, program=minimal) for rank in range(2)]
        inference = [self.start("inference", rank, program=minimal) for rank in range(2)]
        for process in trainers:
            self.assertEqual(self.finish(process), (0, "", ""))
        for rank, process in enumerate(inference):
            code, output, errors = self.finish(process)
            self.assertEqual((code, errors), (0, ""))
            self.assertEqual(output.splitlines()[-1], f"inference/{rank} holds version 3, 0 elements wrong")

    def test_a_killed_benchmark_leaves_nothing_that_the_next_start_does_not_clean(self):
        temporary = self.path / "tmp"
        temporary.mkdir()
        run = self.path / "run"
        self.environment["TMPDIR"] = str(temporary)
        bench = self.start("bench", "--quick", "--size", "1MiB", "--repeat", "1000")
        self.wait_for(run, "p-*/owner")
        bench.kill()
        bench.wait(timeout=HANG)
        self.assertEqual(list(temporary.iterdir()), [])
        deadline = time.monotonic() + HANG
        while list(run.iterdir()):  # its ranks die with it
            self.assertLess(time.monotonic(), deadline, list(run.iterdir()))
            self.assertEqual(self.run_command("doctor", "--clean")[0], 0)

    def doctor(self):
        code, output, errors = self.run_command("doctor", "--json")
        self.assertEqual(code, 0, errors)
        return json.loads(output)

    def test_doctor_says_who_this_process_is_and_which_launcher_won(self):
        for variable in LAUNCHERS:
            self.environment.pop(variable, None)
        self.assertEqual(self.doctor()["launch"], {"rank": "nobody says it", "world": "nobody says it"})
        self.environment.update(SLURM_PROCID="5", SLURM_NTASKS="9", WORLD_SIZE="4")  # torchrun says half of it
        self.assertEqual(self.doctor()["launch"],
                         {"rank": "5, from SLURM_PROCID (Slurm)", "world": "9, from SLURM_NTASKS (Slurm)"})
        self.environment.update(RANK="1", TESSERA_WORLD_SIZE="3")
        self.assertEqual(self.doctor()["launch"],
                         {"rank": "1, from RANK (torchrun)", "world": "3, from TESSERA_WORLD_SIZE (TESSERA_*)"})
        output = self.run_command("doctor")[1]
        self.assertRegex(output, r"rank +1, from RANK \(torchrun\)\n +world +3, from TESSERA_WORLD_SIZE")
        self.environment["RANK"] = "one"
        self.assertIn('RANK is "one"', self.doctor()["launch"]["rank"])

    def test_doctor_shows_every_variable_and_what_it_is_now(self):
        self.environment.update(TESSERA_LOG="", TESSERA_STORE="", TESSERA_NAMESPACE="ours", TESSERA_TOKEN="hush")
        shown = {row["name"]: row for row in self.doctor()["environment"]}
        self.assertEqual(shown["TESSERA_LOG"]["value"], "warn")  # as if it were not set
        self.assertEqual(shown["TESSERA_STORE"]["value"], "auto")
        self.assertEqual(shown["TESSERA_NAMESPACE"]["value"], "ours")
        self.assertEqual(shown["TESSERA_TOKEN"]["value"], "(set)")
        page = (pathlib.Path(__file__).parents[2] / "docs/guide/launching.md").read_text()
        rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
        self.assertEqual(rows, [(row["name"], f"`{row['default']}`" if row["default"] else "", row["meaning"])
                                for row in shown.values()])

    def test_a_store_serves_tcp_until_it_is_told_to_stop(self):
        store = self.start("store", "--listen", "127.0.0.1:0")
        address = store.stdout.readline().strip().split()[-1]
        self.environment["TESSERA_STORE"] = address if address.startswith("tcp://") else "tcp://" + address
        for process in (self.sender(), self.receiver(0, 1, ".*=1:R", "--verify", self.model)):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        store.send_signal(signal.SIGTERM)
        self.assertIn(store.wait(timeout=HANG), (0, 130))


if __name__ == "__main__":
    TESSERA = sys.argv.pop(1)
    unittest.main()
