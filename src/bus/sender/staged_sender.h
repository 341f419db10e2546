// Sends snapshots: a send copies the registered tensors into a slot that nobody reads, has the copy prepared for each
// job, offers it to all of them and is over. Receivers take the newest one when they like.
#pragma once

#include <optional>
#include <set>

#include "bus/sender/leases.h"
#include "bus/sender/offered_snapshot.h"
#include "bus/sender/sender_batch.h"

namespace tessera::bus {

class StagedSender final : public SenderBatch {
 public:
  explicit StagedSender(BatchSetup setup) : SenderBatch(std::move(setup)) {}

  void open(const PairView& view, const CallLimits& limits) override;

  // --- for what is offered, on the loop's thread ---
  void on_prepared(SenderSession& session, const Status& status);
  void on_digested(SenderSession& session, int64_t version);  // sum_digests() has those of it
  // A receiver that has the lease of that slot was lost, or cut off. Its process may still read.
  void on_lease_cut(uint32_t slot, const Incarnation& process);

  std::unique_ptr<OfferedVersion> make_offered(SenderSession& session, uint32_t slot) override;
  void on_receiver(const Incarnation& process) override;
  // Receivers take what there is; only where this rank's terms are wanted does another one wait for it.
  void on_others_ahead(int64_t version) override { numbers_.hear(version, false); }
  void on_unpinned() override;

 private:
  void begin_send() override;
  void check_ended() override;
  void note_begun(int64_t version) override;
  Withdrawal try_withdraw(int64_t version) override;
  void fall_behind(int64_t version) override;
  Untaken untaken() const override;
  void on_attached(SenderSession& session, bool first) override;
  void on_dropped(const SenderSession& session) override { copying_.prepared.erase(&session); }
  void on_deadline() override;
  bool cancel_operation() override;
  std::vector<std::string> waits_for() const override;
  void check_peers() override;
  void on_copied() override;
  void await_readers() override;
  void drop_snapshots() override;

  static OfferedSnapshot& offered(SenderSession& session, uint32_t slot);
  bool pinned(uint32_t slot) const;
  std::optional<uint32_t> free_slot() const;
  void begin_waiting_send();
  bool only_copies() const { return copying_.target && copying_.preparing.empty(); }

  struct Slot {
    int64_t version = 0;  // 0: none
    bool begun = false;   // a receiver has begun to take it, and may have left since
  };
  std::vector<Slot> slots_;
  uint32_t newest_slot_ = 0;
  std::unique_ptr<Leases> leases_;  // from the first one on
  // The version on its way into a slot.
  struct Copying {
    std::optional<uint32_t> target;  // the slot; none while it waits for one
    bool copied = false;
    std::set<const SenderSession*> preparing, prepared;
  };
  Copying copying_;
};

}  // namespace tessera::bus
