#include "bus/prepare/quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "base/fail_point.h"
#include "base/mutation.h"
#include "base/rounding.h"
#include "codec/quant/quantize_formulas.h"

namespace tessera::bus {
namespace {

constexpr size_t kPieceAlignment = 64;

size_t matrices_of(const Shape& shape) {
  Index matrices = 1;
  for (size_t d = 0; d + 2 < shape.size(); ++d) matrices *= shape[d];
  return static_cast<size_t>(matrices);
}

// Of what is quantised here. For a group, the first tensor has the amaxes of all.
bool has_matrix_amaxes(std::span<const Match::Tensor> tensors, size_t t) {
  return tensors[t].wire && !tensors[t].encoded && needs_amax(*tensors[t].wire) && tensors[t].group == t;
}

std::vector<PlaneSource::Matrix> planes_in(const SessionSetup& setup, uint32_t tensor, uint32_t slot) {
  const std::optional<PlaneSource>& plane = setup.tensors[tensor].encoded;
  std::vector<PlaneSource::Matrix> matrices = plane ? plane->matrices : std::vector<PlaneSource::Matrix>();
  for (PlaneSource::Matrix& matrix : matrices) {
    matrix.codes += slot * setup.slot_bytes;
    matrix.scales += slot * setup.slot_bytes;
    if (matrix.amax != nullptr) matrix.amax += slot * setup.slot_bytes;
  }
  return matrices;
}

}  // namespace

bool Quantizer::wanted(const Match& match) {
  return std::ranges::any_of(match.tensors, [](const Match::Tensor& tensor) { return tensor.wire.has_value(); });
}

Quantizer::Quantizer(Agent& agent, const SessionSetup& setup, const SourceOf& source_of, Events events)
    : setup_(setup),
      events_(std::move(events)),
      subject_(fmt::format("{}/{}", setup.view.name, setup.batch)),
      part_of_(setup.routes.sent.size(), kNone),
      looked_(agent.loop(), [this] { on_looked(); }),
      encoded_(agent.loop(), [this] { on_encoded(); }) {
  collect_parts(source_of);
  require_few_keys();
  const std::vector<AmaxKey> keys = collect_keys();
  reported_.resize(keys.size());
  amaxes_ = std::make_shared<QuantizeAmaxes>(*program_);
  pieces_ = SharedHeap::process().allocate(std::max<uint64_t>(setup_.slots * slot_bytes_, 1), kPieceAlignment);
  amax_run_ = setup_.runs->make_amaxes(program_, amaxes_, [this] { looked_.raise(); });
  for (uint32_t slot = 0; slot < setup_.slots; ++slot) {
    std::vector<EncodeRun::Memory> memory;
    for (size_t p = 0; p < parts_.size(); ++p)
      memory.push_back({.data = sources_[slot][p],
                        .piece = pieces_.data() + slot * slot_bytes_ + parts_[p].offset,
                        .planes = planes_in(setup_, parts_[p].tensor, slot)});
    encode_runs_.push_back(setup_.runs->make_encoding(program_, amaxes_, std::move(memory), setup_.agreement.digest,
                                                      [this] { encoded_.raise(); }));
  }
  exchange_ = std::make_unique<AmaxExchange>(
      agent, setup, keys,
      AmaxExchange::Events{
          .ready_changed = events_.ready_changed,
          .lost = events_.lost,
          .agreed = [this](const Status& status, std::span<const float> found) { on_agreed(status, found); }});
}

Quantizer::~Quantizer() {
  TESSERA_CHECK(!busy());
}

void Quantizer::collect_parts(const SourceOf& source_of) {
  std::vector<QuantizeRoute> routes;
  sources_.resize(setup_.slots);
  for (uint32_t sent = 0; sent < setup_.routes.sent.size(); ++sent) {
    const SentRoute& route = setup_.routes.sent[sent];
    const Match::Tensor& matched = setup_.agreement.match.tensors[route.tensor];
    if (!matched.wire) continue;
    part_of_[sent] = static_cast<uint32_t>(parts_.size());
    parts_.push_back({.sent = sent, .tensor = route.tensor, .cut_blocks = {}, .given = {}, .encoded = matched.encoded});
    QuantizeRoute& quantised =
        routes.emplace_back(QuantizeRoute{.tensor = route.tensor, .what = wire_region(matched, route.region)});
    quantised.planes = setup_.tensors[route.tensor].encoded;
    if (matched.encoded) {
      quantised.src = {.owned = quantised.planes->held, .strides = std::vector<Index>(matched.shape.size(), 0)};
    } else {
      quantised.src = source_of(route, 0).src;
    }
    for (uint32_t slot = 0; slot < setup_.slots; ++slot)
      sources_[slot].push_back(matched.encoded ? nullptr : source_of(route, slot).data);
  }
  program_ = std::make_shared<QuantizeProgram>(routes);
  for (size_t p = 0; p < parts_.size(); ++p) {
    parts_[p].offset = slot_bytes_;
    slot_bytes_ += round_up(static_cast<uint64_t>(program_->piece(p).bytes()), kPieceAlignment);
    share_.add(program_->piece(p));
    if (routes[p].planes) parts_[p].given = given_of(*routes[p].planes, program_->piece(p));
  }
}

std::vector<Quantizer::Given> Quantizer::given_of(const PlaneSource& plane, const WirePiece& piece) const {
  const PlaneReader reader(piece, plane);
  const codec::BlockFormat& format = piece.what().format;
  std::vector<Given> given;
  for (Index m = 0; m < piece.walk().matrices(); ++m) {
    const PlaneSource::Matrix& held = plane.matrices[reader.held_matrix(m)];
    const Index matrix = piece.tensor_matrix(m);
    if (held.amax != nullptr) given.push_back({.matrix = matrix, .scale = false, .value = held.amax});
    if (format.one_scale()) given.push_back({.matrix = matrix, .scale = true, .value = held.scales});
  }
  return given;
}

void Quantizer::require_few_keys() const {
  const std::vector<Match::Tensor>& tensors = setup_.agreement.match.tensors;
  std::vector<Index> matrices(tensors.size(), 0), blocks(tensors.size(), 0);
  for (size_t t = 0; t < tensors.size(); ++t)
    if (has_matrix_amaxes(tensors, t)) matrices[t] = static_cast<Index>(matrices_of(tensors[t].shape));
  for (size_t p = 0; p < parts_.size(); ++p)
    blocks[parts_[p].tensor] += program_->cut_block_count(p) + (parts_[p].encoded ? std::ssize(parts_[p].given) : 0);
  Index sum = 0;
  size_t most = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    sum += matrices[t] + blocks[t];
    if (matrices[t] + blocks[t] > matrices[most] + blocks[most]) most = t;
  }
  if (sum <= Index{kMaxAmaxes}) return;
  fail(ErrorCode::kResourceExhausted,
       "batch {} of pair {}: ranks would have to agree on {} amaxes before they quantise, and {} are possible: tensor "
       "{} has {} matrices with one each, and its layout {} cuts {} blocks of {} here: let edges fall between blocks, "
       "or ask for another wire format for it, or for none"_message,
       setup_.batch, setup_.view.name, sum, kMaxAmaxes, tensors[most].name, matrices[most],
       tensors[most].src.to_string(), blocks[most], to_string(*tensors[most].wire));
}

