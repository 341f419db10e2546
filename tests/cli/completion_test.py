"""`tessera completion`: what a shell offers is what the commands take.

    completion_test.py PATH_OF_TESSERA [unittest arguments]
"""

import pathlib
import re
import shutil
import subprocess

import command_case
from command_case import HANG, CommandTest, main


class Completion(CommandTest):
    def script(self, shell):
        code, output, errors = self.run_command("completion", shell)
        self.assertEqual((code, errors), (0, ""))
        return output

    def help_of(self, *command):
        code, output, errors = self.run_command(*command, "--help")
        self.assertEqual(code, 0, errors)
        return output

    def commands(self, *above):
        listed = self.help_of(*above).split("ubcommands:")[1].split("\n\n")[0]
        return re.findall(r"^  (\w+) ", listed, re.MULTILINE)

    def options(self, *command):
        """The options that --help declares."""
        return set(re.findall(r"^ +(?:-\w,)?(--[\w-]+)", self.help_of(*command), re.MULTILINE))

    def offered(self, *words):
        """bash's candidates for the last of these words."""
        (self.path / "completion").write_text(self.script("bash"))
        program = ('source "$1"; shift; COMP_WORDS=(tessera "$@"); COMP_CWORD=$#; _tessera; '
                   'printf "%s\\n" "${COMPREPLY[@]}"')
        done = subprocess.run(["bash", "-euc", program, "bash", self.path / "completion", *words], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=HANG, cwd=self.path)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return set(done.stdout.split())

    def test_bash_offers_every_command_and_every_option(self):
        commands = self.commands()
        self.assertLessEqual({"store", "send", "recv", "top", "completion"}, set(commands))
        self.assertEqual(self.offered("") - {"--help", "-h", "--version"}, set(commands))
        self.assertEqual(self.offered("se"), {"send"})
        for command in commands:
            offered = {word for word in self.offered(command, "-") if word.startswith("--")}
            self.assertEqual(offered, self.options(command), command)
        self.assertEqual(self.offered("completion", ""), {"bash", "zsh", "fish", "--help", "-h"})

    def test_commands_below_others_have_options_of_their_own(self):
        below = self.commands("etp")
        self.assertIn("plan", below)
        self.assertEqual(self.offered("etp", "") - {"--help", "-h"}, set(below))
        for word in below:
            options = self.options("etp", word)
            offered = {offer for offer in self.offered("etp", word, "-") if offer.startswith("--")}
            self.assertEqual(offered, options, word)
            for shell, spelled in (("zsh", "*{}["), ("fish", " -l {} ")):
                for option in options:
                    name = option if shell == "zsh" else option.removeprefix("--")
                    self.assertIn(spelled.format(name), self.script(shell), f"{word} for {shell}")
        self.assertIn("model.safetensors", self.offered("etp", "plan", "--model", "mod"))
        self.assertEqual(self.offered("plan", "--sv"), {"--svg"})

    def test_bash_offers_files_where_a_value_is_due(self):
        self.assertIn("model.safetensors", self.offered("send", "--checkpoint", "mod"))
        self.assertEqual(self.offered("send", "--checkpoint", "model.safetensors", "--lay"), {"--layout"})
        self.assertEqual(self.offered("send", "--js"), {"--json"})

    def test_every_shell_is_told_every_option_and_can_read_it(self):
        for shell, spelled in (("zsh", "*{}["), ("fish", " -l {} ")):
            script = self.script(shell)
            for command in self.commands():
                self.assertIn(command, script)
                for option in self.options(command):
                    name = option if shell == "zsh" else option.removeprefix("--")
                    self.assertIn(spelled.format(name), script, f"{command} for {shell}")
            if shutil.which(shell):
                file = self.path / shell
                file.write_text(script)
                done = subprocess.run([shell, "-n", file], stderr=subprocess.PIPE, text=True, timeout=HANG)
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_shell_that_is_not_known_is_an_error(self):
        self.assert_one_line(self.run_command("completion", "tcsh"), 2, "A subcommand is required", "see tessera completion --help")
        self.assert_one_line(self.run_command("completion"), 2, "A subcommand is required")


if __name__ == "__main__":
    main()
