// `*.safetensors.index.json`: which file holds which tensor of a checkpoint of several files.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>

namespace tessera::checkpoint {

// File names, plain ones in the index' folder, and the tensors to take from each.
using WeightMap = std::map<std::string, std::set<std::string>>;

// Throws Error(kInvalidArgument) for anything but an object with a `weight_map` of names to file names, which must not
// lead out of the folder.
WeightMap read_index(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
