"""What the `tessera` command refuses, and says, at the limits of names, numbers, dtypes and files.

    limits_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import os
import resource
import struct
import subprocess

import command_case
from command_case import HANG, CommandTest, floats, main, write_safetensors


class Terms(CommandTest):
    def test_every_rank_refuses_terms_that_cannot_be_reduced(self):
        """Each would wait for the others until the deadline if it did not detect this itself."""
        write_safetensors(self.model, {"scale": ("F8_E8M0", [4], b"\x7f" * 4)})
        for rank in range(3):
            with self.subTest(rank=rank):
                result = self.finish(self.sender(rank, 3, "scale=2:Pproduct"))
                self.assert_one_line(result, 2, '"scale"', "f8_e8m0 cannot be reduced by product")

    def test_complex_terms_add_up_and_multiply_to_what_plan_says(self):
        write_safetensors(self.model, {
            "sum": ("C64", [3], struct.pack("<6f", -0.0, -0.0, 1.5, -2, 0, 7)),
            "product": ("C64", [3], struct.pack("<6f", 1, 2, 1.5, -2, 0, 7)),
        })
        layouts = ("sum=2:Psum", "product=2:Pproduct")
        senders = [self.sender(rank, 2, layouts[0], None, "--layout", layouts[1]) for rank in range(2)]
        for process in [*senders, self.receiver(0, 1, ".*=1:R", "--verify", self.model)]:
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        for layout in layouts:
            code, _, errors = self.run_command("plan", "--shape", "3", "--dtype", "c64", "--src", layout.split("=")[1],
                                               "--dst", "1@2:R")
            self.assertEqual(code, 0, errors)


class Numbers(CommandTest):
    def send(self, *arguments):
        return self.run_command("send", "--job", "a", "--peer", "b", "--rank", 0, "--world", 1, "--layout", ".*=1:R",
                                "--timeout", 1, "--checkpoint", self.model, *arguments)

    def test_a_version_is_a_whole_number_from_1(self):
        for text in ("0", "-1", "x", "1.5"):
            with self.subTest(version=text):
                result = self.send(f"--version={text}")
                self.assert_one_line(result, 2, f'a version is a whole number from 1 (not "{text}")')
                self.assertLess(len(result[2]), 120)

    def test_versions_end_where_their_numbers_do(self):
        for text in (str(2**63 - 1), str(2**63), str(2**62)):
            with self.subTest(version=text):
                self.assert_one_line(self.send("--version", text), 2, f"from 1 to {2**62 - 1}", text)
        result = self.send("--version", 2**62 - 1, "--checkpoint", self.model)
        self.assert_one_line(result, 2, f"--version {2**62 - 1} for 2 checkpoints")

    def test_a_count_is_a_whole_number_from_1(self):
        for text in ("0", str(2**31), str(2**64)):
            with self.subTest(count=text):
                result = self.finish(self.receiver(0, 1, ".*=1:R", "--count", text))
                self.assert_one_line(result, 2, "a count is a whole number from 1", f'(not "{text}")')


class Names(CommandTest):
    def test_an_empty_value_is_no_choice_of_the_default(self):
        for option in ("--out", "--verify", "--layout", "--dtype", "--skip"):
            with self.subTest(option=option):
                self.assert_one_line(self.finish(self.receiver(0, 1, ".*=1:R", option, "")), 2, option, "empty")
        self.assert_one_line(self.finish(self.sender(0, 1, ".*=1:R", [""])), 2, "--checkpoint", "empty")

    def test_all_unmatched_tensors_are_listed_up_to_a_hundred(self):
        names = [f"layer.{i}" for i in range(120)] + ["z" * 5000]
        for count, rest in ((40, ""), (121, " and 21 more")):
            write_safetensors(self.model, {name: ("U8", [1], b"\0") for name in names[:count]})
            code, _, errors = self.finish(self.sender(0, 1, "none=1:R"))
            self.assertEqual(code, 2)
            self.assertEqual(errors.count('"layer.'), min(count, 100))
            self.assertIn(rest, errors)

    def test_a_long_name_is_cut(self):
        write_safetensors(self.model, {"n" * 50_000: ("U8", [1], b"\0")})
        for layout in ("none=1:R", ".*=1:S3", ".*=2:Pavg", ".*=1@7:R"):
            with self.subTest(layout=layout):
                result = self.finish(self.sender(0, 1, layout))
                self.assert_one_line(result, 2, '"' + "n" * 120 + '"...')
                self.assertLess(len(result[2]), 400)

    def test_a_file_name_that_is_not_utf8_is_shown_in_json(self):
        out = os.fsencode(self.path) + b"/out-\xff"
        sender = self.sender()
        receiver = subprocess.Popen(
            [command_case.TESSERA, "recv", "--job", "inference", "--peer", "trainer", "--rank", "0", "--world", "1",
             "--layout", ".*=1:R", "--timeout", "20", "--json", "--out", out],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(receiver)
        code, output, errors = self.finish(receiver)
        self.assertEqual(code, 0, errors)
        self.assertIn("out-\ufffd", json.loads(output)["transfers"][0]["file"])
        self.assertTrue(os.path.exists(out + b"/rank-00000.safetensors"))


class Files(CommandTest):
    def assert_received_elsewhere(self, sender):
        self.finish(sender)  # it may have been told; both are started again
        sender, receiver = self.sender(), self.receiver(0, 1, ".*=1:R", "--out", self.path / "elsewhere")
        for process in (receiver, sender):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        received, = (self.path / "elsewhere").rglob("*.safetensors")
        self.assertEqual(received.read_bytes()[-(4 << 16):], self.model.read_bytes()[-(4 << 16):])

    def test_the_limit_of_file_sizes_ends_a_receiver_with_a_line(self):
        write_safetensors(self.model, {"w": ("F32", [1 << 16], floats(1 << 16))})
        sender = self.sender()
        receiver = subprocess.Popen(
            [command_case.TESSERA, "recv", "--job", "inference", "--peer", "trainer", "--rank", "0", "--world", "1",
             "--layout", ".*=1:R", "--timeout", "20", "--out", self.path / "out"],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_240, 10_240)))
        self.processes.append(receiver)
        self.assert_one_line(self.finish(receiver), 2, "large")
        self.assert_received_elsewhere(sender)

    def test_a_full_disk_ends_a_receiver_with_a_line_and_leaves_nothing_on_it(self):
        full = self.path / "full"
        full.mkdir()
        user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
        mounted = ["unshare", "--mount", *user, "sh", "-c", f"mount -t tmpfs -o size=64k none {full} && \"$@\"", "sh"]
        try:
            if subprocess.run([*mounted, "true"], capture_output=True, timeout=HANG).returncode != 0:
                self.skipTest("no file system may be mounted here")
        except FileNotFoundError:
            self.skipTest("no unshare here")
        write_safetensors(self.model, {"w": ("F32", [1 << 16], floats(1 << 16))})
        sender = self.sender()
        receive = [command_case.TESSERA, "recv", "--job", "inference", "--peer", "trainer", "--rank", "0", "--world", "1",
                   "--layout", ".*=1:R", "--timeout", "20", "--out", full / "out"]
        receiver = subprocess.Popen(
            [*mounted, "sh", "-c", f'"$@"; code=$?; find {full} -type f; exit $code', "sh", *receive],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(receiver)
        code, output, errors = self.finish(receiver)
        self.assertEqual((code, output), (2, ""), errors)
        self.assertIn("No space left on device", errors)
        self.assert_received_elsewhere(sender)


if __name__ == "__main__":
    main()