// The matrices of all tensors come first, even if this rank holds nothing of them: each rank decides by itself what all
// agree on, and all decide alike.
std::vector<AmaxKey> Quantizer::collect_keys() {
  const std::vector<Match::Tensor>& tensors = setup_.agreement.match.tensors;
  std::vector<AmaxKey> keys;
  matrix_keys_.resize(tensors.size());
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    matrix_keys_[t] = tensors[t].group == t ? keys.size() : matrix_keys_[tensors[t].group];
    if (!has_matrix_amaxes(tensors, t)) continue;
    for (size_t m = 0; m < matrices_of(tensors[t].shape); ++m)
      keys.push_back({.group = t, .matrix = static_cast<uint32_t>(m)});
  }
  for (size_t p = 0; p < parts_.size(); ++p) {
    parts_[p].first_key = keys.size();
    const Match::Tensor& tensor = tensors[parts_[p].tensor];
    for (const CutBlock& block : program_->cut_blocks(p)) {
      keys.push_back({.group = tensor.fused ? tensor.group : parts_[p].tensor,
                      .matrix = static_cast<uint32_t>(block.matrix),
                      .row = static_cast<uint32_t>(block.block_row),
                      .column = static_cast<uint32_t>(block.block_column)});
      parts_[p].cut_blocks.push_back(block.place);
    }
    for (const Given& given : parts_[p].encoded ? std::span(parts_[p].given) : std::span<const Given>())
      keys.push_back({.group = parts_[p].tensor,
                      .matrix = static_cast<uint32_t>(given.matrix),
                      .row = AmaxKey::kWhole,
                      .column = given.scale ? AmaxKey::kGivenScale : AmaxKey::kGivenAmax});
  }
  return keys;
}

