#include "etp/context.h"

#include "base/fail.h"
#include "device/link.h"
#include "layout/text_reader.h"

namespace tessera::etp {

device::Stream& SideStreams::of(Streams& streams, Chain chain, const char* what, std::optional<double> rate) {
  std::shared_ptr<device::Stream>& stream = streams[static_cast<size_t>(chain)];
  if (stream == nullptr) {
    device::StreamOptions options{.name = chain == Chain::kGraphed ? fmt::format("{}-g", what) : std::string(what),
                                  .timeout = group_.timeout(),
                                  .helped = true};
    if (rate) options.link = std::make_shared<device::Link>(*rate);
    stream = group_.device().make_stream(options);
  }
  return *stream;
}

std::vector<device::Stream*> SideStreams::existing(const Streams& streams) {
  std::vector<device::Stream*> found;
  for (const auto& stream : streams)
    if (stream != nullptr) found.push_back(stream.get());
  return found;
}

void SideStreams::synchronize(const Deadline& deadline) {
  for (const Streams* streams : {&gathers_, &reductions_})
    for (device::Stream* stream : existing(*streams)) stream->synchronize(deadline);
}

std::vector<StreamInfo> SideStreams::infos() const {
  std::vector<StreamInfo> infos;
  for (const Streams* streams : {&gathers_, &reductions_})
    for (size_t chain = 0; chain < streams->size(); ++chain) {
      const std::shared_ptr<device::Stream>& stream = (*streams)[chain];
      if (stream == nullptr) continue;
      infos.push_back({.name = stream->name(),
                       .chain = std::string(to_string(static_cast<Chain>(chain))),
                       .gathers = streams == &gathers_,
                       .idle = stream->record().done()});
    }
  return infos;
}

void SideStreams::synchronize(std::optional<Chain> chain, bool gathers, const Deadline& deadline) {
  const Streams& streams = gathers ? gathers_ : reductions_;
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i] != nullptr && (!chain || static_cast<size_t>(*chain) == i)) streams[i]->synchronize(deadline);
}

void SideStreams::close(const Deadline& deadline) {
  for (Streams* streams : {&gathers_, &reductions_})
    for (auto& stream : *streams) {
      if (stream != nullptr) stream->close(deadline);
      stream.reset();
    }
}

Parameter& RuntimeContext::parameter(WeightId weight) const {
  if (weight >= parameters.size())
    fail(ErrorCode::kInvalidArgument, "there is no weight {}: {} have been added"_message, weight, parameters.size());
  if (parameters[weight]->removed)
    fail(ErrorCode::kInvalidArgument, "{} has been removed"_message, tessera::quoted(parameters[weight]->name()));
  return *parameters[weight];
}

void RuntimeContext::note_host_read(const char* name, const Parameter& of, const void* data, size_t bytes) const {
  if (!device.recorder().on() || data == nullptr) return;
  const device::Access access = device::read_of(data, bytes);
  device.recorder().host_access(name, of.name(), {&access, 1});
}

void RuntimeContext::note_host_write(const char* name, const Parameter& of, const void* data, size_t bytes) const {
  if (!device.recorder().on() || data == nullptr) return;
  const device::Access access = device::write_of(data, bytes);
  device.recorder().host_access(name, of.name(), {&access, 1});
}

Parameter& RuntimeContext::started(WeightId weight) const {
  Parameter& p = parameter(weight);
  if (!p.started)
    fail(ErrorCode::kInvalidArgument, "{} is used before start(), which tells the other ranks where it lies"_message,
         tessera::quoted(p.name()));
  return p;
}

}  // namespace tessera::etp
