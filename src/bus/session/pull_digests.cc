#include "bus/session/pull_digests.h"

#include <utility>

#include "base/fail.h"

namespace tessera::bus {

// A source sends digests of delta pieces only if they are cast; otherwise a run computes them anyway.
PullDigests::PullDigests(const PullEnd& exchange) : exchange_(exchange) {
  std::vector<SecondDigest> sent, own;
  for (size_t i = 0; i < exchange.routes().size(); ++i) {
    const WantedRoute& wanted = exchange.routes()[i];
    const bool cast = wanted.route.dst_dtype != wanted.route.what.dtype;
    const SecondDigest second = wanted.route.wire       ? SecondDigest::kRest
                                : exchange.has_delta(i) ? SecondDigest::kPiece
                                                        : SecondDigest::kNone;
    sent.push_back(second == SecondDigest::kPiece && !cast ? SecondDigest::kNone : second);
    if (!wanted.skipped) own.push_back(second);
    sampled_.add(wanted.route.what, second == SecondDigest::kRest);
  }
  sent_table_ = DigestTable(sent);
  own_table_ = DigestTable(own);
}

void PullDigests::receive(Digests digests, const SampleSeed& version) {
  sampled_.draw(version);
  const size_t routes = sent_table_.routes(), expected = sent_table_.size() - routes + sampled_.count();
  if (digests.digests.size() != expected || have_)
    fail(ErrorCode::kMismatch, "{} digests for {} routes, there are {}"_message, digests.digests.size(), routes,
         expected);
  spare_ = std::exchange(sent_, std::move(digests.digests));
  have_ = true;
  if (expected == sent_table_.size()) return;
  // Those that were not sent are 0.
  std::swap(sent_, spare_);
  sent_.resize(sent_table_.size());
  auto next = spare_.begin();
  for (size_t i = 0; i < sent_.size(); ++i) sent_[i] = i >= routes || sampled_.holds(i) ? *next++ : sampled_.nothing(i);
}

std::optional<PullDigests::Place> PullDigests::differing(size_t position, bool as_delta,
                                                         std::span<const Digest> own) const {
  const uint32_t route = exchange_.pulled()[position];
  const auto differ = [&](const Place& place) { return own[place.own] != sent_[place.sent]; };
  const bool piece_only = as_delta && sent_table_.has_second(route);
  const Place whole{.own = position, .sent = route};
  if (!piece_only && differ(whole)) return whole;
  if (!piece_only && !sampled_.quantised(route)) return std::nullopt;
  const Place second{.own = own_table_.second(position), .sent = sent_table_.second(route)};
  return differ(second) ? std::optional(second) : std::nullopt;
}

void PullDigests::add_to(std::span<Digest> sums) const {
  for (const uint32_t route : exchange_.pulled()) sums[sampled_.tensor(route)] += sent_[route];
}

}  // namespace tessera::bus