ServedRoute Quantizer::piece(uint32_t sent, uint32_t slot) const {
  const Part& part = parts_[part_of_[sent]];
  ServedRoute served;
  served.route.what = piece_region(part.tensor, program_->piece(part_of_[sent]));
  served.route.src = {.owned = served.route.what.region, .strides = {1}};
  served.route.data = pieces_.data() + slot * slot_bytes_ + part.offset;
  served.per_route = true;
  served.quantised = true;
  served.slot_bytes = setup_.slots > 1 ? slot_bytes_ : 0;
  return served;
}

const Digest& Quantizer::digest(uint32_t sent, uint32_t slot) const {
  return encode_runs_[slot]->digests()[part_of_[sent]];
}

const Digest& Quantizer::rest(uint32_t sent, uint32_t slot) const {
  return encode_runs_[slot]->rest(part_of_[sent]);
}

// --- a version -----------------------------------------------------------------------------------

void Quantizer::start(int64_t version, uint32_t slot) {
  TESSERA_CHECK(!busy());
  round_.version = version;
  round_.slot = slot;
  round_.failure = {};
  choose_sources();
  amax_run_->read_from(round_.data);
  enter("find amaxes", QuantizePhase::kAmax, amax_run_->bytes());
  amax_run_->start(++round_.epoch);
  fail_point("wire: amax");
}

void Quantizer::choose_sources() {
  round_.data = sources_[round_.slot];
  round_.copied = {};
  for (size_t p = 0; p < parts_.size(); ++p) {
    const LocalTensor& tensor = setup_.tensors[parts_[p].tensor];
    if (tensor.current && !mutated(Mutation::kCopyIgnored) &&
        (tensor.current(round_.slot) || mutated(Mutation::kStaleCopy)))
      round_.data[p] = nullptr;
    if (copies(p)) round_.copied.add(program_->piece(p));
  }
}

void Quantizer::enter(const char* span, QuantizePhase phase, int64_t bytes) {
  if (round_.phase) leave(true);
  round_.phase = phase;
  round_.span = span;
  round_.entered = Clock::steady().now();
  Trace::begin(round_.span, track_, {.subject = subject_, .version = round_.version, .bytes = bytes});
}

void Quantizer::leave(bool well) {
  const QuantizePhase phase = *std::exchange(round_.phase, std::nullopt);
  Trace::end(round_.span, track_, {.subject = subject_, .version = round_.version});
  if (!well) return;
  Metrics& metrics = Metrics::process();
  metrics.quantize_seconds(phase).observe(Clock::steady().now() - round_.entered);
  if (phase != QuantizePhase::kEncode) return;
  const RankShare& copied = round_.copied;
  metrics.quantized_source_bytes.add(
      static_cast<uint64_t>(share_.quantized_source_bytes - copied.quantized_source_bytes));
  metrics.quantized_bytes.add(static_cast<uint64_t>(share_.quantized_bytes - copied.quantized_bytes));
  metrics.encoded_bytes.add(static_cast<uint64_t>(copied.quantized_bytes));
}

