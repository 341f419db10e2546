"""`tessera etp plan`: which weights are gathered when, and what that takes.

    etp_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json

from command_case import CommandTest, floats, main, write_safetensors

WEIGHTS = """# three layers; no bias
embedding.weight 1000 64 bf16
layers.0.weight  256 64 bf16
layers.1.weight  256 64 bf16
head.weight      100 64 bf16
"""
LAYER = 256 * 64 * 2
EMBEDDING = 1024 * 64 * 2  # 1000 rows over 4 ranks: padded to 256 each
HEAD = 128 * 64 * 2


class EtpPlans(CommandTest):
    def setUp(self):
        super().setUp()
        self.weights = self.path / "weights.txt"
        self.weights.write_text(WEIGHTS)

    def plan(self, *arguments, model=None):
        code, output, errors = self.run_command("etp", "plan", "--model", model or self.weights, "--group", 4, "--json",
                                                *arguments)
        self.assertEqual(code, 0, errors)
        return json.loads(output)

    def test_a_step_goes_forward_and_back(self):
        plan = self.plan()
        uses = [(use["weight"].split(".weight")[0], use["phase"], use["plane"]) for use in plan["uses"]]
        names = ["embedding", "layers.0", "layers.1", "head"]
        self.assertEqual(uses, [(name, "forward", "row") for name in names]
                         + [(name, "backward", "row") for name in reversed(names[1:])])
        self.assertEqual(plan["at_start"], [0])
        self.assertEqual([use["prefetches"] for use in plan["uses"]], [[1], [2], [3], [4], [5], [6], []])
        self.assertEqual(plan["uses"][0]["live_bytes"], EMBEDDING + LAYER)
        self.assertEqual((plan["peak_bytes"], plan["on_demand"], plan["fits"]), (EMBEDDING + LAYER, 0, True))
        pools = {pool["key"].split(",")[0]: (pool["buffers"], pool["bytes"]) for pool in plan["pools"]}
        self.assertEqual(pools, {"gather 1024x64 bf16": (1, EMBEDDING), "gather 256x64 bf16": (2, 2 * LAYER),
                                 "gather 128x64 bf16": (2, 2 * HEAD)})
        rank = plan["rank_bytes"]
        rows = 256 + 64 + 64 + 32
        self.assertEqual((rank["parameters"], rank["gradients"]), (rows * 64 * 2, rows * 64 * 4))
        self.assertEqual(rank["publication"], 0)
        self.assertEqual(rank["gathered"], sum(size for _, size in pools.values()))
        self.assertEqual(rank["gradients_in_flight"], (1000 + 2 * 256 + 100) * 64 * 2)

    def test_a_cap_holds_to_the_byte(self):
        peak = EMBEDDING + LAYER
        plan = self.plan("--cap", peak)
        self.assertEqual((plan["on_demand"], plan["peak_bytes"], plan["fits"]), (0, peak, True))
        plan = self.plan("--cap", peak - 1)
        self.assertEqual((plan["on_demand"], plan["peak_bytes"], plan["fits"]), (1, EMBEDDING, True))
        self.assertEqual(plan["peak_bytes_without_cap"], peak)
        plan = self.plan("--cap", EMBEDDING - 1)
        self.assertEqual((plan["peak_bytes"], plan["fits"]), (EMBEDDING, False))

    def test_formats_and_distances(self):
        plan = self.plan("--format", "layers.*=mxfp8", "head.*=nvfp4", "--distance", 2)
        uses = {(use["weight"], use["phase"]): use["plane"] for use in plan["uses"]}
        self.assertEqual(uses["layers.0.weight", "backward"], "column")
        self.assertEqual(uses["head.weight", "backward"], "row")
        self.assertEqual(plan["uses"][0]["prefetches"], [2])
        self.assertEqual(plan["at_start"], [0, 1])
        keys = {pool["key"].split(",")[0] for pool in plan["pools"]}
        self.assertLessEqual({"gather 256x64 mxfp8 row as bf16", "gather 256x64 mxfp8 column as bf16",
                              "gather 128x64 nvfp4 row as bf16"}, keys)
        self.assertGreater(plan["rank_bytes"]["publication"], 0)
        plan = self.plan("--distance", 0, "--expert-distance", 0)
        self.assertEqual(plan["on_demand"], len(plan["uses"]))

    def test_a_checkpoint_and_text_for_people(self):
        model = self.path / "deep.safetensors"
        write_safetensors(model, {f"layers.{i}.w": ("F32", [64, 32], floats(2048)) for i in range(30)}
                          | {"norm": ("F32", [32], floats(32))})
        plan = self.plan("--forward-only", model=model)
        self.assertEqual([use["weight"] for use in plan["uses"]], [f"layers.{i}.w" for i in range(30)])
        self.assertEqual(plan["rank_bytes"]["replicated"], 3 * 32 * 4)
        code, output, errors = self.run_command("etp", "plan", "--model", model, "--group", 4, "--cap", "16KiB")
        self.assertEqual(code, 0, errors)
        self.assertIn("and 20 more uses", output)
        self.assertIn("30 weights of 31 tensors sharded over 4 ranks, 1 replicated", output)
        self.assertIn("gathered at once 16 KiB (fits below the cap of 16 KiB), in pools 16 KiB", output)
        for cap, text in ((8192, "with 59 uses on demand; 16 KiB would prefetch"), (8191, "one use takes 8 KiB")):
            self.assertIn(text, self.run_command("etp", "plan", "--model", model, "--group", 4, "--cap", cap)[1])

    def test_mistakes_give_one_line_and_status_2(self):
        for arguments, texts in {
            ("--group", "0"): ["\"embedding.weight\"", "over 0 ranks"],
            ("--group", "4", "--distance", "65"): ["distance is 65"],
            ("--group", "4", "--format", ".*=fp5"): ["unknown weight format", "nvfp4"],
            ("--group", "4", "--format", "nvfp4"): ["format rule", "no '='"],
            ("--group", "3", "--pad-for-alignment", "0"): ["1000 rows", "pad_for_alignment=16"],
            ("--group", "4", "--dtype", "i64"): ["cannot travel as i64"],
            ("--group", "4", "--min-elements", "1000000"): ["none of its 4 tensors"],
            ("--group", "4", "--micro-batches", "0"): ["a number of micro-batches", "see tessera etp plan --help"],
            ("--group", "4", "--distanse", "2"): ["did you mean --distance", "see tessera etp plan --help"],
            (): ["--group is required"],
        }.items():
            with self.subTest(arguments=arguments):
                self.assert_one_line(self.run_command("etp", "plan", "--model", self.weights, *arguments), 2, *texts)
        self.assert_one_line(self.run_command("etp"), 2, "A subcommand is required", "see tessera etp --help")
        self.weights.write_text("w 64 bf16\n")
        self.assert_one_line(self.run_command("etp", "plan", "--model", self.weights, "--group", 4), 2, "weights.txt:1: ",
                             "NAME ROWS COLUMNS DTYPE [FORMAT]")


if __name__ == "__main__":
    main()
