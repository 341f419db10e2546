"""A program that trains with sharded weights records its schedule; `tessera etp check` and `tessera etp trace` read it.

    etp_record_test.py PATH_OF_TESSERA PATH_OF_ETP_TRAIN [unittest arguments]
"""

import json
import re
import sys

from command_case import HANG, CommandTest, main

TRAIN = sys.argv.pop(2)


class Record(CommandTest):
    def train(self, ranks, pattern, steps=3):
        self.environment["TESSERA_ETP_LOG"] = str(self.path / pattern)
        process = self.start(ranks, "mxfp8", steps, self.path / "weights", program=TRAIN)
        return self.finish(process, 10 * HANG)  # its products have no library

    def test_two_processes_record_a_schedule_without_conflicts(self):
        code, _, errors = self.train(2, "{group}-{rank}.etplog")
        self.assertEqual((code, errors), (0, ""))
        logs = sorted(self.path.glob("*.etplog"))
        self.assertEqual([log.name for log in logs], ["etp-0.etplog", "etp-1.etplog"])
        code, output, errors = self.run_command("etp", "check", *logs)
        self.assertEqual((code, errors), (0, ""), output)
        found = re.fullmatch(r"(\d+) records and (\d+) accesses of 2 ranks: no conflict\n", output)
        self.assertIsNotNone(found, output)
        self.assertGreater(int(found[2]), 100)

        out = self.path / "trace.json"
        code, _, errors = self.run_command("etp", "trace", *logs, "-o", out)
        self.assertEqual((code, errors), (0, ""))
        events = json.loads(out.read_text())["traceEvents"]
        lines = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
        self.assertLessEqual({(0, "host"), (0, "reduce"), (1, "host"), (1, "reduce")}, lines)
        drawn = {(event["pid"], event["name"].split()[0]) for event in events if event["ph"] == "X"}
        self.assertLessEqual({(0, "gather"), (0, "fold"), (1, "gather"), (1, "fold")}, drawn)

    def test_one_file_for_two_ranks_is_refused(self):
        code, _, errors = self.train(2, "log", steps=1)
        self.assertNotEqual(code, 0)
        self.assertIn("put {rank} into TESSERA_ETP_LOG or schedule_log", errors)
        self.assertFalse((self.path / "log").exists())

    def test_a_single_rank_needs_no_rank_in_its_path(self):
        code, _, errors = self.train(1, "log", steps=1)
        self.assertEqual((code, errors), (0, ""))
        code, output, errors = self.run_command("etp", "check", self.path / "log")
        self.assertEqual((code, errors), (0, ""), output)


if __name__ == "__main__":
    main()
