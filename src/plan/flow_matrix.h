// Who sends how much to whom, as a matrix: readable where bands between many ranks would cover each other.
#pragma once

#include "plan/svg_canvas.h"
#include "plan/tensor_picture.h"
#include "tessera/plan.h"

namespace tessera::plan {

// A row for each source and a column for each destination, beside them what each sends and takes. A cell is in the
// colour of the source, the darker the more bytes. Of a Partial source, a second matrix shows the terms that ranks read
// to reduce them. Labels are outside of `frame`: 90 to its sides, 20 above and below.
void draw_flow_matrix(SvgCanvas& canvas, const Rect& frame, const Plan& plan, const ColourOf& colour);

}  // namespace tessera::plan
