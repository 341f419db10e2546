#include "plan/flow_matrix.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "plan/rank_boxes.h"
#include "plan/terms.h"
#include "plan/text.h"

namespace tessera::plan {
namespace {

constexpr size_t kMaxBoxes = 64;  // along a side: limits the size of the picture
constexpr int kLevels = 6;        // of opacity
constexpr double kSwatch = 10;
constexpr double kLetter = 6.2;  // width of one letter, in labels

class Matrix {
 public:
  Matrix(const RankBoxes& from, const RankBoxes& to) : from_(from), to_(to), bytes_(from.size() * to.size()) {}

  void add(Rank from, Rank to, int64_t bytes) {
    int64_t& cell = bytes_[from_.box_of(from) * to_.size() + to_.box_of(to)];
    cell += bytes;
    most_ = std::max(most_, cell);
  }
  int64_t at(size_t row, size_t column) const { return bytes_[row * to_.size() + column]; }
  int64_t most() const { return most_; }
  int64_t sent(size_t row) const {
    int64_t sum = 0;
    for (size_t column = 0; column < to_.size(); ++column) sum += at(row, column);
    return sum;
  }
  // From 0 (nothing) to kLevels.
  int level(size_t row, size_t column) const {
    if (at(row, column) == 0) return 0;
    const double share = static_cast<double>(at(row, column)) / static_cast<double>(most());
    return std::clamp(static_cast<int>(std::ceil(share * kLevels)), 1, kLevels);
  }
  const RankBoxes& from() const { return from_; }
  const RankBoxes& to() const { return to_; }

 private:
  const RankBoxes& from_;
  const RankBoxes& to_;
  std::vector<int64_t> bytes_;
  int64_t most_ = 0;  // of a cell
};

std::string label_of(const RankBoxes& boxes, size_t box) {
  return ranks_text(boxes.ranks(box), 2);
}

// There is room for a label at every n-th box: returns n.
size_t label_step(double needed, double box) {
  return static_cast<size_t>(std::max(1.0, std::ceil(needed / box)));
}

void draw_cells(SvgCanvas& canvas, const Rect& frame, const Matrix& matrix, const ColourOf& colour) {
  const double width = frame.width / static_cast<double>(matrix.to().size());
  const double height = frame.height / static_cast<double>(matrix.from().size());
  canvas.rect(frame, "#f3f3f3");
  for (size_t row = 0; row < matrix.from().size(); ++row) {
    std::map<int, std::string> paths;  // by level; equal neighbours are drawn as one
    for (size_t column = 0, end = 0; column < matrix.to().size(); column = end) {
      const int level = matrix.level(row, column);
      for (end = column; end < matrix.to().size() && matrix.level(row, end) == level;) ++end;
      if (level == 0) continue;
      const double length = width * static_cast<double>(end - column);
      paths[level] += fmt::format("M{:.5g} {:.5g}h{:.5g}v{:.5g}h{:.5g}z", frame.x + width * static_cast<double>(column),
                                  frame.y + height * static_cast<double>(row), length, height, -length);
    }
    for (const auto& [level, path] : paths)
      canvas.path(path, fmt::format("fill=\"{}\" fill-opacity=\"{:.2g}\"", colour(matrix.from().ranks(row).front()),
                                    0.25 + 0.75 * level / kLevels));
  }
  std::string grid;
  for (size_t row = 1; height >= 4 && row < matrix.from().size(); ++row)
    grid += fmt::format("M{:.5g} {:.5g}h{:.5g}", frame.x, frame.y + height * static_cast<double>(row), frame.width);
  for (size_t column = 1; width >= 4 && column < matrix.to().size(); ++column)
    grid += fmt::format("M{:.5g} {:.5g}v{:.5g}", frame.x + width * static_cast<double>(column), frame.y, frame.height);
  if (!grid.empty()) canvas.path(grid, R"(stroke="#fff" stroke-width=".7" fill="none")");
  canvas.rect(frame, "none", R"(stroke="#333" stroke-width=".7")");
}

void label_columns(SvgCanvas& canvas, const Rect& frame, const RankBoxes& boxes, const std::string& below) {
  size_t longest = 0;
  for (size_t box = 0; box < boxes.size(); ++box) longest = std::max(longest, label_of(boxes, box).size());
  const double width = frame.width / static_cast<double>(boxes.size());
  const size_t step = label_step(kLetter * static_cast<double>(longest) + 6, width);
  for (size_t box = 0; box < boxes.size(); box += step)
    canvas.text(frame.x + width * (static_cast<double>(box) + 0.5), frame.y - 4, label_of(boxes, box),
                R"(text-anchor="middle" font-size="10")");
  canvas.text(frame.x + frame.width / 2, frame.y + frame.height + 15, below,
              R"(text-anchor="middle" font-size="11" fill="#555")");
}

// The ranks to the left, what they send to the right.
void label_rows(SvgCanvas& canvas, const Rect& frame, const Matrix& first, const Matrix* second,
                const ColourOf& colour) {
  const RankBoxes& boxes = first.from();
  const double height = frame.height / static_cast<double>(boxes.size());
  const size_t step = label_step(11, height);
  for (size_t box = 0; box < boxes.size(); ++box) {
    const double y = frame.y + height * static_cast<double>(box);
    canvas.rect({frame.x - kSwatch - 2, y, kSwatch, height}, colour(boxes.ranks(box).front()));
    if (box % step != 0) continue;
    const double baseline = y + std::min(height, 11.0) / 2 + 3.5;
    canvas.text(frame.x - kSwatch - 7, baseline, label_of(boxes, box), R"(text-anchor="end" font-size="10")");
    canvas.text(frame.x + frame.width + 7, baseline, bytes_text(first.sent(box) + (second ? second->sent(box) : 0)),
                R"(font-size="10")");
  }
}

}  // namespace

void draw_flow_matrix(SvgCanvas& canvas, const Rect& frame, const Plan& plan, const ColourOf& colour) {
  const RankBoxes sources(plan.src, kMaxBoxes);
  const RankBoxes destinations(plan.dst, kMaxBoxes);
  Matrix delivered(sources, destinations);
  for (const Route& route : plan.routes)
    for (const Rank dst : plan.dsts(route)) delivered.add(route.src, dst, route.bytes);
  Matrix terms(sources, sources);
  for_each_term(plan,
                [&](Rank peer, const Reduction& reduction, int64_t bytes) { terms.add(peer, reduction.owner, bytes); });

  const auto below = [](const char* what, const Matrix& matrix) {
    return fmt::format("{}; full colour: {}", what, bytes_text(matrix.most()));
  };
  Rect right = frame;
  if (!plan.reductions.empty()) {
    constexpr double kGap = 24;
    const auto columns = static_cast<double>(sources.size() + destinations.size());
    Rect left = frame;
    left.width = (frame.width - kGap) * std::clamp(static_cast<double>(sources.size()) / columns, 0.3, 0.7);
    right.x = left.x + left.width + kGap;
    right.width = frame.width - left.width - kGap;
    draw_cells(canvas, left, terms, colour);
    label_columns(canvas, left, sources, below("terms, to the ranks that reduce them", terms));
  }
  draw_cells(canvas, right, delivered, colour);
  label_columns(canvas, right, destinations, below("to destinations", delivered));
  label_rows(canvas, frame, delivered, plan.reductions.empty() ? nullptr : &terms, colour);
}

}  // namespace tessera::plan
