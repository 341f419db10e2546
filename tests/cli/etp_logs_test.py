"""`tessera etp check` and `tessera etp trace`: what the logs of a schedule say.

    etp_logs_test.py PATH_OF_TESSERA [unittest arguments]

The logs are seeds of the fuzz target `schedule`, which the project's own writer wrote (fuzz/schedule_logs.cc).
"""

import json
import pathlib

from command_case import CommandTest, main

SEEDS = pathlib.Path(__file__).resolve().parents[2] / "fuzz/corpus/schedule"


class Logs(CommandTest):
    def log(self, seed):
        path = self.path / f"{seed}.etplog"
        path.write_bytes((SEEDS / f"seed-{seed}").read_bytes().removeprefix(b"f"))
        return path

    def test_a_right_schedule_has_no_conflict(self):
        for logs in (["right-rank0", "right-rank1"], ["right-rank1", "right-rank0"]):
            code, output, errors = self.run_command("etp", "check", *map(self.log, logs))
            self.assertEqual((code, errors), (0, ""))
            self.assertEqual(output, "32 records and 8 accesses of 2 ranks: no conflict\n")

    def test_a_wrong_schedule_names_both_operations_and_the_edge(self):
        code, output, errors = self.run_command("etp", "check", self.log("wrong-rank0"), self.log("wrong-rank1"))
        self.assertEqual((code, errors), (1, ""))
        self.assertTrue(output.startswith("bytes 1024 to 2048 of region heap of rank 0:\n  reads gather in record "), output)
        self.assertIn("  writes publish in record ", output)
        self.assertIn("missing: rank 1's word 4 >= 1, which gemm (record ", output)
        self.assertIn("is not waited for by stream publish of rank 0 before publish", output)
        self.assertTrue(output.endswith("accesses of 2 ranks: 1 conflict\n"), output)

    def test_json_has_the_documented_form(self):
        code, output, errors = self.run_command("etp", "check", "--json", self.log("wrong-rank0"), self.log("wrong-rank1"))
        self.assertEqual((code, errors), (1, ""))
        report = json.loads(output)
        self.assertEqual(set(report), {"records", "accesses", "conflicts", "more", "faults", "unfinished", "unreached",
                                       "torn_bytes"})
        conflict, = report["conflicts"]
        self.assertEqual(set(conflict), {"first", "second", "memory", "owner", "region", "begin", "end", "missing"})
        for side, operation, write, version in (("first", "gather", False, 1), ("second", "publish", True, 2)):
            self.assertEqual((conflict[side]["operation"], conflict[side]["write"], conflict[side]["version"]),
                             (operation, write, version))
        self.assertEqual((conflict["begin"], conflict["end"]), (1024, 2048))

    def test_logs_that_do_not_belong_together_are_refused(self):
        right = self.log("right-rank0")
        self.assert_one_line(self.run_command("etp", "check", right), 2, "the log of rank 1 is missing")
        self.assert_one_line(self.run_command("etp", "check", right, right), 2, "two logs are of rank 0")
        self.assert_one_line(self.run_command("etp", "check", right, self.log("other-kinds")), 2, "different runs")

    def test_faults_are_an_error(self):
        result = self.run_command("etp", "check", self.log("wrong-rank1"), self.log("right-rank0"))
        self.assertEqual(result[0], 0, result)  # one waits for less than the other does
        short = self.path / "short"
        short.write_bytes(self.log("right-rank0").read_bytes()[:32])
        result = self.run_command("etp", "check", self.log("right-rank1"), short)
        self.assert_one_line(result, 2, "the logs do not fit together: ", "collective 1 of group etp")
        self.assertIn("records wait for these, and were not checked", result[1])

    def test_what_is_no_log_is_refused(self):
        self.assert_one_line(self.run_command("etp", "check", self.model), 2, "this is no schedule log")
        self.assert_one_line(self.run_command("etp", "check", self.path / "none"), 2, "No such file or directory")
        self.assert_one_line(self.run_command("etp", "check"), 2, "LOG is required", "see tessera etp")
        log = self.log("other-kinds")
        data = bytearray(log.read_bytes())
        data[20] ^= 1
        log.write_bytes(data)
        self.assert_one_line(self.run_command("etp", "check", log), 2, "the head is damaged")

    def test_the_torn_end_of_a_log_is_left_out(self):
        code, output, errors = self.run_command("etp", "check", self.log("torn"))
        self.assertEqual((code, errors), (0, ""))
        self.assertIn("torn.etplog: its last 5 B were not written whole, and are left out\n", output)

    def test_a_trace_has_a_process_for_each_rank_and_a_line_for_each_stream(self):
        out = self.path / "trace.json"
        code, output, errors = self.run_command("etp", "trace", self.log("right-rank0"), self.log("right-rank1"), "-o", out)
        self.assertEqual((code, errors), (0, ""))
        self.assertEqual(output, f"{out}: 6 operations on 3 streams of 2 ranks; open it at https://ui.perfetto.dev\n")
        events = json.loads(out.read_text())["traceEvents"]
        names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
        self.assertEqual(sorted(names.values()), ["compute", "gather", "publish"])
        drawn = [(event["pid"], names[event["pid"], event["tid"]], event["name"], event["ts"], event["dur"])
                 for event in events if event["ph"] == "X"]
        self.assertEqual(len(drawn), 6)
        self.assertIn((0, "publish", "publish", 0, 1.5), drawn)
        self.assertIn((1, "compute", "gemm", 12.7, 6.3), drawn)

    def test_a_trace_without_times_leaves_the_file_alone(self):
        out = self.path / "trace.json"
        out.write_text("before")
        result = self.run_command("etp", "trace", self.log("other-kinds"), "-o", out)
        self.assert_one_line(result, 2, "no log tells when an operation ran")
        self.assertEqual(out.read_text(), "before")
        self.assert_one_line(self.run_command("etp", "trace", self.log("right-rank0"), "-o", self.path / "none/t"), 2,
                             "cannot write", "No such file or directory")


if __name__ == "__main__":
    main()
