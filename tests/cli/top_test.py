"""`tessera top`: who is on the bus, and who waits for whom.

    top_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import signal
import time

from command_case import HANG, CommandTest, main, write_safetensors


class Top(CommandTest):
    def setUp(self):
        super().setUp()
        store = self.start("store", "--listen", "127.0.0.1:0")
        self.environment["TESSERA_STORE"] = self.line(store).strip()

    def look(self):
        code, output, errors = self.run_command("top", "--once", "--json")
        self.assertEqual(code, 0, errors)
        return json.loads(output)

    def look_until(self, condition):
        """The first look that satisfies `condition`, and the condition's result."""
        deadline = time.monotonic() + HANG
        while True:
            look = self.look()
            found = condition(look)
            if found:
                return look, found
            self.assertLess(time.monotonic(), deadline, json.dumps(look, indent=1))


    def test_nobody_is_shown_where_nobody_is(self):
        look = self.look()
        self.assertEqual((look["ranks"], look["pairs"]), ([], []))
        code, output, _ = self.run_command("top", "--once")
        self.assertEqual(code, 0)
        self.assertIn("namespace default", output)
        self.assertIn("0 ranks of 0 jobs", output)

    def test_a_rank_that_waits_says_for_whom(self):
        first = self.sender(0, 2, ".*=2:R")

        def joins(look):
            return [wait["for"] for rank in look["ranks"] for wait in rank["waits"] if "to join" in wait["for"]]

        look, [wait] = self.look_until(joins)
        self.assertIn("trainer/1", wait)
        [rank] = look["ranks"]
        self.assertEqual((rank["job"], rank["rank"], rank["world"], rank["pid"]), ("trainer", 0, 2, first.pid))
        self.assertEqual(rank["state"], "seen")
        [pair] = look["pairs"]
        self.assertEqual((pair["pair"], pair["job"], pair["peer"]), ("weights", "trainer", "inference"))
        self.assertEqual((pair["ranks"], pair["world"]), (1, 2))
        code, output, _ = self.run_command("top", "--once")
        self.assertEqual(code, 0)
        self.assertIn("waits for trainer/1", output)

    def test_both_sides_show_versions_and_rates_while_data_flows(self):
        size = 16 << 20
        write_safetensors(self.model, {"w": ("U8", [size], bytes(size))})
        self.sender(0, 1, ".*=1:R", [self.model] * 500)
        self.receiver(0, 1, ".*=1:R", "--count", 500)

        def batches(look):
            found = {rank["job"]: batch for rank in look["ranks"] for batch in rank["batches"]}
            return found if all(batch["transfers"] > 0 for batch in found.values()) and len(found) == 2 else None

        def rates(top):
            return {job: batch["bytes_per_second"] for job, batch in batches(json.loads(self.line(top))).items()}

        look, found = self.look_until(batches)
        self.assertEqual([rank["state"] for rank in look["ranks"]], ["seen", "seen"])
        for job, peer, side in (("trainer", "inference", "send"), ("inference", "trainer", "receive")):
            batch = found[job]
            self.assertEqual((batch["pair"], batch["batch"], batch["side"]), ("weights", "checkpoint", side))
            self.assertEqual(batch["peers"], [{"job": peer, "world": 1, "attached": True}])
            self.assertEqual(batch["transfers"], batch["version"])
            self.assertIn(batch["bytes"], (batch["version"] * size, (batch["version"] + 1) * size))
            self.assertIsNone(batch["bytes_per_second"])
        top = self.start("top", "--json", "--interval", "0.2")
        self.assertIsNone(rates(top)["trainer"])  # nothing to compare with yet
        for _ in range(50):  # an interval may see no transfer end
            if min(rates(top).values()) > 0:
                break
        else:
            self.fail("no interval of 50 showed both sides' rates")

    def test_a_stopped_rank_is_called_stopped(self):
        rank = self.sender(0, 2, ".*=2:R")
        self.look_until(lambda look: look["ranks"])
        self.stop(rank)
        look, [shown] = self.look_until(lambda look: [one for one in look["ranks"] if one["state"] == "stopped"])
        self.assertIn(f"kill -CONT {rank.pid}", shown["why"])
        _, output, _ = self.run_command("top", "--once")
        self.assertIn(f"stopped (pid {rank.pid})", output)

    def test_the_command_queue_of_an_agent_is_shown(self):
        agent = self.start("agent", "--job", "trainer", "--rank", 0)
        self.line(agent)
        self.sender(0, 2, ".*=2:R", None, "--agent", "daemon")
        look, [queue] = self.look_until(
            lambda look: [rank["command_queue"] for rank in look["ranks"] if rank["command_queue"]])
        self.assertEqual(queue["queued"], 0)
        self.assertGreater(queue["capacity"], 0)
        _, output, _ = self.run_command("top", "--once")
        self.assertIn(f"command queue of its agent: 0 of {queue['capacity']}", output)

    def test_an_interval_is_a_number(self):
        for wrong in ("nan", "inf", "0", "x"):
            self.assert_one_line(self.run_command("top", "--once", "--interval", wrong), 2, "--interval",
                                 "0.1 to 3600 seconds")

    def test_it_looks_again_until_it_is_interrupted(self):
        top = self.start("top", "--json", "--interval", "0.1")
        looks = [json.loads(self.line(top)) for _ in range(3)]
        self.assertEqual([look["ranks"] for look in looks], [[], [], []])
        top.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(top)[0], 130)

    def test_who_looks_does_not_become_the_store(self):
        self.assert_one_line(self.run_command("top", "--once", "--store", "auto"), 2, "nobody hosts it", "--store")
        self.assertFalse((self.path / "run" / "store.sock").exists())

    def first_look(self, top, waits_for):
        """The first output of `top`, after it has said what it waits for and a store has come."""
        line = self.line(top, "stderr")
        self.assertTrue(line.startswith("tessera: waiting for a store: "), line)
        self.assertIn(waits_for, line)
        return lambda: json.loads(self.line(top))

    def until_shown(self, host, look):
        """A host is there before its rank has joined."""
        deadline = time.monotonic() + HANG
        while host.pid not in [rank["pid"] for rank in look()["ranks"]]:
            self.assertLess(time.monotonic(), deadline)

    def test_started_first_it_waits_for_a_host_and_shows_it(self):
        self.environment["TESSERA_STORE"] = "auto"
        top = self.start("top", "--json", "--interval", "0.1")
        look = self.first_look(top, "nobody hosts it")
        host = self.host()
        self.until_shown(host, look)
        host.kill()  # the next store is waited for, too
        host.wait(timeout=HANG)
        self.assertIn("waiting for a store", self.line(top, "stderr"))
        self.until_shown(self.host(), look)
        top.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(top)[0], 130)

    def test_started_first_it_waits_for_a_server_and_shows_it(self):
        address = self.free_address()
        self.environment.update(TESSERA_STORE=f"tcp://{address}", TESSERA_TOKEN="the token that both sides know")
        top = self.start("top", "--json", "--interval", "0.1")
        look = self.first_look(top, address)
        self.line(self.start("store", "--listen", address))
        self.assertEqual(look()["ranks"], [])

    def test_a_wait_for_a_store_ends_with_a_signal(self):
        self.environment["TESSERA_STORE"] = "auto"
        top = self.start("top")
        self.first_look(top, "nobody hosts it")
        top.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(top)[0], 130)

    def host(self):
        """A process that hosts the store auto."""
        self.environment["TESSERA_STORE"] = "auto"
        host = self.sender(0, 2, ".*=2:R")
        deadline = time.monotonic() + HANG
        while self.run_command("top", "--once")[0] != 0:  # a killed host before it has left its socket
            self.assertLess(time.monotonic(), deadline, "nobody hosts the store")
        self.look_until(lambda look: look["ranks"])
        return host

    def test_a_stopped_host_of_the_store_is_named(self):
        host = self.host()
        self.stop(host)
        self.assert_one_line(self.run_command("top", "--once"), 2, f"its host (pid {host.pid}) is stopped")

    def test_after_a_host_was_killed_nobody_hosts(self):
        host = self.host()
        host.kill()
        host.wait(timeout=HANG)
        self.assertTrue((self.path / "run" / "store.sock").exists())
        self.assert_one_line(self.run_command("top", "--once"), 2, "nobody hosts it")


if __name__ == "__main__":
    main()
