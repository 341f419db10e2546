// How much each source sends to each destination, as a matrix: for so many ranks that bands would cover each other.
#pragma once

#include "plan/svg_canvas.h"
#include "plan/tensor_picture.h"
#include "tessera/plan.h"

namespace tessera::plan {

// A row for each source and a column for each destination, with the totals that each sends and receives. A cell has the
// colour of its source, and is darker for more bytes. For a Partial source, a second matrix shows the terms that ranks
// read to reduce them. Labels are outside of `frame`: 90 at its sides, 20 above and below.
void draw_flow_matrix(SvgCanvas& canvas, const Rect& frame, const Plan& plan, const ColourOf& colour);

}  // namespace tessera::plan
