// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "inputs.h"

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
