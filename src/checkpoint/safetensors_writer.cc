#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/atomic_file.h"
#include "checkpoint/safetensors_plan.h"
#include "tessera/checkpoint.h"

namespace tessera {

int64_t write_safetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                          const std::map<std::string, std::string>& metadata) {
  std::vector<TensorInfo> infos;
  std::unordered_map<std::string_view, const std::byte*> data;
  for (const TensorView& tensor : tensors) {
    infos.push_back({tensor.name, tensor.dtype, tensor.shape});
    data.emplace(tensor.name, tensor.data);
  }
  const checkpoint::FilePlan plan = checkpoint::plan_file(infos, metadata, path.native());
  checkpoint::AtomicFile file(path, plan.bytes);
  file.append(std::as_bytes(std::span(plan.head)));
  for (const TensorInfo& tensor : plan.tensors)
    file.append({data.at(tensor.name), static_cast<size_t>(bytes_of(tensor.dtype, element_count(tensor.shape)))});
  file.commit();
  return plan.bytes;
}

}  // namespace tessera
