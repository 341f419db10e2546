#include <algorithm>
#include <map>
#include <span>

#include "plan/colour.h"
#include "plan/flow_matrix.h"
#include "plan/rank_boxes.h"
#include "plan/svg_canvas.h"
#include "plan/tensor_picture.h"
#include "plan/terms.h"
#include "plan/text.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

using plan::bytes_text;
using plan::Rect;
using plan::SvgCanvas;

constexpr double kWidth = 1200;
constexpr double kHeight = 880;
constexpr size_t kMaxBoxes = 32;  // in a column
constexpr size_t kMaxBands = 96;  // more would cover each other: a matrix shows them instead
constexpr size_t kMaxBars = 256;
constexpr Rect kFlow{150, 130, 900, 400};
constexpr Rect kSourceTensor{60, 600, 300, 210};
constexpr Rect kDestinationTensor{420, 600, 300, 210};
constexpr Rect kBars{800, 620, 340, 190};
constexpr double kBoxWidth = 14;

struct ColumnBox {
  int64_t bytes = 0;  // that a source sends, or a destination receives
  int64_t terms = 0;  // that a source reads to reduce them
  double top = 0;
  double height = 0;
  double used = 0;  // by the bands drawn so far

  int64_t load() const { return bytes + terms; }
  // The height for `part` of the load.
  double share(int64_t part) const { return height * static_cast<double>(part) / static_cast<double>(load()); }
};

using Flows = std::map<std::pair<size_t, size_t>, int64_t>;  // bytes by boxes: from, to

class Column {
 public:
  Column(const Layout& layout, double x) : x_(x), ranks_(layout, kMaxBoxes), boxes_(ranks_.size()) {}

  size_t box_of(Rank rank) const { return ranks_.box_of(rank); }
  std::span<const Rank> ranks(size_t box) const { return ranks_.ranks(box); }
  ColumnBox& operator[](size_t box) { return boxes_[box]; }
  size_t size() const { return boxes_.size(); }
  double x() const { return x_; }

  // Sets heights by load, with room for a label.
  void arrange() {
    int64_t total = 0;
    for (const ColumnBox& box : boxes_) total += box.load();
    const double gap = 4;
    const auto count = static_cast<double>(boxes_.size());
    const double least = std::min(12.0, (kFlow.height - gap * (count - 1)) / count * 0.6);
    const double room = kFlow.height - gap * (count - 1) - least * count;
    double y = kFlow.y;
    for (ColumnBox& box : boxes_) {
      box.top = y;
      box.height = least + (total > 0 ? room * static_cast<double>(box.load()) / static_cast<double>(total) : 0);
      y += box.height + gap;
    }
  }

 private:
  double x_;
  plan::RankBoxes ranks_;
  std::vector<ColumnBox> boxes_;
};

class Picture {
 public:
  explicit Picture(const Plan& plan)
      : plan_(plan), canvas_(kWidth, kHeight), from_(plan.src, kFlow.x), to_(plan.dst, kFlow.x + kFlow.width) {
    colours_.assign(plan.src.mesh().ranks().begin(), plan.src.mesh().ranks().end());
    std::ranges::sort(colours_);
  }

  std::string draw() {
    draw_title();
    draw_flow();
    draw_tensors();
    draw_bars();
    return canvas_.take();
  }

 private:
  std::string colour_of(Rank rank) const {
    const auto at = std::ranges::lower_bound(colours_, rank) - colours_.begin();
    return plan::rank_colour(static_cast<size_t>(at), colours_.size());
  }
  std::string colour_of_box(size_t box) const { return colour_of(from_.ranks(box).front()); }

  static std::string shorten(const std::string& text) { return text.size() > 70 ? text.substr(0, 67) + "..." : text; }

