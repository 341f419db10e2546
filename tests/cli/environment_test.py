"""Environment variables: junk in one is an error that names variable and value; ~/ stands for the home folder.

    environment_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import os

from command_case import LAUNCHERS, CommandTest, main

# Values that are none of a variable's kind.
JUNK = {
    "TESSERA_LOG": ["loud", "3", "WARN "],
    "TESSERA_LOG_FORMAT": ["xml", "JSON", "7"],
    "TESSERA_METRICS": ["abc", "-1", "70000", "host:", "1.5"],
    "TESSERA_TRACE": ["~nobody/trace.json", "~~"],
    "TESSERA_STORE": ["junk", "-1", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:-1"],
    "TESSERA_TOKEN_FILE": ["~nobody/token"],
    "TESSERA_AGENT": ["yes", "0", "-1"],
    "TESSERA_NAMESPACE": ["a/b", "a b", "~/x", "\x1b[2J", "n" * 65],
    "TESSERA_RANK": ["x", "-1", "1.5", "0x1", " 0", "9" * 20],
    "TESSERA_WORLD_SIZE": ["x", "-1", "0", "1.5", "9" * 20],
    "TORCHELASTIC_RESTART_COUNT": ["x", "-1", "1.5"],
    "TESSERA_RUNTIME_DIR": ["~nobody/run"],
    "TESSERA_FORCE_KERNEL": ["x", "-1"],
    "TESSERA_FORCE_PULL": ["x", "-1", "Stream"],
    "TESSERA_FORCE_TRANSPORT": ["x", "-1", "SHM"],
    "TESSERA_ALLOW_PTRACE": ["x", "1", "-1"],
    "TESSERA_ETP_CHECK": ["yes", "-1", "2"],
    "TESSERA_ETP_LOG": ["~nobody/log"],
}
# The token is secret and only looked at by who needs one; the other is the system's, and passed over where it is no folder.
OTHERS = {"TESSERA_TOKEN", "XDG_RUNTIME_DIR"}


class Junk(CommandTest):
    def receive(self, variable, value):
        for launcher in LAUNCHERS:
            self.environment.pop(launcher, None)
        self.environment[variable] = value
        try:
            return self.run_command("recv", "--job", "a", "--peer", "b", "--layout", ".*=1:R", "--timeout", 0.2)
        finally:
            self.environment = dict(os.environ, TESSERA_RUNTIME_DIR=str(self.path / "run"))

    def test_each_variable_is_tried(self):
        code, output, errors = self.run_command("doctor", "--json")
        self.assertIn("environment", output, errors)
        names = {variable["name"] for variable in json.loads(output)["environment"]}
        self.assertEqual(names, set(JUNK) | OTHERS)

    def test_junk_is_refused_with_variable_and_value(self):
        for variable, values in JUNK.items():
            for value in values:
                with self.subTest(variable=variable, value=value):
                    shown = json.dumps(value)[1:-1] if value.isprintable() else "2J"
                    self.assert_one_line(self.receive(variable, value), 2, variable, shown[:60])

    def test_doctor_works_whatever_they_hold(self):
        for variable, values in JUNK.items():
            with self.subTest(variable=variable):
                self.environment[variable] = values[0]
                code, output, errors = self.run_command("doctor", "--json")
                self.environment = dict(os.environ, TESSERA_RUNTIME_DIR=str(self.path / "run"))
                self.assertEqual(code, 0, errors)
                shown = {each["name"]: each["value"] for each in json.loads(output)["environment"]}
                self.assertEqual(shown[variable], values[0])

    def test_an_empty_variable_counts_as_unset(self):
        for variable in JUNK:
            with self.subTest(variable=variable):
                self.assert_one_line(self.receive(variable, ""), 3, "missing: all of job b")

    def test_home_is_expanded_in_paths(self):
        home = self.path / "home"
        home.mkdir()
        self.environment.update(HOME=str(home), TESSERA_RUNTIME_DIR="~/run", TESSERA_TRACE="~/trace-%p.json")
        result = self.run_command("recv", "--job", "a", "--peer", "b", "--rank", 0, "--world", 1, "--layout", ".*=1:R",
                                  "--timeout", 0.2)
        self.assert_one_line(result, 3, "missing: all of job b")
        self.assertTrue((home / "run").is_dir())
        self.assertEqual(len(list(home.glob("trace-*.json"))), 1)

    def test_a_store_is_as_careful(self):
        for variable, value in (("TESSERA_LOG", "loud"), ("TESSERA_RUNTIME_DIR", "~nobody/x"), ("TESSERA_ETP_CHECK", "yes")):
            with self.subTest(variable=variable):
                self.environment[variable] = value
                self.assert_one_line(self.run_command("store", "--listen", "127.0.0.1:0"), 2, variable, value)
                self.environment = dict(os.environ, TESSERA_RUNTIME_DIR=str(self.path / "run"))


if __name__ == "__main__":
    main()
