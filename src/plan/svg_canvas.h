// Writes SVG elements.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace tessera::plan {

struct Rect {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

class SvgCanvas {
 public:
  SvgCanvas(double width, double height) {
    put(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:g} {1:g}" width="{0:g}" height="{1:g}" )"
        R"(style="max-width:100%;height:auto" font-family="Helvetica,Arial,sans-serif" font-size="12" fill="#222">)",
        width, height);
    put("\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n");
  }

  template <typename... Args>
  void put(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  void rect(const Rect& r, std::string_view fill, std::string_view more = {}) {
    put("<rect x=\"{:.4g}\" y=\"{:.4g}\" width=\"{:.4g}\" height=\"{:.4g}\" fill=\"{}\" {}/>\n", r.x, r.y, r.width,
        r.height, fill, more);
  }
  void path(std::string_view d, std::string_view style) { put("<path d=\"{}\" {}/>\n", d, style); }
  void line(double x1, double y1, double x2, double y2, std::string_view style) {
    put("<path d=\"M{:.4g} {:.4g}L{:.4g} {:.4g}\" {}/>\n", x1, y1, x2, y2, style);
  }
  // `style`: attributes, such as text-anchor="end".
  void text(double x, double y, std::string_view text, std::string_view style = {}) {
    put("<text x=\"{:.4g}\" y=\"{:.4g}\" {}>{}</text>\n", x, y, style, escaped(text));
  }
  // A band from a vertical edge at (x1, y1) to one at (x2, y2), with the same thickness at both ends.
  void ribbon(double x1, double y1, double x2, double y2, double thickness, std::string_view fill) {
    const double mid = (x1 + x2) / 2;
    put("<path d=\"M{0:.4g} {1:.5g}C{2:.4g} {1:.5g} {2:.4g} {4:.5g} {3:.4g} {4:.5g}V{6:.5g}"
        "C{2:.4g} {6:.5g} {2:.4g} {5:.5g} {0:.4g} {5:.5g}Z\" fill=\"{7}\" fill-opacity=\".45\"/>\n",
        x1, y1, mid, x2, y2, y1 + thickness, y2 + thickness, fill);
  }
  // A dashed band that leaves a vertical edge at (x, y1) to the right and comes back to it at (x, y2).
  void loop(double x, double y1, double y2, double thickness, std::string_view fill) {
    const double top = std::min(y1, y2);
    const double bottom = std::max(y1, y2);
    const double inner = x + 24 + (bottom - top - thickness) / 2;
    const double outer = inner + thickness * 4 / 3;  // a curve goes 3/4 of the way to its control points
    put("<path d=\"M{0:.4g} {1:.5g}C{2:.5g} {1:.5g} {2:.5g} {3:.5g} {0:.4g} {3:.5g}V{4:.5g}"
        "C{5:.5g} {4:.5g} {5:.5g} {6:.5g} {0:.4g} {6:.5g}Z\" fill=\"{7}\" fill-opacity=\".2\" stroke=\"{7}\" "
        "stroke-width=\".6\" stroke-dasharray=\"5 3\"/>\n",
        x, top, outer, bottom + thickness, bottom, inner, top + thickness, fill);
  }

  std::string take() {
    put("</svg>\n");
    return fmt::to_string(out_);
  }

 private:
  static std::string escaped(std::string_view text) {
    std::string escaped;
    for (const char c : text) {
      if (c == '&')
        escaped += "&amp;";
      else if (c == '<')
        escaped += "&lt;";
      else if (c == '>')
        escaped += "&gt;";
      else
        escaped += c;
    }
    return escaped;
  }

  fmt::memory_buffer out_;
};

}  // namespace tessera::plan
