#include "base/message.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/checksums.h"
#include "checkpoint/safetensors_header.h"
#include "fuzz/targets.h"

namespace tessera::fuzz {
namespace {

using namespace checkpoint;

void read_header(ByteReader& in) {
  const auto data_bytes = static_cast<int64_t>(in.get<uint64_t>() >> 1);
  const SafetensorsHeader header = parse_header(as_text(in.rest()), data_bytes, "a file");
  std::vector<TensorInfo> tensors;
  for (const HeaderEntry& entry : header.tensors) {
    TESSERA_CHECK_EQ(entry.end - entry.begin, bytes_of(entry.info.dtype, element_count(entry.info.shape)));
    TESSERA_CHECK_LE(entry.end, data_bytes);
    tensors.push_back(entry.info);
  }
  const SafetensorsHeader again = parse_header(format_header(tensors, header.metadata), data_bytes, "a file");
  TESSERA_CHECK(again.metadata == header.metadata);
  TESSERA_CHECK_EQ(again.tensors.size(), header.tensors.size());
  for (size_t i = 0; i < header.tensors.size(); ++i) {
    TESSERA_CHECK(again.tensors[i].info == header.tensors[i].info);
    TESSERA_CHECK_EQ(again.tensors[i].begin, header.tensors[i].begin);
  }
}

void check_checksums(const Checksums& checksums) {
  TESSERA_CHECK(parse_checksums(format_checksums(checksums), "checksums") == checksums);
}

void read_index(ByteReader& in) {
  const std::string_view json = as_text(in.rest());
  for (const auto& [file, tensors] : parse_index(json, "an index")) {
    TESSERA_CHECK(!file.empty() && file != "." && file != ".." && file.find('/') == std::string::npos);
    TESSERA_CHECK(!tensors.empty());
  }
  check_checksums(parse_index_checksums(json, "an index"));
}

}  // namespace

bool safetensors(Input input) {
  return accepts([&] {
    ByteReader in(input, "input");
    switch (in.get<char>()) {
      case 'h':
        return read_header(in);
      case 'i':
        return read_index(in);
      case 'c':
        return check_checksums(parse_checksums(as_text(in.rest()), "checksums"));
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind"_message);
    }
  });
}

}  // namespace tessera::fuzz
