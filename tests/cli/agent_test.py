"""`tessera agent`: send and recv through daemons, and what a user sees of them.

    agent_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import os
import signal
import urllib.request

import command_case
from command_case import CommandTest, main


class Agents(CommandTest):
    def agent(self, job, *arguments, rank=0):
        process = self.start("agent", "--job", job, "--rank", str(rank), "--json", *arguments)
        return process, json.loads(self.line(process))["address"]

    def end(self, process):
        process.send_signal(signal.SIGTERM)
        return self.finish(process)

    def transfer(self):
        sender = self.sender(0, 1, ".*=1:R", None, "--agent", "daemon")
        receiver = self.receiver(0, 1, ".*=1:R", "--verify", self.model, "--agent", "daemon")
        for process in (sender, receiver):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)

    def test_worker_after_worker_is_served_and_nothing_is_left(self):
        agents = [self.agent("trainer")[0], self.agent("inference")[0]]
        for _ in range(2):
            self.transfer()
        for agent in agents:
            code, _, errors = self.end(agent)
            self.assertEqual(code, 0, errors)
        self.assertEqual([name for name in os.listdir(self.path / "run") if name.startswith("p-")], [])

    def test_a_rank_is_a_number_from_0(self):
        for wrong in ("-1", "abc", "1.5", ""):
            result = self.finish(self.start("agent", "--job", "trainer", "--rank", wrong))
            self.assert_one_line(result, 2, "--rank", f"a rank is a whole number from 0 (not \"{wrong}\")")

    def test_a_rank_has_one_agent(self):
        first, address = self.agent("trainer")
        second = self.start("agent", "--job", "trainer", "--rank", "0")
        self.assert_one_line(self.finish(second), 2, "trainer/0", address)
        self.end(first)

    def test_without_its_agent_a_worker_is_told_how_to_start_it(self):
        self.environment["TESSERA_AGENT"] = "daemon"
        sender = self.start("send", "--job", "trainer", "--peer", "inference", "--rank", 0, "--world", 1, "--layout",
                            ".*=1:R", "--timeout", 0.2, "--checkpoint", self.model)
        self.assert_one_line(self.finish(sender), 2, "no agent", "tessera agent --job trainer --rank 0",
                             "TESSERA_RUNTIME_DIR")

    def test_an_agent_that_is_neither_is_an_error(self):
        self.assert_one_line(self.finish(self.sender(0, 1, ".*=1:R", None, "--agent", "other")), 2, 'agent "other"', "embedded", "daemon")

    def test_metrics_and_trace_of_an_agent_are_those_of_its_workers_transfers(self):
        trace = self.path / "agent.json"
        sender, _ = self.agent("trainer", "--metrics", "0", "--trace", trace)
        receiver, _ = self.agent("inference")
        self.transfer()
        url = self.line(sender, "stderr").split()[-1]
        with urllib.request.urlopen(url, timeout=command_case.HANG) as reply:
            self.assertRegex(reply.read().decode(), r'tessera_transfers_total\{[^}]*side="send"[^}]*\} 1\n')
        for agent in (sender, receiver):
            self.end(agent)
        with open(trace) as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        self.assertLessEqual({"send", "register", "transfer"}, names)

    def test_a_killed_agent_ends_its_worker_which_says_so(self):
        agent, _ = self.agent("trainer")
        sender = self.sender(0, 1, ".*=1:R", [self.model] * 300, "--agent", "daemon")
        out = self.path / "out"
        self.receiver(0, 1, ".*=1:R", "--count", 300, "--out", out)
        self.wait_for(out, "*.safetensors")
        agent.kill()
        code, _, errors = self.finish(sender)
        self.assertEqual(code, 4, errors)
        self.assertIn("the agent of trainer/0", errors)


if __name__ == "__main__":
    main()
