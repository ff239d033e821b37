// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "inputs.h"

#include <cstring>
#include <utility>

#include "files.h"
#include "text.h"

namespace farm {

InputList::InputList(std::string path) : path_(std::move(path)) {
  std::string text;
  try {
    text = read_text(path_, Stage::kInputs);
  } catch (const Failure& failure) {
    failure_ = failure;
    return;
  }
  for (const std::string& line : split_lines(text)) {
    lines_.push_back({0, lines_.size() + 1, split_any(line, " \t\r")});
  }
}

std::vector<InputLine> InputList::inferences(const std::vector<TensorSpec>& specs) const {
  if (failure_) {
    if (!specs.empty()) throw *failure_;
    return {InputLine{}};
  }
  std::vector<InputLine> list;
  for (const InputLine& line : lines_) {
    if (line.files.empty() && !specs.empty()) continue;
    list.push_back(line);
    list.back().number = static_cast<int64_t>(list.size()) - 1;
    check(list.back(), specs);
  }
  if (list.empty()) {
    throw Failure(Stage::kInputs, "'" + path_ + "' has no inference: write one line " +
                                      (specs.empty() ? "for each; the method has no inputs, so a blank one"
                                                     : "of input files for each"));
  }
  return list;
}

std::vector<InputLine> InputList::lines() const {
  if (failure_) throw *failure_;
  std::vector<InputLine> list;
  for (const InputLine& line : lines_) {
    if (line.files.empty()) continue;
    list.push_back(line);
    list.back().number = static_cast<int64_t>(list.size()) - 1;
  }
  if (list.empty()) throw Failure(Stage::kInputs, "'" + path_ + "' has no line with a file");
  return list;
}

void fill_with_ones(void* data, const TensorSpec& spec) {
  const float f32 = 1;
  const double f64 = 1;
  const uint16_t half = spec.dtype == "bfloat16" ? 0x3F80 : 0x3C00;
  const uint64_t integer = 1;  // little-endian: its first bytes are a 1 of every integer size
  const void* one = &integer;
  if (spec.dtype == "float32") one = &f32;
  if (spec.dtype == "float64") one = &f64;
  if (spec.dtype == "float16" || spec.dtype == "bfloat16") one = &half;
  char* to = static_cast<char*>(data);
  for (size_t at = 0; at + spec.itemsize <= spec.nbytes; at += spec.itemsize) std::memcpy(to + at, one, spec.itemsize);
}

void InputList::check(const InputLine& line, const std::vector<TensorSpec>& specs) const {
  const std::string where = path_ + ":" + std::to_string(line.line_in_file) + ": ";
  if (line.files.size() != specs.size()) {
    throw Failure(Stage::kInputs,
                  where + std::to_string(line.files.size()) + " files, the method has " +
                      std::to_string(specs.size()) + " inputs",
                  std::nullopt, line.number);
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    uint64_t size = 0;
    try {
      size = file_size(line.files[i], Stage::kInputs);
    } catch (const Failure& failure) {
      throw Failure(Stage::kInputs, where + failure.what(), std::nullopt, line.number);
    }
    if (size != specs[i].nbytes) {
      throw Failure(Stage::kInputs,
                    where + "'" + line.files[i] + "' has " + std::to_string(size) + " bytes, input " +
                        std::to_string(i) + " is " + to_string(specs[i]) + " and needs " +
                        std::to_string(specs[i].nbytes),
                    std::nullopt, line.number);
    }
  }
}

}  // namespace farm
