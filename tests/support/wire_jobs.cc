#include "tests/support/wire_jobs.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "tessera/quantize.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

TensorSpec wire_spec(const RandomCase& a, LocalData& data, DType dtype, const Layout& layout, bool asks) {
  TensorSpec spec{.name = a.name,
                  .data = data.bytes().data() + data.offset,
                  .dtype = dtype,
                  .shape = a.shape,
                  .layout = layout,
                  .strides = data.strides};
  if (asks) spec.wire = a.wire;
  return spec;
}

TensorSpec received_spec(const RandomCase& a, LocalData& data, bool asks) {
  TensorSpec spec = wire_spec(a, data, a.dst_dtype, a.dst, asks || !a.planes.empty());
  spec.planes = a.planes;
  return spec;
}

TensorSpec sent_spec(const RandomCase& a, LocalData& data, bool asks) {
  TensorSpec spec = wire_spec(a, data, a.src_dtype, a.src, asks || !a.src_planes.empty());
  spec.planes = a.src_planes;
  return spec;
}

const char* agent_of(bool daemon) {
  return daemon ? "daemon" : "embedded";
}

int send_cases(const WireJobs& jobs, const std::vector<RandomCase>& cases, const std::string& store, Rank rank,
               Barrier& all) {
  Bus bus({.job = "trainer",
           .rank = rank,
           .world = jobs.sources,
           .store = store,
           .agent = agent_of(jobs.sender_agents),
           .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "inference"});
  std::vector<LocalData> data;
  for (const RandomCase& a : cases) data.push_back(source_space(a, rank));
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < cases.size(); ++i) specs.push_back(sent_spec(cases[i], data[i], jobs.asks != Asks::kReceiver));
  std::optional<Batch> batch;  // a staged sender is done before anybody has taken what it sends
  return until_all_know(all, [&] {
    batch = pair.offer("policy", specs, kRendezvousTimeout, {.mode = jobs.sends});
    for (int64_t version = 1; version <= jobs.versions; ++version) {
      for (size_t i = 0; i < cases.size(); ++i) fill_source(cases[i], rank, version, data[i]);
      batch->send(version).wait();
    }
    return 0;
  });
}

int receive_cases(const WireJobs& jobs, const std::vector<RandomCase>& cases, const std::string& store, Rank rank,
                  Barrier& all) {
  ::setenv("TESSERA_FORCE_PULL", jobs.pull, 1);
  Bus bus({.job = "inference",
           .rank = rank,
           .world = jobs.destinations,
           .store = store,
           .agent = agent_of(jobs.receiver_agents),
           .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
  std::vector<LocalData> data;
  for (const RandomCase& a : cases) data.push_back(destination_space(a, rank));
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < cases.size(); ++i)
    specs.push_back(received_spec(cases[i], data[i], jobs.asks != Asks::kSender));
  std::optional<Batch> batch;
  return until_all_know(all, [&] {
    batch = pair.accept("policy", specs, kRendezvousTimeout, {.mode = jobs.receives});
    for (int64_t version = 1; version <= jobs.versions; ++version) {
      const int64_t taken = batch->recv(version).wait();
      if (jobs.sends == Mode::kStaged ? taken < version : taken != version) return 2;
      version = taken;
      for (size_t i = 0; i < cases.size(); ++i) {
        const std::string wrong = check_destination(cases[i], rank, version, data[i]);
        if (wrong.empty()) continue;
        std::fprintf(stderr, "version %ld: %s\n", static_cast<long>(version), wrong.c_str());
        return kWrong;
      }
    }
    return 0;
  });
}

}  // namespace

std::vector<Outcome> transfer_cases(const WireJobs& jobs, const std::vector<RandomCase>& cases, Mutation mistake) {
  TestJobs group;
  for (Rank rank = 0; rank < jobs.sources && jobs.sender_agents; ++rank) group.start_agent("trainer", rank, jobs.pull);
  for (Rank rank = 0; rank < jobs.destinations && jobs.receiver_agents; ++rank)
    group.start_agent("inference", rank, jobs.pull);
  Barrier all;  // none of the agents holds it
  for (Rank rank = 0; rank < jobs.sources; ++rank)
    group.start("trainer/" + std::to_string(rank), [&] {
      mutation() = mistake;
      return send_cases(jobs, cases, group.store(), rank, all);
    });
  for (Rank rank = 0; rank < jobs.destinations; ++rank)
    group.start("inference/" + std::to_string(rank),
                [&] { return receive_cases(jobs, cases, group.store(), rank, all); });
  all.open();
  return group.wait(6 * hang_limit());
}

int until_all_know(Barrier& all, const std::function<int()>& body) {
  try {
    const int status = body();
    all.pass();
    return status;
  } catch (const Error&) {
    all.pass();
    throw;
  }
}

void expect_all_well(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
}

RandomCase fixed_case(Format format, const Shape& shape, const std::string& from, const std::string& to) {
  return {.name = "w",
          .shape = shape,
          .src_dtype = DType::kBF16,
          .dst_dtype = DType::kBF16,
          .src = Layout::parse(from),
          .dst = Layout::parse(to),
          .seed = 7,
          .wire = format};
}

std::vector<float> quantised_values(Format format, std::vector<float> values, Index rows, Index columns) {
  const QuantSpec spec{.format = format};
  const PlaneShape shape = plane_shape(spec, Plane::kRow, rows, columns);
  std::vector<std::byte> codes(static_cast<size_t>(shape.code_bytes()));
  std::vector<std::byte> scales(static_cast<size_t>(shape.scale_bytes()));
  const MatrixView view{values.data(), DType::kF32, rows, columns, columns};
  const float amax = compute_amax({&view, 1})[0].value;
  quantize(view, spec, {amax, 0}, {{codes.data(), shape.code_row_bytes(), scales.data(), shape.scale_row_bytes()}, {}});
  dequantize(spec, Plane::kRow, {codes.data(), shape.code_row_bytes(), scales.data(), shape.scale_row_bytes()}, amax,
             {values.data(), DType::kF32, rows, columns, columns});
  return values;
}

Side quantised(Side side, Format format) {
  side.wire = format;
  return side;
}

Side wire_sender(Rank rank) {
  return quantised(trainer(rank, kWireSenders));
}

Side wire_receiver(Rank rank) {
  return quantised(inference(rank));
}

bool holds_quantised(const Side& side, const std::vector<float>& tensor, int64_t version) {
  Side all = side;
  all.layout = "1:R";
  all.rank = 0;
  std::vector<float> whole = local_tensor(all);
  fill(all, whole, version);
  whole.pop_back();
  whole = quantised_values(*side.wire, std::move(whole), side.shape[0], side.shape[1]);
  std::vector<float> place = local_tensor(side);  // of each element in the tensor
  fill(side, place, 0);
  for (size_t i = 0; i + 1 < place.size(); ++i)
    if (tensor[i] != whole[static_cast<size_t>(place[i])]) return false;
  return true;
}

}  // namespace tessera::test
