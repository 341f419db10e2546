#include "bus/registration/rename.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bus/registration/manifest_testing.h"

namespace tessera::bus {
namespace {

using Names = std::vector<std::string>;

// Shapes follow from the last segment of a name, so that only tensors of one kind have equal ones.
Manifest names_offered(const Names& names) {
  Manifest manifest;
  for (const std::string& name : names)
    manifest.entries.push_back(
        entry(name, {static_cast<int64_t>(name.size() - std::min(name.size(), name.rfind('.') + 1))}, "1:R"));
  return manifest;
}

std::string suggestion(const Names& offered, const Names& taken) {
  const Manifest sender = names_offered(offered), receiver = names_offered(taken);
  std::vector<bool> filled;
  for (const std::string& name : taken) filled.push_back(std::ranges::count(offered, name) != 0);
  return suggest_map({sender, "trainer"}, {receiver, "engine"}, filled);
}

struct Case {
  const char* what;
  Names offered, taken;
  const char* text;
};

class SuggestMap : public testing::TestWithParam<Case> {};

// The maps' effect is tested in python/tests/maps/test_suggested_maps.py.
const Case kCases[] = {
    {"ThePrefixOfTheSender",
     {"module.a.weight", "module.a.bias", "module.b.weight"},
     {"a.weight", "a.bias", "b.weight"},
     R"m(all 3 names match if engine registers with map={r"(.*)": r"module.\1"})m"},
    {"ThePrefixOfTheReceiver",
     {"a.weight", "a.bias"},
     {"model.a.weight", "model.a.bias"},
     R"m(all 2 names match if engine registers with map={r"model\.(.*)": r"\1"})m"},
    {"OneName",
     {"module.a.weight"},
     {"a.weight"},
     R"m(the name matches if engine registers with map={r"(.*)": r"module.\1"})m"},
    {"AnotherPrefix",
     {"transformer.h.a.weight", "transformer.h.a.bias"},
     {"model.h.a.weight", "model.h.a.bias"},
     R"m(all 2 names match if engine registers with map={r"model\.(.*)": r"transformer.\1"})m"},
    {"APrefixOfSomeNames",
     {"lm_head.weight", "model.layers.0.weight", "model.norm.weight"},
     {"lm_head.weight", "layers.0.weight", "norm.weight"},
     R"m(all 2 names match if engine registers with map={r"((?:layers|norm)\..*)": r"model.\1"})m"},
    {"AWrapperWithin",
     {"_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "_fsdp_wrapped_module.norm.weight"},
     {"layers.0.weight", "norm.weight"},
     R"m(all 2 names match if trainer registers with map=)m"
     R"m(lambda name, tensor: re.sub(r"\b_fsdp_wrapped_module\.", "", name))m"},
    {"WrappersOfBothSides",
     {"_orig_mod.a._orig_mod.weight", "b._orig_mod.weight"},
     {"module.a.weight", "b.module.weight"},
     R"m(all 2 names match if engine registers with map=lambda name, tensor: re.sub(r"\bmodule\.", "", name))m"
     R"m(, and trainer registers with map=lambda name, tensor: re.sub(r"\b_orig_mod\.", "", name))m"},
    {"AdaptersAndTheirBase",
     {"model.q.weight", "model.v.weight", "model.norm.bias"},
     {"base_model.model.model.q.base_layer.weight", "base_model.model.model.v.base_layer.weight",
      "base_model.model.model.norm.bias", "base_model.model.model.q.lora_A.default.weight"},
     R"m(3 of the 4 names match if engine registers with map=)m"
     R"m(lambda name, tensor: re.sub(r"^base_model\.model\.", "", re.sub(r"\bbase_layer\.", "", name)))m"},
    {"NoneForAPartOfASegment", {"submodule.a.weight", "submodule.b.weight"}, {"suba.weight", "subb.weight"}, ""},
    {"NoneIfAnotherTensorHasThatName", {"a.weight", "b.bias"}, {"a.weight", "head.weight"}, ""},
    {"NoneIfTwoWouldDo", {"a.weight", "b.weight"}, {"weight"}, ""},
    {"NoneThatTakesAnotherLayer",
     {"layers.0.q.weight", "layers.0.v.weight"},
     {"layers.1.q.weight", "layers.1.v.weight"},
     ""},
    {"NoneForOneOfManyNames", {"module.a.weight", "b.weight"}, {"a.weight", "c.bias", "d.bias", "e.bias"}, ""},
    {"NoneIfShapesDiffer", {"module.weights.a", "module.weights.b"}, {"weights", "a"}, ""},
    {"NoneThatIsNoPlainText", {"mo\"dule.a.weight", "mo\"dule.b.weight"}, {"a.weight", "b.weight"}, ""},
    {"NoneWithoutOffers", {}, {"a.weight"}, ""},
};
INSTANTIATE_TEST_SUITE_P(, SuggestMap, testing::ValuesIn(kCases),
                         [](const auto& of) { return std::string(of.param.what); });

TEST_P(SuggestMap, IsSuggested) {
  EXPECT_EQ(suggestion(GetParam().offered, GetParam().taken), GetParam().text);
}

}  // namespace
}  // namespace tessera::bus
