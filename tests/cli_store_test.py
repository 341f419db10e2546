"""`tessera store` and what it leaves: its token, its folder on disk, and what `tessera doctor` says about both.

    cli_store_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import os
import signal
import sys
import unittest

import cli_test
from cli_test import HANG, CommandTest


class StoreTest(CommandTest):
    def store(self, *arguments, listen="127.0.0.1:0"):
        """The process and its address; TESSERA_STORE is set to it."""
        process = self.start("store", "--listen", listen, "--json", *arguments)
        address = json.loads(process.stdout.readline())["address"]
        self.environment["TESSERA_STORE"] = address
        return process, address

    def token_files(self):
        return list((self.path / "run").glob("p-*/token"))

    def transfer(self):
        for process in (self.sender(), self.receiver(0, 1, ".*=1:R", "--verify", self.model)):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)


class Tokens(StoreTest):
    def test_a_loopback_store_leaves_a_token_that_goes_with_it(self):
        store, address = self.store()
        (token,) = self.token_files()
        self.assertEqual(token.stat().st_mode & 0o777, 0o600)
        url, secret = token.read_text().split()
        self.assertEqual(url, address)
        self.assertGreaterEqual(len(secret), 32)
        self.transfer()
        store.send_signal(signal.SIGTERM)
        _, output, errors = self.finish(store)
        self.assertNotIn(secret, output + errors)
        self.assertEqual(os.listdir(self.path / "run"), [])

    def test_who_does_not_find_the_token_is_told_how_to_get_it(self):
        _, address = self.store()
        (token,) = self.token_files()
        secret = token.read_text().split()[1]
        own_folder = self.environment["TESSERA_RUNTIME_DIR"]
        self.environment["TESSERA_RUNTIME_DIR"] = str(self.path / "other")
        self.assert_one_line(self.finish(self.sender()), 2, address, "TESSERA_TOKEN", "TESSERA_RUNTIME_DIR",
                             str(self.path / "other"))
        self.environment["TESSERA_TOKEN"] = "not the token of that store"
        result = self.finish(self.sender())
        self.assert_one_line(result, 2, address, "does not accept the token from TESSERA_TOKEN")
        self.assertNotIn("not the token", result[2])
        self.environment["TESSERA_TOKEN"] = secret
        self.transfer()
        self.environment["TESSERA_RUNTIME_DIR"] = own_folder

    def test_a_store_that_others_can_reach_demands_a_token(self):
        self.assert_one_line(self.run_command("store", "--listen", "0.0.0.0:0"), 2, "TESSERA_TOKEN",
                             "TESSERA_TOKEN_FILE", "127.0.0.1")
        self.environment["TESSERA_TOKEN"] = "short"
        result = self.run_command("store", "--listen", "0.0.0.0:0")
        self.assert_one_line(result, 2, "TESSERA_TOKEN has 5 bytes")
        self.assertNotIn("short", result[2])
        del self.environment["TESSERA_TOKEN"]
        secret = self.path / "secret"
        secret.write_text("a secret that both sides know\n")
        self.environment["TESSERA_TOKEN_FILE"] = str(secret)
        _, address = self.store(listen="0.0.0.0:0")
        self.assertEqual(self.token_files(), [])
        self.environment["TESSERA_STORE"] = address.replace("0.0.0.0", "127.0.0.1")
        self.transfer()

    def test_a_killed_stores_token_is_not_taken_for_the_next_ones(self):
        first, address = self.store()
        first.kill()
        first.wait(timeout=HANG)
        self.store(listen=address.removeprefix("tcp://"))
        self.transfer()

    def test_the_secret_is_shown_by_nothing(self):
        self.environment["TESSERA_TOKEN"] = "correct horse battery staple"
        for arguments in (["doctor"], ["doctor", "--json"]):
            code, output, errors = self.run_command(*arguments)
            self.assertEqual(code, 0, errors)
            self.assertNotIn("correct horse", output + errors)
            self.assertIn("(set)", output)


class Data(StoreTest):
    def test_a_transfer_goes_on_over_a_store_that_is_killed_and_started_again(self):
        folder = self.path / "data"
        first, address = self.store("--data", folder)
        self.transfer()
        first.kill()
        first.wait(timeout=HANG)
        _, again = self.store("--data", folder, listen=address.removeprefix("tcp://"))
        self.assertEqual(again, address)
        self.transfer()

    def test_a_folder_that_cannot_be_used_ends_the_store_with_a_line(self):
        folder = self.path / "data"
        self.store("--data", folder)
        self.assert_one_line(self.run_command("store", "--listen", "127.0.0.1:0", "--data", folder), 2,
                             "another store", str(folder))
        missing = self.path / "no" / "such"
        self.assert_one_line(self.run_command("store", "--listen", "127.0.0.1:0", "--data", missing), 2, str(missing))
        foreign = self.path / "foreign"
        foreign.mkdir()
        (foreign / "store.db").write_bytes(b"not a database" * 1000)
        self.assert_one_line(self.run_command("store", "--listen", "127.0.0.1:0", "--data", foreign), 1,
                             str(foreign / "store.db"), "move the folder's files away")


class Leftovers(StoreTest):
    def doctor(self, *arguments):
        code, output, errors = self.run_command("doctor", "--json", *arguments)
        self.assertEqual(code, 0, errors)
        return [check["detail"] for check in json.loads(output)["checks"] if check["name"] == "left over"]

    def test_doctor_names_what_a_killed_store_left_and_removes_it(self):
        store, address = self.store()
        self.assertEqual(self.doctor(), [])
        store.kill()
        store.wait(timeout=HANG)
        (found,) = self.doctor()
        for text in (f"pid {store.pid}", f"store {address}", "--listen 127.0.0.1:0"):
            self.assertIn(text, found)
        self.assertEqual(self.doctor(), [found])
        self.assertEqual(self.doctor("--clean"), [])
        self.assertEqual(os.listdir(self.path / "run"), [])


if __name__ == "__main__":
    cli_test.TESSERA = sys.argv.pop(1)
    unittest.main()
