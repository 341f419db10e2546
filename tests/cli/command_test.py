"""The `tessera` command: help, doctor, bench, store, and an example, as users meet them.

    command_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import pathlib
import re
import signal
import time

import command_case
from command_case import HANG, LAUNCHERS, CommandTest, main


class Commands(CommandTest):
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
        minimal = pathlib.Path(command_case.TESSERA).with_name("minimal")
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
        self.assertEqual(self.doctor()["launch"], {"rank": "not set", "world": "not set"})
        self.environment.update(SLURM_PROCID="5", SLURM_NTASKS="9", WORLD_SIZE="4")  # torchrun sets only one of the two
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
        address = self.line(store).strip().split()[-1]
        self.environment["TESSERA_STORE"] = address if address.startswith("tcp://") else "tcp://" + address
        for process in (self.sender(), self.receiver(0, 1, ".*=1:R", "--verify", self.model)):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        store.send_signal(signal.SIGTERM)
        self.assertEqual(self.finish(store), (0, "", ""))
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
            store = self.start("store", "--listen", "127.0.0.1:0")
            self.line(store)
            store.send_signal(number)
            self.assertEqual(self.finish(store)[0], status)


if __name__ == "__main__":
    main()
