// `*.safetensors.index.json`: the file of each tensor in a checkpoint of several files.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

// File names, without folders, in the index's folder, and the tensors to take from each.
using WeightMap = std::map<std::string, std::set<std::string>>;

// `path` is for messages. Throws Error(kInvalidArgument) unless it is an object with a `weight_map` of names to file
// names, which must not lead out of the folder.
WeightMap parse_index(std::string_view json, std::string_view path);
// Reads the text of an index's file, of at most 100 MB.
std::string read_index(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
