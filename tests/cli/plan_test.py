"""`tessera plan`: what would travel.

    plan_test.py PATH_OF_TESSERA [unittest arguments]
"""

import json
import xml.etree.ElementTree

from command_case import CommandTest, main


class Plans(CommandTest):
    def test_json_has_the_documented_form(self):
        code, output, errors = self.run_command("plan", "--shape", "4096x4096", "--dtype", "bf16", "--src",
                                                "dp=2,fsdp=4@0-7:R,S0", "--dst", "tp=4@8-11:S1", "--json")
        self.assertEqual(code, 0, errors)
        plan = json.loads(output)
        self.assertEqual(plan["shape"], [4096, 4096])
        self.assertEqual(plan["stats"]["bytes_moved"], 4096 * 4096 * 2)
        self.assertEqual(plan["stats"]["max_egress"], plan["stats"]["max_egress_lower_bound"])
        self.assertEqual(sum(route["bytes"] for route in plan["routes"]), plan["stats"]["bytes_delivered"])
        for route in plan["routes"]:
            self.assertEqual(set(route), {"src", "dsts", "kind", "region", "bytes"})

    def test_a_picture_and_an_explanation(self):
        picture = self.path / "plan.svg"
        code, output, errors = self.run_command("plan", "--shape", "64x64", "--dtype", "f32", "--src", "4:S0", "--dst",
                                                "2@4-5:S1", "--svg", picture)
        self.assertEqual(code, 0, errors)
        self.assertIn("lower bound", output)
        svg = xml.etree.ElementTree.parse(picture)
        texts = [element.text for element in svg.iter() if element.tag.endswith("}text")]
        self.assertIn("64x64 f32:  4:S0  →  2@4-5:S1", texts)
        ranks = [f"{rank}  ({size} KiB)" for rank, size in enumerate((4, 4, 4, 4, 8, 8))]
        self.assertEqual([text for text in texts if text in ranks], ranks)
        bands = [element for element in svg.iter() if element.get("fill-opacity") == ".45"]
        self.assertEqual(len(bands), 4 * 2)  # each source has columns for both destinations

    def test_invalid_layouts_give_one_line_and_status_2(self):
        cases = {
            "dp=2@0-7:R": "8 ranks for a mesh of 2",
            "2:S0,S1": "2 placements for a mesh of 1",
            "2:X": 'expected a placement (R, S<dim>, S<dim>*<factor>, G<dim>[<bound>;...], Psum|Pavg|Pmin|Pmax|Pproduct), '
                   'got "X"',
            "dp=2:S9": 'at 7: expected a dim from -8 to 7, got "9"',
            "0:R": "at 1: expected an axis",
            "2@0-99999999999:R": 'at 5: expected a rank from 0 to 2147483647, got "99999999999"',
        }
        for source, text in cases.items():
            with self.subTest(source=source):
                result = self.run_command("plan", "--shape", "8x8", "--dtype", "f32", "--src", source, "--dst", "1@9:R")
                self.assert_one_line(result, 2, json.dumps(source), text)

    def test_a_whole_model(self):
        arguments = ["plan", "--checkpoint", self.model, "--src", ".*=1:R", "--dst", "w=2@1-2:S1", "--dst", ".*=2@1-2:R"]
        code, output, errors = self.run_command(*arguments)
        self.assertEqual(code, 0, errors)
        self.assertIn("4 tensors of 4 kinds", output)
        code, output, errors = self.run_command(*arguments, "--json")
        self.assertEqual(code, 0, errors)
        plan = json.loads(output)
        moved = {tensor["name"]: (tensor["dst"], tensor["bytes_moved"]) for tensor in plan["tensors"]}
        self.assertEqual(moved, {"w": ("2@1-2:S1", 6 * 8 * 4), "bias": ("2@1-2:R", 2 * 8 * 4),
                                 "steps": ("2@1-2:R", 2 * 8), "none": ("2@1-2:R", 0)})
        self.assertEqual(plan["stats"]["bytes_moved"], sum(size for _, size in moved.values()))
        self.assertEqual(plan["stats"]["bytes_lower_bound"], plan["stats"]["bytes_moved"])


if __name__ == "__main__":
    main()
