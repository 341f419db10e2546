#include <algorithm>
#include <cstring>
#include <vector>

#include "base/framing.h"
#include "base/message.h"
#include "collective/group.h"
#include "collective/hostile_testing.h"
#include "collective/messages.h"
#include "collective/movement/gather.h"
#include "collective/shared/page.h"
#include "collective/shared/shared_pages.h"
#include "device/cpu_device.h"
#include "fuzz/targets.h"

namespace tessera::fuzz {
namespace {

using namespace collective;

template <typename Message>
void read_again(std::span<const std::byte> bytes) {
  expect_round_trip(
      read_message<Message>(bytes, "group"),
      [](const std::vector<std::byte>& again) { return read_message<Message>(again, "again"); },
      [](const Message& message) { return message_bytes(message); });
}

void read_frame(const Frame& frame) {
  switch (static_cast<ServiceType>(frame.type)) {
    case ServiceType::kHello:
      return read_again<GroupHello>(frame.payload);
    case ServiceType::kAskArena:
      return read_again<AskArena>(frame.payload);
    case ServiceType::kArena:
      return read_again<ArenaAnswer>(frame.payload);
  }
  fail(ErrorCode::kInvalidArgument, "no such frame"_message);
}

// One frame after another: type, length, payload. The framing itself is the bus's.
void read_frames(ByteReader& in) {
  while (in.left() > 0) {
    Frame frame;
    frame.type = in.get<uint8_t>();
    const auto payload = in.get_bytes(kMaxServiceBytes);
    frame.payload.assign(payload.begin(), payload.end());
    read_frame(frame);
  }
}

constexpr uint32_t kGroupSlots = 4;

// A group of two, whose other rank is this function: it owns a page and writes anything to it.
class HostilePeer {
 public:
  HostilePeer() : pages_(SharedPages::create_in_process(Page::bytes_for(kGroupSlots), kKey)) {
    const Page page = Page::create(pages_->data(), 1, 2, kGroupSlots);
    page.set_state(RankState::kHere);
    const Exchange exchange = [](const std::string& own) { return blobs_of_two(own, kKey); };
    group_ = Group::form(exchange, {.rank = 0,
                                    .size = 2,
                                    .name = "fuzz",
                                    .timeout = Duration::zero(),  // whatever is not there fails at once
                                    .device = &device_,
                                    .slots = kGroupSlots,
                                    .in_process = true});
  }

  void write(size_t offset, uint64_t value) {
    std::memcpy(pages_->data() + offset % (pages_->bytes() - sizeof(value)), &value, sizeof(value));
  }

  // Reads everything that a rank can say.
  void look(uint8_t call) const {
    for (const Word word : {Word::kPublished, Word::kProduced, Word::kFolded})
      for (uint32_t slot = 0; slot < kGroupSlots; ++slot) TESSERA_CHECK_LE(group_->get(1, word, slot), kMaxWordValue);
    for (const Word word : {Word::kRetired, Word::kClosed, Word::kLeftPlan})
      TESSERA_CHECK_LE(group_->get(1, word, kWholeRank), kMaxWordValue);
    const auto shown = group_->gradient(1, 1, 0, 2);
    TESSERA_CHECK(!shown || shown->dtype <= kLastDType);
    const uint64_t before = group_->refusals();
    try {
      make(call);
    } catch (const Error& error) {
      if (!group_->status().ok()) throw;
      // A refusal, which another rank may have passed on, or a difference of the calls: the group lives, and has
      // counted it once.
      TESSERA_CHECK_EQ(group_->refusals(), before + 1);
      TESSERA_CHECK_LE(group_->latest_refusal()->reason.message().size(), 16U << 10);
    }
    const Status status = group_->status();
    TESSERA_CHECK_LE(status.message().size(), 16U << 10);
    status.throw_if_error();
  }

 private:
  static constexpr uint64_t kKey = 2;

  void make(uint8_t call) const {
    if (call >= 128) group_->hear_refusal();  // as a wait for a word does
    std::vector<float> values(100);
    if (call % 4 == 1) group_->max_exchange(values);
    if (call % 4 == 2) TESSERA_CHECK_EQ(group_->exchange("fuzz", "blob").size(), 2U);
    if (call % 4 == 3) group_->barrier("fuzz");
  }

  device::CpuDevice device_{device::DeviceOptions{}};
  std::shared_ptr<SharedPages> pages_;
  std::shared_ptr<Group> group_;
};

void read_page(ByteReader& in) {
  HostilePeer peer;
  while (in.left() > 0) {
    const auto writes = in.get<uint8_t>();
    for (int i = 0; i < writes % 16; ++i) {
      const auto offset = in.get<uint32_t>();
      peer.write(offset, in.get<uint64_t>());
    }
    peer.look(in.get<uint8_t>());
  }
}

}  // namespace

bool group(Input input) {
  return accepts([&] {
    ByteReader in(input, "input");
    switch (in.get<char>()) {
      case 'b':
        return read_again<Bootstrap>(in.rest());
      case 'f':
        return read_frames(in);
      case 'p':
        return read_page(in);
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind"_message);
    }
  });
}

}  // namespace tessera::fuzz
