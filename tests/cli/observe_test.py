"""What a command reports: metrics over HTTP, a trace for Perfetto, log lines for machines.

    observe_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import signal
import socket
import urllib.error
import urllib.request

from command_case import HANG, CommandTest, main


def check_trace(test, path):
    """The events of a trace, after checks of what the Trace Event Format requires. Spans of one thread nest."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    open_spans, open_tracks = {}, {}
    for event in events:
        test.assertIsInstance(event["name"], str)
        test.assertIsInstance(event["pid"], int)
        phase = event["ph"]
        test.assertIn(phase, "MXibe")
        if phase == "M":
            continue
        test.assertGreaterEqual(event["ts"], 0)
        test.assertEqual("dur" in event, phase == "X")
        if phase == "X":
            open_spans.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        if phase in "be":
            key = (event["cat"], event["id"], event["name"])
            open_tracks[key] = open_tracks.get(key, 0) + (1 if phase == "b" else -1)
    for spans in open_spans.values():
        ends = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            test.assertTrue(not ends or end <= ends[-1], "spans of one thread overlap")
            ends.append(end)
    for key, balance in open_tracks.items():
        test.assertGreaterEqual(balance, 0, key)
    return events


class Observed(CommandTest):
    def store(self, *arguments):
        store = self.start("store", "--listen", "127.0.0.1:0", *arguments)
        self.line(store)
        return store

    def test_metrics_on_all_interfaces_are_warned_of(self):
        for address, warnings in (("0.0.0.0:0", 1), ("127.0.0.1:0", 0)):
            store = self.store("--metrics", address)
            store.send_signal(signal.SIGTERM)
            code, _, errors = self.finish(store)
            self.assertEqual((code, errors.count("metrics are served on all interfaces")), (0, warnings), errors)

    def test_metrics_are_served_on_loopback_until_the_end(self):
        store = self.start("store", "--listen", "127.0.0.1:0", "--metrics", "0")
        url = self.line(store, "stderr").split()[-1]
        self.assertRegex(url, r"^http://127\.0\.0\.1:[0-9]+/metrics$")
        with urllib.request.urlopen(url, timeout=HANG) as reply:
            self.assertTrue(reply.headers["Content-Type"].startswith("text/plain; version=0.0.4"))
            self.assertIn(b"# TYPE tessera_transfers_total counter\n", reply.read())
        with self.assertRaises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url.replace("/metrics", "/"), timeout=HANG)
        self.assertEqual(refused.exception.code, 404)
        refused.exception.close()
        store.send_signal(signal.SIGINT)
        self.assertEqual(store.wait(timeout=HANG), 130)
        port = int(url.split(":")[2].split("/")[0])
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=HANG).close()

    def test_an_address_that_cannot_be_served_is_a_mistake_in_one_line(self):
        self.assert_one_line(self.run_command("store", "--metrics", "nonsense"), 2, "nonsense", "HOST:PORT")
        self.assert_one_line(self.run_command("store", "--trace", "/nonexistent/t.json"), 2, "/nonexistent/t.json")

    def test_a_trace_is_whole_after_an_interrupt(self):
        trace = self.path / "trace.json"
        self.environment["TESSERA_TRACE"] = str(trace)
        store = self.store()
        store.send_signal(signal.SIGINT)
        self.assertEqual(store.wait(timeout=HANG), 130)
        names = [event["args"]["name"] for event in check_trace(self, trace) if event["name"] == "process_name"]
        self.assertEqual(names, ["tessera"])

    def test_two_processes_do_not_write_one_trace(self):
        trace = self.path / "trace.json"
        self.environment["TESSERA_TRACE"] = str(trace)
        first = self.store()
        self.assert_one_line(self.run_command("store", "--listen", "127.0.0.1:0", "--trace", trace), 2,
                             "another process writes it", "%p")
        second = self.store()
        for store, says in ((second, True), (first, False)):
            store.send_signal(signal.SIGINT)
            code, _, errors = self.finish(store)
            self.assertEqual(code, 130)
            self.assertEqual("TESSERA_TRACE: trace " in errors, says, errors)
        pids = {event["pid"] for event in check_trace(self, trace)}
        self.assertEqual(pids, {first.pid})

    def test_a_trace_of_a_transfer_has_the_structure_of_one(self):
        traces = [self.path / "send.json", self.path / "recv.json"]
        sender = self.sender(0, 1, ".*=1:R", None, "--trace", traces[0])
        receiver = self.receiver(0, 1, ".*=1:R", "--verify", self.model, "--trace", traces[1])
        for process in (sender, receiver):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        spans = [{"send", "register", "exchange", "attach", "wait for receivers", "transfer"},
                 {"recv", "register", "exchange", "attach", "wait for a version", "pull", "take"}]
        for trace, expected in zip(traces, spans):
            events = check_trace(self, trace)
            self.assertLessEqual(expected, {event["name"] for event in events})
            ends = [event["args"] for event in events if event["ph"] == "e" and event["name"] in ("send", "recv")]
            self.assertEqual([(end["subject"], end["version"]) for end in ends], [("weights/checkpoint", 1)])
            self.assertEqual(ends[0]["bytes"], 4 * 48 + 4 * 8 + 8)

    def test_a_trace_of_a_sender_that_quantises_shows_each_phase(self):
        traces = [self.path / "send.json", self.path / "recv.json"]
        for process in (self.sender(0, 1, ".*=1:R", [self.model] * 2, "--wire", "w=nvfp4", "--trace", traces[0]),
                        self.receiver(0, 1, ".*=1:R", "--count", 2, "--trace", traces[1])):
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
        sent, received = (check_trace(self, trace) for trace in traces)
        phases = ("find amaxes", "agree on amaxes", "encode")
        begun = [(event["name"], event["args"].get("version"), event["args"]["subject"])
                 for event in sent if event["ph"] == "b" and event["name"] in phases]
        self.assertEqual(begun, [(phase, version, "weights/checkpoint") for version in (1, 2) for phase in phases])
        self.assertEqual([event for event in received if event["name"] in phases], [])

    def test_every_log_line_is_json_where_that_is_asked_for(self):
        self.environment.update(TESSERA_LOG="trace", TESSERA_LOG_FORMAT="json")
        processes = [self.sender(), self.receiver(0, 1, ".*=1:R", "--verify", self.model)]
        lines = []
        for process in processes:
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
            lines += [line for line in errors.splitlines() if line.startswith("{")]
        self.assertTrue(lines)
        events = {}
        for line in map(json.loads, lines):
            self.assertLessEqual({"ts", "level", "pid", "tid", "thread"}, line.keys())
            events.setdefault((line.get("job"), line.get("event")), []).append(line)
        for job, expected in (("trainer", ["batch.registered", "version.offered", "transfer.done", "batch.closed"]),
                              ("inference", ["batch.registered", "transfer.done", "batch.closed"])):
            for event in expected:
                [line] = events[job, event]
                self.assertEqual((line["rank"], line["pair"], line["batch"]), (0, "weights", "checkpoint"))
        [done] = events["inference", "transfer.done"]
        self.assertEqual((done["version"], done["bytes"]), (1, 4 * 48 + 4 * 8 + 8))

    def test_what_a_store_turns_away_is_an_event_with_its_caller(self):
        self.environment.update(TESSERA_LOG_FORMAT="json")
        store = self.start("store", "--listen", "127.0.0.1:0", "--json")
        address = json.loads(self.line(store))["address"]
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=HANG) as stranger:
            stranger.sendall(b"no hello at all, and worth a warning")
            stranger.recv(1)
        self.environment["TESSERA_TOKEN"] = "not the token of that store"
        self.assertEqual(self.run_command("top", "--once", "--store", address)[0], 2)
        store.send_signal(signal.SIGINT)
        _, _, errors = self.finish(store)
        lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
        stranger, *others = [line["event"] for line in lines]
        self.assertEqual((stranger, set(others)), ("connection.closed", {"connection.refused"}), errors)  # it tries again
        for line in lines:
            self.assertEqual((line["level"], line["store"]), ("warn", address))
            self.assertIn("peer", line)

    def test_any_process_on_the_bus_shows_what_the_environment_asks_for(self):
        self.environment.update(TESSERA_METRICS="0", TESSERA_TRACE=str(self.path / "trace-%p.json"))
        sender, receiver = self.sender(), self.receiver(0, 1, ".*=1:R", "--verify", self.model)
        for process in (sender, receiver):
            self.assertRegex(self.line(process, "stderr"), r"^metrics at http://127\.0\.0\.1:[0-9]+/metrics$")
            code, _, errors = self.finish(process)
            self.assertEqual(code, 0, errors)
            check_trace(self, self.path / f"trace-{process.pid}.json")
        self.environment["TESSERA_METRICS"] = "203.0.113.1:1"  # no interface of this machine has it (RFC 5737)
        store = self.store()
        store.send_signal(signal.SIGINT)
        _, _, errors = self.finish(store)
        self.assertIn("observation.failed variable=TESSERA_METRICS: TESSERA_METRICS: ", errors)

    def test_a_level_or_form_that_does_not_exist_is_refused(self):
        for variable, value in (("TESSERA_LOG", "verbose"), ("TESSERA_LOG_FORMAT", "xml")):
            with self.subTest(variable=variable):
                self.environment[variable] = value
                self.assert_one_line(self.run_command("store", "--listen", "127.0.0.1:0"), 2, variable, value)
                del self.environment[variable]


if __name__ == "__main__":
    main()
