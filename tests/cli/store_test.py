"""`tessera store` and its files: its token, its folder on disk, and what `tessera doctor` says about both.

    store_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import os
import re
import signal
import socket
import time

from command_case import HANG, CommandTest, main


class StoreTest(CommandTest):
    def store(self, *arguments, listen="127.0.0.1:0"):
        """The process and its address; TESSERA_STORE is set to it."""
        process = self.start("store", "--listen", listen, "--json", *arguments)
        address = json.loads(self.line(process))["address"]
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

    def test_a_token_that_cannot_be_used_is_said_at_once(self):
        _, address = self.store()
        missing = str(self.path / "no-such-file")
        for given, expected in (({"TESSERA_TOKEN": "short"}, ["TESSERA_TOKEN has 5 bytes"]),
                                ({"TESSERA_TOKEN_FILE": missing}, ["TESSERA_TOKEN_FILE cannot be read", missing]),
                                ({"TESSERA_TOKEN": 20 * "x", "TESSERA_TOKEN_FILE": missing}, ["both set"])):
            self.environment.update(given)
            for url in (address, "tcp://127.0.0.1:1"):
                begin = time.monotonic()
                result = self.run_command("top", "--once", "--store", url)
                self.assert_one_line(result, 2, *expected)
                self.assertLess(time.monotonic() - begin, 4, result)
            for variable in given:
                del self.environment[variable]

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

    def test_a_token_file_that_any_user_can_read_is_warned_of_once(self):
        secret = self.path / "secret"
        secret.write_text("a secret that both sides know\n")
        self.environment["TESSERA_TOKEN_FILE"] = str(secret)
        for mode, warnings in ((0o644, 1), (0o640, 0), (0o600, 0)):
            secret.chmod(mode)
            store, _ = self.store(listen="0.0.0.0:0")
            self.environment["TESSERA_STORE"] = self.environment["TESSERA_STORE"].replace("0.0.0.0", "127.0.0.1")
            self.transfer()
            store.send_signal(signal.SIGTERM)
            code, output, errors = self.finish(store)
            self.assertEqual((code, errors.count(f"chmod 600 {secret}")), (0, warnings), errors)
            self.assertNotIn("a secret that", output + errors)

    def test_a_killed_stores_token_is_not_taken_for_the_next_ones(self):
        listen = self.free_address()
        first, _ = self.store(listen=listen)
        first.kill()
        first.wait(timeout=HANG)
        self.store(listen=listen)
        self.transfer()

    def test_a_flood_of_refused_callers_leaves_a_few_lines(self):
        self.environment["TESSERA_LOG_FORMAT"] = "logfmt"
        store, address = self.store()
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        callers = 300
        for _ in range(callers):
            with socket.create_connection((host, int(port)), timeout=HANG) as caller:
                caller.sendall(b"no store's frame" * 8)
                caller.recv(1)  # until the store has closed it
        store.send_signal(signal.SIGTERM)
        _, _, errors = self.finish(store)
        lines = [line for line in errors.splitlines() if "event=connection." in line]
        self.assertGreaterEqual(len(lines), 1, errors)
        # 20 of each name in ten seconds, however long this test takes; the rest is counted in the next line.
        shown = len(lines) + sum(int(count) for line in lines for count in re.findall(r"withheld=(\d+)", line))
        self.assertLessEqual(shown, callers)
        self.assertLess(len(lines), callers // 2, errors)

    def test_the_secret_is_shown_by_nothing(self):
        self.environment["TESSERA_TOKEN"] = "correct horse battery staple"
        for arguments in (["doctor"], ["doctor", "--json"]):
            code, output, errors = self.run_command(*arguments)
            self.assertEqual(code, 0, errors)
            self.assertNotIn("correct horse", output + errors)
            self.assertIn("(set)", output)


class UnixSockets(StoreTest):
    def setUp(self):
        super().setUp()
        self.socket = self.path / "store.sock"
        self.url = f"unix://{self.socket}"

    def test_a_killed_store_is_started_again_at_its_path(self):
        first, address = self.store(listen=self.url)
        self.assertEqual(address, self.url)
        self.assert_one_line(self.run_command("store", "--listen", self.url), 2, str(self.socket), "already in use")
        self.transfer()
        first.kill()
        first.wait(timeout=HANG)
        self.assertTrue(self.socket.exists())
        second, _ = self.store(listen=self.url)
        self.transfer()
        second.send_signal(signal.SIGTERM)
        self.finish(second)
        self.assertFalse(self.socket.exists())

    def test_of_those_that_start_together_one_serves(self):
        for _ in range(5):
            first, _ = self.store(listen=self.url)
            first.kill()
            first.wait(timeout=HANG)
            stores = [self.start("store", "--listen", self.url) for _ in range(4)]
            deadline = time.monotonic() + HANG
            while sum(store.poll() is None for store in stores) > 1:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            [serving] = [store for store in stores if store.poll() is None]
            self.environment["TESSERA_STORE"] = self.url
            self.assertEqual(self.run_command("top", "--once")[0], 0)
            serving.send_signal(signal.SIGTERM)
            self.finish(serving)

    def test_what_is_no_socket_stays(self):
        self.socket.write_text("precious")
        self.assert_one_line(self.run_command("store", "--listen", self.url), 2, str(self.socket))
        self.assertEqual(self.socket.read_text(), "precious")

    def test_a_path_that_is_too_long_is_said_to_be(self):
        result = self.run_command("store", "--listen", "unix://" + 120 * "x")
        self.assert_one_line(result, 2, "has 120 bytes", "choose a shorter one")
        self.assertNotIn("TESSERA_RUNTIME_DIR", result[2])


class Data(StoreTest):
    def test_a_transfer_goes_on_over_a_store_that_is_killed_and_started_again(self):
        folder = self.path / "data"
        listen = self.free_address()
        first, address = self.store("--data", folder, listen=listen)
        self.transfer()
        first.kill()
        first.wait(timeout=HANG)
        _, again = self.store("--data", folder, listen=listen)
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


    def test_doctor_names_all_that_a_killed_host_may_have_left(self):
        run = self.path / "run"
        run.mkdir(mode=0o700)
        names = ["store.leaving", "store.members", "store.members.new", "store.new"]
        for name in names:
            (run / name).touch(mode=0o600)
        (found,) = self.doctor()
        for name in names:
            self.assertIn(name, found)
        self.assertEqual(self.doctor("--clean"), [])
        self.assertEqual(os.listdir(run), [])


if __name__ == "__main__":
    main()
