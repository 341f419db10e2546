#include "device/record/missing_edge.h"

#include <fmt/format.h>

#include "base/escape.h"

namespace tessera::device {
namespace {

// "operation gather wte.weight"
std::string waiter_text(const ScheduleOrder& order, const OrderedRecord& second) {
  return fmt::format("{} before {}", order.actor(second.point.actor).to_string(), record_text(*second.record));
}

std::string missing_event(const ScheduleOrder& order, const OrderedRecord& first, const OrderedRecord& second) {
  const std::string stream = order.actor(first.point.actor).to_string();
  const Record* const event = order.event_after(first.point);
  if (event == nullptr)
    return fmt::format("{} records no event after {}, for which {} could wait", stream, record_text(*first.record),
                       waiter_text(order, second));
  return fmt::format("no event of {} from event {} (record {}) on is waited for by {}", stream, event->event,
                     event->sequence, waiter_text(order, second));
}

std::string missing_word(const ScheduleOrder& order, const OrderedRecord& first, const OrderedRecord& second) {
  const int rank = first.record->rank;
  const ScheduleOrder::WordWritten* const written = order.word_after(first.point);
  if (written == nullptr)
    return fmt::format("rank {} writes no word after {}, for which {} could wait", rank, record_text(*first.record),
                       waiter_text(order, second));
  return fmt::format("rank {}'s word {} >= {}, which {} sets, is not waited for by {}", rank, written->word.word,
                     written->word.value, record_text(*written->record), waiter_text(order, second));
}

}  // namespace

std::string record_text(const Record& record) {
  std::string text;
  for (const std::string_view part : {record.name, record.subject})
    if (!part.empty()) text += printable(part) + ' ';
  if (text.empty()) text = std::string(to_string(record.kind)) + ' ';
  return text + fmt::format("(record {})", record.sequence);
}

std::string missing_edge(const ScheduleOrder& order, const OrderedRecord& first, const OrderedRecord& second) {
  return first.record->rank == second.record->rank ? missing_event(order, first, second)
                                                   : missing_word(order, first, second);
}

}  // namespace tessera::device
