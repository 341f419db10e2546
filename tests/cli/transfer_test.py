"""send and recv: tensors of checkpoints from job to job.

    transfer_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import math
import random
import signal
import struct
import time

from command_case import LAUNCHERS, CommandTest, floats, main, read_safetensors, write_safetensors


class Transfers(CommandTest):
    def test_a_process_without_rank_and_launcher_is_a_job_of_its_own(self):
        for launcher in LAUNCHERS:
            self.environment.pop(launcher, None)
        sender = self.start("send", "--job", "trainer", "--peer", "inference", "--layout", ".*=1:R", "--timeout", 20,
                            "--checkpoint", self.model)
        receiver = self.start("recv", "--job", "inference", "--peer", "trainer", "--layout", ".*=1:R", "--timeout", 20,
                              "--verify", self.model)
        for process in (sender, receiver):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)

    def test_a_dtype_may_be_written_as_torch_writes_it(self):
        for written in ("bf16", "bfloat16", "torch.bfloat16", "BF16"):
            out = self.path / written
            processes = self.sender(), self.receiver(0, 1, ".*=1:R", "--dtype", written, "--out", out)
            for process in processes:
                code, _, errors = self.finish(process)
                self.assertEqual(code, 0, errors)
            self.assertEqual(read_safetensors(out / "rank-00000.safetensors")[1]["w"][0], "BF16")

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

    def test_a_cast_touches_only_floats_and_several_versions_follow_each_other(self):
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

    def test_the_weaker_choice_of_digests_holds(self):
        block = 16384
        write_safetensors(self.model, {"w": ("F32", [16, block // 4], floats(4 * block))})
        found = {}
        for sent, received in (("full", "full"), ("sampled", "full"), ("full", "sampled"), ("sampled", "off")):
            processes = (self.sender(0, 1, ".*=1:R", None, "--digest", sent),
                         self.receiver(0, 1, ".*=1:R", "--digest", received, "--verify", self.model))
            digests = []
            for process in processes:
                code, output, errors = self.finish(process)
                self.assertEqual(code, 0, errors)
                digests.append(json.loads(output)["digests"])
            self.assertEqual(*digests)
            found[sent, received] = digests[0]
        whole = found["full", "full"]
        self.assertEqual([each["elements"] for each in found["sampled", "off"]], [0])  # none was made
        for sampled in (found["sampled", "full"], found["full", "sampled"]):
            self.assertEqual([each["name"] for each in sampled], ["w"])
            self.assertNotIn(sampled[0]["digest"], (whole[0]["digest"], 32 * "0"))

    def test_digests_of_another_kind_are_refused(self):
        self.assert_one_line(self.run_command("send", "--job", "a", "--peer", "b", "--layout", ".*=1:R", "--checkpoint",
                                              self.model, "--digest", "half"), 2, "full, sampled and off are possible")

    def test_only_what_has_changed_is_sent_where_both_sides_ask(self):
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
        """Kills `victim` once a version has arrived; `survivor` is stopped meanwhile, so that more versions are to
        come."""
        self.wait_for(out, "*.safetensors")
        survivor.send_signal(signal.SIGSTOP)
        victim.kill()
        self.assertEqual(self.finish(victim)[0], -signal.SIGKILL)
        survivor.send_signal(signal.SIGCONT)

    def start_stream(self, out):
        versions = 300
        return (self.sender(0, 1, ".*=1:R", [self.model] * versions),
                self.receiver(0, 1, ".*=1:R", "--count", versions, "--out", out))

    def assert_ended_by_death(self, result, name, out, hidden=()):
        """`hidden`: what a receiver may leave that is killed between the link and the rename of a file; the next one
        removes it."""
        self.assert_one_line(result, 4, name)
        self.assertNotIn("closed the batch", result[2])  # which a process reports that ends normally
        self.assertEqual({p.name for p in out.iterdir()} - set(hidden), {"rank-00000.safetensors"})
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
        self.assert_ended_by_death(self.finish(sender), "inference/0", out, [".rank-00000.safetensors.new"])

    def test_skipped_tensors_are_not_received(self):
        out = self.path / "out"
        sender = self.sender()
        receiver = self.receiver(0, 1, ".*=1:R", "--skip", "bias|no.e|st", "--out", out)
        for process in (sender, receiver):
            code, output, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
            self.assertEqual((json.loads(output)["tensors"], json.loads(output)["skipped"]), (2, 2))
        self.assertEqual(set(read_safetensors(out / "rank-00000.safetensors")[1]), {"w", "steps"})  # whole names match

    def test_what_would_skip_or_quantise_nothing_is_refused(self):
        for option, value in (("--skip", "st"), ("--wire", "st=mxfp8")):
            with self.subTest(option=option):
                sender = self.sender()
                self.assert_one_line(self.finish(self.receiver(0, 1, ".*=1:R", option, value)), 2,
                                     f'{option}: "st" matches none of the 4 tensors ("bias", "none", "steps", "w")')
                self.assertNotEqual(self.finish(sender)[0], 0)

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

    def test_a_wire_format_alone_is_for_all_tensors_that_it_fits(self):
        processes = [self.sender(0, 1, ".*=1:R", None, "--wire", "nvfp4"),
                     self.receiver(0, 1, ".*=1:R", "--verify", self.model)]
        for process in processes:
            status, output, errors = self.finish(process)
            self.assertEqual(status, 0, errors)
            self.assertEqual(json.loads(output)["quantized"]["elements"], 48)  # of w; bias has one dim
        self.assert_one_line(self.finish(self.sender(0, 1, ".*=1:R", None, "--wire", "fp3")), 2,
                             'wire rule "fp3": unknown format', "REGEX=FORMAT")

    def test_what_either_side_asks_for_is_quantised_on_its_way(self):
        processes = [self.sender(), self.receiver(0, 1, ".*=1:R", "--wire", "none=none", "--wire", ".*=mxfp8")]
        for process in processes:
            status, _, errors = self.finish(process)
            self.assertEqual(status, 0, errors)

    def flip(self, path, name):
        """Changes a bit of the last byte of a tensor."""
        raw = bytearray(path.read_bytes())
        (size,) = struct.unpack("<Q", raw[:8])
        raw[7 + size + json.loads(raw[8 : 8 + size])[name]["data_offsets"][1]] ^= 16
        path.write_bytes(raw)

    def receive_rows(self, out):
        """Has two ranks write their rows to a folder; returns what they are called, and the tensors of each."""
        processes = [self.sender(), *(self.receiver(rank, 2, ".*(w|no.e)=2:S0", "--layout", ".*=2:R", "--out", out)
                                      for rank in range(2))]
        for process in processes:
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        return {path: read_safetensors(path)[1] for path in sorted(out.iterdir())}

    def test_a_flipped_bit_of_what_was_received_is_named_before_anything_is_sent(self):
        written = self.receive_rows(self.path / "out")
        self.assertEqual(len(written), 2)
        for path, tensors in written.items():
            for name in (name for name, (_, _, content) in tensors.items() if content):
                with self.subTest(path=path.name, name=name):
                    self.flip(path, name)
                    for world in (1, 3):  # every rank says so, also one that would not read that part
                        result = self.finish(self.sender(world - 1, world, f".*={world}@0-{world - 1}:R", [path]))
                        self.assert_one_line(result, 1, path.name, f'tensor "{name}" is damaged', "--no-verify")
                    result = self.finish(self.receiver(0, 1, ".*=1:R", "--verify", path))
                    self.assert_one_line(result, 1, path.name, f'tensor "{name}" is damaged')
                    self.flip(path, name)
        path = next(iter(written))
        self.flip(path, "w")
        for process in (self.sender(0, 1, ".*=1:R", [path], "--no-verify"), self.receiver()):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)

    def test_the_checksums_of_an_index_are_compared(self):
        file = next(iter(self.receive_rows(self.path / "out")))
        metadata, tensors = read_safetensors(file)
        folder = self.path / "saved"
        folder.mkdir()
        write_safetensors(folder / "model-1.safetensors", tensors)
        sums = json.loads(metadata["tessera.checksums"])
        (folder / "model.safetensors.index.json").write_text(json.dumps({
            "metadata": {"tessera": {"generation": 1, "checksums": sums}},
            "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
        for process in (self.sender(0, 1, ".*=1:R", [folder]), self.receiver(0, 1, ".*=1:R", "--verify", folder)):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        self.flip(folder / "model-1.safetensors", "bias")
        self.assert_one_line(self.finish(self.sender(0, 1, ".*=1:R", [folder])), 1, "model-1.safetensors",
                             'tensor "bias" is damaged')

    def transfer_layers(self, model, wire):
        """The output of two senders of rows and two receivers of columns; the receivers verify."""
        senders = [self.sender(rank, 2, "norm.*=2:R", [model], "--layout", ".*=2:S0", "--wire", wire)
                   for rank in range(2)]
        receivers = [self.receiver(rank, 2, "norm.*=2:R", "--layout", "(embed|q)=2:S1", "--layout", ".*=2:S2",
                                   "--dtype", "bf16", "--verify", model) for rank in range(2)]
        results = [self.finish(process) for process in senders + receivers]
        for code, _, errors in results:
            self.assertEqual(code, 0, errors)
        return [json.loads(output) for _, output, _ in results]

    def test_quantised_tensors_take_their_share_of_bf16_and_pass_verification(self):
        # A layer of a small model, with values over many powers of two; its norms are not quantised.
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
                self.wait_for(run, "p-*/agent")  # its socket: now it only has to wait
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


if __name__ == "__main__":
    main()
