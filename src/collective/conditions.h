// Conditions on the words of a group: they sleep on its bell.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/group.h"
#include "device/condition.h"

namespace tessera::collective {

// The common part. Keeps the group alive.
class WordsCondition : public device::Condition {
 public:
  explicit WordsCondition(std::shared_ptr<const Group> group) : group_(std::move(group)) {}
  // Throws if the group has failed, and fails it if a rank that is waited for is_final(): what it wrote before counts.
  bool met() const final;
  void sleep(const Deadline& deadline) const final {
    group_->sleep_until([this] { return met(); }, deadline);
  }
  std::string explain() const final {
    const std::string hint = this->hint();
    return group_->explain(awaited()) + (hint.empty() ? "" : "; " + hint);
  }
  // Throws if a rank whose word is waited for waits in a numbered call, which all ranks make, for this one.
  void check() const final;

 protected:
  // Whether the words are what they are to be. Throws if they cannot become so.
  virtual bool reached() const = 0;
  // Ranks whose words are not yet what they are to be.
  virtual std::vector<int> awaited() const = 0;
  // Asks what the program may have done otherwise, for the message of a wait that ended at its deadline.
  virtual std::string hint() const { return {}; }
  // Whether the ranks that are waited for store the word themselves, in a call that all ranks make in one order with
  // the numbered ones, and not by a thread beside it.
  virtual bool is_meeting() const { return false; }
  const Group& group() const { return *group_; }

 private:
  std::shared_ptr<const Group> group_;
};

// Each of some ranks has reached a value.
class ReachedCondition final : public WordsCondition {
 public:
  ReachedCondition(std::shared_ptr<const Group> group, std::vector<int> ranks, Word word, uint32_t slot, uint64_t value,
                   std::string what);

  std::string to_string() const override;
  void note(device::WaitNotes& notes) const override;

 private:
  bool reached() const override { return awaited().empty(); }
  bool is_meeting() const override { return word_ == Word::kRetired; }
  std::string hint() const override {
    return is_meeting() ? "do all ranks make the same steps and writes, and have they ended their reads?" : "";
  }
  std::vector<int> awaited() const override;

  const std::vector<int> ranks_;
  const Word word_;
  const uint32_t slot_;
  const uint64_t value_;
  const std::string what_;
};

// Something of the group's own, for waits within a call of it: it does not outlive the group.
class OwnCondition final : public device::Condition {
 public:
  using Sleep = std::function<void(const std::function<bool()>& ready, const Deadline& deadline)>;
  OwnCondition(std::string what, std::function<bool()> met, Sleep sleep, std::function<std::string()> explain)
      : what_(std::move(what)), met_(std::move(met)), sleep_(std::move(sleep)), explain_(std::move(explain)) {}

  bool met() const override { return met_(); }
  void sleep(const Deadline& deadline) const override { sleep_(met_, deadline); }
  std::string to_string() const override { return what_; }
  std::string explain() const override { return explain_(); }

 private:
  const std::string what_;
  const std::function<bool()> met_;
  const Sleep sleep_;
  const std::function<std::string()> explain_;
};

}  // namespace tessera::collective
