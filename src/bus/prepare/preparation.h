// The steps of a version before it is offered to a receiving job: this rank's share of Partial tensors is reduced; then
// what travels quantised is quantised, and the rest is compared with the version before.
//
//   idle --start(v)--> reducing --and copied--> quantising, comparing --both done--> prepared()
//                          \-------------------------|---- a step fails: failed(why)
//
// On the loop's thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bus/prepare/delta_encoder.h"
#include "bus/prepare/quantizer.h"
#include "bus/prepare/reducer.h"
#include "bus/prepare/step.h"
#include "bus/session/session.h"

namespace tessera::bus {

class Preparation {
 public:
  struct Events {
    std::function<void()> ready_changed;      // of the connections within this job
    std::function<void(const Status&)> lost;  // a rank of this job was lost, or reports that another was
    std::function<void()> prepared;           // the version of start() is ready; perhaps called before start() returns
    std::function<void(const Status&)> failed;  // one of its steps has failed; call abort()
    std::function<void()> stopped;              // a step that was aborted has ended
    std::function<void(int64_t)> ahead;         // a rank of this job prepares that version, newer than that of start()
  };
  // The elements of a sent route in a slot: in its tensor, or in the result of a reduction.
  using SourceOf = std::function<SourceRoute(const SentRoute& route, uint32_t slot)>;

  // Allocates scratch memory, before anyone can attach, since its place is announced with the rest. Throws
  // kResourceExhausted. REQUIRES: `setup` and the memory that source_of() returns outlive it
  Preparation(const SessionSetup& setup, const SourceOf& source_of, Events events);
  ~Preparation();  // REQUIRES: not busy

  Reducer* reducer() const { return reducer_.get(); }        // null if this rank reduces nothing
  Quantizer* quantizer() const { return quantizer_.get(); }  // null if nothing travels quantised
  DeltaEncoder* deltas() const { return deltas_.get(); }     // null without deltas
  bool quantises(uint32_t sent) const { return quantizer_ && quantizer_->quantises(sent); }

  // REQUIRES: not busy. `copied`: the slot holds the version; otherwise copied() must follow.
  void start(int64_t version, uint32_t slot, bool copied);
  void copied();
  void abort(const Status& status);  // the version started last: its results do not count
  bool busy() const;
  bool complete() const;  // all that start() began is done
  // Whether the digests of that version in that slot, and perhaps deltas, are ready.
  bool compared(int64_t version, uint32_t slot) const;

  // The ranks of this job have sent versions up to this one without this session.
  void passed(int64_t version);
  std::string missing() const;       // what holds up the version: "it was still being quantised"
  std::string awaited() const;       // likewise: "version 7 to be quantised"
  std::vector<Link*> links() const;  // within this job
  void detach(const Status& why);

 private:
  enum StepName : size_t { kReduce, kQuantise, kCompare, kSteps };
  struct Stage {
    PreparationStep* step = nullptr;
    bool begun = false;  // or the others know that this rank will not begin it
    bool done = false;
  };

  void begin(Stage& stage);
  void end(StepName name, const Status& status);
  void advance();
  const Stage* present() const;

  const SessionSetup& setup_;
  const Events events_;
  std::unique_ptr<Reducer> reducer_;
  std::unique_ptr<Quantizer> quantizer_;
  std::unique_ptr<DeltaEncoder> deltas_;
  std::array<Stage, kSteps> stages_;
  bool active_ = false;  // from start() to abort()
  bool copied_ = false;
  int64_t version_ = 0;
  uint32_t slot_ = 0;
};

}  // namespace tessera::bus