  void draw_title() {
    const PlanStats& stats = plan_.stats;
    canvas_.text(kWidth / 2, 34,
                 fmt::format("{} {}:  {}  →  {}", to_string_shape(plan_.meta.shape), to_string(plan_.meta.dtype),
                             shorten(plan_.src.to_string()), shorten(plan_.dst.to_string())),
                 R"(text-anchor="middle" font-size="17" font-weight="bold")");
    std::string figures = fmt::format(
        "{} moved (lower bound {}), {} served by the ranks themselves; the busiest source sends {} (at least {})",
        bytes_text(stats.bytes_moved), bytes_text(stats.bytes_lower_bound),
        bytes_text(stats.bytes_delivered - stats.bytes_moved), bytes_text(stats.max_egress),
        bytes_text(stats.max_egress_lower_bound));
    if (stats.reduction_bytes > 0)
      figures += fmt::format("; {} read for reductions", bytes_text(stats.reduction_bytes));
    if (stats.bytes_between_hosts > 0)
      figures += fmt::format("; {} between hosts", bytes_text(stats.bytes_between_hosts));
    canvas_.text(kWidth / 2, 60, figures, R"(text-anchor="middle" font-size="13" fill="#555")");
  }

  // Who sends to whom.
  void draw_flow() {
    Flows terms;
    Flows flows;
    plan::for_each_term(plan_, [&](Rank peer, const Reduction& reduction, int64_t bytes) {
      terms[{from_.box_of(peer), from_.box_of(reduction.owner)}] += bytes;
    });
    for (const Route& route : plan_.routes)
      for (const Rank dst : plan_.dsts(route)) flows[{from_.box_of(route.src), to_.box_of(dst)}] += route.bytes;
    canvas_.text(from_.x() + kBoxWidth, kFlow.y - 24, heading("source", plan_.src),
                 R"(text-anchor="end" font-weight="bold")");
    canvas_.text(kWidth - 10, kFlow.y - 24, heading("destination", plan_.dst),
                 R"(text-anchor="end" font-weight="bold")");
    if (terms.size() + flows.size() <= kMaxBands) {
      draw_bands(terms, flows);
      return;
    }
    draw_legend("bytes from each source (a row) to each destination (a column): the paler, the fewer");
    plan::draw_flow_matrix(canvas_, kFlow, plan_, [this](Rank rank) { return colour_of(rank); });
  }

  void draw_legend(const char* text) {
    canvas_.text(kFlow.x + kFlow.width / 2, kFlow.y - 24, text, R"(text-anchor="middle" fill="#555")");
  }

  // Draws a band for each pair of boxes; its thickness shows its bytes.
  void draw_bands(const Flows& terms, const Flows& flows) {
    for (const auto& [pair, bytes] : terms) {
      from_[pair.first].bytes += bytes;
      from_[pair.second].terms += bytes;
    }
    for (const auto& [pair, bytes] : flows) {
      from_[pair.first].bytes += bytes;
      to_[pair.second].bytes += bytes;
    }
    from_.arrange();
    to_.arrange();
    draw_terms(terms);
    draw_routes(flows);
    draw_column(from_, "end", from_.x() - 8, true);
    draw_column(to_, "start", to_.x() + kBoxWidth + 8, false);
    draw_legend(plan_.reductions.empty()
                    ? "bands: bytes delivered, in the colour of the sender"
                    : "bands: bytes delivered, dashed: terms to be reduced, in the sender's colour");
  }

  void draw_terms(const Flows& terms) {
    for (const auto& [pair, bytes] : terms) {
      ColumnBox& peer = from_[pair.first];
      ColumnBox& owner = from_[pair.second];
      const double y1 = peer.top + peer.used;
      peer.used += peer.share(bytes);
      const double y2 = owner.top + owner.used;
      owner.used += owner.share(bytes);
      if (&peer == &owner) continue;  // ranks that share a box
      canvas_.loop(from_.x() + kBoxWidth, y1, y2, std::min(peer.share(bytes), owner.share(bytes)),
                   colour_of_box(pair.first));
    }
  }

  void draw_routes(const Flows& flows) {
    for (const auto& [pair, bytes] : flows) {
      ColumnBox& source = from_[pair.first];
      ColumnBox& destination = to_[pair.second];
      const double thickness = std::max(0.4, std::min(source.share(bytes), destination.share(bytes)));
      canvas_.ribbon(from_.x() + kBoxWidth, source.top + source.used, to_.x(), destination.top + destination.used,
                     thickness, colour_of_box(pair.first));
      source.used += source.share(bytes);
      destination.used += destination.share(bytes);
    }
  }

  static std::string heading(const char* side, const Layout& layout) {
    return plan::count_text(layout.mesh().size(), fmt::format("{} rank", side).c_str());
  }

  void draw_column(Column& column, const char* anchor, double text_x, bool coloured) {
    for (size_t i = 0; i < column.size(); ++i) {
      const ColumnBox& box = column[i];
      canvas_.rect({column.x(), box.top, kBoxWidth, box.height}, coloured ? colour_of_box(i) : "#888",
                   R"(stroke="#333" stroke-width=".6")");
      const std::string ranks = plan::ranks_text(column.ranks(i), 2);
      const double size = std::clamp(box.height, 7.0, 12.0);
      canvas_.text(text_x, box.top + box.height / 2 + size * 0.35,
                   box.height < 9 ? ranks : fmt::format("{}  ({})", ranks, bytes_text(box.bytes)),
                   fmt::format(R"(text-anchor="{}" font-size="{:.3g}")", anchor, size));
    }
  }

  void draw_tensors() {
    const auto colour = [this](Rank rank) { return colour_of(rank); };
    const auto title = [&](const Rect& frame, const char* text) {
      canvas_.text(frame.x + frame.width / 2, frame.y - 26, text, R"(text-anchor="middle" font-weight="bold")");
      canvas_.text(frame.x + frame.width / 2, frame.y - 9, plan::picture_axes(plan_),
                   R"(text-anchor="middle" font-size="11" fill="#555")");
    };
    title(kSourceTensor, "the tensor as the sources hold it, striped by holder");
    title(kDestinationTensor, "as the destinations take it, by sender");
    draw_source_cut(canvas_, kSourceTensor, plan_, colour);
    draw_destination_cut(canvas_, kDestinationTensor, plan_, colour);
  }

  // What each source sends, compared with its fair share. Terms are drawn on top, since no bound is known for them.
  void draw_bars() {
    struct Sent {
      int64_t routes = 0;
      int64_t terms = 0;
      int64_t total() const { return routes + terms; }
    };
    std::vector<Sent> sent(colours_.size());
    const auto of = [&](Rank rank) -> Sent& {
      return sent[static_cast<size_t>(std::ranges::lower_bound(colours_, rank) - colours_.begin())];
    };
    for (const auto& [rank, bytes] : plan_.egress()) of(rank).routes = bytes;
    plan::for_each_term(plan_, [&](Rank peer, const Reduction&, int64_t bytes) { of(peer).terms += bytes; });
    canvas_.text(kBars.x + kBars.width / 2, kBars.y - 46, "what each source sends",
                 R"(text-anchor="middle" font-weight="bold")");
    canvas_.text(kBars.x + kBars.width / 2, kBars.y - 29,
                 plan_.reductions.empty() ? "dashed: the least that the busiest must send"
                                          : "pale: terms; dashed: the least that the busiest must send of the rest",
                 R"(text-anchor="middle" font-size="11" fill="#555")");
    const size_t bars = std::min(sent.size(), kMaxBars);
    const int64_t bound = plan_.stats.max_egress_lower_bound;
    const int64_t most = std::ranges::max(sent, {}, &Sent::total).total();
    const double per_byte = kBars.height / static_cast<double>(std::max<int64_t>({most, bound, 1}));
    const double step = kBars.width / static_cast<double>(bars);
    for (size_t bar = 0; bar < bars; ++bar) {
      const size_t first = bar * sent.size() / bars;
      const size_t last = (bar + 1) * sent.size() / bars;
      const Sent& shown = *std::ranges::max_element(std::span(sent).subspan(first, last - first), {}, &Sent::total);
      const double x = kBars.x + step * static_cast<double>(bar);
      const double width = std::max(step * 0.85, 0.8);
      const double height = per_byte * static_cast<double>(shown.routes);
      const double terms = per_byte * static_cast<double>(shown.terms);
      const double base = kBars.y + kBars.height;
      canvas_.rect({x, base - height, width, height}, colour_of(colours_[first]));
      if (terms > 0)
        canvas_.rect({x, base - height - terms, width, terms}, colour_of(colours_[first]), R"(fill-opacity=".45")");
      if (step > 22)
        canvas_.text(kBars.x + step * (static_cast<double>(bar) + 0.42), kBars.y + kBars.height + 15,
                     fmt::to_string(colours_[first]), R"(text-anchor="middle" font-size="11")");
    }
    const double y = kBars.y + kBars.height - per_byte * static_cast<double>(bound);
    canvas_.line(kBars.x, y, kBars.x + kBars.width, y, R"(stroke="#c00" stroke-dasharray="5 3")");
    canvas_.text(kBars.x + kBars.width, y - 5, bytes_text(bound), R"(text-anchor="end" font-size="11" fill="#c00")");
    canvas_.line(kBars.x, kBars.y + kBars.height, kBars.x + kBars.width, kBars.y + kBars.height, R"(stroke="#333")");
  }

  const Plan& plan_;
  SvgCanvas canvas_;
  Column from_;
  Column to_;
  std::vector<Rank> colours_;  // source ranks, ascending
};

}  // namespace

std::string Plan::to_svg() const {
  return Picture(*this).draw();
}

}  // namespace tessera
