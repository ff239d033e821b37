// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "shapes.h"

#include <cerrno>
#include <cstdlib>

#include "files.h"
#include "text.h"

namespace farm {

namespace {

int64_t parse_size(const std::string& where, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (*end != '\0' || errno != 0 || value < 0) {
    throw Failure(Stage::kInputs, where + "'" + text + "' is no size: write a shape as `1, 3, 16, 16`");
  }
  return value;
}

TensorSpec shaped(const std::string& where, const std::string& line, const TensorSpec& bound,
                  const std::string& what) {
  TensorSpec spec = bound;
  spec.shape.clear();
  // Python writes the shape of a vector as "5,".
  for (const std::string& size : split_any(line, ", \t\r")) spec.shape.push_back(parse_size(where, size));
  bool fits = spec.shape.size() == bound.shape.size();
  for (size_t i = 0; fits && i < spec.shape.size(); ++i) fits = spec.shape[i] <= bound.shape[i];
  if (!fits) {
    throw Failure(Stage::kInputs, where + to_string(spec) + " does not fit " + what + ", at most " + to_string(bound));
  }
  // The product of the bounds fits into size_t, and this product is not larger.
  spec.nbytes = spec.itemsize;
  for (const int64_t size : spec.shape) spec.nbytes *= static_cast<size_t>(size);
  return spec;
}

}  // namespace

std::vector<TensorSpec> read_shapes(const std::string& path, const std::vector<TensorSpec>& bounds,
                                    const std::string& what) {
  const std::vector<std::string> lines = split_lines(read_text(path, Stage::kInputs));
  if (lines.size() != bounds.size()) {
    throw Failure(Stage::kInputs, "'" + path + "' has " + std::to_string(lines.size()) + " lines, the method has " +
                                      std::to_string(bounds.size()) + " " + what + "s");
  }
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < bounds.size(); ++i) {
    specs.push_back(shaped(path + ":" + std::to_string(i + 1) + ": ", lines[i], bounds[i],
                           what + " " + std::to_string(i)));
  }
  return specs;
}

}  // namespace farm
