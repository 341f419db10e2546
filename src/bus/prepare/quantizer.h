// Quantises this rank's part of a version before it is offered: it computes the amaxes of its routes, exchanges them
// once with the other ranks of its job, and encodes into pieces (exec/wire/wire_piece.h) in shared memory, which
// receivers map.
//
//   idle --start(v)--> amaxes of this rank --> agreeing with all ranks --> encoding --> idle, quantized(ok)
//                            \---- aborted, or failed on any rank: quantized(why), on all ----/
//
// A rank that sends nothing quantised takes part as well, so that all sends fail alike. Tensors that are quantised
// already are only copied into pieces, once all ranks have told the same amaxes of them; so are quantised copies of
// elements, while they are current. On the loop's thread.
// docs/formats/bus-protocol.md, "Amaxes".
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "base/trace.h"
#include "bus/prepare/amax_exchange.h"
#include "bus/prepare/step.h"
#include "bus/session/source_link.h"
#include "exec/wire/quantize_run.h"
#include "peer/loop_signal.h"
#include "tessera/memory.h"

namespace tessera::bus {

class Quantizer final : public PreparationStep {
 public:
  struct Events {
    std::function<void()> ready_changed;
    std::function<void(const Status&)> lost;       // see AmaxExchange
    std::function<void(const Status&)> quantized;  // what start() began is over; never called before start() returns
  };
  // The elements of a sent route in a slot.
  using SourceOf = std::function<SourceRoute(const SentRoute& route, uint32_t slot)>;

  static bool wanted(const Match& match);  // whether any rank has anything to quantise

  // Allocates pieces and grids. Throws kResourceExhausted if there are more amaxes than can be agreed on. REQUIRES:
  // `setup` and the memory that source_of() returns outlive it.
  Quantizer(Agent& agent, const SessionSetup& setup, const SourceOf& source_of, Events events);
  ~Quantizer() override;  // REQUIRES: not busy

  AmaxExchange& exchange() { return *exchange_; }
  const AmaxExchange& exchange() const { return *exchange_; }

  // By index into the batch's sent routes.
  bool quantises(uint32_t sent) const { return part_of_[sent] != kNone; }
  ServedRoute piece(uint32_t sent, uint32_t slot) const;
  // Of the last version encoded into the slot. REQUIRES: the batch has digests
  const Digest& digest(uint32_t sent, uint32_t slot) const;
  const Digest& rest(uint32_t sent, uint32_t slot) const;

  // What travels quantised from here in one transfer, not counting the bytes that it moves.
  const RankShare& share() const { return share_; }

  void start(int64_t version, uint32_t slot) override;
  void abort(const Status& status) override;  // quantized() follows, if it is busy
  void give_up(int64_t version, const Status& status) override { exchange_->give_up(version, status); }
  bool busy() const override { return round_.phase.has_value(); }
  std::string missing() const override;
  std::string awaited(int64_t version) const override;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  // What all ranks that hold a matrix must tell alike, as it is quantised already.
  struct Given {
    Index matrix = 0;
    bool scale = false;                // its only one; else its amax
    const std::byte* value = nullptr;  // f32, in the first slot
  };
  struct Part {
    uint32_t sent = 0;
    uint32_t tensor = 0;
    uint64_t offset = 0;             // of its piece in a slot
    std::vector<size_t> cut_blocks;  // blocks whose amaxes are agreed on, in the order of their keys
    size_t first_key = 0;            // of those, or of what is given
    std::vector<Given> given;        // of planes that are there
    bool encoded = false;            // they are all that is there: all ranks must tell the same
  };

  std::string waits_for() const;                                     // "trainer/1, trainer/2", or empty
  void enter(const char* span, QuantizePhase phase, int64_t bytes);  // the phase succeeded. `span`: a literal
  void leave(bool well);                                             // ends the version. REQUIRES: busy()
  void collect_parts(const SourceOf& source_of);
  std::vector<Given> given_of(const PlaneSource& plane, const WirePiece& piece) const;
  std::vector<AmaxKey> collect_keys();
  void require_few_keys() const;
  void on_looked();
  void on_agreed(const Status& status, std::span<const float> amaxes);
  void on_encoded();
  Status check_range(std::span<const float> amaxes) const;
  const Match::Tensor& matched(const Part& part) const { return setup_.agreement.match.tensors[part.tensor]; }
  bool copies(size_t part) const { return round_.data[part] == nullptr; }  // from its planes
  void choose_sources();
  void find_given_amaxes();
  Status check_copies(std::span<const float> amaxes) const;
  float value_of(const Given& given) const;  // in the round's slot
  Status check_given() const;
  void report();
  void take_over(std::span<const float> amaxes);
  void spoil_piece();
  void finish(const Status& status);

  const SessionSetup& setup_;
  const Events events_;
  const std::string subject_;  // "weights/policy", in traces
  const uint64_t track_ = Trace::new_track();
  std::vector<uint32_t> part_of_;  // by sent route; kNone
  std::vector<Part> parts_;
  std::vector<size_t> matrix_keys_;  // by tensor, of the first matrix of its group; if the format needs amaxes
  std::shared_ptr<const QuantizeProgram> program_;
  std::shared_ptr<QuantizeAmaxes> amaxes_;
  std::vector<std::vector<const std::byte*>> sources_;  // by slot, of the parts; null: there are only planes
  SharedBuffer pieces_;
  uint64_t slot_bytes_ = 0;
  RankShare share_;

  LoopSignal looked_, encoded_;
  std::unique_ptr<AmaxRun> amax_run_;
  std::vector<std::unique_ptr<EncodeRun>> encode_runs_;  // by slot: each keeps its slot's digests
  std::unique_ptr<AmaxExchange> exchange_;
  std::vector<float> reported_;  // in the order of the keys

  // The current version, or the last one.
  struct Round {
    std::optional<QuantizePhase> phase;  // the current phase; nothing: it is over
    const char* span = "";
    TimePoint entered{};
    int64_t version = 0;
    uint32_t slot = 0;
    uint32_t epoch = 0;
    std::vector<const std::byte*> data;  // of the parts; null: it is copied from its planes
    RankShare copied;                    // of share()
    Status failure;
  };
  Round round_;
};

}  // namespace tessera::bus
