#include "plan/tensor_picture.h"

#include <algorithm>

#include "plan/holders.h"
#include "plan/text.h"

namespace tessera::plan {
namespace {

constexpr size_t kMaxCells = 64;  // of the raster along one side: limits the size of the picture
constexpr size_t kMaxStripes = 2048;
constexpr double kMinLabelHeight = 13;

// One axis of the picture: a tensor dim (-1: there is none) and the positions of the raster's cells on it.
struct PictureAxis {
  int dim = -1;
  Index size = 1;
  std::vector<Index> edges{0, 1};

  size_t cells() const { return edges.size() - 1; }
  double at(size_t edge) const {
    return static_cast<double>(edges[edge]) / static_cast<double>(std::max<Index>(size, 1));
  }
  // The cells whose first element is in the set.
  std::vector<size_t> cells_in(const Region& region) const {
    std::vector<size_t> cells_in;
    for (size_t i = 0; i < cells(); ++i)
      if (dim < 0 || region.dim(dim).contains(edges[i])) cells_in.push_back(i);
    return cells_in;
  }
};

PictureAxis axis_of(const Plan& plan, int dim) {
  PictureAxis axis;
  axis.dim = dim;
  if (dim < 0) return axis;
  axis.size = plan.meta.shape[static_cast<size_t>(dim)];
  axis.edges = {0, axis.size};
  for (const Layout* layout : {&plan.src, &plan.dst})
    for (const IntervalSet& part : partition_dim(*layout, axis.size, dim).parts)
      for (const Interval interval : part.intervals()) axis.edges.push_back(interval.begin);
  std::ranges::sort(axis.edges);
  axis.edges.erase(std::ranges::unique(axis.edges).begin(), axis.edges.end());
  if (axis.edges.size() - 1 > kMaxCells) {
    const auto cells = static_cast<Index>(kMaxCells);
    axis.edges.clear();
    for (Index i = 0; i <= cells; ++i) axis.edges.push_back(axis.size / cells * i + std::min(i, axis.size % cells));
  }
  return axis;
}

struct Raster {
  PictureAxis rows;
  PictureAxis columns;
  std::vector<int> value;  // by cell, row-major; -1: empty

