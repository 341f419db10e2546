#!/usr/bin/env python3
"""A tree that breaks each rule of check_layers.py, and one that breaks none.

    scripts/check_layers_test.py [unittest arguments]
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK = pathlib.Path(__file__).with_name("check_layers.py")
OPTIONS = "option(TESSERA_BUILD_TESTS)\n"


class Rules(unittest.TestCase):
    def findings(self, files):
        """The findings for a tree with these files (path: text)."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {"CMakeLists.txt": OPTIONS, **files}.items():
                path = pathlib.Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            done = subprocess.run(
                [sys.executable, CHECK, "--root", folder], stdout=subprocess.PIPE, text=True, check=False
            )
            lines = done.stdout.splitlines()
            self.assertEqual(done.returncode, 1 if len(lines) > 1 else 0, done.stdout)
            self.assertEqual(lines[-1], f"layers: {len(lines) - 1} finding(s)")
            return lines[:-1]

    def refused(self, files, *words):
        """Expects one finding with these words."""
        found = self.findings(files)
        self.assertEqual(len(found), 1, found)
        for word in words:
            self.assertIn(word, found[0])

    def accepted(self, files):
        self.assertEqual(self.findings(files), [])

    def test_a_layer_includes_none_above_it(self):
        self.accepted({"src/exec/run.cc": '#include "base/fd.h"\n#include "tessera/layout.h"\n'})
        self.refused({"src/exec/run.cc": '\n#include "peer/agent.h"\n'}, "src/exec/run.cc:2", "exec", "peer")
        self.refused({"src/base/fd.h": '#include "tessera/bus.h"\n'}, "src/base/fd.h:1", "bus")
        self.refused({"src/attic/old.h": ""}, "src/attic", "LAYERS")

    def test_a_room_includes_none_above_it(self):
        self.accepted({"src/bus/sender/a.cc": '#include "bus/session/session.h"\n#include "bus/sender/b.h"\n'})
        self.refused({"src/bus/session/a.h": '#include "bus/sender/b.h"\n'}, "bus/session", "bus/sender/b.h")
        self.refused({"src/bus/embedded.cc": '#include "bus/lending/lender.h"\n'}, "bus/embedded")
        self.accepted({"src/bus/daemon/daemon.cc": '#include "bus/embedded.h"\n'})
        self.refused({"src/bus/receiver/a.cc": '#include "bus/bus_impl.h"\n'}, "bus/receiver", "bus/bus_impl.h")
        self.refused({"src/bus/attic/a.cc": '#include "bus/session/session.h"\n'}, "bus/attic", "ROOMS")

    def test_what_lies_behind_a_seam_is_private(self):
        for folder in ("transport/shm", "transport/loopback", "memory/cuda", "store/etcd", "exec/cuda"):
            header = f'#include "{folder}/inner.h"\n'
            layer = folder.split("/")[0]
            self.accepted({f"src/{folder}/a.cc": header, f"src/{layer}/registry.cc": header})
            self.refused({"src/bus/session/a.cc": header}, "private to " + folder)
            self.refused({"tools/doctor.cc": header}, "private to " + folder)
            self.accepted({"fuzz/a.cc": header, "tests/fault/a_test.cc": header, f"src/{layer}/a_test.cc": header})
        self.accepted({"src/bus/session/a.cc": '#include "memory/host/shared_arena.h"\n'})
        self.accepted({"src/store/server/a.cc": '#include "store/memory/state.h"\n'})
        self.refused({"src/exec/pull/a.cc": '#include "exec/pull/cuda/inner.h"\n#include "exec/cuda/x.h"\n'}, "exec/cuda")

    def test_the_wall_clock_is_not_read(self):
        self.refused({"src/base/a.cc": "std::chrono::system_clock::now();\n"}, "wall clock")
        self.refused({"python/src/a_py.cc": "std::chrono::system_clock::now();\n"}, "wall clock")
        self.refused({"python/tessera/a.py": "import time\nat = time.time()\n"}, "python/tessera/a.py:2", "wall clock")
        self.accepted({"python/tessera/a.py": "at = time.monotonic()\n", "tests/a.cc": "system_clock"})

    def test_an_option_that_is_named_exists(self):
        self.accepted({"src/store/a.cc": 'fail("build with -DTESSERA_BUILD_TESTS=ON");\n'})
        self.refused({"src/store/a.cc": 'fail("build with -DTESSERA_ETCD=ON");\n'}, "src/store/a.cc:1", "TESSERA_ETCD")

    def test_a_name_is_one_class(self):
        self.refused({"src/plan/a.h": "class Walk {\n};\n", "src/exec/b.h": "class Walk final : public A {\n"}, "Walk")
        self.refused({"src/plan/a.h": "enum class Type : int {\n", "src/store/b.cc": "struct Type {\n"}, "Type")
        self.accepted({"src/plan/a.h": "namespace a {\nclass Walk {\n", "src/exec/b.h": "namespace b {\nclass Walk {\n"})
        self.refused({"src/plan/a.h": "namespace a {\nclass Walk {\n", "src/exec/b.h": "namespace a {\nclass Walk {\n"}, "Walk")
        self.accepted({"src/plan/a.h": "class Walk;\nstruct Walk::Inner {\n", "src/exec/b.h": "class Walk {\n"})
        self.accepted({"src/plan/a.h": "struct A {\n  struct Walk {\n", "src/exec/b.h": "struct Walk {\n"})

    def test_the_pure_layers_have_no_threads_and_no_files(self):
        self.refused({"src/plan/a.cc": "#include <thread>\n"}, "pure")
        self.refused({"src/layout/a.cc": '#include "base/socket.h"\n'}, "pure")
        self.accepted({"src/plan/a_test.cc": "#include <thread>\n"})

    def test_no_cuda_header_is_included_elsewhere(self):
        self.refused({"src/exec/a.cc": "#include <cuda.h>\n"}, "CUDA")
        self.accepted({"src/exec/cuda/a.cu": "#include <cuda.h>\n", "src/transport/nccl/a.cc": "#include <nccl.h>\n"})

    def test_public_headers_need_the_standard_library_only(self):
        self.refused({"include/tessera/bus.h": "#include <fmt/format.h>\n"}, "public header", "fmt")
        self.refused({"include/tessera/other.h": ""}, "PUBLIC")


if __name__ == "__main__":
    unittest.main()
