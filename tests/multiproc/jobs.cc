#include "tests/multiproc/jobs.h"

namespace tessera::test {

Side trainer(Rank rank, int world) {
  return {.job = "trainer",
          .peer = "inference",
          .rank = rank,
          .world = world,
          .layout = std::to_string(world) + ":S0",
          .sends = true};
}

Side inference(Rank rank, int world) {
  return {.job = "inference", .peer = "trainer", .rank = rank, .world = world, .layout = std::to_string(world) + ":S1"};
}

std::vector<float> local_tensor(const Side& side) {
  const Layout layout = Layout::parse(side.layout).bind(side.shape);
  return std::vector<float>(static_cast<size_t>(layout.owned(side.shape, side.rank).size()) + 1);
}

int with_batch(const Side& side, const std::string& store,
               const std::function<int(Batch& batch, std::vector<float>& tensor)>& body) {
  Bus bus({.job = side.job, .rank = side.rank, .world = side.world, .store = store, .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = side.peer, .timeout = side.rendezvous});
  std::vector<float> tensor = local_tensor(side);
  const TensorSpec spec{.name = side.name,
                        .data = tensor.data(),
                        .dtype = side.dtype,
                        .shape = side.shape,
                        .layout = Layout::parse(side.layout)};
  Batch batch = side.sends ? pair.offer("policy", {&spec, 1}, side.rendezvous)
                           : pair.accept("policy", {&spec, 1}, side.rendezvous);
  return body(batch, tensor);
}

}  // namespace tessera::test
