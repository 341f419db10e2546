"""Mistakes of users, and the command's one-line answers.

    mistake_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import struct

from command_case import CommandTest, floats, main, write_safetensors


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
            (["--layout", ".*=1:R", "--wire", "w", "--checkpoint", self.model], "unknown format 'w'"),
            (["--layout", ".*=1:R", "--wire", "(=nvfp4", "--checkpoint", self.model], "bad regex"),
            (["--layout", ".*=1:R", "--wire", "w=mxfp8", "--wire", "weight=mxfp8", "--checkpoint", self.model],
             '--wire: "weight" matches none of the 4 tensors ("bias", "none", "steps", "w")'),
        ]
        for arguments, text in cases:
            with self.subTest(text=text):
                result = self.run_command("send", "--job", "a", "--peer", "b", "--rank", 0, "--world", 1, "--timeout", 2,
                                          *arguments)
                self.assert_one_line(result, 2, text)
        result = self.run_command("send", "--job", "a", "--peer", "b", "--rank", 3, "--world", 2, "--checkpoint",
                                  self.model, "--layout", ".*=2:R")
        self.assertEqual(result[0], 2, result[2])

    def test_what_is_mistyped_is_answered_with_what_was_meant(self):
        self.assert_one_line(self.run_command("sned", "--job", "a"), 2, "unknown command 'sned'", "did you mean send?")
        result = self.run_command("send", "--job", "a", "--peer", "b", "--lyout=.*=1:R", "--checkpoint", self.model)
        self.assert_one_line(result, 2, "--lyout", "did you mean --layout?", "see tessera send --help")
        self.assertNotIn("did you mean", self.run_command("frobnicate")[2])
        result = self.run_command("top", "--frobnicate")
        self.assert_one_line(result, 2, "--frobnicate")
        self.assertNotIn("did you mean", result[2])

    def test_a_layout_that_cannot_be_is_answered_with_one_that_can(self):
        for layout, texts in (("2:Shard(0)", ["expected S0 (which is how that placement is written here)"]),
                              ("2:Replicate()", ["expected R ("]),
                              ("4:R", ["layout 4:R is over 4 ranks up to 3, but the job has 2 ranks, 0 to 1: choose"])):
            with self.subTest(layout=layout):
                self.assert_one_line(self.finish(self.sender(0, 2, f".*={layout}")), 2, *texts)

    def test_two_jobs_that_do_the_same_are_told_so(self):
        def second(verb, *more):
            return self.start(verb, "--job", "inference", "--peer", "trainer", "--rank", 0, "--world", 1, "--layout",
                              ".*=1:R", "--timeout", 20, *more)

        for process in (self.sender(), second("send", "--checkpoint", self.model)):
            self.assert_one_line(self.finish(process), 2, "both jobs send it", "the other receives (recv)")

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

    def test_a_cast_goes_to_floats_only(self):
        self.assert_one_line(self.finish(self.receiver(0, 1, ".*=1:R", "--dtype", "i64")), 2, "--dtype i64", "bf16")


if __name__ == "__main__":
    main()