void Quantizer::abort(const Status& status) {
  if (!round_.phase) return;
  switch (*round_.phase) {
    case QuantizePhase::kAmax:
      if (round_.failure.ok()) round_.failure = status;
      return amax_run_->abort(status);
    case QuantizePhase::kAgree:
      return exchange_->abort(status);
    case QuantizePhase::kEncode:
      return encode_runs_[round_.slot]->abort(status);
  }
}

void Quantizer::on_looked() {
  if (round_.failure.ok()) round_.failure = check_given();
  if (!round_.failure.ok()) {
    exchange_->give_up(round_.version, round_.failure);
    return finish(round_.failure);
  }
  enter("agree on amaxes", QuantizePhase::kAgree, 0);
  if (const auto found = amax_run_->nonfinite())
    return exchange_->start(round_.version, {},
                            {.tensor = found->tensor, .index = found->index, .value = found->value});
  report();
  exchange_->start(round_.version, reported_);
}

float Quantizer::value_of(const Given& given) const {
  float value = 0;
  std::memcpy(&value, given.value + round_.slot * setup_.slot_bytes, sizeof(value));
  return value;
}

Status Quantizer::check_given() const {
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    for (const Given& given : copies(p) ? std::span(part.given) : std::span<const Given>()) {
      const float value = value_of(given);
      if (std::isfinite(value) && !std::signbit(value)) continue;
      return failed(ErrorCode::kInvalidArgument,
                    "tensor {}: it is quantised to {} already, and the {} of its matrix {} is {}: it is finite, and 0 "
                    "or more"_message,
                    matched(part).name, to_string(*matched(part).wire), given.scale ? "scale" : "amax", given.matrix,
                    value);
    }
  }
  return {};
}

// Those of copies, which AmaxRun has left out.
void Quantizer::find_given_amaxes() {
  for (size_t p = 0; p < parts_.size(); ++p) {
    if (!copies(p)) continue;
    auto amax = amaxes_->matrices(p).begin();
    for (const Given& given : parts_[p].given)
      if (!given.scale) *amax++ = value_of(given);
  }
}

// They were quantised with the largest amax of all ranks, if other ranks have copies of the same, or the same elements.
Status Quantizer::check_copies(std::span<const float> amaxes) const {
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    if (part.encoded || !copies(p)) continue;
    for (const Given& given : part.given) {
      const float agreed = given.scale ? 0 : amaxes[matrix_keys_[part.tensor] + static_cast<size_t>(given.matrix)];
      if (given.scale || agreed == value_of(given)) continue;
      return failed(ErrorCode::kMismatch,
                    "tensor {}: the quantised copy of its matrix {} has amax {}, and the largest of all ranks is {}: "
                    "write elements and their copy together, on all ranks"_message,
                    matched(part).name, given.matrix, value_of(given), agreed);
    }
  }
  return {};
}

void Quantizer::report() {
  find_given_amaxes();
  std::ranges::fill(reported_, 0.0F);
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    if (part.encoded) {
      for (size_t g = 0; g < part.given.size(); ++g) reported_[part.first_key + g] = value_of(part.given[g]);
      continue;
    }
    const std::span<const float> matrices = amaxes_->matrices(p);
    for (size_t m = 0; m < matrices.size(); ++m) {
      const Index matrix = program_->matrix_of(p, static_cast<Index>(m));
      float& amax = reported_[matrix_keys_[part.tensor] + static_cast<size_t>(matrix)];
      amax = std::max(amax, matrices[m]);
    }
    for (size_t b = 0; b < part.cut_blocks.size(); ++b)
      reported_[part.first_key + b] = amaxes_->blocks(p)[part.cut_blocks[b]];
  }
}