  int& at(size_t row, size_t column) { return value[row * columns.cells() + column]; }
  void fill(const Region& region, int v) {
    const auto in_row = columns.cells_in(region);
    for (const size_t row : rows.cells_in(region))
      for (const size_t column : in_row)
        if (at(row, column) < 0) at(row, column) = v;
  }
};

// The two dims that the layouts cut most, in order; a 1-d tensor is drawn as rows.
std::pair<int, int> shown_dims(const Plan& plan) {
  std::vector<std::pair<size_t, int>> cuts;
  for (int d = 0; d < static_cast<int>(plan.meta.shape.size()); ++d) {
    size_t parts = 1;
    for (const Layout* layout : {&plan.src, &plan.dst})
      parts = std::max(parts, partition_dim(*layout, plan.meta.shape[static_cast<size_t>(d)], d).parts.size());
    cuts.emplace_back(parts, d);
  }
  std::ranges::stable_sort(cuts, std::ranges::greater{}, [](const auto& cut) { return cut.first; });
  if (cuts.empty()) return {-1, -1};
  if (cuts.size() == 1) return {0, -1};
  return std::minmax(cuts[0].second, cuts[1].second);
}

Raster raster_of(const Plan& plan) {
  const auto [row_dim, column_dim] = shown_dims(plan);
  Raster raster{axis_of(plan, row_dim), axis_of(plan, column_dim), {}};
  raster.value.assign(raster.rows.cells() * raster.columns.cells(), -1);
  return raster;
}

Rect place(const Raster& raster, const Rect& frame, size_t top, size_t bottom, size_t left, size_t right) {
  const double x = frame.x + frame.width * raster.columns.at(left);
  const double y = frame.y + frame.height * raster.rows.at(top);
  return {x, y, frame.x + frame.width * raster.columns.at(right) - x,
          frame.y + frame.height * raster.rows.at(bottom) - y};
}

// Merges equal neighbours: as far right as possible, then as far down.
template <typename Draw>  // void(const Rect&, int value)
void for_each_block(Raster raster, const Rect& frame, Draw draw) {
  for (size_t row = 0; row < raster.rows.cells(); ++row) {
    for (size_t column = 0; column < raster.columns.cells(); ++column) {
      const int value = raster.at(row, column);
      if (value < 0) continue;
      size_t right = column;
      while (right < raster.columns.cells() && raster.at(row, right) == value) ++right;
      const auto row_is_equal = [&](size_t r) {
        for (size_t c = column; c < right; ++c)
          if (raster.at(r, c) != value) return false;
        return true;
      };
      size_t bottom = row + 1;
      while (bottom < raster.rows.cells() && row_is_equal(bottom)) ++bottom;
      draw(place(raster, frame, row, bottom, column, right), value);
      for (size_t r = row; r < bottom; ++r)
        for (size_t c = column; c < right; ++c) raster.at(r, c) = -1;
    }
  }
}

void label(SvgCanvas& canvas, const Rect& r, const std::string& text) {
  if (r.height < kMinLabelHeight || r.width < 6.5 * static_cast<double>(text.size())) return;
  const double size = std::min(12.0, r.height - 4);
  canvas.text(r.x + r.width / 2, r.y + r.height / 2 + size / 3, text,
              fmt::format(R"(text-anchor="middle" font-size="{:.3g}" stroke="#fff" stroke-width="{:.3g}" )"
                          R"(paint-order="stroke")",
                          size, size / 4));
}

// Visits the regions of a layout's classes, with the ranks of each class, ascending.
template <typename Visit>  // void(const Region&, const std::vector<Rank>&)
void for_each_class(const Plan& plan, const Layout& layout, Visit visit) {
  const Holders holders(layout, static_cast<int>(plan.meta.shape.size()));
  for (int cls = 0; cls < holders.classes(); ++cls) {
    std::vector<Rank> ranks(holders.ranks(cls).begin(), holders.ranks(cls).end());
    const Region region = layout.owned(plan.meta.shape, ranks.front());
    std::ranges::sort(ranks);
    if (!region.empty()) visit(region, ranks);
  }
}

void outline(SvgCanvas& canvas, const Rect& frame, const Raster& raster) {
  for_each_block(raster, frame,
                 [&](const Rect& r, int) { canvas.rect(r, "none", R"(stroke="#333" stroke-width=".7")"); });
}

}  // namespace

std::string picture_axes(const Plan& plan) {
  const auto [row_dim, column_dim] = shown_dims(plan);
  if (row_dim < 0) return "a scalar";
  const auto name = [&](int dim) { return fmt::format("dim {} ({})", dim, plan.meta.shape[static_cast<size_t>(dim)]); };
  if (column_dim < 0) return "down: " + name(row_dim);
  return fmt::format("down: {}, across: {}", name(row_dim), name(column_dim));
}

void draw_source_cut(SvgCanvas& canvas, const Rect& frame, const Plan& plan, const ColourOf& colour) {
  Raster raster = raster_of(plan);
  std::vector<std::vector<Rank>> holders;
  for_each_class(plan, plan.src, [&](const Region& region, const std::vector<Rank>& ranks) {
    raster.fill(region, static_cast<int>(holders.size()));
    holders.push_back(ranks);
  });
  for_each_block(raster, frame, [&](const Rect& r, int value) {
    const auto& ranks = holders[static_cast<size_t>(value)];
    const size_t stripes = std::clamp<size_t>(kMaxStripes / holders.size(), 1, std::min<size_t>(ranks.size(), 8));
    for (size_t i = 0; i < stripes; ++i) {  // side by side: every stripe stands for the whole block
      const double width = r.width / static_cast<double>(stripes);
      canvas.rect({r.x + width * static_cast<double>(i), r.y, width, r.height},
                  colour(ranks[i * ranks.size() / stripes]));
    }
    canvas.rect(r, "none", R"(stroke="#fff" stroke-width=".7")");
    label(canvas, r, ranks_text(ranks, 3));
  });
  canvas.rect(frame, "none", R"(stroke="#333")");
}

void draw_destination_cut(SvgCanvas& canvas, const Rect& frame, const Plan& plan, const ColourOf& colour) {
  Raster senders = raster_of(plan);
  for (const Route& route : plan.routes)
    if (route.kind != RouteKind::kLocal) senders.fill(route.region, route.src);
  for (const Route& route : plan.routes) senders.fill(route.region, route.src);
  for_each_block(senders, frame, [&](const Rect& r, int value) { canvas.rect(r, colour(value)); });

  Raster takers = raster_of(plan);
  std::vector<std::string> names;
  for_each_class(plan, plan.dst, [&](const Region& region, const std::vector<Rank>& ranks) {
    takers.fill(region, static_cast<int>(names.size()));
    names.push_back(ranks_text(ranks, 3));
  });
  outline(canvas, frame, takers);
  for_each_block(takers, frame, [&](const Rect& r, int value) { label(canvas, r, names[static_cast<size_t>(value)]); });
  canvas.rect(frame, "none", R"(stroke="#333")");
}

}  // namespace tessera::plan
