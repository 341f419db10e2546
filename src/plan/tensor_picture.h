// A tensor drawn as a rectangle: which source holds each part, and which sender each destination takes it from.
#pragma once

#include <functional>

#include "plan/svg_canvas.h"
#include "tessera/plan.h"

namespace tessera::plan {

using ColourOf = std::function<std::string(Rank)>;  // of a source rank

// The cut of the source layout: each part with its ranks, striped in their colours.
void draw_source_cut(SvgCanvas& canvas, const Rect& frame, const Plan& plan, const ColourOf& colour);
// The cut of the destination layout: each element in the colour of the rank that sends it.
void draw_destination_cut(SvgCanvas& canvas, const Rect& frame, const Plan& plan, const ColourOf& colour);
// Describes what the rectangle shows: "rows: dim 0 (4096), columns: dim 1 (4096)".
std::string picture_axes(const Plan& plan);

}  // namespace tessera::plan