void Quantizer::on_agreed(const Status& status, std::span<const float> amaxes) {
  if (!status.ok()) return finish(status);
  setup_.on_amaxes_agreed();
  const Status range = check_range(amaxes);
  if (!range.ok()) return finish(range);
  const Status copies = check_copies(amaxes);
  if (!copies.ok()) return finish(copies);
  take_over(amaxes);
  encode_runs_[round_.slot]->read_from(round_.data);
  enter("encode", QuantizePhase::kEncode, share_.quantized_source_bytes);
  encode_runs_[round_.slot]->start(++round_.epoch);
}

void Quantizer::on_encoded() {
  spoil_piece();
  finish(encode_runs_[round_.slot]->status());
}

Status Quantizer::check_range(std::span<const float> amaxes) const {
  const std::vector<Match::Tensor>& tensors = setup_.agreement.match.tensors;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].wire != Format::kNvfp4 || tensors[t].encoded) continue;
    for (size_t m = 0; m < matrices_of(tensors[t].shape); ++m) {
      const float amax = amaxes[matrix_keys_[t] + m];
      if (amax != 0 && (amax < codec::kLeastNvAmax || amax > codec::kMostNvAmax))
        return failed(ErrorCode::kInvalidArgument,
                      "tensor {}: the amax of matrix {} is {}: nvfp4 takes 0 and {} to {}: rescale it, or ask for "
                      "another wire format"_message,
                      tensors[t].name, m, amax, codec::kLeastNvAmax, codec::kMostNvAmax);
    }
  }
  return {};
}

void Quantizer::take_over(std::span<const float> amaxes) {
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    if (part.encoded) continue;
    const std::span<float> matrices = amaxes_->matrices(p);
    const std::span<const float> of_matrices =
        mutated(Mutation::kLocalAmax) ? std::span<const float>(reported_) : amaxes;
    const std::span<const float> of_blocks =
        mutated(Mutation::kLocalBlockAmax) ? std::span<const float>(reported_) : amaxes;
    for (size_t m = 0; m < matrices.size(); ++m)
      matrices[m] =
          of_matrices[matrix_keys_[part.tensor] + static_cast<size_t>(program_->matrix_of(p, static_cast<Index>(m)))];
    for (size_t b = 0; b < part.cut_blocks.size(); ++b)
      amaxes_->blocks(p)[part.cut_blocks[b]] = of_blocks[part.first_key + b];
  }
}

// For a Mutation: corrupts the first piece once it is encoded.
void Quantizer::spoil_piece() {
  if (parts_.empty() || program_->piece(0).bytes() == 0) return;
  const WirePiece& piece = program_->piece(0);
  std::byte* const data = pieces_.data() + round_.slot * slot_bytes_ + parts_[0].offset;
  if (mutated(Mutation::kSpoiledCode)) data[piece.code_section()] ^= std::byte{1};
  if (mutated(Mutation::kSpoiledScale)) data[piece.scale(0, 0, 0)] ^= std::byte{1};
  if (mutated(Mutation::kSpoiledAmax)) data[piece.amax(0)] ^= std::byte{1};
}

void Quantizer::finish(const Status& status) {
  leave(status.ok());
  events_.quantized(status);
}

std::string Quantizer::missing() const {
  const std::string names = waits_for();
  return names.empty() ? "it was still being quantised"
                       : fmt::format("{} have not sent the amaxes of quantised tensors"_message, names);
}

std::string Quantizer::awaited(int64_t version) const {
  const std::string names = waits_for();
  return names.empty() ? fmt::format("version {} to be quantised"_message, version)
                       : fmt::format("{} to send the amaxes of version {}"_message, names, version);
}

std::string Quantizer::waits_for() const {
  return fmt::format("{}", fmt::join(exchange_->waiting_for(), ", "));
}

}  // namespace tessera::bus
