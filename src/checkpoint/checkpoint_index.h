// `*.safetensors.index.json`: which file holds which tensor of a checkpoint of several files.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

// File names, plain ones in the index' folder, and the tensors to take from each.
using WeightMap = std::map<std::string, std::set<std::string>>;

// `path` is for messages. Throws Error(kInvalidArgument) unless it is an object with a `weight_map` of names to
// file names, which must not lead out of the folder.
WeightMap parse_index(std::string_view json, std::string_view path);
// The same of a file, which must not be larger than 100 MB.
WeightMap read_index(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
